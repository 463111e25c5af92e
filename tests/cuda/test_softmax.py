"""The kernels of softmax.cu against their twins in float64: schedules, odd sizes, dtypes, NaN and infinity."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plsc.ops import kernels, twins

SCALE = 64.0
HALF = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6}  # rounding of what is stored
PAIRS = [(torch.float32, out) for out in HALF] + [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
# A block of T threads takes 16 T classes of 4 samples: one short, exact, one over; fewer than four; more samples.
SIZES = [(1, 1), (3, 5), (4, 1023), (5, 1024), (7, 1025), (2, 4095), (9, 2051)]


def batch(samples: int, classes: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A block's products, as of unit rows times the rows' norms; own classes in it, beside it, and nowhere."""
    inverse = torch.rand(classes, generator=generator) + 0.5
    cos = torch.rand(samples, classes, generator=generator) * 2 - 1
    place = torch.randint(-1, 2 * classes + 5, (samples,), generator=generator)
    place[0] = classes + 4  # the last class of a block that starts at 5
    return {
        "product": (cos / inverse).to(dtype),
        "inverse": inverse,
        "shift": torch.rand(samples, generator=generator) + 20.0,
        "place": place,
        "coefficient": torch.randn(samples, generator=generator),
        "own_value": torch.randn(samples, generator=generator),
    }


def close(got: Tensor, expected: Tensor, relative: float) -> None:
    """To a relative error of each entry, and as NaN and infinite as expected."""
    got, expected = got.double(), expected.double()
    assert got.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~finite & ~expected.isnan()], expected[~finite & ~expected.isnan()])
    error = (got - expected).abs()[finite] - relative * expected.abs()[finite]
    assert error.numel() == 0 or error.max() <= 1e-37, f"{error.max()}"  # what is too small for a half type is 0


def twin(fn: Callable[..., Tensor], given: dict[str, Any], names: tuple[str, ...], **options: Any) -> Any:
    """The twin's result in float64: what it returns and what it stores."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    out = torch.empty_like(wide["product"])
    sums = fn(*(wide[name] for name in names), inverse=wide["inverse"], out=out, **options)
    return sums, out


EXP = ("product", "shift", "place")
GRAD = (*EXP, "coefficient", "own_value")


@pytest.mark.parametrize(("samples", "classes"), SIZES)
def test_exponentials_of_a_block(launch: Any, generator: torch.Generator, samples: int, classes: int) -> None:
    for (order, threads), weigh in itertools.product([(0, 64), (3, 64), (4, 32), (5, 128)], [False, True]):
        launch(threads=threads, order=order, workers=1 + order % 2)
        given = batch(samples, classes, generator)
        options = {"start": 5, "scale": SCALE, "weigh": weigh}
        sums, expected = twin(twins.exp_rows, given, EXP, **options)
        out = torch.full((samples, classes), torch.nan)
        got = kernels.exp_rows(*(given[n] for n in EXP), inverse=given["inverse"], out=out, **options)
        close(got, sums, 2e-5)  # exp of a float32 logit near 64
        close(out, expected, 2e-5)
        assert out[0, -1] == 0.0 if given["place"][0] == classes + 4 else True


@pytest.mark.parametrize("order", range(6))
def test_gradients_of_a_block(launch: Any, generator: torch.Generator, order: int) -> None:
    for samples, classes in SIZES:
        launch(threads=64, order=order, workers=2)
        given = batch(samples, classes, generator)
        options = {"start": 5, "scale": SCALE, "weigh": order % 2 == 0}
        sums, expected = twin(twins.grad_rows, given, GRAD, **options)
        out = torch.full((samples, classes), torch.nan)
        got = kernels.grad_rows(*(given[n] for n in GRAD), inverse=given["inverse"], out=out, **options)
        close(out, expected, 2e-5)
        size = (expected / (given["inverse"].double() if options["weigh"] else 1)).abs().sum(1)
        assert ((got - sums).abs() <= 2e-5 * size + 1e-30).all()  # a sum of both signs


@pytest.mark.parametrize("order", range(6))
def test_online_maxima_and_sums(launch: Any, generator: torch.Generator, order: int) -> None:
    for samples, classes in SIZES:
        launch(threads=32 << order % 3, order=order)
        given = batch(samples, classes, generator)
        top, sums = kernels.online_rows(
            given["product"], given["place"], start=5, scale=300.0, inverse=given["inverse"]
        )
        wide = [given["product"].double(), given["place"]]
        m, s = twins.online_rows(*wide, start=5, scale=300.0, inverse=given["inverse"].double())
        close(top, m, 1e-6)
        close(top.double() + sums.double().log(), m + s.log(), 3e-6)


@pytest.mark.parametrize(("kind", "stored"), PAIRS)
def test_half_types(launch: Any, generator: torch.Generator, kind: torch.dtype, stored: torch.dtype) -> None:
    launch(order=3)
    given = batch(5, 1027, generator, kind)
    given["shift"] += 40.0  # float16 holds 65504
    for names, fn, reference in ((EXP, kernels.exp_rows, twins.exp_rows), (GRAD, kernels.grad_rows, twins.grad_rows)):
        sums, expected = twin(reference, given, names, start=5, scale=SCALE)
        out = torch.empty(5, 1027, dtype=stored)
        got = fn(*(given[n] for n in names), inverse=given["inverse"], out=out, start=5, scale=SCALE)
        assert got.dtype == torch.float32
        error = (out.double() - expected).abs()
        step = {torch.float16: 2.0**-25}.get(stored, 1e-37)  # the smallest numbers of the type
        assert (error <= expected.abs() * (HALF[stored] + 2e-5) + step).all()
        assert (got - sums).abs().max() <= 2e-5 * sums.abs().max()  # sums are of what was not rounded


def test_in_place_and_unaligned(launch: Any, generator: torch.Generator) -> None:
    """The result may replace the product; rows that start at any address are read one element at a time."""
    launch(order=4)
    given = batch(6, 1028, generator)
    _, expected = twin(twins.exp_rows, given, EXP, scale=SCALE)
    memory = torch.empty(6 * 1028 + 1)
    shifted = memory[1:].view(6, 1028)
    for product in (given["product"].clone(), shifted.copy_(given["product"])):
        kernels.exp_rows(product, given["shift"], given["place"], inverse=given["inverse"], out=product, scale=SCALE)
        close(product, expected, 2e-5)


def test_nan_and_infinity_stay_in_their_sample(launch: Any, generator: torch.Generator) -> None:
    launch(order=5)
    given = batch(5, 130, generator)
    given["place"][:] = -1
    given["product"][1, 7], given["product"][2, 129], given["product"][3, 0] = math.nan, math.inf, -math.inf
    for names, fn, reference in ((EXP, kernels.exp_rows, twins.exp_rows), (GRAD, kernels.grad_rows, twins.grad_rows)):
        sums, expected = twin(reference, given, names, scale=SCALE)
        out = torch.empty(5, 130)
        got = fn(*(given[n] for n in names), inverse=given["inverse"], out=out, scale=SCALE)
        assert torch.equal(got.isfinite(), sums.isfinite()) and torch.equal(out.isnan(), expected.isnan())
    top, sums = kernels.online_rows(given["product"], given["place"], inverse=given["inverse"], scale=SCALE)
    m, s = twins.online_rows(given["product"], given["place"], inverse=given["inverse"], scale=SCALE)
    assert torch.equal(top.isnan(), m.isnan()) and torch.equal(sums.isnan(), s.isnan()) and top[2] == math.inf
    lone = kernels.online_rows(torch.zeros(2, 1), torch.tensor([0, 1]))
    assert lone[0].tolist() == [-math.inf, 0.0] and lone[1].tolist() == [0.0, 1.0]
    empty = kernels.online_rows(torch.zeros(2, 0), torch.tensor([0, 1]))
    assert empty[0].tolist() == [-math.inf] * 2 and empty[1].tolist() == [0.0, 0.0]
    assert kernels.exp_rows(torch.zeros(2, 0), torch.zeros(2), torch.zeros(2).long(), out=torch.zeros(2, 0)).sum() == 0


def test_float64_goes_to_the_twin(launch: Any) -> None:
    launcher = launch()
    x = torch.zeros(2, 3, dtype=torch.float64)
    kernels.exp_rows(x, torch.zeros(2).double(), torch.tensor([-1, -1]), out=x)
    assert not launcher.launched and torch.equal(x, torch.ones(2, 3).double())


def test_wrong_types_and_shapes_are_refused(launch: Any) -> None:
    """Kernels see addresses only."""
    launch()
    x, place = torch.zeros(2, 8), torch.tensor([0, 1])
    shift = torch.zeros(2)
    for bad in ({"place": place.int()}, {"shift": shift.bfloat16()}, {"shift": torch.zeros(3)}, {"inverse": shift}):
        given = {"shift": shift, "place": place, "out": x.clone(), **bad}
        with pytest.raises(ValueError, match=rf"{next(iter(bad))}: got torch\.\w+ \(\d,\) on cpu, expected"):
            kernels.exp_rows(x, **given)
    with pytest.raises(ValueError, match=r"expected torch\.int64"):
        kernels.sgd_rows(x, x.clone(), None, lr=0.1, rows=place.int())
    with pytest.raises(ValueError, match=r"expected torch\.int16"):
        kernels.sgd_rows(x.bfloat16(), x.clone(), None, lr=0.1, low=x.int())


def test_every_tensor_may_lie_at_any_address(launch: Any, generator: torch.Generator, elsewhere: Any) -> None:
    """Vector loads only where all addresses allow them: the shim refuses others."""
    launch(order=4)
    given = batch(6, 1028, generator)
    _, e = twin(twins.exp_rows, given, EXP, scale=SCALE)
    _, g = twin(twins.grad_rows, given, GRAD, scale=SCALE)
    top = twins.online_rows(given["product"], given["place"], inverse=given["inverse"], scale=SCALE)[0]
    for name in ("product", "inverse", "out"):
        for names, fn, expected in ((EXP, kernels.exp_rows, e), (GRAD, kernels.grad_rows, g)):
            moved = {**given, "out": torch.empty(6, 1028)}
            moved[name] = elsewhere(moved[name])
            fn(*(moved[n] for n in names), inverse=moved["inverse"], out=moved["out"], scale=SCALE)
            close(moved["out"], expected, 2e-5)
        got, _ = kernels.online_rows(moved["product"], moved["place"], inverse=moved["inverse"], scale=SCALE)
        close(got, top, 1e-6)


def test_exponentials_down_to_the_smallest_numbers(launch: Any) -> None:
    """Below e^-87 they are subnormal, and no zeros."""
    launch(order=1)
    logits = torch.linspace(-104.0, -80.0, 200)[None]
    expected, nowhere = logits.double().exp(), torch.tensor([-1])
    out = torch.empty(1, 200)
    kernels.exp_rows(logits, torch.zeros(1), nowhere, out=out)
    assert ((out.double() - expected).abs() <= 2e-5 * expected + 2.0**-149).all()
    kernels.grad_rows(logits, torch.zeros(1), nowhere, torch.full((1,), 3.0), torch.zeros(1), out=out)
    assert ((out.double() - 3 * expected).abs() <= 6e-5 * expected + 2.0**-147).all()


def test_grids_fit_whatever_the_classes(recorder: Any) -> None:
    """A GPU takes 2**31 - 1 blocks in x and 65,535 in y and z: at 300 million classes 73,243 chunks of 4,096."""
    product, place = torch.empty(9, 300_000_000, device="meta"), torch.empty(9, dtype=torch.int64, device="meta")
    some = torch.empty(9, device="meta")
    kernels.exp_rows(product, some, place, out=product)
    kernels.grad_rows(product, some, place, some, some, out=product)
    kernels.online_rows(product, place)
    assert recorder.grids == [(3 * 73_243,), (3 * 73_243,), (9 * 73_243,)]


def test_other_devices_are_refused_and_gaps_go_to_the_twin(launch: Any, generator: torch.Generator) -> None:
    launcher = launch()
    given = batch(4, 8, generator)
    for name in ("place", "inverse", "shift", "out"):
        moved = {name: given[name] for name in (*EXP, "inverse")} | {"out": torch.empty(4, 8)}
        moved[name] = moved[name].to("meta")
        with pytest.raises(ValueError, match=f"{name}: got .* on meta, expected .* on cpu.*convert it with"):
            kernels.exp_rows(**moved)
    assert not launcher.launched
    _, expected = twin(twins.exp_rows, given, EXP)
    wide = torch.empty(4, 16)[:, ::2].copy_(given["product"])
    kernels.exp_rows(wide, given["shift"], given["place"], out=wide, inverse=given["inverse"])
    close(wide, expected, 2e-5)
    assert not launcher.launched
    with pytest.raises(ValueError, match=r"inverse: got .* with strides \(2,\), expected .* contiguous"):
        kernels.exp_rows(**{**moved, "out": torch.empty(4, 8), "inverse": torch.ones(16)[::2]})
