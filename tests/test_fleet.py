"""Fleet: one agreed step on any number of ranks, in every precision, accumulated or clipped."""

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import plsc
from plsc.comm import Communicator, LocalCommunicator, run_ranks
from plsc.data import Synthetic
from plsc.fleet import NonFiniteLoss

CLASSES = 11
INIT = threading.Lock()  # ranks as threads share torch's generator


def train(comm: Communicator, options: dict, *, steps: int = 6, fused: bool = False, rate: float = 1.0) -> tuple:
    fleet = plsc.Fleet(plsc.Strategy(**options), comm)
    with INIT:
        torch.manual_seed(0)
        backbone = plsc.models.plainnet(16, image_size=16, in_channels=1).double()
    backbone = fleet.replicate(backbone)
    head = plsc.ClassParallelHead(
        16,
        CLASSES,
        margin=plsc.CosFace(scale=16.0),
        comm=comm,
        sample_rate=rate,
        head_optimizer=plsc.SGD(0.2, 5e-4, momentum=0.9) if fused else None,
    ).double()
    params = [*backbone.parameters(), *([] if fused else head.parameters())]
    optimizer = torch.optim.SGD(params, 0.2, momentum=0.9, weight_decay=5e-4)
    data = Synthetic(96, CLASSES, image_size=16, channels=1)
    loader = fleet.loader(data, batch_size=24)
    losses: list[Tensor] = []
    taken = []
    for images, labels in loader.epochs(100):
        loss = head(backbone(images.double()), labels)
        losses.append(loss.detach())
        taken.append(fleet.step(loss, optimizer))
        if sum(step.updated for step in taken) == steps:
            break
    means = comm.all_reduce(torch.stack(losses)).wait() / comm.world_size
    return means, torch.cat([p.detach().flatten() for p in backbone.parameters()]), head.weight.detach(), taken


@pytest.fixture(scope="module")
def alone() -> tuple:
    return run_ranks(1, train, {})[0]


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_losses_and_weights_do_not_depend_on_the_number_of_ranks(world: int, alone: tuple) -> None:
    results = run_ranks(world, train, {})
    torch.testing.assert_close(results[0][0], alone[0], rtol=1e-10, atol=1e-10)
    for result in results:
        torch.testing.assert_close(result[1], alone[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), alone[2], rtol=1e-9, atol=1e-11)


def test_fused_head_takes_the_same_steps(alone: tuple) -> None:
    results = run_ranks(2, lambda comm: train(comm, {}, fused=True))
    torch.testing.assert_close(results[0][0], alone[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), alone[2], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_accumulation_is_the_same_step_in_smaller_pieces(world: int, fused: bool, alone: tuple) -> None:
    results = run_ranks(world, lambda comm: train(comm, {"accumulate": 3}, fused=fused))
    torch.testing.assert_close(results[0][0].view(-1, 3).mean(1), alone[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), alone[2], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_clipping_counts_cut_weights_once(fused: bool, clip: float, alone: tuple) -> None:
    single = run_ranks(1, lambda comm: train(comm, {"clip_norm": clip}))[0]
    many = run_ranks(3, lambda comm: train(comm, {"clip_norm": clip}, fused=fused))
    norms = [[step.grad_norm for step in result[3]] for result in (single, *many)]
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-9)
    torch.testing.assert_close(torch.cat([r[2] for r in many]), single[2], rtol=1e-9, atol=1e-11)
    assert torch.allclose(single[2], alone[2], rtol=1e-9) == (clip == 1e9)
    assert max(norms[0]) > 0.3


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_overflow_on_one_rank_makes_all_skip_and_training_goes_on(fused: bool) -> None:
    def run(comm: Communicator) -> tuple:
        fleet = plsc.Fleet(plsc.Strategy(amp="fp16"), comm)
        layer = fleet.replicate(torch.nn.Linear(4, 4))
        head = plsc.ClassParallelHead(
            4, 6, margin=plsc.CosFace(scale=8.0), comm=comm, head_optimizer=plsc.SGD(0.1) if fused else None
        )
        optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], 0.1)
        log = []
        for turn in range(3):
            before = head.weight.detach().clone()
            loss = head(layer(torch.randn(2, 4, generator=torch.Generator().manual_seed(turn))), torch.tensor([0, 5]))
            if turn == 1 and comm.rank == 1:
                layer.weight.register_hook(lambda grad: grad * float("inf"))
            step = fleet.step(loss, optimizer)
            log.append((step.updated, step.overflow, torch.equal(head.weight, before), fleet.scaler.loss_scale))
            for handle in list((layer.weight._backward_hooks or {}).keys()):
                if turn == 1 and comm.rank == 1:
                    del layer.weight._backward_hooks[handle]
                    break
        return log, layer.weight.detach().clone()

    (first, w0), (second, w1) = run_ranks(2, run)
    assert first == second and torch.equal(w0, w1)
    assert [entry[:3] for entry in first][:2] == [(True, False, False), (False, True, True)]
    assert first[1][3] == 2.0**15


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_any_change() -> None:
    def run(comm: Communicator) -> bool:
        fleet = plsc.Fleet(comm=comm)
        layer = fleet.replicate(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        before = layer.weight.detach().clone()
        value = float("nan") if comm.rank == 1 else 1.0
        with pytest.raises(NonFiniteLoss, match="no weight was changed"):
            fleet.step((layer(torch.ones(1, 3)) * value).sum(), optimizer)
        return torch.equal(before, layer.weight)

    assert run_ranks(3, run) == [True] * 3


def detached(x: Tensor, net: torch.nn.Module) -> Tensor:
    return net(x).detach()


def without_gradients(x: Tensor, net: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return net(x)


def partly(x: Tensor, net: torch.nn.Module) -> Tensor:
    return net[1](net[0](x).detach())


CUT = "none of the 4 trainable parameters of Sequential that the optimizer has got a gradient"


@pytest.mark.parametrize("options", [{}, {"local_sgd": 2}, {"compress": "dgc"}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize(
    ("forward", "trained", "said"),
    [
        (detached, True, [CUT]),
        (without_gradients, True, [CUT]),
        (partly, True, []),
        (lambda x, net: net(x), True, []),
        (detached, False, []),  # a head alone, on fixed features
    ],
    ids=["detached", "no_grad", "partly", "reached", "head alone"],
)
def test_a_backbone_that_gets_no_gradient_is_said_once(
    forward: Callable[..., Tensor], trained: bool, said: list[str], options: dict, caplog: pytest.LogCaptureFixture
) -> None:
    def run(comm: Communicator) -> list[Tensor]:
        fleet = plsc.Fleet(plsc.Strategy(**options), comm)
        net = fleet.replicate(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
        head = plsc.ClassParallelHead(4, 6, comm=comm)
        optimizer = torch.optim.SGD([*(net.parameters() if trained else []), *head.parameters()], 0.1)
        before = [param.detach().clone() for param in net.parameters()]
        for turn in range(4):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(turn))
            fleet.step(head(forward(x, net), torch.tensor([0, 5])), optimizer)
        listening = [len(param._post_accumulate_grad_hooks or {}) - len(fleet.reducers) for param in net.parameters()]
        assert not trained or max(listening) <= 0  # nobody does any more
        return [(param != old).any() for param, old in zip(net.parameters(), before, strict=True)]

    with caplog.at_level(logging.WARNING, "plsc"):
        moved = run_ranks(2, run)[0]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == said
    assert any(moved) == (trained and not said)


def test_a_module_of_another_optimizer_waits_for_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    """Two networks that are trained in turn: each is looked at when the optimizer that has it steps."""
    fleet = plsc.Fleet(plsc.Strategy(), LocalCommunicator())
    one, two = (fleet.replicate(torch.nn.Linear(2, 1)) for _ in range(2))
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (one, two)]
    with caplog.at_level(logging.WARNING, "plsc"):
        fleet.step(one(torch.ones(1, 2)).sum(), optimizers[0])
        fleet.step(two(torch.ones(1, 2)).sum(), optimizers[1])
    assert not caplog.records


def test_a_parameter_nobody_syncs_is_refused() -> None:
    def run(comm: Communicator) -> None:
        layer = torch.nn.Linear(3, 1)
        fleet = plsc.Fleet(comm=comm)
        with pytest.raises(ValueError, match=r"neither replicated nor cut.*fleet\.replicate"):
            fleet.step(layer(torch.ones(1, 3)).sum(), torch.optim.SGD(layer.parameters(), 0.1))

    run_ranks(2, run)


@pytest.mark.parametrize("options", [{}, {"compress": "dgc"}, {"local_sgd": 2}], ids=str)
def test_a_parameter_is_replicated_once(options: dict) -> None:
    def rank(comm: Communicator) -> None:
        one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        two.weight = one.weight
        fleet = plsc.Fleet(plsc.Strategy(**options), comm)
        fleet.replicate(one)
        for again in (one, two, torch.nn.Sequential(torch.nn.Linear(4, 4), one)):
            with pytest.raises(ValueError, match=r"parameter '(1\.)?weight' is replicated already; .* nn.ModuleList"):
                fleet.replicate(again)
        fleet = plsc.Fleet(plsc.Strategy(**options), comm)  # the one before is gone
        fleet.replicate(torch.nn.ModuleList([one, two]))
        optimizer = torch.optim.SGD([*one.parameters(), two.bias], 1.0)
        before = one.weight.detach().clone()
        fleet.step((one(torch.ones(1, 4)) + two(torch.ones(1, 4))).sum() * (comm.rank + 1), optimizer)
        fleet.meet(optimizer)
        torch.testing.assert_close(one.weight.detach(), before - 3.0)

    run_ranks(2, rank)


def test_a_checkpoint_of_other_modules_says_so() -> None:
    def fleet(modules: int, options: dict) -> plsc.Fleet:
        made = plsc.Fleet(plsc.Strategy(**options), LocalCommunicator("cpu"))
        for _ in range(modules):
            made.replicate(torch.nn.Linear(2, 2))
        return made

    for options in ({}, {"local_sgd": 2}):
        for saved, loaded in ((1, 2), (2, 1)):
            one, other = fleet(saved, options), fleet(loaded, options)
            with pytest.raises(ValueError, match=f"made with {saved} replicated modules, this run has {loaded}"):
                other.load_state_dict(one.state_dict())


def test_sync_bn_makes_batch_norm_independent_of_the_number_of_ranks() -> None:
    def run(comm: Communicator) -> Tensor:
        fleet = plsc.Fleet(plsc.Strategy(sync_bn=True), comm)
        with INIT:
            torch.manual_seed(0)
            conv, linear = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(784, 8)
        net = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(4), torch.nn.Flatten(), linear)
        backbone = fleet.replicate(net.double())
        head = plsc.ClassParallelHead(8, CLASSES, comm=comm, margin=plsc.CosFace(scale=8.0)).double()
        optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], 0.1)
        losses = []
        for images, labels in fleet.loader(Synthetic(48, CLASSES, image_size=16, channels=1), batch_size=12).epochs(1):
            loss = head(backbone(images.double()), labels)
            losses.append(loss.detach())
            fleet.step(loss, optimizer)
        return comm.all_reduce(torch.stack(losses)).wait() / comm.world_size

    single = run_ranks(1, run)[0]
    for world in (2, 3):
        torch.testing.assert_close(run_ranks(world, run)[0], single, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amp": "fp8"}, "amp 'fp8'"),
        ({"reduce_dtype": "int8"}, "reduce_dtype: got 'int8'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"accumulate": 2.5}, "accumulate is 2.5, expected int"),
        ({"accumulate": True}, "accumulate is True, expected int"),
        ({"lanes": "2"}, "lanes is '2', expected int"),
        ({"clip_norm": "1"}, "clip_norm is '1', expected float"),
        ({"topology": None}, "topology is None, expected str"),
        ({"sync_bn": "no"}, "sync_bn is 'no', expected bool"),
        ({"compress_args": [("density", 0.1)]}, "compress_args is .*, expected dict"),
        ({"servers": "a:1"}, "servers is 'a:1', expected tuple"),
    ],
)
def test_bad_strategies(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plsc.Strategy(**options)


def test_a_batch_that_does_not_divide_names_the_numbers() -> None:
    fleet = plsc.Fleet(plsc.Strategy(accumulate=4))
    with pytest.raises(ValueError, match="batch_size is 10, expected a multiple of world_size"):
        fleet.loader(Synthetic(100, 3, image_size=16), batch_size=10)


def test_a_fleet_connects_by_itself_without_a_false_alarm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under torchrun it is the Fleet that connects: nobody has to be told to."""
    made = LocalCommunicator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("plsc.fleet.connect", lambda: made)
    monkeypatch.setattr("plsc.fleet.connected", lambda: None)
    assert plsc.Fleet().comm is made and not caplog.records
