"""Sampling, top-k, selection and the half cast: the kernels against the functions they stand for."""

import math
from typing import Any

import pytest
import torch

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


def test_vectors_longer_than_a_grid(launch: Any, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thread blocks that go through in strides, as 1,024 do from 262,144 or 1,048,576 entries on."""
    monkeypatch.setattr(kernels, "_WAVE", 2)
    for order in ORDERS:
        launch(threads=32 << order % 2, order=order, workers=1 + order % 2)
        for n in (127, 128, 255, 256, 257, 1500):
            x = torch.randn(n, generator=generator)
            for place in (0, n // 2, n - 1):  # the largest is everywhere found
                x[place] = 100.0 + place
                assert kernels.largest_magnitude(x) == 100.0 + place
            for count in (1, 3, n // 2):
                assert torch.equal(kernels.largest_entries(x, count), twins.largest_entries(x, count))


def test_not_a_number_is_one_magnitude_whatever_its_bits(launch: Any) -> None:
    """Kept from the front, as other equal ones are."""
    launch()
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([1.0, math.inf]), payloads, torch.tensor([9.0])])
    assert x.isnan().sum() == 5
    for count in range(1, 9):
        assert kernels.largest_entries(x, count).tolist() == sorted([2, 3, 4, 5, 6, 1, 7, 0][:count])


@pytest.mark.parametrize("filler", [-1, 900, 2**40])
def test_fillers_are_no_candidates(launch: Any, filler: int) -> None:
    """Rows whose score is -inf are rows, before all fillers."""
    launch(order=2)
    worst = -math.inf
    scores, classes = torch.tensor([[4.0, worst, worst, worst]]), torch.tensor([[7, filler, 3, filler]])
    for module in (kernels, twins):
        for found, expected in ((None, [7, 3]), ([2.0, worst], [7, 20, 3, 21]), ([math.nan, worst], [20, 7, 3, 21])):
            new = None if found is None else torch.tensor([found])
            for k in (1, 2, 3, 4, 6, 9):
                best, ids = module.merge_topk(scores, classes, new, k=k, first=20, filler=filler)
                assert ids.tolist() == [(expected + [filler] * 9)[:k]]
                assert (best[0, len(expected) :] == worst).all()


@pytest.mark.parametrize("none", [-1, 50])
def test_search_with_fewer_rows_than_k(launch: Any, monkeypatch: pytest.MonkeyPatch, none: int) -> None:
    """The same with kernels and without, a bias of -inf included."""
    monkeypatch.setattr("plsc.ops.topk.SCORES", 1)  # a row a round
    queries, rows = torch.eye(2, 4), torch.tensor([[3.0, 1, 0, 0], [1, 3, 0, 0], [2, 2, 0, 0]])
    for bias in (None, torch.tensor([0.0, -math.inf, -math.inf])):
        plain = block_topk(queries, rows.split(2), 6, none=none, bias=bias)
        expected = [[0, 2, 1], [1, 2, 0]] if bias is None else [[0, 1, 2]] * 2
        assert plain[1].tolist() == [row + [none] * 3 for row in expected]
        with monkeypatch.context() as patch:
            launcher = launch(order=3)
            patch.setattr("plsc.ops.topk.launcher_for", lambda device, launcher=launcher: launcher)
            got = block_topk(queries, rows.split(2), 6, none=none, bias=bias)
            assert launcher.launched
        assert torch.equal(got[0], plain[0]) and torch.equal(got[1], plain[1])


def test_gaps_and_counts_are_as_the_twins_take_them(launch: Any) -> None:
    launch()
    x = torch.arange(-6.0, 6.0)
    assert torch.equal(kernels.largest_entries(x[::2], 2), twins.largest_entries(x[::2], 2))
    assert kernels.largest_entries(x[:3], 7).tolist() == [0, 1, 2]
    assert kernels.largest_magnitude(x[::2]) == 6 and kernels.largest_magnitude(x.view(3, 4).t()) == 6
    grid = x.view(3, 4).t()
    assert torch.equal(kernels.cast_scaled(grid, torch.float16), grid.half())
    assert kernels.cast_scaled(torch.tensor(3.0), torch.bfloat16).item() == 3
    shard = Shard.of(3000, Ranks(0, 1))  # type: ignore[arg-type]
    labels = torch.tensor([5, 2999, -1], dtype=torch.int32)
    got, expected = (m.sample_classes(labels, shard, rate=0.01, seed=1, step=0) for m in (kernels, sampling))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_what_does_not_belong_together_is_refused(launch: Any) -> None:
    launcher = launch()
    scores, classes, found = torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 4)
    one = torch.tensor(1.0)
    refused: list[tuple[Any, str]] = [
        (lambda: kernels.merge_topk(scores, classes, found[:1], k=2), r"found: got torch.float32 \(1, 4\)"),
        (lambda: kernels.merge_topk(scores, classes.to("meta"), found, k=2), "classes: got .* on meta"),
        (lambda: kernels.merge_topk(scores, classes, found, k=2, first=2**32 - 3), "merge_topk: got classes 42949672"),
        (lambda: kernels.largest_entries(found, 2), r"largest_entries: got 2 of \(3, 4\)"),
        (lambda: kernels.largest_entries(found[0], -1), "largest_entries: got -1"),
        (lambda: kernels.cast_scaled(found, torch.float16, largest=one.bfloat16()), "largest: got torch.bfloat16"),
        (lambda: kernels.cast_scaled(found, torch.float16, largest=one[None]), r"largest: got torch.float32 \(1,\)"),
        (lambda: kernels.cast_scaled(found, torch.float16, largest=one.to("meta")), "largest: got .* on meta"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()
    assert not launcher.launched
    got = kernels.cast_scaled(found + 1, torch.float16, largest=one.double())  # of a reduction of float64
    assert (got == 2.0**14).all() and not launcher.launched
