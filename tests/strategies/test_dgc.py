"""DGC: momentum SGD where all is sent, nothing lost where little is, the same on all ranks."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from plsc.comm import Communicator, Counting, LocalCommunicator, Shard, mark, run_ranks
from plsc.strategies import DGC, DGCOptions
from plsc.strategies.dgc import kept_entries, largest_entries

from .dgc_runs import (
    ALL,
    BATCH,
    MODEL,
    SETTINGS,
    alone,
    drift,
    fixed_gradients,
    loss_of,
    same_bits,
    sparse,
    train,
    weights,
)

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


@pytest.mark.parametrize(
    "wrong", [{"density": 0.0}, {"density": 1.5}, {"warmup_steps": -1}, {"begin": -1}, {"min_numel": 0}]
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}"):
        DGCOptions(**wrong)
