"""DGC: momentum SGD where all is sent, nothing lost where little is, the same on all ranks, through restarts too."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from plsc.comm import Communicator, Counting, Hierarchical, LocalCommunicator, Shard, mark, run_ranks
from plsc.strategies import DGC, DGCOptions
from plsc.strategies.dgc import kept_entries, largest_entries
from plsc.train.checkpoint import load, save

torch.manual_seed(0)
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))
MODEL = MODEL.double()
BATCH = torch.randn(12, 6, dtype=torch.float64)
SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
ALL = DGCOptions(density=1.0, min_numel=1, fallback=False, masking=False)


def sparse(density: float = 0.05, **options: Any) -> DGCOptions:
    return DGCOptions(density=density, min_numel=1, fallback=False, **options)


def loss_of(model: nn.Module, step: int, comm: Communicator | None = None) -> Tensor:
    x = BATCH.roll(step, 0)
    x = x if comm is None else x.chunk(comm.world_size)[comm.rank]
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def alone(steps: int = 6, **changes: Any) -> Tensor:
    """One process on the whole batch with torch's SGD."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), **{**SETTINGS, **changes})
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return weights(model)


def train(
    comm: Communicator,
    options: DGCOptions,
    *,
    steps: int = 6,
    **changes: Any,
) -> Tensor:
    model = copy.deepcopy(MODEL)
    dgc = DGC(model.parameters(), comm, options=options)
    optimizer = torch.optim.SGD(model.parameters(), **{**SETTINGS, **changes})
    for step in range(steps):
        loss_of(model, step, comm).backward()
        assert dgc.step(optimizer)
    return weights(model)


def same_bits(results: list[Tensor]) -> Tensor:
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


# ---- where everything is sent


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("changes", [{}, {"nesterov": True}, {"momentum": 0.0}], ids=str)
def test_at_ratio_1_it_is_momentum_sgd_on_averaged_gradients(world: int, changes: dict[str, Any]) -> None:
    got = same_bits(run_ranks(world, lambda comm: train(comm, ALL, **changes)))
    torch.testing.assert_close(got, alone(**changes), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_ratio_1_with_masking_it_is_plain_sgd(nesterov: bool) -> None:
    """What is sent loses its momentum; Nesterov's first step is 1 + momentum times as long. The bias is dense."""
    options = DGCOptions(density=1.0, min_numel=1, fallback=False, masking=True)
    got = same_bits(run_ranks(3, lambda comm: train(comm, options, nesterov=nesterov)))
    model = copy.deepcopy(MODEL)
    plain = [param for param in model.parameters() if param.dim() > 1]
    rate = SETTINGS["lr"] * (1.9 if nesterov else 1.0)
    first = torch.optim.SGD(plain, rate, weight_decay=SETTINGS["weight_decay"])
    second = torch.optim.SGD([model[4].bias], **SETTINGS, nesterov=nesterov)
    for step in range(6):
        model.zero_grad()
        loss_of(model, step).backward()
        first.step()
        second.step()
    torch.testing.assert_close(got, weights(model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_steps_are_momentum_sgd_and_hand_their_momentum_on(nesterov: bool) -> None:
    """Three dense steps, then sparse ones at ratio 1: without a seam."""
    options = DGCOptions(density=1.0, min_numel=1, fallback=False, masking=False, begin=3)
    got = same_bits(run_ranks(3, lambda comm: train(comm, options, nesterov=nesterov)))
    torch.testing.assert_close(got, alone(nesterov=nesterov), rtol=1e-12, atol=1e-12)
    dense = DGCOptions(density=1.0, min_numel=1)  # sparse would never pay
    got = same_bits(run_ranks(3, lambda comm: train(comm, dense, nesterov=nesterov)))
    torch.testing.assert_close(got, alone(nesterov=nesterov), rtol=1e-12, atol=1e-12)


# ---- where little is sent


def fixed_gradients(rank: int, step: int) -> Tensor:
    return torch.randn(20, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def drift(comm: Communicator, options: DGCOptions, steps: int, **settings: Any) -> tuple[Tensor, DGC]:
    """Steps along gradients that do not depend on the weight; the weight's way and the DGC."""
    weight = nn.Parameter(torch.zeros(20, 10, dtype=torch.float64))
    dgc = DGC([weight], comm, options=options)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, **settings)
    for step in range(steps):
        (weight * fixed_gradients(comm.rank, step)).sum().backward()
        dgc.step(optimizer)
    return weight.detach(), dgc


def velocities(rank: int, steps: int) -> Tensor:
    """The sum of momentum SGD's steps along one rank's gradients."""
    velocity = total = torch.zeros(20, 10, dtype=torch.float64)
    for step in range(steps):
        velocity = 0.9 * velocity + fixed_gradients(rank, step)
        total = total + velocity
    return total


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_sent_and_what_is_kept_is_all_there_was(world: int) -> None:
    """Conservation: the sum of u over steps is what was sent plus the residual."""

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        weight, dgc = drift(comm, sparse(masking=False), 9)
        assert dgc._entries[0].residual is not None
        return weight, dgc._entries[0].residual.view(20, 10)

    results = run_ranks(world, body)
    sent = -world * results[0][0]  # the weight went along the mean
    kept = torch.stack([residual for _, residual in results]).sum(0)
    assert kept.abs().max() > 1
    expected = torch.stack([velocities(rank, 9) for rank in range(world)]).sum(0)
    torch.testing.assert_close(sent + kept, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("masking", [True, False])
def test_sparse_training_learns_and_sends_exactly_k(masking: bool) -> None:
    def body(comm: Communicator) -> Tensor:
        counting = Counting(comm)
        result = train(counting, sparse(0.1, masking=masking), steps=150, lr=0.02)
        entries = round(96 * 0.1) + round(128 * 0.1) + 1
        assert counting.bytes["all_gather"] == 150 * entries * (8 + 4)
        return result

    got = same_bits(run_ranks(3, body))
    model = copy.deepcopy(MODEL)
    start = loss_of(model, 0).item()
    torch.nn.utils.vector_to_parameters(got, model.parameters())
    assert loss_of(model, 0).item() < 0.3 * start


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 5000),
    density=st.sampled_from([0.001, 0.01, 0.05, 0.3, 1.0]),
    kind=st.sampled_from(["normal", "zeros", "equal", "spikes", "heavy"]),
    seed=st.integers(0, 99),
)
def test_exactly_the_largest_entries(numel: int, density: float, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    if kind == "zeros":
        x = torch.zeros(numel)
    elif kind == "equal":
        x = torch.ones(numel)
    elif kind == "spikes":
        x = torch.where(torch.rand(numel, generator=generator) < 0.002, x, 0.0)
    elif kind == "heavy":
        x = x.mul(8).exp()
    places = largest_entries(x, density, start=seed * 7919)
    count = kept_entries(numel, density)
    assert len(places) == len(set(places.tolist())) == count >= 1
    assert torch.equal(x[places].abs().sort().values, x.abs().topk(count).values.flip(0))


def test_the_density_falls_in_stages() -> None:
    options = DGCOptions(density=0.001, warmup_steps=8, begin=2)
    got = [options.density_at(step) for step in range(12)]
    assert got == pytest.approx(
        [1, 1, 0.2512, 0.2512, 0.0631, 0.0631, 0.01585, 0.01585, 0.00398, 0.00398, 0.001, 0.001], rel=1e-3
    )
    assert DGCOptions(density=0.01).density_at(0) == pytest.approx(0.01)


def test_dense_while_sparse_would_send_more() -> None:
    """Of 4 ranks: 8 bytes an entry to 3 others against 4 bytes, 1.5 times: sparse below a quarter only."""

    def body(comm: Communicator) -> None:
        weight, bias = nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(7))
        options = DGCOptions(density=0.01, min_numel=1, warmup_steps=4)
        counting = Counting(comm)
        dgc = DGC([weight, bias], counting, options=options)
        optimizer = torch.optim.SGD([weight, bias], 0.1, momentum=0.9)
        forms = []
        for step in range(6):
            expected = dgc.bytes_per_step
            counting.reset()
            (weight.sum() * (comm.rank + step) + bias.sum()).backward()
            dgc.step(optimizer)
            forms.append("all_gather" not in counting.calls)
            flags = 4  # the agreement on what is finite
            assert counting.bytes["all_reduce"] + counting.bytes["all_gather"] == expected + flags
        assert forms == [True, False, False, False, False, False]  # 0.398, then 0.158 and less

    run_ranks(4, body)


def test_who_is_compressed() -> None:
    def body(comm: Communicator) -> None:
        large, conv = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(4, 4, 3, 3))
        conv.data = conv.data.to(memory_format=torch.channels_last)
        dense = {
            "vector": nn.Parameter(torch.ones(100)),
            "small": nn.Parameter(torch.ones(7, 9)),
            "half": nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)),
            "gaps": nn.Parameter(torch.ones(8, 16)[:, ::2]),
        }
        cut = mark(nn.Parameter(torch.ones(8, 8)), Shard.of(16, comm))
        frozen = nn.Parameter(torch.ones(8, 8), requires_grad=False)
        options = DGCOptions(density=0.5, min_numel=64, fallback=False)
        dgc = DGC([large, conv, *dense.values(), cut, frozen], comm, options=options)
        assert {id(p) for p in dgc.wide.params} == {id(large), id(conv)}
        assert {id(p) for p in dgc.rest.params} == {id(p) for p in dense.values()}
        optimizer = torch.optim.SGD([large, conv, *dense.values(), cut], 1.0)
        pattern = torch.arange(144.0).view(4, 4, 3, 3)
        loss = (conv * pattern).sum() + sum(p.float().sum() for p in (large, *dense.values(), cut)) * (comm.rank + 1)
        loss.backward()
        assert dgc.step(optimizer)
        assert torch.equal(conv.detach() != 1, pattern >= 72)  # the larger half, in the layout of channels_last
        torch.testing.assert_close(conv.detach()[pattern >= 72], 1 - pattern[pattern >= 72])
        assert all((p == 1 - 1.5).all() for p in dense.values()) and (cut == 1 - (comm.rank + 1)).all()
        for param in (large, conv):
            assert param.grad is not None and not param.grad.any()

    run_ranks(2, body)


def test_local_clipping_is_by_the_root_of_the_ranks() -> None:
    def body(comm: Communicator) -> Tensor:
        weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        dgc = DGC([weight], comm, options=ALL, clip_norm=1.0)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (weight * (100.0 if comm.rank == 0 else 1e-3)).sum().backward()
        dgc.step(optimizer)
        return weight.detach()

    # rank 0's gradient has the norm 400 and is clipped to 1 / 2: 1 / 8 an entry; the others' stay
    expected = torch.full((4, 4), -(1 / 8 + 3e-3) / 4, dtype=torch.float64)
    for got in run_ranks(4, body):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 4])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_enters_nothing(bad: float, where: int) -> None:
    """where: a compressed parameter or the dense bias."""

    def body(comm: Communicator, poisoned: bool) -> Tensor:
        model = copy.deepcopy(MODEL)
        dgc = DGC(model.parameters(), comm, options=sparse(0.1))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        for step in range(6):
            if step == 3 and poisoned:
                before, state = weights(model), copy.deepcopy(dgc.state_dict()["residuals"])
                param = list(model[where].parameters())[-1]
                handle = param.register_hook(lambda grad: grad * (bad if comm.rank == 1 else 1.0))
                loss_of(model, step, comm).backward()
                handle.remove()
                assert not dgc.step(optimizer)
                assert torch.equal(before, weights(model)) and dgc.steps == 4
                after = dgc.state_dict()["residuals"]
                assert all(torch.equal(state[i][k], after[i][k]) for i in state for k in "uv")
                assert not any(param.grad.any() for param in model.parameters())
            loss_of(model, step, comm).backward()
            assert dgc.step(optimizer)
        return weights(model)

    got = same_bits(run_ranks(3, body, True))
    assert got.isfinite().all()
    torch.testing.assert_close(got, run_ranks(3, body, False)[0], rtol=0.05, atol=0.05)  # another sample, same course


def test_accumulation_communicates_once() -> None:
    def body(comm: Communicator) -> Tensor:
        model = copy.deepcopy(MODEL)
        dgc = DGC(model.parameters(), comm, options=ALL)
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        for step in range(6):
            first, second = BATCH.roll(step, 0).chunk(comm.world_size)[comm.rank].chunk(2)
            with dgc.accumulate():
                ((model(first) - first.sum(1, keepdim=True)).square().mean() / 2).backward()
            ((model(second) - second.sum(1, keepdim=True)).square().mean() / 2).backward()
            dgc.step(optimizer)
        return weights(model)

    torch.testing.assert_close(run_ranks(2, body)[0], alone(), rtol=1e-12, atol=1e-12)


# ---- restarts


def saved_at(world: int, path: Path, steps: int = 5) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Trains and saves on `world` ranks; each rank's weight, u and v."""

    def body(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        weight, dgc = drift(comm, sparse(), steps)
        save(path, comm=comm, step=steps, dgc=dgc)
        entry = dgc._entries[0]
        assert entry.velocity is not None and entry.residual is not None
        return weight, entry.velocity.clone(), entry.residual.clone()

    return run_ranks(world, body)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_residuals_survive_a_restart_on_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    before = saved_at(4, tmp_path / "saved")

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        dgc = DGC([nn.Parameter(torch.zeros(20, 10, dtype=torch.float64))], comm, options=sparse())
        load(tmp_path / "saved", comm=comm, dgc=dgc)
        entry = dgc._entries[0]
        assert dgc.steps == 5 and entry.velocity is not None and entry.residual is not None
        return entry.velocity, entry.residual

    after = run_ranks(world, body)
    for which in (0, 1):  # the mean over ranks is what will reach the weight
        old = torch.stack([rank[1 + which] for rank in before]).mean(0)
        new = torch.stack([rank[which] for rank in after]).mean(0)
        assert old.abs().max() > 0.1
        torch.testing.assert_close(new, old, rtol=1e-14, atol=1e-15)
    if world == 4:
        assert all(torch.equal(old[1 + i], new[i]) for old, new in zip(before, after, strict=True) for i in (0, 1))


def test_resume_continues_bit_for_bit(tmp_path: Path) -> None:
    def body(comm: Communicator, stop: int) -> Tensor:
        model = copy.deepcopy(MODEL)
        dgc = DGC(model.parameters(), comm, options=sparse(0.05, warmup_steps=4))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        parts = {"model": model, "optimizer": optimizer, "dgc": dgc}
        path = tmp_path / "saved"
        if stop == 0:
            load(path, comm=comm, **parts)
        for step in range(dgc.steps, stop or 8):
            loss_of(model, step, comm).backward()
            dgc.step(optimizer)
        if stop == 3:
            save(path, comm=comm, **parts)
        return weights(model)

    straight = same_bits(run_ranks(3, body, 8))
    run_ranks(3, body, 3)
    assert torch.equal(same_bits(run_ranks(3, body, 0)), straight)


def test_what_was_kept_is_sent_when_sparse_steps_end(tmp_path: Path) -> None:
    """Saved by 4 ranks, loaded where sparse does not pay: one step later no residual is left, and the sum is whole."""
    before = saved_at(4, tmp_path / "saved")
    expected = before[0][0] - torch.stack([rank[2] for rank in before]).mean(0).view(20, 10)
    velocity = torch.stack([rank[1] for rank in before]).mean(0).view(20, 10)

    def body(comm: Communicator) -> Tensor:
        weight = nn.Parameter(before[0][0].clone())
        dgc = DGC([weight], comm, options=DGCOptions(density=1.0, min_numel=1))
        load(tmp_path / "saved", comm=comm, dgc=dgc)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        (weight * 2.0).sum().backward()
        dgc.step(optimizer)
        assert not dgc._entries[0].residual.any()  # type: ignore[union-attr]
        return weight.detach()

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, expected - (0.9 * velocity + 2.0), rtol=1e-13, atol=1e-13)


# ---- sparse between hosts


@pytest.mark.parametrize(("world", "hosts"), [(4, 2), (6, 3), (6, 2), (2, 2), (4, [3, 1])])
def test_between_hosts_at_ratio_1_it_is_momentum_sgd(world: int, hosts: Any) -> None:
    for result in run_ranks(world, lambda comm: train(Hierarchical(comm, hosts=hosts), ALL)):
        torch.testing.assert_close(result, alone(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("world", "hosts"), [(4, 2), (6, 3), (6, 2)])
def test_a_host_compresses_as_one_rank_would(world: int, hosts: int) -> None:
    twin = run_ranks(world // hosts, lambda comm: train(comm, sparse(0.1)))
    for result in run_ranks(world, lambda comm: train(Hierarchical(comm, hosts=hosts), sparse(0.1))):
        torch.testing.assert_close(result, twin[0], rtol=1e-12, atol=1e-12)


def test_the_ranks_of_a_host_share_out_what_it_sends() -> None:
    def body(comm: Communicator) -> tuple[int, int, int]:
        counting = Counting(comm)
        model = nn.Linear(6, 31, bias=False).double()  # nothing is left dense, and the payload does not divide
        dgc = DGC(model.parameters(), Hierarchical(counting, hosts=3), options=sparse(0.1))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        loss_of(model, 0, comm).backward()
        counting.reset()
        dgc.step(optimizer)
        return counting.bytes["all_gather"], dgc._payload(0.1), dgc.bytes_per_step

    for gathered, payload, told in run_ranks(6, body):
        share = -(-payload // 3)
        assert gathered == share + 2 * share and told == share  # between two hosts, then what came inside each


@pytest.mark.parametrize("before", [None, 2, 4])
@pytest.mark.parametrize("after", [None, 2])
def test_residuals_survive_a_change_of_hosts(before: int | None, after: int | None) -> None:
    def route(comm: Communicator, hosts: int | None) -> Communicator:
        return comm if hosts is None else Hierarchical(comm, hosts=hosts)

    def body(comm: Communicator) -> tuple[Tensor, Tensor, bool]:
        model = copy.deepcopy(MODEL)
        first = DGC(model.parameters(), route(comm, before), options=sparse(0.1))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        for step in range(3):
            loss_of(model, step, comm).backward()
            first.step(optimizer)
        second = DGC(copy.deepcopy(model).parameters(), route(comm, after), options=sparse(0.1))
        second.load_state_dict(first.state_dict())
        kept = [torch.cat([entry.state()[1] for entry in dgc._entries]) for dgc in (first, second)]
        return kept[0], kept[1], torch.equal(*kept)

    results = run_ranks(4, body)
    old, new = (torch.stack([result[index] for result in results]) for index in (0, 1))
    torch.testing.assert_close(new.mean(0), old.mean(0), rtol=1e-12, atol=1e-14)
    if before == after:
        assert all(result[2] for result in results)
    if after == 2:
        assert torch.equal(new[0], new[1]) and torch.equal(new[2], new[3])


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved_at(2, tmp_path / "saved")

    def body(comm: Communicator) -> None:
        dgc = DGC([nn.Parameter(torch.zeros(10, 20, dtype=torch.float64))], comm, options=sparse())
        load(tmp_path / "saved", comm=comm, dgc=dgc)

    with pytest.raises(Exception, match=r"compressed other tensors .*\[20, 10\]"):
        run_ranks(2, body)


# ---- refusals


def test_only_sgd() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    dgc = DGC([weight], LocalCommunicator("cpu"), options=ALL)
    with pytest.raises(ValueError, match=r"got the optimizer AdamW, expected torch.optim.SGD: only its momentum"):
        dgc.step(torch.optim.AdamW([weight]))
    with pytest.raises(ValueError, match="dampening or maximize"):
        dgc.check(torch.optim.SGD([weight], 0.1, momentum=0.9, dampening=0.5))
    with pytest.raises(ValueError, match="without some of the compressed parameters"):
        dgc.check(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
    optimizer = torch.optim.SGD([weight], 0.1)
    dgc.check(optimizer)
    optimizer.param_groups[0]["dampening"] = 0.5
    with pytest.raises(ValueError, match="dampening or maximize"):  # looked at in every step
        dgc.check(optimizer)


@pytest.mark.parametrize("density", [1.0, 0.1])
def test_weights_that_were_put_elsewhere_are_trained_there(density: float) -> None:
    """Averages of weights are swapped in and out so, and vector_to_parameters does it."""

    def body(comm: Communicator, moving: bool) -> Tensor:
        model = copy.deepcopy(MODEL)
        options = DGCOptions(density=density, min_numel=1, fallback=False)
        dgc, optimizer = DGC(model.parameters(), comm, options=options), torch.optim.SGD(model.parameters(), **SETTINGS)
        for step in range(4):
            if moving and step == 2:
                nn.utils.vector_to_parameters(weights(model).clone(), model.parameters())
            loss_of(model, step, comm).backward()
            assert dgc.step(optimizer)
        return weights(model)

    stayed = same_bits(run_ranks(2, lambda comm: body(comm, False)))
    assert torch.equal(same_bits(run_ranks(2, lambda comm: body(comm, True))), stayed)
    model = copy.deepcopy(MODEL)
    dgc = DGC(model.parameters(), LocalCommunicator("cpu"), options=ALL)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"shapes and strides .* expected .* as when DGC was built"):
        dgc.check(torch.optim.SGD(model.parameters(), 0.1))


def test_finite_gradients_of_a_host_do_not_overflow_in_their_sum() -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.zeros(8, 8))
        dgc = DGC([weight], Hierarchical(comm, hosts=2), options=sparse(0.25))
        (weight * 3e38).sum().backward()
        assert dgc.step(torch.optim.SGD([weight], 1e-38))
        residual = dgc._entries[0].residual
        assert residual is not None
        return weight.detach(), residual

    for weight, residual in run_ranks(4, body):
        assert sorted(weight.flatten().tolist())[15:17] == [pytest.approx(-3.0), 0.0] and weight.min() >= -3.01
        assert residual.isfinite().all() and (residual == 0).sum() == 16


@pytest.mark.parametrize(
    "wrong", [{"density": 0.0}, {"density": 1.5}, {"warmup_steps": -1}, {"begin": -1}, {"min_numel": 0}]
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}"):
        DGCOptions(**wrong)
