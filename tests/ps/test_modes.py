"""The modes' promises, with workers that are threads: rounds are means, moves add up, nothing is lost or doubled."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from plsc.ps import Table
from plsc.ps.geo import Geo
from plsc.ps.host import Host, Seat
from plsc.ps.merging import merge
from plsc.ps.modes import Async, Communicator, Direct, HalfAsync, Sync
from plsc.ps.store import WorkerMissing, place

from .pushes import DIM, KEYS, batches, moved, table, together


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
