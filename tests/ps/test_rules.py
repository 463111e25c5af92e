"""Each rule against torch's optimizer, or against its paper's formula in float64 where torch has none."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from plsc.ps import FTRL, SGD, Adagrad, Adam, Momentum, PythonRule, RowAdagrad, Rule, Table

KEYS, STEPS, LR = 13, 60, 0.05


def gradients(dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and gradients of every step; no key twice in a step, no step with all keys."""
    random = np.random.default_rng(dim)
    steps = []
    for _ in range(STEPS):
        keys = random.permutation(KEYS)[: random.integers(1, KEYS)].astype(np.uint64)
        steps.append((keys, random.standard_normal((len(keys), dim), np.float32)))
    return steps


def with_torch(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], start: np.ndarray) -> np.ndarray:
    """A parameter and an optimizer for every row: only rows with a gradient step."""
    rows = [torch.nn.Parameter(torch.from_numpy(row).double()) for row in start]
    optimizers = [make([row]) for row in rows]
    for keys, grads in gradients(start.shape[1]):
        for key, grad in zip(keys, grads, strict=True):
            rows[key].grad = torch.from_numpy(grad).double()
            optimizers[key].step()
    return torch.stack([row.detach() for row in rows]).numpy()


def trained(rule: Rule | PythonRule | str, dim: int, **options: object) -> tuple[np.ndarray, np.ndarray]:
    table = Table(dim, rule=rule, lr=LR, init_scale=0.5, **options)
    keys = np.arange(KEYS, dtype=np.uint64)
    start = table.pull(keys)
    for some, grads in gradients(dim):
        table.push(some, grads)
    return start, table.pull(keys)


TORCH = {
    "sgd": (SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
    "sgd, decay": (SGD(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.1)),
    "momentum": (Momentum(momentum=0.8), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8)),
    "momentum, decay": (
        Momentum(weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1),
    ),
    "adagrad": (Adagrad(), lambda p: torch.optim.Adagrad(p, lr=LR)),
    "adagrad, initial, decay": (
        Adagrad(initial=0.1, eps=1e-3, weight_decay=0.01),
        lambda p: torch.optim.Adagrad(p, lr=LR, initial_accumulator_value=0.1, eps=1e-3, weight_decay=0.01),
    ),
    "adam": (Adam(), lambda p: torch.optim.Adam(p, lr=LR)),
    "adam, betas, decay": (
        Adam(beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=LR, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("dim", [3, 8, 16, 32, 64])
@pytest.mark.parametrize("name", TORCH)
def test_equals_torch(name: str, dim: int) -> None:
    rule, make = TORCH[name]
    start, end = trained(rule, dim)
    np.testing.assert_allclose(end, with_torch(make, start), rtol=1e-6, atol=1e-6)


def test_row_adagrad_formula() -> None:
    start, end = trained(RowAdagrad(eps=1e-8, initial=0.2), 16)
    rows, sums = start.astype(np.float64), np.full(KEYS, 0.2)
    for keys, grads in gradients(16):
        for key, grad in zip(keys, grads.astype(np.float64), strict=True):
            sums[key] += (grad**2).mean()
            rows[key] -= LR * grad / (np.sqrt(sums[key]) + 1e-8)
    np.testing.assert_allclose(end, rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("init", ["zeros", "uniform"])
def test_ftrl_formula(init: str) -> None:
    """McMahan et al. 2013, algorithm 1; a value other than 0 at birth is the w of its z."""
    rule = FTRL(beta=1.0, l1=0.3, l2=0.1)
    start, end = trained(rule, 4, init=init)
    n = np.zeros((KEYS, 4))
    z = -np.sign(start) * (abs(start.astype(np.float64)) * (1.0 / LR + 0.1) + 0.3)

    def weights(key: int) -> np.ndarray:
        w = -(z[key] - np.sign(z[key]) * 0.3) / ((1.0 + np.sqrt(n[key])) / LR + 0.1)
        return np.where(abs(z[key]) <= 0.3, 0.0, w)

    for keys, grads in gradients(4):
        for key, grad in zip(keys, grads.astype(np.float64), strict=True):
            w = weights(key)
            sigma = (np.sqrt(n[key] + grad**2) - np.sqrt(n[key])) / LR
            z[key] += grad - sigma * w
            n[key] += grad**2
    np.testing.assert_allclose(end, np.stack([weights(key) for key in range(KEYS)]), rtol=1e-6, atol=1e-6)


def test_ftrl_makes_zeros() -> None:
    _, end = trained(FTRL(l1=10.0), 8, init="zeros")
    assert (end == 0).mean() > 0.5


def test_adam_counts_far() -> None:
    """The corrections of late steps are computed, not looked up; both must meet."""
    table = Table(2, rule=Adam(beta2=0.9999), lr=1e-3, init="zeros", locked=True)
    row = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.Adam([row], lr=1e-3, betas=(0.9, 0.9999))
    grads = np.random.default_rng(0).standard_normal((4200, 2), np.float32)
    table.push(np.zeros(4200, np.uint64), grads)
    for grad in torch.from_numpy(grads).double():
        row.grad = grad
        optimizer.step()
    np.testing.assert_allclose(table.pull(np.zeros(1, np.uint64))[0], row.detach().numpy(), rtol=0, atol=1e-5)


def test_clipping() -> None:
    grads = np.array([[3.0, 4.0], [0.3, 0.4], [-30.0, 0.0]], np.float32)
    keys = np.arange(3, dtype=np.uint64)
    for rule, expected in [
        (SGD(clip_norm=1.0), [[0.6, 0.8], [0.3, 0.4], [-1.0, 0.0]]),
        (SGD(clip_value=0.35), [[0.35, 0.35], [0.3, 0.35], [-0.35, 0.0]]),
        (SGD(clip_norm=1.0, clip_value=0.7), [[0.6, 0.7], [0.3, 0.4], [-0.7, 0.0]]),
    ]:
        table = Table(2, rule=rule, lr=1.0, init="zeros")
        table.push(keys, grads)
        np.testing.assert_allclose(table.pull(keys), -np.array(expected, np.float32), rtol=1e-6)


def test_learning_rate_schedule() -> None:
    table = Table(1, rule="sgd", lr=1.0, init="zeros")
    key, grad = np.zeros(1, np.uint64), np.ones((1, 1), np.float32)
    for step in range(4):
        table.lr = 0.5**step
        table.push(key, grad)
    assert table.pull(key)[0, 0] == -1.875


class Lion(PythonRule):
    """Chen et al. 2023: the sign of an interpolated momentum."""

    name = "lion"

    def state_size(self, dim: int) -> int:
        return dim

    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        values -= lr * np.sign(0.9 * state + 0.1 * grads)
        state *= 0.99
        state += 0.01 * grads


class PythonAdagrad(PythonRule):
    name = "my adagrad"

    def state_size(self, dim: int) -> int:
        return dim

    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        state += grads**2
        values -= lr * grads / (np.sqrt(state) + 1e-10)


@pytest.mark.parametrize("locked", [False, True])
def test_rule_of_your_own(locked: bool) -> None:
    _, end = trained(PythonAdagrad(), 16, locked=locked)
    np.testing.assert_allclose(end, trained("adagrad", 16)[1], rtol=1e-6, atol=1e-6)
    assert np.isfinite(trained(Lion(), 4)[1]).all()


def test_rule_of_your_own_with_repeats_and_nan() -> None:
    random = np.random.default_rng(2)
    keys = random.integers(0, 20, 300, np.uint64)
    grads = random.standard_normal((300, 5), np.float32)
    grads[7, 1] = np.nan
    mine, native = Table(5, rule=PythonAdagrad()), Table(5, rule="adagrad")
    assert mine.push(keys, grads) == native.push(keys, grads) == 1
    np.testing.assert_allclose(mine.pull(keys), native.pull(keys), rtol=1e-6, atol=1e-6)


def test_bad_rules() -> None:
    for wrong in [lambda: SGD(weight_decay=-1.0), lambda: Adam(beta1=1.0), lambda: Adagrad(eps=float("nan"))]:
        with pytest.raises(ValueError, match="expected"):
            wrong()
    with pytest.raises(ValueError, match="PythonRule"):
        Table(4, rule=torch.optim.SGD)
