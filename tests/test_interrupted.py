"""Steps that fail half-way, weights frozen and thawed in the middle: a run goes on as if alone, or says why not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plsc
from plsc.comm import Communicator, run_ranks
from plsc.fleet import NonFiniteLoss

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
BATCHES = torch.randn(9, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DGC = {"compress": "dgc", "compress_args": {"density": 1.0, "min_numel": 1, "masking": False, "fallback": False}}
SMALL = {"bucket_mb": 1e-4, "lanes": 2}
Between = Callable[[nn.Module, int], None]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.05)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def alone(steps: list[list[int]], between: Between = lambda model, turn: None, clip: float = 0.0) -> Tensor:
    """Plain torch on the whole batches; each step takes the mean over its batches."""
    model = copy.deepcopy(MODEL)
    optimizer = sgd(model)
    for turn, batches in enumerate(steps):
        between(model, turn)
        optimizer.zero_grad()
        torch.stack([model(BATCHES[batch]).square().mean() for batch in batches]).mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def together(
    comm: Communicator,
    options: dict[str, Any],
    *,
    bad: dict[int, Any] | None = None,
    between: Between = lambda model, turn: None,
) -> tuple[list[str], Tensor]:
    """One call of Fleet.step a batch; in those that `bad` names, the gradient of the first weight goes wrong."""
    fleet = plsc.Fleet(plsc.Strategy(**options), comm)
    model = fleet.replicate(copy.deepcopy(MODEL))
    optimizer, log = sgd(model), []

    def spoil(grad: Tensor) -> Tensor:
        if what == "raise":
            raise RuntimeError("this was too much")
        return grad if what is None else grad * what

    what = None
    model[2].weight.register_hook(spoil)
    for turn, batch in enumerate(BATCHES):
        between(model, turn)
        what = (bad or {}).get(turn)
        loss = model(batch.chunk(comm.world_size)[comm.rank]).square().mean()
        try:
            log.append("stepped" if fleet.step(loss, optimizer).updated else "waits")
        except (RuntimeError, NonFiniteLoss) as error:
            log.append(type(error).__name__)
    fleet.meet(optimizer)
    return log, weights(model)


@pytest.mark.parametrize(
    "options",
    [{}, SMALL, {"amp": "fp16"}, DGC, DGC | SMALL | {"amp": "fp16"}, {"local_sgd": 1}, {"topology": "ring"}],
    ids=str,
)
def test_a_step_that_failed_half_way_leaves_nothing_behind(options: dict[str, Any]) -> None:
    """The loss of the others, to which the backward had come, and its buckets on their way, are not in the next."""
    expected = alone([[turn] for turn in range(9) if turn not in (0, 3, 4)])
    for log, got in run_ranks(3, lambda comm: together(comm, options, bad={0: "raise", 3: "raise", 4: "raise"})):
        assert [turn for turn, word in enumerate(log) if word != "stepped"] == [0, 3, 4]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"amp": "fp16"}, DGC, {"local_sgd": 1}], ids=str)
def test_an_accumulation_that_failed_half_way_begins_afresh(options: dict[str, Any]) -> None:
    expected = alone([[0, 1], [4, 5], [6, 7]])
    for log, got in run_ranks(2, lambda comm: together(comm, options | {"accumulate": 2}, bad={3: "raise"})):
        assert log == ["waits", "stepped", "waits", "RuntimeError", "waits", "stepped", "waits", "stepped", "waits"]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_a_norm_that_is_not_finite_is_not_in_the_next_step() -> None:
    expected = alone([[turn] for turn in range(9) if turn != 4], clip=0.2)
    for log, got in run_ranks(2, lambda comm: together(comm, {"clip_norm": 0.2}, bad={4: float("nan")})):
        assert log == ["stepped"] * 4 + ["NonFiniteLoss"] + ["stepped"] * 4
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # torch's clipping has an epsilon of its own


def freezing(*names: str) -> Between:
    """These are not trained from step 3 to step 5."""

    def between(model: nn.Module, turn: int) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(not 3 <= turn < 6)

    return between


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("0.weight", "2.bias")),
        (SMALL, ("2.weight", "4.weight", "4.bias")),
        ({"local_sgd": 1}, ("0.weight", "2.bias")),
        ({"accumulate": 1, "clip_norm": 1e9}, ("4.weight",)),
    ],
    ids=str,
)
def test_what_is_frozen_stands_still_and_goes_on_when_it_is_thawed(options: dict[str, Any], names: Any) -> None:
    """Neither momentum nor weight decay moves it: it has no gradient, as in torch."""
    expected = alone([[turn] for turn in range(9)], freezing(*names))
    assert not torch.equal(expected, alone([[turn] for turn in range(9)]))
    for _, got in run_ranks(3, lambda comm: together(comm, options, between=freezing(*names))):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_with_dgc_only_what_it_averages_densely_may_be_frozen() -> None:
    few = DGC | {"compress_args": DGC["compress_args"] | {"min_numel": 10}}  # type: ignore[operator]
    expected = alone([[turn] for turn in range(9)], freezing("2.bias", "4.weight"))
    for _, got in run_ranks(2, lambda comm: together(comm, few, between=freezing("2.bias", "4.weight"))):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    def refused(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"dgc: got a compressed parameter of shape \(6, 5\) that was frozen"):
            together(comm, few, between=freezing("0.weight"))

    run_ranks(2, refused)


def test_outer_momentum_does_not_move_what_is_frozen() -> None:
    def body(comm: Communicator) -> None:
        options = {"local_sgd": 2, "local_sgd_args": {"outer_lr": 0.7, "outer_momentum": 0.9}}
        fleet = plsc.Fleet(plsc.Strategy(**options), comm)
        model = fleet.replicate(copy.deepcopy(MODEL))
        optimizer = sgd(model)
        for turn, batch in enumerate(BATCHES):
            if turn == 4:
                model[0].requires_grad_(False)
                before = copy.deepcopy(model)
            fleet.step(model(batch.chunk(2)[comm.rank]).square().mean(), optimizer)
        fleet.meet(optimizer)
        assert torch.equal(model[0].weight, before[0].weight) and torch.equal(model[0].bias, before[0].bias)
        assert not torch.equal(model[2].weight, before[2].weight)

    run_ranks(2, body)


def test_what_nobody_keeps_together_is_refused_whenever_it_comes() -> None:
    def body(comm: Communicator) -> None:
        fleet = plsc.Fleet(comm=comm)
        model = copy.deepcopy(MODEL)
        model[0].requires_grad_(False)
        model, extra = fleet.replicate(model), nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = sgd(model)
        assert fleet.step(model(BATCHES[0]).square().mean(), optimizer).updated
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"group 0 has a parameter of shape \(6, 5\) that is neither replicated"):
            fleet.step(model(BATCHES[0]).square().mean(), optimizer)
        model[0].requires_grad_(False)
        assert fleet.step(model(BATCHES[0]).square().mean(), optimizer).updated
        optimizer.add_param_group({"params": [extra]})
        with pytest.raises(ValueError, match=r"group 1 has a parameter of shape \(2,\) that is neither replicated"):
            fleet.step((model(BATCHES[0]) * extra).square().mean(), optimizer)

    run_ranks(2, body)
