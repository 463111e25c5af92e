"""The kernels of update.cu against their twins: every format of weight and state, schedules, chosen rows, rounding."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import plsc
from plsc.ops import kernels, twins

WEIGHTS = ("float", "bf16", "split")
STATES = (None, torch.float32, torch.bfloat16, torch.int8)
DIMS = (1, 3, 4, 127, 128, 129, 512, 513, 1100)  # a warp holds 512 at a time


def make(weight: str, state: torch.dtype | None, dim: int, generator: torch.Generator) -> dict[str, Any]:
    """A weight of 13 rows in a format, a state, a gradient for 9 rows from row 2 on."""
    classes, count = 13, 9
    w = torch.randn(classes, dim, generator=generator)
    made: dict[str, Any] = {"low": None, "scales": None, "velocity": None}
    made["weight"] = w
    if weight == "bf16":
        made["weight"] = w.bfloat16()
    if weight == "split":
        bits = w.view(torch.int32)
        made["weight"], made["low"] = (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
    v = torch.randn(classes, dim, generator=generator)
    if state == torch.int8:
        made["scales"] = torch.rand(classes, generator=generator) / 64
        made["velocity"] = torch.randint(-127, 128, (classes, dim), generator=generator).to(torch.int8)
    elif state is not None:
        made["velocity"] = v.to(state)
    made["grad"] = torch.randn(count, dim, generator=generator)
    made["inverse"] = torch.full((count,), torch.nan)
    return made


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


def agree(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Floats to rounding; what is rounded by chance almost everywhere the same, and by one step elsewhere."""
    for name, value in expected.items():
        mine = got[name]
        if not isinstance(value, Tensor) or name in ("low", "grad"):
            continue
        if value.dtype == torch.float32:
            assert error(mine, value) < 2e-5, name
            continue
        if value.dtype == torch.int8:
            apart = (mine.int() - value.int()).abs()
        else:
            apart = (mine.view(torch.int16).int() - value.view(torch.int16).int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01, name
    if expected["low"] is not None:
        assert error(joined(got), joined(expected)) < 1e-6


def joined(made: dict[str, Any]) -> Tensor:
    upper = made["weight"].view(torch.int16).to(torch.int32) << 16
    return (upper | (made["low"].to(torch.int32) & 0xFFFF)).view(torch.float32)


def sgd(module: Any, made: dict[str, Any], **options: Any) -> None:
    fixed: dict[str, Any] = {"normalize": True, "lr": 0.1}
    fixed |= {"momentum": 0.9, "weight_decay": 5e-4, "start": 2, "key": 12345, "first_class": 7}
    module.sgd_rows(
        made["weight"],
        made["grad"],
        made["velocity"],
        low=made["low"],
        scales=made["scales"],
        inverse=made["inverse"],
        **{**fixed, **options},
    )


@pytest.mark.parametrize(("weight", "state"), list(itertools.product(WEIGHTS, STATES)))
def test_sgd_in_every_format(launch: Any, generator: torch.Generator, weight: str, state: torch.dtype | None) -> None:
    rows = torch.tensor([12, 0, 5, 3, 7, 1, 9, 2, 11])
    for order, dim in enumerate(DIMS):
        launch(threads=32 << order % 4, order=order % 6, workers=1 + order % 2)
        for options in ({}, {"nesterov": state is not None, "weighed": True}, {"rows": rows, "weight_decay": 0.0}):
            made = make(weight, state, dim, generator)
            before, expected = copy.deepcopy(made), copy.deepcopy(made)
            sgd(kernels, made, **options)
            sgd(twins, expected, **options)
            agree(made, expected)
            untouched = [4, 6, 8, 10] if "rows" in options else [0, 1, 11, 12]
            for name in ("weight", "low", "velocity", "scales"):
                if before[name] is not None:
                    assert torch.equal(made[name][untouched], before[name][untouched]), name


@pytest.mark.parametrize("order", range(6))
def test_adam_in_every_format(launch: Any, generator: torch.Generator, order: int) -> None:
    for weight, state in itertools.product(WEIGHTS, (torch.float32, torch.bfloat16)):
        dim = DIMS[(order + len(weight)) % len(DIMS)]
        launch(threads=64, order=order)
        made = make(weight, state, dim, generator)
        made["square"] = made["velocity"].abs()
        made["steps"] = torch.arange(13, dtype=torch.float32)
        expected = copy.deepcopy(made)
        for module, one in ((kernels, made), (twins, expected)):
            module.adam_rows(
                one["weight"],
                one["grad"],
                one["velocity"],
                one["square"],
                one["steps"],
                low=one["low"],
                normalize=order > 0,
                inverse=one["inverse"],
                lr=0.01,
                weight_decay=0.05,
                start=2,
                key=7,
                weighed=order % 2 == 1,
            )
        agree(made, expected)
        assert made["steps"].tolist() == [0, 1, *range(3, 12), 11, 12]


def test_twins_are_the_row_optimizers(generator: torch.Generator) -> None:
    """In float64, without normalisation: what plsc.SGD and plsc.AdamW do."""
    weight = torch.randn(5, 8, generator=generator).double()
    for _ in range(3):
        grad = torch.randn(5, 8, generator=generator).double()
        optimizer = plsc.SGD(0.1, weight_decay=1e-3, momentum=0.9, nesterov=True)
        mine, theirs = weight.clone(), weight.clone()
        v, state = torch.ones(5, 8).double(), {"momentum": torch.ones(5, 8).double()}
        twins.sgd_rows(mine, grad, v, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
        optimizer.update(theirs, grad.clone(), state)
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(v, state["momentum"])
        adam, mine, theirs = plsc.AdamW(0.01, weight_decay=0.1), weight.clone(), weight.clone()
        state = adam.state(theirs)
        m, s, steps = (torch.zeros_like(state[name]) for name in ("exp_avg", "exp_avg_sq", "steps"))
        for _ in range(3):
            twins.adam_rows(mine, grad, m, s, steps, lr=0.01, weight_decay=0.1)
            adam.update(theirs, grad.clone(), state)
        torch.testing.assert_close(mine, theirs)


def test_gradient_goes_through_the_normalisation(generator: torch.Generator) -> None:
    """Against autograd in float64, both ways of handing it over; the new inverse norm is the new row's."""
    w = torch.randn(4, 6, generator=generator).double().requires_grad_()
    upstream = torch.randn(4, 6, generator=generator).double()
    (expected,) = torch.autograd.grad((torch.nn.functional.normalize(w) * upstream).sum(), w)
    for weighed in (False, True):
        weight, inverse = w.detach().clone(), torch.empty(4).double()
        given = upstream / w.detach().norm(dim=1, keepdim=True) if weighed else upstream
        twins.sgd_rows(weight, given, None, lr=1.0, normalize=True, inverse=inverse, weighed=weighed)
        torch.testing.assert_close(w.detach() - weight, expected)
        torch.testing.assert_close(inverse, 1 / weight.norm(dim=1))


def test_rounding_by_chance_is_right_on_average(launch: Any) -> None:
    """A step far below bfloat16's moves the mean of many rows by itself, and the step's key moves the choice."""
    launch(threads=256, order=3)
    weight = torch.ones(512, 128).bfloat16()
    grad = torch.full((512, 128), 2.0**-12)  # bfloat16 above 1 goes by 2**-7, below by 2**-8
    first = weight.clone()
    kernels.sgd_rows(first, grad, None, lr=1.0, key=1)
    moved = float((1 - first.double()).mean()) / 2.0**-12
    assert abs(moved - 1) < 5 * math.sqrt(2**-8 / 2**-12 / first.numel()) * 4
    second, third = weight.clone(), weight.clone()
    kernels.sgd_rows(second, grad, None, lr=1.0, key=2)
    kernels.sgd_rows(third, grad, None, lr=1.0, key=1)
    assert torch.equal(first, third) and not torch.equal(first, second)


def test_rounding_does_not_depend_on_where_rows_lie(launch: Any, generator: torch.Generator) -> None:
    """A class draws the same numbers on whatever rank, in whatever block."""
    launch(order=4)
    weight, grad = torch.randn(8, 20, generator=generator).bfloat16(), torch.randn(8, 20, generator=generator)
    whole, lower, upper = weight.clone(), weight[:3].clone(), weight[3:].clone()
    kernels.sgd_rows(whole, grad, None, lr=0.01, key=3)
    kernels.sgd_rows(lower, grad[:3], None, lr=0.01, key=3)
    kernels.sgd_rows(upper, grad[3:], None, lr=0.01, key=3, first_class=3)
    assert torch.equal(whole, torch.cat([lower, upper]))


@pytest.mark.parametrize("state", [torch.bfloat16, torch.int8])
def test_what_is_not_finite_stays_in_its_row(launch: Any, generator: torch.Generator, state: torch.dtype) -> None:
    launch(order=3)
    for bad in (math.nan, math.inf):
        made = make("bf16", state, 36, generator)
        made["grad"][4, 35] = bad
        expected = copy.deepcopy(made)
        sgd(kernels, made)
        sgd(twins, expected)
        wrong = ~made["weight"].isfinite().all(1)
        assert wrong.nonzero().flatten().tolist() == [6]
        assert torch.equal(made["weight"].isnan(), expected["weight"].isnan())
        if made["scales"] is not None:
            assert (~made["scales"].isfinite()).nonzero().flatten().tolist() == [6]


def test_zero_rows_stay_zero(launch: Any) -> None:
    launch(order=5)
    weight, inverse = torch.zeros(3, 8), torch.ones(3)
    v = torch.zeros(3, 8)
    kernels.sgd_rows(weight, torch.ones(3, 8), v, lr=0.1, momentum=0.9, normalize=True, inverse=inverse)
    assert not weight.any() and not inverse.any()
    kernels.sgd_rows(weight, torch.empty(0, 8), None, lr=0.1, rows=torch.empty(0, dtype=torch.int64))
