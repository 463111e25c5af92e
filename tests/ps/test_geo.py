"""Geo's promises, with workers that are threads: copies, the weight of a difference, what comes back from others."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from plsc.ps import Adagrad, Table
from plsc.ps.geo import Geo, weights
from plsc.ps.host import Host, Seat
from plsc.ps.store import WorkerMissing

from .pushes import DIM, KEYS, batches, moved, table, together


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", ["sgd", Adagrad(), "adam"])
def test_geo_with_one_worker_is_local_training(rule: object, overlap: bool) -> None:
    alone, host = table(rule), Host(table("sgd"))
    geo = Geo(Seat(host), every=3, rule=rule, overlap=overlap)
    for keys, grads in batches(20, 30):
        np.testing.assert_array_equal(geo.pull(keys), alone.pull(keys))
        geo.push(keys, grads)
        alone.push(keys, grads)
    geo.close()
    np.testing.assert_array_equal(geo.pull(KEYS), alone.pull(KEYS))
    np.testing.assert_allclose(host.table.pull(KEYS), alone.pull(KEYS), atol=1e-6)


@pytest.mark.parametrize("every", [1, 5, "auto"])
def test_geo_adds_every_move_with_its_weight(every: int | str) -> None:
    workers, host = 4, Host(table())
    before = host.table.pull(KEYS)
    mine = [batches(25, 40 + rank) for rank in range(workers)]

    def work(rank: int) -> None:
        geo = Geo(Seat(host, rank=rank), every=every, weight=1.0)
        for keys, grads in mine[rank]:
            geo.pull(keys)
            geo.push(keys, grads)
        geo.close()

    together(work, workers)
    total = sum(moved(pushes) for pushes in mine)
    np.testing.assert_allclose(host.table.pull(KEYS) - before, total, atol=2e-5)


def test_geo_weighs_by_the_workers_and_the_rest_is_not_forgotten() -> None:
    """One row, gradient 1 a push, a quarter of the way sent at a time: what was sent and what is still here add up."""
    host = Host(table())
    geo = Geo(Seat(host), every=1, workers=4)
    start = host.table.pull(KEYS[:1]).copy()
    there, moves = 0.0, 0.0
    for _ in range(5):
        geo.push(KEYS[:1], np.ones((1, DIM), np.float32))
        moves -= 0.5
        there += (moves - there) / 4
        np.testing.assert_allclose(host.table.pull(KEYS[:1]) - start, there, atol=1e-6)
        np.testing.assert_allclose(geo.pull(KEYS[:1]) - start, moves, atol=1e-6)
    assert Geo(Seat(host), every=1).store.num_workers == 2  # the default weight is then a half


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_geo_at_a_pace_goes_as_far_as_all_steps_one_after_the_other(workers: int) -> None:
    """Rows of a quadratic, stepped by every worker 1, 5 and 2,000 times between two exchanges: as one worker alone."""
    pace, repeats, target = 0.01, np.array([1, 5, 2000]), np.float32([3.0, -1.0, 2.0])[:, None]
    host = Host(Table(DIM, rule="sgd", lr=1.0, init="zeros", locked=True))
    crew = [Geo(Seat(host, rank=rank), every=1, pace=pace, workers=workers, overlap=True) for rank in range(workers)]
    for geo in crew:
        rows = geo.pull(KEYS[:3])
        way = (1 - (1 - pace) ** repeats)[:, None]
        geo.local.add(KEYS[:3], (way * (target - rows)).astype(np.float32))
    for geo in crew:  # all have moved before the first exchange
        geo.touch(KEYS[:3], repeats.astype(np.float32))
        geo.flush()
    alone = target * (1 - (1 - pace) ** (repeats * workers))[:, None]
    np.testing.assert_allclose(host.table.pull(KEYS[:3]), np.repeat(alone, DIM, 1), rtol=1e-5)
    for geo in crew:
        geo.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_geo_in_rounds_goes_on_from_the_same_rows(workers: int) -> None:
    """Four rounds of the quadratic above, on threads, are as 4 * workers windows of one worker alone."""
    pace, repeats, target = 0.02, np.array([1, 8, 500]), np.float32([3.0, -1.0, 2.0])[:, None]
    host = Host(Table(DIM, rule="sgd", lr=1.0, init="zeros", locked=True))
    ended: dict[int, np.ndarray] = {}
    seen = threading.Barrier(workers)

    def work(rank: int) -> None:
        geo = Geo(Seat(host, rank=rank), every=1, pace=pace, workers=workers, rounds=True, deadline=30)
        geo.pull(KEYS[:3])
        seen.wait(30)  # before the first of them adds
        for _ in range(4):
            rows = geo.pull(KEYS[:3])
            way = (1 - (1 - pace) ** repeats)[:, None]
            geo.local.add(KEYS[:3], (way * (target - rows)).astype(np.float32))
            geo.touch(KEYS[:3], repeats.astype(np.float32))
        ended[rank] = geo.pull(KEYS[:3])
        geo.close()

    together(work, workers)
    alone = target * (1 - (1 - pace) ** (4.0 * repeats * workers))[:, None]
    np.testing.assert_allclose(host.table.pull(KEYS[:3]), np.repeat(alone, DIM, 1), rtol=1e-4)
    for rows in ended.values():
        np.testing.assert_allclose(rows, host.table.pull(KEYS[:3]), rtol=1e-5)


def test_geo_in_rounds_names_who_is_missing() -> None:
    host = Host(table(), name="clicks")
    geo = Geo(Seat(host, rank=0), every=1, workers=2, rounds=True, deadline=0.05)
    with pytest.raises(WorkerMissing, match=r"round 0 of table 'clicks': worker 1 has not come within 0.05 s"):
        geo.push(KEYS[:1], np.ones((1, DIM), np.float32))


def test_weights_of_rows() -> None:
    steps = np.array([0.0, 1.0, 10.0, 1e9])
    np.testing.assert_allclose(weights(steps, 1e-6, 4), [1, 1, 1, 1 / 4], rtol=1e-4)
    np.testing.assert_allclose(weights(steps, 0.3, 1), 1)
    by_hand = (1 - 0.7**40) / (4 * (1 - 0.7**10))
    np.testing.assert_allclose(weights(steps, 0.3, 4)[2], by_hand, rtol=1e-6)
    pushed = Geo(Seat(Host(table())), every=2, pace=0.3, workers=4)  # a push is one step of each of its keys
    start, ones = pushed.pull(KEYS[:2]).copy(), np.ones((1, DIM), np.float32)
    for keys in (KEYS[:1], KEYS[:1]):
        pushed.push(keys, ones)
    moved = pushed.store.pull(KEYS[:1]) - start[:1]
    np.testing.assert_allclose(moved, -2 * 0.5 * (1 - 0.7**8) / (4 * (1 - 0.7**2)), rtol=1e-5)


def test_geo_brings_what_others_changed_and_only_what_is_held() -> None:
    host = Host(table())
    one, two = (Geo(Seat(host, rank=rank), every=1, weight=1.0) for rank in range(2))
    ones = np.ones((1, DIM), np.float32)
    one.pull(KEYS[:2])
    two.pull(KEYS[1:3])
    two.push(KEYS[1:2], ones)
    two.push(KEYS[2:3], ones)
    np.testing.assert_allclose(one.pull(KEYS[1:2]), host.table.pull(KEYS[1:2]) + 0.5, rtol=1e-5)  # not yet
    one.push(KEYS[:1], ones)
    np.testing.assert_array_equal(one.pull(KEYS[1:2]), host.table.pull(KEYS[1:2]))
    assert one.local.contains(KEYS[:3]).tolist() == [True, True, False]
    assert two.local.contains(KEYS[:3]).tolist() == [False, True, True]


def test_geo_that_has_fallen_behind_takes_all_rows_it_holds_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.ps.host.REMEMBERED_KEYS", 3)
    host = Host(table())
    slow, busy = (Geo(Seat(host, rank=rank), every=1, weight=1.0) for rank in range(2))
    ones = np.ones((1, DIM), np.float32)
    slow.pull(KEYS)
    slow.push(KEYS[:1], ones)
    for i in range(1, 30):
        busy.push(KEYS[i : i + 1], ones)
    slow.push(KEYS[:1], ones)
    np.testing.assert_allclose(slow.pull(KEYS), host.table.pull(KEYS), atol=1e-6)
    assert len(host._changes) <= 3


def test_geo_with_ftrl_keeps_what_comes_from_outside() -> None:
    """FTRL computes a value from its state: what others added must survive the next step."""
    own = Table(DIM, rule="ftrl", lr=0.5, init_scale=0.3)
    own.push(KEYS[:1], np.full((1, DIM), 0.3, np.float32))
    before = own.pull(KEYS[:1]).copy()
    own.add(KEYS[:1], np.full((1, DIM), 2.0, np.float32))
    np.testing.assert_allclose(own.pull(KEYS[:1]), before + 2, rtol=1e-6)
    own.push(KEYS[:1], np.zeros((1, DIM), np.float32))
    np.testing.assert_allclose(own.pull(KEYS[:1]), before + 2, rtol=1e-5)


def test_rows_trained_by_other_means_travel_too() -> None:
    host = Host(table())
    geo = Geo(Seat(host), every=2)
    geo.fetch(KEYS[:2])
    before = host.table.pull(KEYS[:2]).copy()
    geo.local.add(KEYS[:2], np.ones((2, DIM), np.float32))
    geo.touch(KEYS[:1])
    geo.touch(KEYS[:2])
    np.testing.assert_allclose(host.table.pull(KEYS[:2]) - before, 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda s: Geo(s, every=0), "every: got 0"),
        (lambda s: Geo(s, every="often"), "every: got 'often'"),
        (lambda s: Geo(s, weight=2.0), "weight: got 2.0"),
        (lambda s: Geo(s, weight=0.5, pace=0.1), r"got pace=0\.1, weight=0\.5"),
        (lambda s: Geo(s, pace=1.0), r"got pace=1\.0"),
        (lambda s: Geo(s, rounds=True), "rounds: got workers=None, every=100"),
        (lambda s: Geo(s, rounds=True, workers=2, every="auto"), "rounds: got workers=2, every='auto'"),
        (lambda s: Geo(s, deadline=0.0), r"deadline: got 0\.0"),
        (lambda s: Geo(s, pace=0.1).touch(KEYS[:1], -np.ones(1, np.float32)), "steps: got a negative number"),
        (lambda s: Geo(s, workers=0), "workers: got 0"),
    ],
)
def test_senseless_settings_are_refused(make: Callable[[Seat], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make(Seat(Host(table())))


def test_rounds_are_counted_by_pushes_whatever_threads_make_them() -> None:
    """Workers meet in rounds, so each makes an exchange after so many pushes; one more would wait for the others."""
    host = Host(Table(2, rule="sgd", lr=1.0, locked=True))
    geo = Geo(Seat(host), every=4, rounds=True, workers=1)
    keys, grads = np.arange(5, dtype=np.uint64), np.ones((5, 2), np.float32)
    together(lambda rank: [geo.push(keys, grads) for _ in range(100)] and None, 2)
    geo.flush()
    assert geo.sends == 50
    geo.close()


def test_a_sender_that_failed_before_anybody_waited_is_told() -> None:
    geo = Geo(Seat(Host(Table(2))), every=1, rounds=True, workers=2, deadline=0.2)
    keys = np.array([1], np.uint64)
    geo.pull(keys)
    goal = geo.touch(keys, wait=False)
    geo._sender.join(20)
    assert not geo._sender.is_alive()
    failed: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(WorkerMissing) as error:
            geo.wait(goal)
        failed.append(error.value)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(20)
    assert failed
