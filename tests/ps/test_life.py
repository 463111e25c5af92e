"""Life of a key: admission, counters and their decay, eviction by age, by score, and at a bound."""

from pathlib import Path

import numpy as np
import pytest

from plsc.ps import Table


def push(table: Table, *keys: int, **counts: np.ndarray) -> None:
    table.push(np.array(keys, np.uint64), np.ones((len(keys), table.dim), np.float32), **counts)


def has(table: Table, *keys: int) -> list[bool]:
    return table.contains(np.array(keys, np.uint64)).tolist()


def test_admission_by_count() -> None:
    table = Table(2, rule="sgd", lr=1.0, init="zeros", admit_after=3)
    push(table, 1, 2)
    push(table, 1)
    assert (table.pull(np.array([1], np.uint64)) == 0).all() and len(table) == 0
    assert table.stats()["unadmitted"] == 3
    push(table, 1)
    assert has(table, 1, 2) == [True, False]
    assert (table.pull(np.array([1], np.uint64)) == -1).all()


def test_admission_by_chance() -> None:
    table = Table(1, admit_probability=0.25, seed=3)
    push(table, *range(4000))
    assert 850 < len(table) < 1150
    again = Table(1, admit_probability=0.25, seed=3)
    push(again, *range(4000))
    assert has(again, *range(4000)) == has(table, *range(4000))


def test_counters() -> None:
    table = Table(2, counters=True)
    push(table, 1, 2, 1)
    push(table, 1, shows=np.array([5.0], np.float32), clicks=np.array([2.0], np.float32))
    keys = np.array([1, 2, 3], np.uint64)
    assert table.counters(keys).tolist() == [[7, 2], [1, 0], [0, 0]]
    table.decay(0.5)
    assert table.counters(keys).tolist() == [[3.5, 1], [0.5, 0], [0, 0]]
    assert table.evict(min_score=1.0, show_weight=1.0, click_weight=1.0) == 1
    assert has(table, 1, 2) == [True, False]


def test_eviction_by_age() -> None:
    table = Table(2)
    for key in range(10):
        push(table, key)
    assert table.evict(max_age=3) == 6
    assert has(table, *range(10)) == [False] * 6 + [True] * 4
    assert table.stats()["evicted"] == 6 and len(table) == 4


def test_bound_drops_the_longest_unseen() -> None:
    table = Table(4, max_rows=1024, stripes=1)
    for start in range(0, 4000, 100):
        push(table, *range(start, start + 100))
        assert len(table) <= 1024
    assert all(has(table, *range(3300, 4000))) and not any(has(table, *range(2900)))


def test_bound_drops_the_least_shown() -> None:
    table = Table(4, max_rows=1024, stripes=1, policy="lfu", counters=True)
    for _ in range(3):
        push(table, *range(500))
    for start in range(1000, 5000, 100):
        push(table, *range(start, start + 100))
    assert all(has(table, *range(500))) and len(table) <= 1024


def test_bound_within_one_batch() -> None:
    """More new keys than there is room for: all are answered right, the bound holds afterwards."""
    table, free = Table(8, max_rows=4096), Table(8)
    keys = np.arange(200_000, dtype=np.uint64)
    np.testing.assert_array_equal(table.pull(keys), free.pull(keys))
    assert 3000 < len(table) <= 4096
    assert table.stats()["arena_bytes"] < free.stats()["arena_bytes"] / 2 + (32 << 20)


@pytest.mark.parametrize("start", [2**32 - 3, 2**32 - 7, 2**32 - 25])
def test_the_clock_goes_round(start: int, tmp_path: Path) -> None:
    """After 2^32 pushes ages, bounds and deltas are those of a table that is not so old."""

    def life(clock: int) -> list[object]:
        table, found = Table(2, max_rows=1024, stripes=1), []
        table._core.set_clock(clock)
        for key in range(10):
            push(table, key)
        table.save(tmp_path / "base")
        push(table, 3, 100)
        found.append(table.save(tmp_path / "delta", delta=True))
        loaded = Table.load(tmp_path / "base", deltas=tmp_path / "delta", max_rows=1024, stripes=1)
        for each in (table, loaded):
            found += [each.evict(max_age=4), has(each, *range(10), 100)]
            for first in range(0, 4000, 100):
                push(each, *range(first, first + 100))
            found.append(has(each, *range(4000)))
        return found

    assert life(start) == life(1)


def test_bad_ages_and_scores() -> None:
    table = Table(2, counters=True)
    for wrong in ({"max_age": -1}, {"max_age": 2.5}, {"min_score": float("nan")}, {"max_age": 1, "show_weight": "1"}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            table.evict(**wrong)
    with pytest.raises(ValueError, match="factor"):
        table.decay(float("nan"))


def test_what_needs_counters_says_so() -> None:
    table = Table(2)
    for call in (
        lambda: table.evict(min_score=1.0),
        lambda: table.decay(0.5),
        lambda: table.counters(np.zeros(1, np.uint64)),
        lambda: push(table, 1, clicks=np.ones(1, np.float32)),
    ):
        with pytest.raises(ValueError, match="counters=True"):
            call()
    with pytest.raises(ValueError, match="max_age"):
        table.evict()


@pytest.mark.parametrize("pushes", [3, 50])
def test_merged_rows_keep_their_ages(pushes: int, tmp_path: Path) -> None:
    """Shards count pushes of their own: the clock of one says nothing of the other's rows."""
    first, second = Table(2), Table(2)
    keys = np.arange(40, dtype=np.uint64)
    for i in range(20):  # one row a push
        first.push(keys[i : i + 1], np.ones((1, 2), np.float32))
    for i in range(pushes):
        second.push(keys[20 + i % 20 :][:1], np.ones((1, 2), np.float32))
    second.save(tmp_path / "t")
    first.merge(tmp_path / "t")
    first.evict(max_age=6)  # a save is a tick of its table's, too
    old, new = first.contains(keys[:20]), first.contains(keys[20:])
    assert old.sum() == 7 and old[13:].all()
    assert new.sum() == min(pushes, 6) and new[[(pushes - 1 - i) % 20 for i in range(min(pushes, 6))]].all()
    first.push(keys, np.ones((40, 2), np.float32))
    first.save(tmp_path / "u")
    assert len(Table.load(tmp_path / "u")) == 40
