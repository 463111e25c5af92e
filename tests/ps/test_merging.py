"""Keys brought together: by the native loop and by torch, against numpy."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

import plsc.ps
from plsc.ps import merging
from plsc.ps.store import GOLDEN, mix


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(merging, "_core", None)
    return str(request.param)


def drawn(count: int, different: int, seed: int = 0) -> np.ndarray:
    """Keys of all kinds: 0, the largest, low bits and high bits alike."""
    random = np.random.default_rng(seed)
    some = np.concatenate([[0, 2**64 - 1], np.arange(different) << 40, random.integers(0, 2**63, different)])
    return random.choice(some.astype(np.uint64), count)


@pytest.mark.parametrize(("count", "different"), [(0, 1), (1, 1), (1000, 3), (1000, 5000), (70_000, 20_000)])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_sums_are_those_of_numpy(way: str, count: int, different: int, shape: tuple[int, ...]) -> None:
    keys = drawn(count, different)
    part = np.random.default_rng(1).standard_normal((count, *shape)).astype(np.float32)
    unique, sums, counts = plsc.ps.merge(keys, part, np.ones(count, np.float32))
    want, at, times = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(unique)
    assert np.array_equal(unique[order], want) and np.array_equal(counts[order], times)
    exact = np.zeros((len(want), *shape))
    np.add.at(exact, at, part)
    assert sums.shape == exact.shape and sums.dtype == np.float32
    np.testing.assert_allclose(sums[order], exact, rtol=1e-5, atol=1e-4)


def test_entries_are_added_in_their_order(way: str) -> None:
    """Of 1e8, 1, -1e8 in float32 only one order gives 0."""
    (_, sums) = plsc.ps.merge(np.array([7, 7, 9, 7], np.uint64), np.array([1e8, 1, 5, -1e8], np.float32))
    assert sorted(sums.tolist()) == [0.0, 5.0]


@pytest.mark.parametrize("kind", [np.uint64, np.int64, torch.int64, torch.uint64])
def test_the_kind_that_came_in_comes_out(way: str, kind: Any) -> None:
    keys = [3, 2**62, 3]
    made = torch.tensor(keys).view(kind) if isinstance(kind, torch.dtype) else np.array(keys, kind)
    rows = torch.ones(3, 2) if isinstance(kind, torch.dtype) else np.ones((3, 2), np.float32)
    unique, sums = plsc.ps.merge(made, rows)
    assert type(unique) is type(made) and unique.dtype == made.dtype and type(sums) is type(rows)
    assert {int(k): row.tolist() for k, row in zip(unique, sums, strict=True)} == {3: [2, 2], 2**62: [1, 1]}


def test_arrays_that_do_not_lie_together(way: str) -> None:
    keys, rows = drawn(200, 9)[::2], np.asfortranarray(np.random.default_rng(0).random((100, 3), np.float32))
    merged, want = plsc.ps.merge(keys, rows), plsc.ps.merge(keys.copy(), np.ascontiguousarray(rows))
    assert all(np.array_equal(a, b) for a, b in zip(merged, want, strict=True))


@pytest.mark.parametrize(
    ("keys", "part", "message"),
    [
        (np.ones(2), np.ones(2, np.float32), "keys: got dtype float64, expected uint64 or int64"),
        (np.ones(2, np.uint64), np.ones(2), "parts: got dtype float64, expected float32"),
        (np.ones(2, np.uint64), [1.0, 2.0], "parts: got list, expected a numpy array"),
        (np.ones(2, np.uint64), np.ones((3, 4), np.float32), r"parts: got shape \(3, 4\), expected \(2, 4\)"),
    ],
)
def test_what_does_not_fit(keys: Any, part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plsc.ps.merge(keys, part)


@pytest.mark.parametrize("shift", [0, 24, 40])
def test_nobody_can_choose_keys_that_meet(shift: int) -> None:
    """Keys whose hashes agree in all low bits, or all high ones: quadratic work would take many minutes."""
    hashes = np.arange(1_000_000, dtype=np.uint64) << np.uint64(shift)
    keys = hashes ^ (hashes >> np.uint64(31)) ^ (hashes >> np.uint64(62))  # back through splitmix64's finaliser
    keys *= np.uint64(0x319642B2D24D8EC3)
    keys = keys ^ (keys >> np.uint64(27)) ^ (keys >> np.uint64(54))
    keys *= np.uint64(0x96DE1B173F119089)
    keys = (keys ^ (keys >> np.uint64(30)) ^ (keys >> np.uint64(60))) - GOLDEN
    assert np.array_equal(mix(keys + GOLDEN), hashes)
    found: list[np.ndarray] = []
    work = threading.Thread(target=lambda: found.append(merging.unique_keys(keys)[0]), daemon=True)
    work.start()
    work.join(60)
    assert found and len(found[0]) == len(keys)


def test_a_merged_push_is_one_step_of_torch_adagrad() -> None:
    """Repeated keys in one push step one after the other; merged they are one sparse gradient."""
    keys, grads = drawn(500, 20), np.random.default_rng(2).standard_normal((500, 4)).astype(np.float32)
    table = plsc.ps.Table(4, rule="adagrad", lr=0.1, seed=3)
    different, at = np.unique(keys, return_inverse=True)
    weight = torch.nn.Parameter(torch.from_numpy(table.pull(different)))
    optimizer = torch.optim.Adagrad([weight], lr=0.1)
    weight.grad = torch.zeros_like(weight).index_add_(0, torch.from_numpy(at), torch.from_numpy(grads))
    optimizer.step()
    table.push(*plsc.ps.merge(keys, grads))
    np.testing.assert_allclose(table.pull(different), weight.detach().numpy(), rtol=1e-5, atol=1e-6)
