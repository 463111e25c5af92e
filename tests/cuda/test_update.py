"""The kernels of update.cu against their twins: every format of weight and state, schedules, chosen rows, rounding."""

import copy
import itertools
import math
import os
from typing import Any

import numpy as np
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


def adam(module: Any, made: dict[str, Any], **options: Any) -> None:
    fixed: dict[str, Any] = {"lr": 0.01, "start": 2, "key": 7, **options}
    names = ("weight", "grad", "velocity", "square", "steps")
    module.adam_rows(*(made[name] for name in names), low=made["low"], inverse=made["inverse"], **fixed)


@pytest.mark.parametrize(("weight", "state"), list(itertools.product(WEIGHTS, STATES[1:])))
def test_every_tensor_may_lie_at_any_address(
    launch: Any, generator: torch.Generator, elsewhere: Any, weight: str, state: torch.dtype
) -> None:
    """Vector loads only where all addresses allow them: the shim refuses others."""
    launch(order=3)
    made = make(weight, state, 132, generator)
    made["square"], made["steps"] = made["velocity"].abs(), torch.ones(13)
    for step in (sgd, adam) if state != torch.int8 else (sgd,):
        expected = copy.deepcopy(made)
        step(twins, expected)
        for name in ("weight", "grad", "velocity", "low", "square"):
            if made[name] is not None:
                moved = copy.deepcopy(made)
                moved[name] = elsewhere(moved[name])
                step(kernels, moved)
                agree(moved, expected)


def test_random_numbers_are_of_the_whole_class_number(launch: Any, generator: torch.Generator) -> None:
    """Classes beyond 2**32 draw others than those 2**32 before."""
    launch()
    made = make("bf16", torch.bfloat16, 40, generator)
    after = []
    for first in (7, 7 + 2**32, 7 + 5 * 2**32):
        got, expected = copy.deepcopy(made), copy.deepcopy(made)
        sgd(kernels, got, first_class=first)
        sgd(twins, expected, first_class=first)
        agree(got, expected)
        after.append(got["velocity"])
    assert not torch.equal(after[0], after[1]) and not torch.equal(after[1], after[2])


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_eps_of_adam(launch: Any, eps: float) -> None:
    """Of gradients as small as eps a first step is lr * g / (g + eps)."""
    launch()
    sizes = torch.tensor([[0.1, 1.0, 10.0, 1e4]]) * eps
    weight = torch.zeros(1, 4)
    states = torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(1)
    kernels.adam_rows(weight, sizes, *states, lr=0.5, eps=eps)
    torch.testing.assert_close(weight, -0.5 * sizes / (sizes + eps), rtol=1e-4, atol=0)


def test_bytes_stay_between_their_limits(launch: Any) -> None:
    """Where rounding makes the largest a little more than 127 steps, of either sign, it is 127 of them."""
    launch()
    tops = torch.linspace(1.0, 2.0, 9999)
    top = tops[tops / (tops / 127.0) > 127.0][0]
    classes = torch.arange(400_000)
    first = int(classes[(twins._random_bits(0, classes, 1)[:, 0] >> 16) == 0][0])  # rounded down
    for sign in (-1.0, 1.0):
        for module in (kernels, twins):
            velocity, scales = torch.zeros(1, 1, dtype=torch.int8), torch.zeros(1)
            grad = (top * sign).view(1, 1)
            module.sgd_rows(torch.zeros(1, 1), grad, velocity, lr=0.1, momentum=0.9, scales=scales, first_class=first)
            assert velocity.item() == 127 * sign


@pytest.mark.parametrize("weighed", [False, True])
def test_a_row_that_is_not_a_number_stays_one(launch: Any, generator: torch.Generator, weighed: bool) -> None:
    """Its direction is unknown: all of the row is."""
    launch()
    made = make("float", torch.float32, 8, generator)
    made["weight"][5, 3] = math.nan
    sgd(kernels, made, weighed=weighed)
    assert made["weight"].isnan().all(1).nonzero().flatten().tolist() == [5]


@pytest.mark.skipif("PLSC_TEST_LAUNCHER" in os.environ, reason="addresses of this process's memory")
@pytest.mark.parametrize("numbered", [False, True])
def test_rows_behind_2_to_the_31_elements(launch: Any, generator: torch.Generator, numbered: bool) -> None:
    """The last rows of a weight of 17 GB, of which only they are there: 64 bits of an offset are counted."""
    launcher = launch()
    dim, first, count = 1024, 2**22, 3
    weight, velocity, grad = (torch.randn(count, dim, generator=generator) for _ in range(3))
    expected = copy.deepcopy((weight, velocity))
    base = [np.uint64(x.data_ptr() - 4 * dim * first) for x in (weight, velocity)]
    rows = torch.arange(first, first + count) if numbered else None
    args = [base[0], None, base[1], None, grad, None, rows, np.int64(count), np.int64(dim), np.int64(first)]
    args += [np.int64(0), np.int32(0), np.int32(1), np.uint32(0)]
    args += [np.float32(0.1), np.float32(0.9), np.float32(0.0), np.int32(0)]
    launcher.launch("update", "sgd_float_float", grid=(2,), args=args)
    twins.sgd_rows(expected[0], grad, expected[1], lr=0.1, momentum=0.9)
    torch.testing.assert_close((weight, velocity), expected)


def test_what_does_not_belong_together_is_refused(launch: Any, generator: torch.Generator) -> None:
    """Before a kernel gets an address: devices, shapes, rows outside, formats without a meaning."""
    launcher = launch()
    made = make("split", torch.int8, 8, generator)
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({name: made[name].to("meta")}, {}, f"{name}: got .* on meta, expected .* on cpu")
        for name in ("weight", "velocity", "scales", "low", "inverse")
    ]
    bad += [
        ({"velocity": made["velocity"][:5]}, {}, r"velocity: got torch.int8 \(5, 8\)"),
        ({"scales": None}, {}, "expected them with int8"),
        ({"velocity": made["velocity"].short()}, {}, "velocity: got torch.int16, expected a floating type"),
        ({}, {"start": 5}, "start: got 5 for 9 rows, expected them within the weight's 13"),
        ({}, {"start": -1}, "start: got -1"),
        ({}, {"rows": torch.arange(8)}, r"rows: got torch.int64 \(8,\)"),
    ]
    for changed, options, words in bad:
        with pytest.raises(ValueError, match=words):
            sgd(kernels, {**made, **changed}, **options)
    made = make("float", torch.float32, 8, generator)
    made["square"], made["steps"] = made["velocity"].abs(), torch.ones(13)
    for name in ("weight", "velocity", "square", "steps"):
        with pytest.raises(ValueError, match=f"{name.replace('velocity', 'average')}: got .* on meta"):
            adam(kernels, {**made, name: made[name].to("meta")})
    assert not launcher.launched


def test_what_no_kernel_knows_goes_to_the_twin(launch: Any, generator: torch.Generator) -> None:
    """Gaps between rows, a velocity in float64, moments of two types."""
    launcher = launch()
    made = make("float", torch.float32, 8, generator)
    made["square"], made["steps"] = made["velocity"].abs(), torch.ones(13)
    apart = torch.empty(13, 16)[:, ::2].copy_(made["weight"])
    for step, changed in (
        (sgd, {"weight": apart}),
        (sgd, {"velocity": made["velocity"].double()}),
        (adam, {"weight": apart}),
        (adam, {"square": made["square"].bfloat16()}),
    ):
        got, expected = copy.deepcopy({**made, **changed}), copy.deepcopy({**made, **changed})
        step(kernels, got)
        step(twins, expected)
        assert torch.equal(got["weight"], expected["weight"]) and not torch.equal(got["weight"], made["weight"])
    assert not launcher.launched
