"""The hooks of the head's sweep: kernels against what plsc.ops computes in plain torch, bit formats included."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import plsc
from plsc.ops import fused, native
from plsc.ops.formats import Rounding, join, split
from plsc.ops.optim import apply_rows

OPTIMIZERS = [
    plsc.SGD(0.1, weight_decay=1e-3),
    plsc.SGD(0.1, momentum=0.9, nesterov=True),
    plsc.SGD(0.1, momentum=0.9, weight_decay=1e-3, state_dtype="bf16"),
    plsc.SGD(0.1, momentum=0.9, state_dtype="int8"),
    plsc.AdamW(0.01, weight_decay=0.1),
]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with is no C++ either."""
    monkeypatch.setenv("PLSC_KERNELS", "0")


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between."""
    if a.dtype == torch.int8:
        return (a.int() - b.int()).abs()
    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()


@pytest.mark.parametrize("order", [0, 3, 5])
def test_steps_of_the_row_optimizers(launch: Any, generator: torch.Generator, order: int, monkeypatch: Any) -> None:
    launcher = launch(threads=64, order=order)
    monkeypatch.setattr(fused, "launcher_for", lambda device: launcher)
    for optimizer, kind in itertools.product(OPTIMIZERS, ("fp32", "bf16", "split")):
        rows: Any
        for rows in (slice(3, 9), torch.tensor([8, 0, 5, 2, 11, 6])):
            full = torch.randn(12, 40, generator=generator)
            weight, state = full.clone(), optimizer.state(full)
            if kind == "bf16":
                weight = full.bfloat16()
            if kind == "split":
                weight, state["low"] = split(full)
            rounding = Rounding(seed=3, step=5, first=100)
            mine, my_state = weight.clone(), {name: value.clone() for name, value in state.items()}
            for _ in range(2):
                grad = torch.randn(6, 40, generator=generator)
                apply_rows(optimizer, weight, state, rows, grad.clone(), normalize=True, rounding=rounding)
                options = optimizer.kernel_options(my_state)
                assert options is not None
                options |= {"low": my_state.get("low"), "key": rounding.key, "first": rounding.first}
                assert fused.step(mine, rows, grad, normalize=True, options=options)
            pairs = {"weight": (mine, weight), **{name: (my_state[name], state[name]) for name in state}}
            if kind == "split":
                torch.testing.assert_close(
                    join(mine, my_state["low"]), join(weight, state["low"]), rtol=1e-5, atol=1e-5
                )
                pairs = {name: pair for name, pair in pairs.items() if name not in ("weight", "low")}
            for name, (got, expected) in pairs.items():
                if expected.dtype in (torch.bfloat16, torch.int8):  # the same random bits: almost always the same
                    apart = steps_apart(got, expected)
                    assert apart.max() <= 2 and (apart > 0).float().mean() < 0.02, (name, kind, optimizer)
                else:
                    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


def test_exponentials_of_the_sweep(launch: Any, generator: torch.Generator, monkeypatch: Any) -> None:
    launcher = launch(order=4)
    monkeypatch.setattr(fused, "launcher_for", lambda device: launcher)
    dots, inverse = torch.randn(5, 700, generator=generator) * 8, torch.rand(700, generator=generator) + 0.5
    place, total = torch.tensor([-1, 3, 702, 20, 9999]), torch.rand(5, generator=generator)
    expected, sums = dots.clone(), total.clone()
    native.exponentials(expected, inverse, place=place, start=3, shift=4.0, total=sums)
    assert fused.exponentials(dots, inverse, place=place, start=3, shift=4.0, total=total)
    torch.testing.assert_close(dots, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(total, sums, rtol=1e-5, atol=0)
    assert dots[1, 0] == 0 and dots[2, 699] == 0 and dots[3, 17] == 0


def test_exponentials_rounded_in_the_same_pass(launch: Any, generator: torch.Generator, monkeypatch: Any) -> None:
    """To bfloat16, from products that are not scaled yet; their sums are of what was not rounded."""
    launcher = launch(order=2)
    monkeypatch.setattr(fused, "launcher_for", lambda device: launcher)
    dots, inverse = torch.randn(5, 700, generator=generator) / 8, torch.rand(700, generator=generator) + 0.5
    given: dict[str, Any] = {"place": torch.tensor([-1, 3, 702, 20, 9999]), "start": 3, "shift": 4.0, "scale": 64.0}
    halves = [torch.empty(5, 700, dtype=torch.bfloat16) for _ in range(2)]
    totals = [torch.ones(5), torch.ones(5)]
    assert fused.exponentials(dots, inverse, total=totals[0], out=halves[0], **given)
    assert native.exponentials(dots, inverse, total=totals[1], out=halves[1], **given) is halves[1]
    assert [*launcher.launched] == ["softmax.exp_rows_float_bf16"]
    apart = steps_apart(*halves)
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
    torch.testing.assert_close(*totals, rtol=1e-5, atol=0)


def test_what_no_kernel_knows_is_left_alone() -> None:
    """No launcher on a CPU; other rules, shapes and types."""
    weight, grad = torch.zeros(3, 4), torch.ones(3, 4)
    known: dict[str, Any] = {"rule": 1, "lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    assert not fused.step(weight, slice(0, 3), grad, normalize=True, options=known)
    assert not fused._known(weight, grad, {**known, "rule": 0})
    assert not fused._known(weight.double(), grad, known) and not fused._known(weight, grad.double(), known)
    assert fused._known(weight, grad, known) and not weight.any()
    place = torch.tensor([-1, -1, -1])
    assert not fused.exponentials(grad, torch.ones(4), place=place, start=0, shift=0.0, total=torch.zeros(3))


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["fp32", "split", "bf16"])
def test_head_over_the_kernels(launch: Any, monkeypatch: pytest.MonkeyPatch, kind: str, products: str) -> None:
    """The whole head, its sweep's two steps by kernels, against itself in plain torch: losses, gradients, weights."""
    launcher = launch(order=3)
    monkeypatch.setattr(fused, "launcher_for", lambda device: launcher)

    def trained() -> tuple[plsc.ClassParallelHead, Tensor, Tensor]:
        optimizer = plsc.SGD(0.05, momentum=0.9, weight_decay=1e-3, state_dtype="bf16")
        kept = {"weight_dtype": kind, "product_dtype": products, "block": 32, "seed": 3, "cache_mb": 0.0}
        head = plsc.ClassParallelHead(24, 101, head_optimizer=optimizer, **kept)
        generator, losses = torch.Generator().manual_seed(4), []
        for _ in range(3):
            x = torch.randn(9, 24, generator=generator, requires_grad=True)
            loss = head(x, torch.randint(-1, 101, (9,), generator=generator))
            loss.backward()
            losses.append(loss.detach())
        assert x.grad is not None
        return head, torch.stack(losses), x.grad

    plain, losses, grad = trained()
    before = native.exponentials

    def exponentials(dots: Tensor, inverse: Tensor, **where: Any) -> Tensor:
        done = fused.exponentials(dots, inverse, **where)
        return before(dots, inverse, **where) if not done else dots if where["out"] is None else where["out"]

    monkeypatch.setattr(native, "exponentials", exponentials)
    monkeypatch.setattr(native, "step", fused.step)
    ours, our_losses, our_grad = trained()
    stored = "float" if products == "fp32" else "bf16"
    rows = "float" if kind == "fp32" else kind
    assert {*launcher.launched} == {f"softmax.exp_rows_float_{stored}", f"update.sgd_{rows}_bf16"}
    torch.testing.assert_close(our_losses, losses, rtol=2e-3 if kind == "bf16" else 1e-4, atol=0)
    torch.testing.assert_close(our_grad, grad, rtol=1e-2, atol=1e-3)
    apart = (ours.weight.float() - plain.weight.float()).abs() / plain.weight.float().abs().amax()
    assert apart.max() < (2e-2 if kind == "bf16" else 1e-2)
