"""Sampling, top-k, selection and the half cast: the kernels against the functions they stand for."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plsc.comm import Shard
from plsc.ops import kernels, sampling, twins
from plsc.ops.topk import block_topk
from plsc.strategies.dgc import largest_entries

ORDERS = range(6)
HALF_TYPES = (torch.bfloat16, torch.float16)


class Ranks:
    """As much of a communicator as Shard.of asks for."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


@pytest.mark.parametrize("order", ORDERS)
def test_sampling_is_the_same_bit_for_bit(launch: Any, generator: torch.Generator, order: int) -> None:
    launch(threads=32 << order % 4, order=order, workers=1 + order % 2)
    for total in (1, 31, 1023, 1024, 1025, 5000):
        labels = torch.randint(-1, total, (33,), generator=generator)
        for world_size in (1, 3):
            for rank in range(world_size):
                shard = Shard.of(total, Ranks(rank, world_size))  # type: ignore[arg-type]
                for rate, seed, step in ((0.0, 0, 0), (0.1, -3, 7), (0.37, 2**40, 2**33 + 1), (1.0, 5, 1)):
                    got = kernels.sample_classes(labels, shard, rate=rate, seed=seed, step=step)
                    expected = sampling.sample_classes(labels, shard, rate=rate, seed=seed, step=step)
                    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 4000), st.integers(1, 4), st.floats(0.0, 1.0), st.integers(-(2**63), 2**63 - 1), st.data())
def test_sampling_of_any_shape(launch: Any, total: int, world_size: int, rate: float, seed: int, data: Any) -> None:
    launch(order=data.draw(st.integers(0, 5)))
    labels = torch.tensor(data.draw(st.lists(st.integers(-1, total - 1), max_size=9)), dtype=torch.int64)
    shard = Shard.of(total, Ranks(data.draw(st.integers(0, world_size - 1)), world_size))  # type: ignore[arg-type]
    got = kernels.sample_classes(labels, shard, rate=rate, seed=seed, step=3)
    expected = sampling.sample_classes(labels, shard, rate=rate, seed=seed, step=3)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("order", ORDERS)
def test_merging_the_best_classes(launch: Any, generator: torch.Generator, order: int) -> None:
    """Distinct scores: as sorting; many equal ones, NaN, both zeros: as the twin, which sorts."""
    launch(threads=32 << order % 3, order=order, workers=2)
    for k, before, count in ((1, 1, 1), (3, 3, 63), (5, 5, 64), (5, 5, 65), (7, 7, 200), (4, 2, 1), (3, 40, 0)):
        classes = torch.stack([torch.randperm(1000, generator=generator)[:before] for _ in range(6)])
        distinct = torch.stack([torch.randperm(999, generator=generator)[: before + count] for _ in range(6)]).float()
        scores, found = distinct[:, :before].contiguous(), distinct[:, before:].contiguous()
        new = found if count else None
        got = kernels.merge_topk(scores, classes, new, k=k, first=1000, filler=2000)
        expected = twins.merge_topk(scores, classes, new, k=k, first=1000, filler=2000)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        if before + count >= k:
            ids = torch.cat([classes, torch.arange(1000, 1000 + count).expand(6, -1)], 1)
            order = distinct.argsort(dim=1, descending=True)[:, :k]
            assert torch.equal(got[0], distinct.gather(1, order)) and torch.equal(got[1], ids.gather(1, order))
        for dtype in (torch.float32, *HALF_TYPES):
            tied = torch.randint(-2, 3, distinct.shape, generator=generator).to(dtype)
            tied[tied == 1] = -0.0
            tied[tied == 2] = math.nan if k == 5 else math.inf
            scores, found = tied[:, :before].contiguous(), tied[:, before:].contiguous()
            new = found if count else None
            got = kernels.merge_topk(scores, classes, new, k=k, first=1000, filler=2000)
            expected = twins.merge_topk(scores, classes, new, k=k, first=1000, filler=2000)
            torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got[1], expected[1])


def test_merging_block_after_block(launch: Any, generator: torch.Generator) -> None:
    """From fillers on, as a sweep does: the best of all classes."""
    launch(order=3)
    found = torch.randint(0, 30, (4, 150), generator=generator).float()
    scores, classes = torch.full((4, 6), -math.inf), torch.full((4, 6), 150)
    for first in range(0, 150, 64):
        block = found[:, first : first + 64].contiguous()
        scores, classes = kernels.merge_topk(scores, classes, block, k=6, first=first, filler=150)
    order = found.argsort(dim=1, descending=True, stable=True)[:, :6]
    assert torch.equal(classes, order) and torch.equal(scores, found.gather(1, order))


@pytest.mark.parametrize("order", ORDERS)
def test_largest_entries(launch: Any, generator: torch.Generator, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(threads=32 << order % 4, order=order, workers=1 + order % 2)
    monkeypatch.setattr(kernels, "_CHUNK", 300)  # several chunks of a short vector
    for dtype in (torch.float32, *HALF_TYPES):
        for n in (1, 255, 256, 257, 2500):
            x = torch.randn(n, generator=generator).to(dtype)
            x[:: n // 3 + 1] = 0.25  # equal ones
            for count in {1, n // 100 + 1, n // 2 + 1, n}:
                got = kernels.largest_entries(x, count)
                assert torch.equal(got, twins.largest_entries(x, count))
                chosen = x[largest_entries(x, count / n)].abs().sort().values  # of which equal ones is free there
                assert torch.equal(x[got].abs().sort().values, chosen)
    x = torch.tensor([0.0, -math.inf, 5.0, math.nan, -0.0, 5.0, -5.0, 1e-42])
    for count in range(1, 9):
        assert torch.equal(kernels.largest_entries(x, count), twins.largest_entries(x, count))
    assert kernels.largest_entries(x, 1).tolist() == [3]
    assert kernels.largest_entries(torch.zeros(700), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("order", ORDERS)
def test_largest_magnitude_and_casts(launch: Any, generator: torch.Generator, order: int) -> None:
    launch(threads=32 << order % 4, order=order, workers=1 + order % 2)
    for dtype in (torch.float32, *HALF_TYPES):
        for n in (0, 1, 3, 127, 128, 129, 5000):
            for size in (1.0, 1e-20, 1e-41) if dtype == torch.float32 else (1.0,):
                x = (torch.randn(n, generator=generator) * size).to(dtype)
                largest = kernels.largest_magnitude(x)
                assert torch.equal(largest, x.abs().float().max() if n else torch.tensor(0.0))
                for to in (torch.float32, *HALF_TYPES):
                    for options in ({}, {"largest": largest, "divisor": 3.0}, {"largest": largest, "down": True}):
                        got = kernels.cast_scaled(x, to, **options)
                        torch.testing.assert_close(got, twins.cast_scaled(x, to, **options), rtol=0, atol=0)
                unaligned = torch.cat([x, x])[n // 2 : n // 2 + n]
                assert torch.equal(kernels.cast_scaled(unaligned, dtype), unaligned)
    for value in (math.nan, math.inf):
        x = torch.tensor([1.0, -value, 2.0] * 50)
        largest = kernels.largest_magnitude(x)
        assert largest.isnan() if math.isnan(value) else largest == math.inf
        torch.testing.assert_close(kernels.cast_scaled(x, torch.float16, largest=largest), x.half(), equal_nan=True)


def test_scale_is_the_twins(launch: Any) -> None:
    """The power of two of a reduction in fp16, from the smallest float to the largest."""
    launch()
    for exponent in range(-149, 128):
        largest = torch.tensor(1.75 * 2.0**exponent if exponent > -148 else 2.0**exponent)
        for down in (False, True):
            got, expected = (
                m.cast_scaled(torch.ones(1), torch.float32, largest=largest, down=down) for m in (kernels, twins)
            )
            assert torch.equal(got, expected)


def test_search_and_compression_take_the_kernels(
    launch: Any, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plsc.ops.block_topk and plsc.strategies.dgc on a device with kernels against themselves without."""
    queries, rows = (torch.randint(-2, 3, (n, 8), generator=generator).float() for n in (5, 700))
    x = torch.randn(3000, generator=generator)
    expected = block_topk(queries, rows.split(128), 6, first=50), largest_entries(x, 0.01).sort().values
    launcher = launch(order=1)
    monkeypatch.setattr("plsc.ops.topk.SCORES", 200)  # several rounds
    for module in ("plsc.ops.topk", "plsc.strategies.dgc"):
        monkeypatch.setattr(f"{module}.launcher_for", lambda device: launcher)
    got = block_topk(queries, rows.split(128), 6, first=50), largest_entries(x, 0.01)
    assert torch.equal(got[0][0], expected[0][0]) and torch.equal(got[0][1], expected[0][1])
    assert torch.equal(got[1], expected[1])
