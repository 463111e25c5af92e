"""The C++ kernels against their twins in torch, and those against formulas: every instruction set, format and rule."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from plsc.ops import SGD, AdamW, RowOptimizer, native
from plsc.ops.formats import Rounding, join, split, to_bf16, to_int8
from plsc.ops.optim import apply_rows

SETS = ["scalar", "avx2", "avx512"]


@pytest.fixture(params=SETS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each set of instructions that this processor has, if the extension was built."""
    if native._native is None:
        pytest.skip("plsc.ops._kernels was not built")
    if not native._native.runs(request.param):
        pytest.skip(f"no {request.param} here")
    monkeypatch.delenv("PLSC_KERNELS", raising=False)
    before = native._native.chosen()
    native._native.choose(request.param)
    yield request.param
    native._native.choose(before)


def twin(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    monkeypatch.setenv("PLSC_KERNELS", "0" if on else "")


def exponentials(dots: Tensor, inverse: Tensor, place: list[int], start: int = 0, shift: float = 0.0) -> tuple:
    out, total = dots.clone(), torch.zeros(len(dots), dtype=dots.dtype)
    where = torch.tensor(place)
    native.exponentials(out, inverse, place=where, start=start, shift=shift, total=total)
    return out, total


def test_exp_is_within_one_unit_in_the_last_place(kernel: str) -> None:
    x = torch.linspace(-103.5, 88.72, 400_001)[None]
    got, _ = exponentials(x, torch.ones(x.shape[1]), [-1])
    true = torch.exp(x.double())
    unit = torch.from_numpy(np.spacing(true.float().numpy())).double()  # that of a denormal number too
    assert ((got.double() - true).abs() / unit).max() < 1.05


def test_what_is_not_finite_passes(kernel: str) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 100.0, -110.0, 0.0]])
    got, total = exponentials(x, torch.ones(6), [-1])
    torch.testing.assert_close(got, torch.exp(x), equal_nan=True)
    assert total.isnan()
    weight = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [3.0, 4.0], [0.0, 0.0]])
    inverse = torch.empty(4)
    native.read_rows(weight, slice(0, 4), out=None, inverse=inverse)
    assert inverse[0].isnan() and inverse[1:].tolist() == pytest.approx([0.0, 0.2, 0.0])


@pytest.mark.parametrize("width", [1, 7, 33, 130])
def test_exponentials_equal_their_twin(kernel: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(width)
    dots, inverse = torch.randn(5, width, generator=g) * 20, torch.rand(width, generator=g)
    inverse[-1] = 0.0  # a zero row: cosine 0, and nothing to pull at
    place = [-1, 100, 100 + width - 1, 100 + width, 99]
    got = exponentials(dots, inverse, place, 100, 2.0)
    twin(monkeypatch, True)
    for a, b in zip(got, exponentials(dots, inverse, place, 100, 2.0), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
    full = torch.exp(dots.double() * inverse - 2.0)
    full[1, 0] = full[2, -1] = 0
    torch.testing.assert_close(got[1].double(), full.sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 5), (9, 64), (9, 3, 20)])
@pytest.mark.parametrize("rows", [slice(2, 9), [7, 0, 3]])
def test_rows_are_read_as_their_twin_reads_them(
    kernel: str, dtype: torch.dtype, shape: tuple, rows: slice | list, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    chosen = rows if isinstance(rows, slice) else torch.tensor(rows)
    num = len(weight[chosen])
    results = []
    for on in (False, True):
        twin(monkeypatch, on)
        out, inverse = torch.empty(num, *shape[1:]), torch.empty(num * (shape[1] if len(shape) == 3 else 1))
        results.append((native.read_rows(weight, chosen, out=out, inverse=inverse), inverse))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)
    assert torch.equal(results[0][0], weight[chosen].float())


def kept_weight(fmt: str, shape: tuple) -> tuple[Tensor, dict[str, Tensor]]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if fmt == "fp32":
        return weight, {}
    if fmt == "bf16":
        return weight.bfloat16(), {}
    high, low = split(weight)
    return high, {"low": low}


RULES: dict[str, RowOptimizer] = {
    "plain": SGD(0.1, 1e-2),
    "momentum": SGD(0.1, 1e-2, momentum=0.9),
    "nesterov": SGD(0.1, momentum=0.9, nesterov=True),
    "momentum bf16": SGD(0.1, 1e-2, momentum=0.9, state_dtype="bf16"),
    "momentum int8": SGD(0.1, 1e-2, momentum=0.9, state_dtype="int8"),
    "adamw": AdamW(0.01, 0.1),
}


def run_steps(optimizer: RowOptimizer, fmt: str, shape: tuple, rows: Tensor | None, normalize: bool) -> dict:
    weight, low = kept_weight(fmt, shape)
    state = {**optimizer.state(weight), **low}
    g = torch.Generator().manual_seed(4)
    for i in range(3):
        grad = torch.randn(len(weight) if rows is None else len(rows), *shape[1:], generator=g)
        apply_rows(optimizer, weight, state, rows, grad, normalize=normalize, rounding=Rounding(7, i, 1000))
    full = join(weight, state["low"]) if "low" in state else weight
    return {"weight": full, **{name: value for name, value in state.items() if name != "low"}}


@pytest.mark.parametrize(("rule", "fmt"), list(itertools.product(RULES, ["fp32", "split", "bf16"])))
def test_steps_equal_their_twin(kernel: str, rule: str, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are rounded at random may differ by a unit where a sum in another order tips the scale."""
    for shape, rows, normalize in (
        ((11, 19), None, True),
        ((11, 2, 19), torch.tensor([8, 1, 4]), True),
        ((11, 19), torch.tensor([3, 2]), False),
    ):
        results = []
        for on in (False, True):
            twin(monkeypatch, on)
            results.append(run_steps(RULES[rule], fmt, shape, rows, normalize))
        assert results[0].keys() == results[1].keys()
        for name, value in results[0].items():
            other = results[1][name]
            if value.dtype == torch.float32:
                lossy = "int8" in rule or "bf16" in rule  # the rounded momentum is what moved the weight
                torch.testing.assert_close(value, other, rtol=1e-2 if lossy else 2e-5, atol=4e-3 if lossy else 1e-6)
            off = value.float() != other.float()
            if value.dtype != torch.float32:
                assert off.float().mean() < 0.03
                unit = 1.0 if value.dtype == torch.int8 else other.float().abs() * 2**-7
                assert ((value.float() - other.float()).abs() <= unit).all()


def test_the_gradient_of_a_normalised_row(kernel: str) -> None:
    """Autograd's, from the gradient of w / |w|; the row of zeros gets it unchanged."""
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    seed = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    w = weight.double().requires_grad_()
    torch.nn.functional.normalize(w).backward(seed.double())
    grad = seed / weight.norm(dim=1, keepdim=True)
    assert native.step(weight, slice(0, 6), grad, normalize=True, options=None)
    torch.testing.assert_close(grad.double(), w.grad, rtol=1e-5, atol=1e-6)
    grad = seed.clone()
    native.step(torch.zeros_like(weight), slice(0, 6), grad, normalize=True, options=None)
    assert torch.equal(grad, seed)


def test_threads_change_no_bit_and_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads of one call, and several callers at once (ranks may be threads), give what one gives."""
    twin(monkeypatch, False)
    weight = torch.randn(700, 200, generator=torch.Generator().manual_seed(0))

    def run() -> tuple[Tensor, Tensor]:
        mine, inverse = weight.clone(), torch.empty(700)
        native.read_rows(mine, slice(0, 700), out=None, inverse=inverse)
        apply_rows(SGD(0.1), mine, {}, None, weight.clone(), normalize=True)
        return mine, inverse

    alone = run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    results: list[tuple[Tensor, Tensor]] = []
    callers = [threading.Thread(target=lambda: results.extend(run() for _ in range(20))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 60
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, alone, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the OpenMP runtime, which the parent's loops use, are not there after a fork: waiting for them hangs."""
    twin(monkeypatch, False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    weight = torch.randn(700, 200, generator=torch.Generator().manual_seed(0))

    def lengths() -> Tensor:
        inverse = torch.empty(700)
        native.read_rows(weight, slice(0, 700), out=None, inverse=inverse)
        return inverse

    want = lengths()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(lengths(), want) and torch.equal(lengths(), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_split_float_comes_back_to_the_bit() -> None:
    x = torch.tensor([1.0, -1.0, 3.14159, -2.7e-20, 1e38, 0.0, -0.0, float("inf")])
    x = torch.cat([x, torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    high, low = split(x)
    assert torch.equal(join(high, low).view(torch.int32), x.view(torch.int32))
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    assert ((high.float() - x)[8:].abs() <= x[8:].abs() * 2**-7).all()
    assert join(*split(torch.tensor([float("nan")]))).isnan()


@pytest.mark.parametrize("value", [1.003, -0.7123, 3e-5])
def test_rounding_at_random_is_right_on_average(value: float) -> None:
    x = torch.full((20_000,), value)
    bits = Rounding(1, 2, 3).bits(torch.arange(20_000), 1)[:, 0]
    got = to_bf16(x, bits & 0xFFFF).float()
    low, high = got.min(), got.max()
    assert low <= value <= high and low < high  # both neighbours are met
    spread = float(high - low) / 2 / 20_000**0.5
    assert abs(float(got.double().mean()) - float(x[0])) < 4 * spread
    rows = x.view(100, 200) * torch.linspace(-1, 1, 200)
    units, scale = to_int8(rows, (bits & 0xFFFF).view(100, 200))
    error = units.float() * scale[:, None] - rows
    assert error.abs().max() <= scale.max() * 1.001 and abs(float(error.mean())) < 4 * float(scale[0]) / 2 / 20_000**0.5


def test_rounding_of_what_is_not_finite() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.38e38])
    got = to_bf16(x, torch.full((4,), 0xFFFF))
    assert got[0].isnan() and got[1] == torch.inf and got[2] == -torch.inf
    units, scale = to_int8(
        torch.tensor([[1.0, torch.inf], [0.0, 0.0], [1.0, -2.0]]), torch.zeros(3, 2, dtype=torch.int64)
    )
    assert scale[0].isinf() and (units[0].float() * scale[0]).isinf().all()
    assert units[1].tolist() == [0, 0] and units[2].tolist() == [63, -127]


def test_random_bits_belong_to_the_class_and_the_step() -> None:
    whole = Rounding(5, 9, 0).bits(torch.arange(40), 16)
    assert torch.equal(Rounding(5, 9, 30).bits(torch.arange(10), 16), whole[30:])
    assert not torch.equal(Rounding(5, 10, 0).bits(torch.arange(40), 16), whole)
    assert not torch.equal(Rounding(6, 9, 0).bits(torch.arange(40), 16), whole)
    assert len(whole.unique()) == whole.numel()
    assert abs(float((whole & 0xFFFF).double().mean()) / 65535 - 0.5) < 0.04
    assert abs(float((whole >> 16).double().mean()) / 65535 - 0.5) < 0.04


def test_twins_run_where_kernels_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, grad = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    assert not native.step(weight, slice(0, 4), grad, normalize=True, options=None)
    assert not native.step(weight.float().T, slice(0, 6), grad.float().T, normalize=True, options=None)
    twin(monkeypatch, True)
    assert not native.enabled(weight)
