"""Local SGD: data parallel at period 1, the same weights on all ranks at meetings, every rule of when they meet."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plsc
from plsc.comm import Communicator, Counting, LocalCommunicator, Shard, mark, run_ranks
from plsc.strategies import Fp16, LocalSGD, LocalSGDOptions, Reduction, broadcast_parameters
from plsc.strategies.local_sgd import adapted_period
from plsc.train.checkpoint import load, save

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
BATCH = torch.randn(24, 6, dtype=torch.float64)
SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
TINY = 1e-4  # MiB: several buckets


def loss_of(model: nn.Module, step: int, comm: Communicator | None = None) -> Tensor:
    x = BATCH.roll(step, 0)
    x = x if comm is None else x.chunk(comm.world_size)[comm.rank]
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def alone(steps: int = 6, **changes: Any) -> Tensor:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), **{**SETTINGS, **changes})
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return weights(model)


def train(
    comm: Communicator, options: LocalSGDOptions, *, steps: int = 6, reduce: str | Reduction = "fp32", meet: bool = True
) -> Tensor:
    model = copy.deepcopy(MODEL)
    local = LocalSGD(model, comm, options=options, bucket_mb=TINY, reduce_dtype=reduce)
    optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, comm)
        loss.backward()
        local.begin_step()
        optimizer.step()
        local.note(loss)
        local.end_step(optimizer)
    if meet:
        local.meet(optimizer)
    return weights(model)


def by_hand(world: int, every: int, steps: int, merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Replicas one after the other in one process; merge(weights before, [ranks, n] after) at each meeting."""
    models = [copy.deepcopy(MODEL) for _ in range(world)]
    optimizers = [torch.optim.SGD(model.parameters(), **SETTINGS) for model in models]
    anchor = weights(models[0])
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            x = BATCH.roll(step, 0).chunk(world)[rank]
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        if (step + 1) % every == 0:
            anchor = merge(anchor, torch.stack([weights(model) for model in models]))
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    return anchor


def same_bits(results: list[Tensor]) -> Tensor:
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


# ---- meetings


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_step_it_is_data_parallel_momentum_sgd(world: int) -> None:
    got = same_bits(run_ranks(world, lambda comm: train(comm, LocalSGDOptions(every=1))))
    torch.testing.assert_close(got, alone(), rtol=1e-12, atol=1e-12)


def test_every_third_step_it_is_the_mean_of_replicas() -> None:
    got = same_bits(run_ranks(3, lambda comm: train(comm, LocalSGDOptions(every=3))))
    torch.testing.assert_close(got, by_hand(3, 3, 6, lambda _, after: after.mean(0)), rtol=1e-12, atol=1e-12)
    assert (got - alone()).abs().max() > 1e-6
    apart = run_ranks(3, lambda comm: train(comm, LocalSGDOptions(every=3), steps=5, meet=False))
    assert not torch.equal(apart[0], apart[1])
    same_bits(run_ranks(3, lambda comm: train(comm, LocalSGDOptions(every=3), steps=5)))


def test_outer_momentum_is_nesterov_sgd_on_what_the_ranks_moved() -> None:
    outer = nn.Parameter(weights(MODEL))
    optimizer = torch.optim.SGD([outer], 0.7, momentum=0.9, nesterov=True)

    def merge(anchor: Tensor, after: Tensor) -> Tensor:
        assert torch.equal(anchor, outer.detach())
        outer.grad = anchor - after.mean(0)
        optimizer.step()
        return outer.detach().clone()

    options = LocalSGDOptions(every=2, outer_lr=0.7, outer_momentum=0.9)
    got = same_bits(run_ranks(3, lambda comm: train(comm, options, steps=8)))
    torch.testing.assert_close(got, by_hand(3, 2, 8, merge), rtol=1e-12, atol=1e-12)
    single = run_ranks(1, lambda comm: train(comm, LocalSGDOptions(every=2, outer_lr=1.0), steps=8))[0]
    assert torch.equal(single, alone(8))  # a world of one is left alone by a plain mean


@pytest.mark.parametrize("reduce", ["bf16", "fp16", Fp16()], ids=str)
def test_differences_may_travel_in_half(reduce: str | Reduction) -> None:
    got = same_bits(run_ranks(3, lambda comm: train(comm, LocalSGDOptions(every=2), reduce=reduce)))
    exact = run_ranks(3, lambda comm: train(comm, LocalSGDOptions(every=2)))[0]
    moved = (exact - weights(MODEL)).norm()
    assert 0 < (got - exact).norm() / moved < (1e-2 if reduce == "bf16" else 1e-3)


def test_bytes() -> None:
    def body(comm: Communicator) -> None:
        counting = Counting(comm)
        model = copy.deepcopy(MODEL)
        local = LocalSGD(model, counting, options=LocalSGDOptions(every=4), reduce_dtype="bf16")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        counting.reset()
        for step in range(8):
            local.begin_step()
            loss_of(model, step, comm).backward()
            optimizer.step()
            local.end_step(optimizer)
        agreed = 3 * 8
        assert (
            counting.bytes["all_reduce"] == 2 * (local.bytes_per_meeting + agreed) and counting.calls["all_reduce"] == 4
        )
        assert local.bytes_per_meeting < 2 * 2 * (len(weights(model)) + 4 * 32)

    run_ranks(2, body)


def test_statistics_counts_and_cut_weights() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model[0].weight.data.fill_(1.0)
        model[0].bias.data.zero_()
        model.register_parameter("cut", mark(nn.Parameter(torch.full((2,), float(comm.rank))), Shard.of(6, comm)))
        model.register_buffer("constant", torch.tensor([0.1, 0.7]))
        model.register_buffer("flags", torch.tensor([comm.rank, 7]))
        local = LocalSGD(model, comm, options=LocalSGDOptions(every=2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            local.begin_step()
            model(torch.full((4, 2), comm.rank + 1.0))  # means 2 (rank + 1), momentum 0.1
            if comm.rank == 0:
                model[1].num_batches_tracked += step
            local.end_step(optimizer)
        assert torch.allclose(model[1].running_mean, torch.full((3,), 2 * 2 * 0.19))
        assert torch.equal(model.constant, torch.tensor([0.1, 0.7])) and model.flags.tolist() == [0, 7]
        assert int(model[1].num_batches_tracked) == 3 and (model.cut == comm.rank).all()
        same = comm.gather_objects(model[1].running_var.tolist())
        assert same[0] == same[1] == same[2]

    run_ranks(3, body)


@pytest.mark.parametrize("way", ["fleet", "around"])
def test_statistics_are_the_mean_of_the_ranks_at_each_meeting(way: str) -> None:
    """Also what the forwards have made of them before the first step, and right after a meeting."""
    xs = torch.randn(7, 3, 6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        torch_net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        torch_net.register_buffer("constant", torch.tensor([0.1, 1 / 3]))
        optimizer = torch.optim.SGD(torch_net.parameters(), 0.0)  # the second layer stays out of it
        if way == "fleet":
            fleet = plsc.Fleet(plsc.Strategy(local_sgd=3), comm)
            net = fleet.replicate(torch_net)
            for step in range(7):
                fleet.step(net(xs[step, comm.rank]).square().mean(), optimizer)
            fleet.meet(optimizer)
        else:
            broadcast_parameters(torch_net, comm)
            with LocalSGD(torch_net, comm, options=LocalSGDOptions(every=3)).around(optimizer):
                for step in range(7):
                    optimizer.zero_grad()
                    torch_net(xs[step, comm.rank]).square().mean().backward()
                    optimizer.step()
        assert torch.equal(torch_net.constant, torch.tensor([0.1, 1 / 3]))
        return torch_net[0].running_mean.clone(), torch_net[0].running_var.clone()

    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for step in range(7):  # both are linear, so that it does not matter when they are averaged
        mean = 0.9 * mean + 0.1 * xs[step].mean(1).mean(0)
        var = 0.9 * var + 0.1 * xs[step].var(1).mean(0)
    for got in run_ranks(3, body):
        torch.testing.assert_close(got, (mean, var), rtol=1e-12, atol=1e-12)


def test_buffers_that_a_forward_puts_anew_are_averaged() -> None:
    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.mean, self.calls = 0.5 * self.mean + 0.5 * x.mean(0), self.calls + 1
            return x * self.scale

    def body(comm: Communicator) -> None:
        model = Follows()
        local = LocalSGD(model, comm, options=LocalSGDOptions(every=2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            local.begin_step()
            model(torch.full((3, 2), comm.rank + 1.0))
            local.end_step(optimizer)
        assert torch.allclose(model.mean, torch.full((2,), 0.75 * 1.5)) and int(model.calls) == 2
        model.mean = torch.zeros(3)
        local.end_step(optimizer)
        with pytest.raises(ValueError, match=r"buffer 'mean' of shape \[3\], expected \[2\]"):
            local.meet(optimizer)

    run_ranks(2, body)


KEEP = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"amsgrad": True},
    "Adafactor": {},
    "NAdam": {},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "ASGD": {},
}


@pytest.mark.parametrize("name", KEEP)
def test_a_meeting_leaves_the_same_state_of_every_optimizer(name: str) -> None:
    """Also of a single number, of factors of other shapes, and of a weight that one rank has never used."""

    def body(comm: Communicator) -> list[dict[str, Any]]:
        model = nn.ParameterList([torch.ones(4, 3), torch.tensor(2.0), torch.ones(2, 3).t()])  # the last is transposed
        matrix, scale, own = model
        local = LocalSGD(model, comm, options=LocalSGDOptions(every=2))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **KEEP[name])
        before = []
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3 * step + comm.rank))
            loss = (matrix * x).sum() * scale + ((own * x[:3, :2]).sum() if comm.rank == 1 else 0)
            optimizer.zero_grad()
            loss.backward()
            local.begin_step()
            optimizer.step()
            before = [dict(optimizer.state[param]) for param in model]
            local.end_step(optimizer)
        copies = comm.gather_objects([{k: copy.deepcopy(v) for k, v in state.items()} for state in before])
        local.meet(optimizer)
        after = [optimizer.state[param] for param in model]
        for place, param in enumerate(model):
            ranks = [state[place] for state in copies]
            assert set(after[place]) == set(ranks[1])
            for key, value in after[place].items():
                theirs = [torch.as_tensor(state[key]) for state in ranks if key in state]
                want = theirs[0]
                if key != "step" and (want.dim() or not param.dim()):
                    want = torch.stack(theirs).sum(0) / 2
                torch.testing.assert_close(torch.as_tensor(value), want)
        kept = [copy.deepcopy(dict(state)) for state in after]
        optimizer.step()  # what was made for a rank is whole
        return kept

    one, two = run_ranks(2, body)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


def test_ranks_may_weigh_by_their_samples() -> None:
    def body(comm: Communicator) -> float:
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(1.0)
        local = LocalSGD(model, comm, options=LocalSGDOptions(every=2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            local.begin_step()
            model.weight.data.add_(1.0 + comm.rank)
            local.note(torch.tensor(1.0), samples=[10, 30][comm.rank])
            local.end_step(optimizer)
        return model.weight.item()

    assert run_ranks(2, body) == pytest.approx([1 + (2 * 10 + 4 * 30) / 40] * 2)


# ---- when


def meetings(
    comm: Communicator,
    options: LocalSGDOptions,
    steps: int,
    *,
    rate: Callable[[int], float] = lambda step: 0.1,
    loss: Callable[[int], float] = lambda step: 1.0,
) -> list[int]:
    model = nn.Linear(1, 1)
    local, optimizer, met = LocalSGD(model, comm, options=options), torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        local.begin_step()
        local.note(torch.tensor(loss(step) * (1 + comm.rank)))
        if local.end_step(optimizer):
            met.append(step + 1)
    return met


def test_post_local_start() -> None:
    got = run_ranks(2, meetings, LocalSGDOptions(every=3, begin=4), 12)
    assert got == [[1, 2, 3, 4, 7, 10]] * 2


def test_the_period_follows_loss_and_rate() -> None:
    def body(comm: Communicator) -> list[int]:
        falling = lambda step: 1.0 if step < 4 else 0.25  # noqa: E731
        return meetings(comm, LocalSGDOptions(every=4, adaptive=True), 16, loss=falling)

    # the first meeting sets the scale; at 8 the loss is a quarter, so the period halves
    assert run_ranks(2, body) == [[4, 8, 10, 12, 14, 16]] * 2

    def decaying(comm: Communicator) -> list[int]:
        return meetings(
            comm, LocalSGDOptions(every=2, adaptive=True), 24, rate=lambda step: 0.1 if step < 6 else 0.1 / 16
        )

    assert run_ranks(2, decaying) == [[2, 4, 6, 8, 16, 24]] * 2


def test_adapted_period() -> None:
    assert adapted_period(4, (2.0, 0.1), (2.0, 0.1), 9) == 4
    assert adapted_period(4, (2.0, 0.1), (1.0, 0.1), 9) == math.ceil(4 / math.sqrt(2))
    assert adapted_period(4, (2.0, 0.1), (2.0, 0.001), 9) == 16
    assert adapted_period(4, (2.0, 0.1), (1e-9, 0.1), 9) == 1
    for first, now in (
        ((0.0, 0.1), (1.0, 0.1)),
        ((1.0, 0.1), (math.nan, 0.1)),
        ((1.0, 0.1), (1.0, 0.0)),
        ((1.0, 0.1), (-1.0, 0.1)),
    ):
        assert adapted_period(4, first, now, 9) == 9


def test_skipped_steps_count() -> None:
    """One rank's optimizer skips a step, as a loss scaler of its own might make it: all still meet together."""

    def body(comm: Communicator) -> tuple[int, Tensor]:
        model = copy.deepcopy(MODEL)
        local = LocalSGD(model, comm, options=LocalSGDOptions(every=3))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        for step in range(9):
            optimizer.zero_grad()
            loss_of(model, step, comm).backward()
            local.begin_step()
            if (step, comm.rank) != (4, 1):
                optimizer.step()
            local.end_step(optimizer)
        return local.since, weights(model)

    results = run_ranks(2, body)
    assert [since for since, _ in results] == [0, 0]
    same_bits([after for _, after in results])


def test_around_your_own_loop() -> None:
    def body(comm: Communicator) -> Tensor:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        with LocalSGD(model, comm, options=LocalSGDOptions(every=4)).around(optimizer) as local:
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, step, comm).backward()
                optimizer.step()
            assert (local.steps, local.since) == (6, 2)
        met = weights(model)
        optimizer.step()  # no longer one of local SGD
        assert (local.steps, local.since) == (6, 0)
        return met

    same_bits(run_ranks(2, body))


def test_a_loop_that_fails_does_not_wait_for_a_meeting() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local = LocalSGD(model, LocalCommunicator("cpu"), options=LocalSGDOptions(every=4))
    with pytest.raises(ZeroDivisionError), local.around(optimizer):
        optimizer.step()
        raise ZeroDivisionError
    assert local.since == 1 and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


# ---- restarts


@pytest.mark.parametrize("worlds", [(3, 3), (4, 2), (2, 4)])
def test_a_checkpoint_is_a_meeting_and_resume_goes_on_from_it(worlds: tuple[int, int], tmp_path: Path) -> None:
    options = LocalSGDOptions(every=4, outer_lr=0.7, outer_momentum=0.9)

    def body(comm: Communicator, stop: int, folder: str, resume: bool = False) -> Tensor:
        model = copy.deepcopy(MODEL)
        local = LocalSGD(model, comm, options=options)
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        parts = {"model": model, "optimizer": optimizer, "local": local}
        if resume:
            load(tmp_path / folder, comm=comm, **parts)
            assert local.steps == 6
        for step in range(local.steps, stop):
            optimizer.zero_grad()
            loss_of(model, step, comm).backward()
            local.begin_step()
            optimizer.step()
            local.end_step(optimizer)
            if step == 5:
                if comm.world_size > 1:
                    with pytest.raises(ValueError, match=r"got 2 steps since the ranks met.*fleet.meet"):
                        local.state_dict()
                local.meet(optimizer)
                if folder:
                    save(tmp_path / folder, comm=comm, **parts)
        local.meet(optimizer)
        state = [optimizer.state[param]["momentum_buffer"].flatten() for param in model.parameters()]
        return torch.cat([weights(model), *state])

    straight = same_bits(run_ranks(worlds[0], body, 12, ""))
    saved = same_bits(run_ranks(worlds[0], body, 6, "saved"))
    assert torch.equal(same_bits(run_ranks(worlds[1], body, 6, "saved", True)), saved)
    resumed = same_bits(run_ranks(worlds[1], body, 12, "saved", True))
    assert torch.equal(resumed, straight) == (worlds[0] == worlds[1])


# ---- refusals


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"begin": -1}, {"outer_lr": 0.0}, {"outer_momentum": 1.0}, {"every": 17, "adaptive": True}],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}"):
        LocalSGDOptions(**wrong)


def test_an_adaptive_period_needs_losses() -> None:
    model = nn.Linear(1, 1)
    local = LocalSGD(model, LocalCommunicator("cpu"), options=LocalSGDOptions(every=1, adaptive=True))
    with pytest.raises(ValueError, match=r"call note\(loss\) in every step"):
        local.end_step(torch.optim.SGD(model.parameters(), 0.1))
