"""Each rule against torch's optimizer, or against its paper's formula in float64 where torch has none."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.ps import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    NativeRule,
    PythonRule,
    RowAdagrad,
    Rule,
    Server,
    Table,
    connect,
    native_rule,
)
from plsc.ps.settings import read_settings

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
    "adamw": (
        AdamW(beta1=0.8, beta2=0.95, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.8, 0.95), weight_decay=0.3),
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


LION = """
#include <cmath>
#include "plsc_rule.h"

int plsc_rule_state(int dim, const float* args) { return args[0] > 0 ? dim : 0; }

void plsc_rule_step(float* value, float* state, const float* grad, int dim, float lr, const float* args) {
  for (int d = 0; d < dim; ++d) {
    const float mixed = 0.9f * state[d] + 0.1f * grad[d];
    value[d] -= lr * static_cast<float>((mixed > 0) - (mixed < 0));
    state[d] = args[0] * state[d] + args[1] * grad[d];
  }
}
"""


@pytest.fixture(scope="module")
def lion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A rule in C++, compiled into a cache of its own."""
    place = tmp_path_factory.mktemp("rule")
    (place / "lion.cc").write_text(LION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        yield place / "lion.cc"


@pytest.mark.parametrize("options", [{}, {"locked": True}, {"dtype": "bf16"}], ids=str)
def test_rule_of_your_own_in_cpp(lion: Path, options: dict[str, object]) -> None:
    native, python = (trained(rule, 16, **options)[1] for rule in (NativeRule(lion, args=(0.99, 0.01)), Lion()))
    np.testing.assert_allclose(native, python, rtol=1e-5, atol=1e-5)
    assert len(list((lion.parent / "cache").rglob("*.so"))) == 1  # compiled once


def test_cpp_rule_decays_clips_refuses_and_is_saved(lion: Path, tmp_path: Path) -> None:
    rule = NativeRule(lion, args=(0.5, 0.5), weight_decay=0.1, clip_value=0.3)
    table, keys = Table(4, rule=rule, lr=LR), np.arange(20, dtype=np.uint64)
    grads = np.random.default_rng(3).standard_normal((20, 4), np.float32)
    start = table.pull(keys)
    assert table.push(keys, np.full((20, 4), np.nan, np.float32)) == 20
    table.push(keys, grads)
    moved = np.clip(grads + np.float32(0.1) * start, -0.3, 0.3)
    np.testing.assert_allclose(table.pull(keys), start - np.float32(LR) * np.sign(moved), rtol=1e-6)
    table.save(tmp_path / "t")
    with pytest.raises(ValueError, match="rule 'lion', got None; give rule="):
        Table.load(tmp_path / "t")
    with pytest.raises(ValueError, match="rule 'lion', got 'lion'"):  # of another state
        Table.load(tmp_path / "t", rule=NativeRule(lion, args=(0.0, 1.0)))
    again = Table.load(tmp_path / "t", rule=rule)
    for each in (table, again):
        each.push(keys, grads[::-1].copy())
    np.testing.assert_array_equal(again.pull(keys), table.pull(keys))


def test_python_goes_on_while_the_core_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for what only another Python thread can do: with the GIL held, neither would go on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "wait.cc").write_text(
        """
#include <atomic>
#include "plsc_rule.h"
int plsc_rule_state(int, const float*) { return 0; }
void plsc_rule_step(float* value, float*, const float* grad, int, float, const float*) {
  volatile float* const flag = const_cast<float*>(grad);
  *flag = 1.0f;
  for (long turns = 0; *flag == 1.0f && turns < 3000000000; ++turns) {}
  value[0] = *flag;
}
"""
    )
    table, grads = Table(1, rule=NativeRule(tmp_path / "wait.cc")), np.zeros((1, 1), np.float32)
    pushing = threading.Thread(target=table.push, args=(np.zeros(1, np.uint64), grads))
    pushing.start()
    while pushing.is_alive() and grads[0, 0] == 0.0:
        time.sleep(0.001)
    grads[0, 0] = 7.0
    pushing.join()
    assert table.pull(np.zeros(1, np.uint64))[0, 0] == 7.0


@pytest.mark.parametrize("durability", ["save", "log"])
def test_rules_of_your_own_on_a_server(lion: Path, tmp_path: Path, durability: str) -> None:
    """Named in tables.toml by its file, or given in Python; a server that starts again goes on with it."""
    (tmp_path / "lion.cc").write_bytes(lion.read_bytes())
    text = (
        '[tables.cpp]\ndim = 4\nrule = "lion.cc"\nrule_args = { args = [0.99, 0.01], clip_value = 1.0 }\nstripes = 4\n'
    )
    (tmp_path / "tables.toml").write_text(text)
    keys, grads = np.arange(30, dtype=np.uint64), np.random.default_rng(0).standard_normal((60, 4), np.float32)
    alone = Table(4, rule=NativeRule(lion, args=(0.99, 0.01), clip_value=1.0))
    for start in (0, 30):  # each time a new server
        tables, options = read_settings(tmp_path / "tables.toml", {"folder": str(tmp_path / "state")})
        python = {"python": Table(4, rule=Lion())}
        options["load_options"]["python"] = {"locked": True}
        with Server({**tables, **python}, **options, durability=durability) as server:
            for name in ("cpp", "python"):
                with connect(server.address, table=name) as store:
                    assert store.rule.name == "lion"
                    store.push(keys, grads[start : start + 30])
                    rows = store.pull(keys)
                    if name == "cpp":
                        alone.push(keys, grads[start : start + 30])
                        np.testing.assert_array_equal(rows, alone.pull(keys))
            server.close(save=durability == "save")
    (tmp_path / "tables.toml").write_text(text.replace("clip_value", "clip"))
    with pytest.raises(ValueError, match=r"rule_args unknown clip; expected args, name, weight_decay"):
        read_settings(tmp_path / "tables.toml", {})


def test_bad_cpp_rules(lion: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.cc").write_text('#include "plsc_rule.h"\nint plsc_rule_state(int dim) { return nothing; }\n')
    (tmp_path / "empty.so").write_bytes(b"no library")
    (tmp_path / "half.cc").write_text('#include "plsc_rule.h"\n')
    for path, told in [
        (tmp_path / "none.cc", "that exists"),
        (tmp_path / "broken.cc", "does not compile:(.|\n)*nothing"),
        (tmp_path / "empty.so", "no library with the functions"),
        (tmp_path / "half.cc", "define plsc_rule_state and plsc_rule_step"),
    ]:
        with pytest.raises(ValueError, match=told):
            NativeRule(path)
    with pytest.raises(ValueError, match="give yours another name"):
        NativeRule(lion, name="adam")


def test_bad_rules() -> None:
    for wrong in [lambda: SGD(weight_decay=-1.0), lambda: Adam(beta1=1.0), lambda: Adagrad(eps=float("nan"))]:
        with pytest.raises(ValueError, match="expected"):
            wrong()
    with pytest.raises(ValueError, match="PythonRule"):
        Table(4, rule=torch.optim.SGD)


def test_ftrl_follows_a_schedule(tmp_path: Path) -> None:
    """sigma = 1 / eta_t - 1 / eta_(t-1) (McMahan et al. 2013), in float64; a save changes nothing."""
    random, rates = np.random.default_rng(7), [0.1, 0.1, 0.03, 0.03, 0.2, 0.01]
    table, key = Table(5, rule=FTRL(beta=0.7, l1=0.02, l2=0.1), lr=0.5, init_scale=0.5, seed=3), np.zeros(1, np.uint64)
    w = table.pull(key)[0].astype(np.float64)
    n, z, last = np.zeros(5), None, 0.0
    for step, rate in enumerate(rates):
        grad = random.standard_normal(5).astype(np.float32)
        table.lr = rate
        table.push(key, grad[None])
        if z is None:
            z, last = -np.sign(w) * (abs(w) * (0.7 / rate + 0.1) + 0.02), rate
        z += grad - ((0.7 + np.sqrt(n + grad.astype(np.float64) ** 2)) / rate - (0.7 + np.sqrt(n)) / last) * w
        n, last = n + grad.astype(np.float64) ** 2, rate
        w = np.where(abs(z) <= 0.02, 0.0, -(z - np.sign(z) * 0.02) / ((0.7 + np.sqrt(n)) / rate + 0.1))
        np.testing.assert_allclose(table.pull(key)[0], w, rtol=2e-5, atol=2e-6)
        if step == 2:
            table.save(tmp_path / "t")
            table = Table.load(tmp_path / "t")


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_ftrl_stands_still_without_gradient(beta: float, tmp_path: Path) -> None:
    """Whatever the rates: newborn, assigned, added to, trained."""
    table, keys = Table(4, rule=FTRL(beta=beta), lr=0.1), np.arange(4, dtype=np.uint64)
    table.pull(keys)
    table.assign(keys[1:2], np.full((1, 4), 0.3, np.float32))
    table.push(keys[2:], np.ones((2, 4), np.float32))
    table.add(keys[3:], np.ones((1, 4), np.float32))
    table.pull(np.array([9], np.uint64))
    table.save(tmp_path / "t")
    before = table.pull(keys)
    for each in (table, Table.load(tmp_path / "t")):
        for rate in (0.01, 1.0, 0.1):
            each.lr = rate
            assert each.push(keys, np.zeros((4, 4), np.float32)) == 0
            np.testing.assert_allclose(each.pull(keys), before, rtol=1e-5)


def test_python_rule_is_judged_as_native_ones_are() -> None:
    """Refusals, counters, admission, clock of a table under a rule in Python: those of its native twin."""
    keys = np.array([1, 2, 1, 3, 4, 1], np.uint64)
    grads = np.ones((6, 3), np.float32)
    grads[3, 1], grads[4, 2] = np.nan, 1e16
    tables = [Table(3, rule=rule, counters=True, admit_after=2) for rule in (PythonAdagrad(), "adagrad")]
    for table in tables:
        assert [table.push(keys, grads) for _ in range(3)] == [2, 2, 2]
    mine, native = tables
    told = ("rows", "born", "refused", "unadmitted", "clock")
    assert [mine.stats()[name] for name in told] == [native.stats()[name] for name in told]
    np.testing.assert_array_equal(mine.counters(keys), native.counters(keys))
    np.testing.assert_allclose(mine.pull(keys), native.pull(keys), rtol=1e-6)


class Breaks(PythonRule):
    """Breaks the value of keys whose gradient is 1, the state of those with 2."""

    def state_size(self, dim: int) -> int:
        return 1

    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        values += grads
        values[grads[:, 0] == 1] = np.nan
        state[grads[:, 0] == 2] = np.inf


def test_python_rule_that_breaks_a_row() -> None:
    table, keys = Table(2, rule=Breaks(), init="zeros"), np.arange(3, dtype=np.uint64)
    assert table.push(keys, np.arange(1, 4, dtype=np.float32).repeat(2).reshape(3, 2)) == 2
    assert table.pull(keys).tolist() == [[0, 0], [0, 0], [3, 3]] and table.stats()["refused"] == 2


def test_rules_that_would_divide_nothing_by_nothing() -> None:
    for wrong in (
        lambda: Adagrad(eps=0.0),
        lambda: RowAdagrad(eps=0.0),
        lambda: Adam(eps=0.0),
        lambda: AdamW(eps=1e-60),
    ):
        with pytest.raises(ValueError, match="0 / 0"):
            wrong()
    table = Table(2, rule=Adagrad(eps=0.0, initial=0.1))
    before = table.pull(np.zeros(1, np.uint64))
    table.push(np.zeros(1, np.uint64), np.zeros((1, 2), np.float32))
    np.testing.assert_array_equal(table.pull(np.zeros(1, np.uint64)), before)


@pytest.mark.parametrize("decay", [np.float32(0.25), np.float64(0.25), np.int64(1), 1])
def test_constants_of_any_kind_of_number_are_saved(decay: float, tmp_path: Path) -> None:
    table, keys = Table(2, rule=SGD(weight_decay=decay), lr=0.5), np.arange(5, dtype=np.uint64)
    start = table.pull(keys)
    table.push(keys, np.ones((5, 2), np.float32))
    table.save(tmp_path / "t")
    again = Table.load(tmp_path / "t")
    assert again.rule == SGD(weight_decay=float(decay))
    again.merge(tmp_path / "t")
    np.testing.assert_allclose(again.pull(keys), start - 0.5 * (1 + np.float32(decay) * start), rtol=1e-6)


def test_what_is_no_constant() -> None:
    for wrong in ("0.1", None, True, torch.tensor(0.1), 1e39):
        with pytest.raises(ValueError, match=r"Momentum: got weight_decay=.*expected a finite float32"):
            Momentum(weight_decay=wrong)
    with pytest.raises(ValueError, match="lr: got 1e-50"):  # 0 as a float32
        Table(2, lr=1e-50)


def test_a_table_keeps_the_rule_it_was_made_with(tmp_path: Path) -> None:
    table = Table(2, rule="adagrad")
    for name, value in (("rule", SGD()), ("dim", 3)):
        with pytest.raises(AttributeError):
            setattr(table, name, value)
    table.push(np.arange(5, dtype=np.uint64), np.ones((5, 2), np.float32))
    table.save(tmp_path / "t")
    assert Table.load(tmp_path / "t").rule == Adagrad() and len(Table.load(tmp_path / "t")) == 5


class Count(PythonRule):
    """Counts pushes, and checks that a key's come in order."""

    def state_size(self, dim: int) -> int:
        return dim

    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        assert (grads >= state).all()
        values += 1
        state[:] = grads


def test_python_rule_takes_many_repeats() -> None:
    keys = np.zeros(20_000, np.uint64)
    keys[::5] = np.arange(4000)
    table = Table(1, rule=Count(), init="zeros")
    table.push(keys, np.arange(20_000, dtype=np.float32)[:, None])
    np.testing.assert_array_equal(table.pull(np.arange(3, dtype=np.uint64))[:, 0], [16_001, 1, 1])


def test_a_compiled_rule_is_of_one_kind_of_processor(lion: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in a home that machines share: code of one with wider registers would end another's process."""
    here = NativeRule(lion, args=(0.9, 0.99)).library()
    native_rule._compiled.cache_clear()
    monkeypatch.setattr(native_rule, "_processor", lambda: "another")
    assert NativeRule(lion, args=(0.9, 0.99)).library() != here
