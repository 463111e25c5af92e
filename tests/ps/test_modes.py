"""The modes' promises, with workers that are threads: rounds are means, moves add up, nothing is lost or doubled."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from plsc.ps import Adagrad, Table
from plsc.ps.geo import Geo, weights
from plsc.ps.host import Host, Seat
from plsc.ps.modes import Async, Communicator, Direct, HalfAsync, Sync
from plsc.ps.store import WorkerMissing, merge, place

DIM = 3
KEYS = np.arange(40, dtype=np.uint64) * np.uint64(2**58 + 77)


def table(rule: object = "sgd", **options: object) -> Table:
    return Table(DIM, rule=rule, lr=0.5, locked=True, init_scale=0.3, **options)


def batches(count: int, seed: int, size: int = 12) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pushes whose keys come several times, in one push and over many."""
    random = np.random.default_rng(seed)
    return [(random.choice(KEYS, size), random.standard_normal((size, DIM)).astype(np.float32)) for _ in range(count)]


def moved(pushes: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """What SGD at rate 0.5 has added to the rows of KEYS in all, in float64."""
    sums = np.zeros((len(KEYS), DIM))
    for keys, grads in pushes:
        np.add.at(sums, np.searchsorted(KEYS, keys), grads.astype(np.float64))
    return -0.5 * sums


def together(work: Callable[[int], None], count: int) -> None:
    """work(0), ..., work(count - 1), a thread each; the first error is raised here."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Recorded:
    """A table that counts its pushes and can hold them up, or fail."""

    keeps_counters = False

    def __init__(self, inner: Table) -> None:
        self.inner, self.dim, self.pushes = inner, inner.dim, 0
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def pull(self, keys: np.ndarray, **options: object) -> np.ndarray:
        return self.inner.pull(keys, **options)

    def push(self, keys: np.ndarray, grads: np.ndarray, **options: object) -> int:
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        self.pushes += 1
        return self.inner.push(keys, grads)


def test_merge_sums_by_key() -> None:
    keys, grads = batches(1, 0, 1000)[0]
    unique, sums, counts = merge(keys, grads, np.ones(1000, np.float32))
    assert len(np.unique(unique)) == len(unique) == len(KEYS)
    order = np.argsort(unique)
    np.testing.assert_allclose(sums[order], moved([(keys, grads)]) / -0.5, atol=1e-4)
    assert counts.sum() == 1000


def test_servers_get_equal_shares_of_any_keys_and_leave_stripes_full() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    where = place(keys, 4)
    np.testing.assert_allclose(np.bincount(where) / len(keys), 1 / 4, atol=0.01)
    own = Table(1, stripes=64)
    own.pull(keys[where == 0])
    filled = [len(found) for found, _ in own.items()]
    assert min(filled) > 0.6 * max(filled)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_async_that_waits_for_every_push_is_direct(rule: str) -> None:
    one, two = table(rule), table(rule)
    direct, queued = Direct(one), Async(two, merge=1, staleness=0)
    for keys, grads in batches(30, 1):
        np.testing.assert_array_equal(direct.pull(keys), queued.pull(keys))
        direct.push(keys, grads)
        queued.push(keys, grads)
    queued.close()
    np.testing.assert_array_equal(one.pull(KEYS), two.pull(KEYS))


def test_async_merges_by_key() -> None:
    store = Recorded(table())
    before = store.pull(KEYS)
    pushes = batches(20, 2)
    with Async(store, merge=8, linger=60, queue=20) as queued:
        for keys, grads in pushes:
            queued.push(keys, grads)
        queued.flush()
        assert queued.sends == store.pushes == 3  # 8, 8 and the 4 that flush does not wait with
    np.testing.assert_allclose(store.pull(KEYS) - before, moved(pushes), atol=1e-5)


def test_merged_adagrad_takes_one_step_with_the_sum() -> None:
    one, many = table("adagrad"), table("adagrad")
    pushes = batches(4, 3)
    with Async(many, merge=4, linger=60) as queued:
        for keys, grads in pushes:
            queued.push(keys, grads)
    keys, sums = merge(np.concatenate([k for k, _ in pushes]), np.concatenate([g for _, g in pushes]))
    one.push(keys, sums)
    np.testing.assert_array_equal(one.pull(KEYS), many.pull(KEYS))


def test_merging_keeps_counters() -> None:
    counted = Table(DIM, rule="sgd", counters=True, locked=True)
    ones, some = np.ones(2, np.float32), np.zeros((2, DIM), np.float32)
    with Async(counted, merge=3, linger=60) as queued:
        queued.push(KEYS[:2], some)
        queued.push(KEYS[1:3], some, shows=5 * ones, clicks=ones)
        queued.push(KEYS[:2], some, clicks=2 * ones)
    np.testing.assert_array_equal(counted.counters(KEYS[:3]), [[2, 2], [7, 3], [5, 1]])
    with pytest.raises(ValueError, match="keeps no counters"):
        Async(table()).push(KEYS[:2], some, shows=ones)


def test_a_full_queue_holds_the_trainer_back() -> None:
    store = Recorded(table())
    store.open.clear()
    queued = Async(store, merge=1, queue=3, linger=0.0)
    pushed: list[int] = []

    def train() -> None:
        for i, (keys, grads) in enumerate(batches(10, 4)):
            queued.push(keys, grads)
            pushed.append(i)

    trainer = threading.Thread(target=train)
    trainer.start()
    while len(pushed) < 3:
        assert trainer.is_alive()
    trainer.join(0.2)
    assert trainer.is_alive() and len(pushed) <= 4  # three wait, one is with the sender
    store.open.set()
    trainer.join(30)
    queued.close()
    assert len(pushed) == 10 and store.pushes == 10


def test_staleness_bounds_what_a_pull_may_miss() -> None:
    store = Recorded(table())
    store.open.clear()
    queued = Async(store, merge=1, queue=8, staleness=2)
    for keys, grads in batches(2, 5):
        queued.push(keys, grads)
    queued.pull(KEYS)  # two are pending, as many as may
    queued.push(*batches(1, 6)[0])
    puller = threading.Thread(target=queued.pull, args=(KEYS,))
    puller.start()
    puller.join(0.1)
    assert puller.is_alive() and queued.pending == 3
    store.open.set()
    puller.join(30)
    assert not puller.is_alive()
    queued.close()


def test_half_async_waits_at_every_nth() -> None:
    store = Recorded(table())
    half = HalfAsync(store, every=4)
    for i, (keys, grads) in enumerate(batches(8, 7)):
        half.push(keys, grads)
        if i % 4 == 3:
            assert half.pending == 0
    half.close()


def test_what_the_sender_fails_with_reaches_the_trainer() -> None:
    store = Recorded(table())
    store.error = OSError("disk full")
    queued = Async(store)
    queued.push(*batches(1, 8)[0])
    with pytest.raises(OSError, match="disk full"):
        queued.flush()
    with pytest.raises(OSError, match="disk full"):
        queued.pull(KEYS)
    with pytest.raises(OSError, match="disk full"):
        queued.push(*batches(1, 8)[0])


def test_what_the_sender_fails_with_after_the_last_push_is_raised_at_the_end() -> None:
    store = Recorded(table())
    store.error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"), Async(store) as queued:
        queued.push(*batches(1, 8)[0])
        queued._sender.join(30)
    queued.close()  # said once
    with pytest.raises(ValueError, match="mine"), Async(Recorded(table())) as queued:
        raise ValueError("mine")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_gradient_does_not_take_the_good_ones_of_its_key_along(bad: float) -> None:
    """It is refused as if it had not been sent, whatever it is merged with."""
    grads = np.ones((len(KEYS), DIM), np.float32)
    wrong = grads.copy()
    wrong[3, 1] = bad
    expected = -0.5 * 4 * grads
    expected[3] /= 4 / 3
    merging = table()
    before = merging.pull(KEYS)
    with Async(merging, merge=4, linger=30) as queued:
        for each in (grads, wrong, grads, grads):
            queued.push(KEYS, each)
    assert queued.refused == 1 and queued.sends == 1
    np.testing.assert_allclose(merging.pull(KEYS) - before, expected, atol=1e-6)

    host = Host(table())
    workers = [Sync(Seat(host, rank=rank), workers=4) for rank in range(4)]
    refused = [sync.push(KEYS, wrong if rank == 1 else grads) for rank, sync in enumerate(workers)]
    assert refused == [0, 1, 0, 0]
    np.testing.assert_allclose(workers[0].pull(KEYS) - before, expected / 4, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_sync_equals_one_worker_with_all_batches(workers: int) -> None:
    """Every worker's loss is the mean over its own samples, and so is the large batch's: divided by the workers."""
    rounds, host = 15, Host(table())
    mine = [batches(rounds, 10 + rank) for rank in range(workers)]

    def work(rank: int) -> None:
        sync = Sync(Seat(host, rank=rank), workers=workers, deadline=30)
        for keys, grads in mine[rank]:
            sync.pull(keys)
            sync.push(keys, grads + 0.1 * sync.pull(keys))  # the gradient depends on the rows: order would show
        sync.close()

    together(work, workers)
    alone = table()
    for number in range(rounds):
        parts = [mine[rank][number] for rank in range(workers)]
        grads = [(grads + 0.1 * alone.pull(keys)) / workers for keys, grads in parts]
        alone.push(np.concatenate([keys for keys, _ in parts]), np.concatenate(grads))
    np.testing.assert_allclose(host.table.pull(KEYS), alone.pull(KEYS), atol=1e-6)


def test_sync_divides_by_all_workers_of_the_round() -> None:
    host = Host(table())
    before = host.table.pull(KEYS[:1]).copy()

    def work(rank: int) -> None:
        sync = Sync(Seat(host, rank=rank), workers=4, deadline=30)
        keys = KEYS[:1] if rank == 2 else KEYS[:0]  # only one of four has this key
        sync.push(keys, np.ones((len(keys), DIM), np.float32))
        sync.close()

    together(work, 4)
    np.testing.assert_allclose(host.table.pull(KEYS[:1]), before - 0.5 / 4, rtol=1e-6)


def test_sync_names_who_is_missing_and_takes_a_successor() -> None:
    host = Host(table(), name="clicks")
    keys, grads = batches(1, 20)[0]
    first = Sync(Seat(host, rank=0), workers=3, deadline=0.05)
    first.push(keys, grads)
    with pytest.raises(WorkerMissing, match=r"round 0 of table 'clicks': worker 1, 2 have not come within 0.05 s"):
        first.pull(keys)
    dead = Seat(host, rank=1)
    Sync(dead, workers=3).push(keys, grads)
    dead.close()
    again = Sync(Seat(host, rank=1), workers=3, deadline=0.05)  # takes part from the next round on
    with pytest.raises(WorkerMissing, match="worker 2 has not"):
        first.pull(keys)
    Sync(Seat(host, rank=2), workers=3, deadline=30).push(keys, grads)
    first.pull(keys)
    again.push(keys, grads)
    assert host.round == 1
    with pytest.raises(ValueError, match="twice; are two of that number running"):
        Seat(host, rank=1).contribute(keys, grads, round=1, workers=3)
    with pytest.raises(ValueError, match="counts 2 workers, the others 3"):
        Seat(host, rank=0).contribute(keys, grads, round=1, workers=2)
    with pytest.raises(ValueError, match="rounds up to 1 are closed"):
        Seat(host, rank=2).contribute(keys, grads, round=0, workers=3)


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


MODES: dict[str, Callable[[Seat], Communicator]] = {
    "direct": Direct,
    "async": lambda seat: Async(seat, merge=5),
    "half": lambda seat: HalfAsync(seat, every=3),
    "geo": lambda seat: Geo(seat, every=4, weight=1.0, overlap=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_lost_or_applied_twice(mode: str) -> None:
    """Four workers of two threads each: all of SGD's steps add up."""
    host = Host(table())
    before = host.table.pull(KEYS)
    mine = [batches(40, 100 + i) for i in range(8)]

    def work(rank: int) -> None:
        with MODES[mode](Seat(host, rank=rank)) as store:

            def train(half: int) -> None:
                for keys, grads in mine[2 * rank + half]:
                    store.pull(keys)
                    store.push(keys, grads)

            together(train, 2)

    together(work, 4)
    np.testing.assert_allclose(host.table.pull(KEYS) - before, sum(moved(each) for each in mine), atol=1e-4)


def test_the_same_write_twice_is_one_write() -> None:
    host = Host(table())
    client = host.join("someone", 0)
    keys, grads = batches(1, 50)[0]
    before = host.table.pull(KEYS)
    for number in (1, 2, 2, 1):
        host.push(client, number, keys, grads)
    for _ in range(2):
        host.exchange(client, 3, keys, grads, epoch=host.epoch, since=0)
    once = moved([(keys, grads)])
    np.testing.assert_allclose(host.table.pull(KEYS) - before, 2 * once - once / 0.5, atol=1e-5)
    assert host.duplicates == 3


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda s: Async(s, merge=0), "merge: got 0"),
        (lambda s: Async(s, queue=0), "queue: got 0"),
        (lambda s: Async(s, staleness=-1), "staleness: got -1"),
        (lambda s: HalfAsync(s, every=0), "got 0"),
        (lambda s: Sync(s, workers=0), "workers=0"),
        (lambda s: Sync(s, workers=70_000), "workers=70000"),
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


def test_closed_store_says_so() -> None:
    queued = Async(table())
    queued.push(*batches(1, 60)[0])
    queued.close()
    with pytest.raises(ValueError, match="closed store"):
        queued.push(*batches(1, 60)[0])
