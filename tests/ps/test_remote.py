"""Tables on servers, each a thread of this process: they answer as one table would, whatever happens to the wire."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.ps import Adagrad, SparseEmbedding, Table
from plsc.ps import wire as w
from plsc.ps.geo import Geo
from plsc.ps.modes import Async, Communicator, Direct, HalfAsync, Sync
from plsc.ps.remote import RemoteStore, connect
from plsc.ps.server import Server
from plsc.ps.store import WorkerMissing

from .pushes import together

DIM = 4
KEYS = np.random.default_rng(0).integers(0, 2**64 - 1, 500, np.uint64)


def table(rule: object = "sgd", **options: object) -> Table:
    return Table(DIM, rule=rule, lr=0.5, locked=True, init_scale=0.3, **options)


class Cluster:
    """Servers of one table and the stores connected to them."""

    def __init__(self, count: int = 2, make: Callable[[], Table] = table, **options: object) -> None:
        self.servers = [Server({"clicks": make()}, index=i, count=count, **options) for i in range(count)]
        self._open = ExitStack()

    @property
    def addresses(self) -> str:
        return ",".join(server.address for server in self.servers)

    def connect(self, **options: object) -> RemoteStore:
        return self._open.enter_context(connect(self.addresses, table="clicks", **options))

    def close(self) -> None:
        self._open.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as stack:

        def make(*args: object, **options: object) -> Cluster:
            made = Cluster(*args, **options)
            stack.callback(made.close)
            return made

        yield make


def batches(count: int, seed: int, size: int = 60) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [(random.choice(KEYS, size), random.standard_normal((size, DIM)).astype(np.float32)) for _ in range(count)]


def moved(pushes: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """What SGD at rate 0.5 has added to the rows of KEYS in all, in float64."""
    places = {key: i for i, key in enumerate(KEYS.tolist())}
    sums = np.zeros((len(KEYS), DIM))
    for keys, grads in pushes:
        np.add.at(sums, [places[key] for key in keys.tolist()], grads.astype(np.float64))
    return -0.5 * sums


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_servers_answer_as_one_table(cluster: Callable[..., Cluster], count: int, rule: str) -> None:
    here, there = table(rule), cluster(count, lambda: table(rule)).connect()
    for keys, grads in batches(20, 1):
        np.testing.assert_array_equal(there.pull(keys), here.pull(keys))
        assert there.push(keys, grads) == here.push(keys, grads) == 0
    np.testing.assert_array_equal(there.pull(KEYS), here.pull(KEYS))
    assert there.rule == here.rule and there.lr == here.lr and there.dim == DIM
    assert there.pull(KEYS[:0]).shape == (0, DIM) and there.push(KEYS[:0], np.zeros((0, DIM), np.float32)) == 0


def test_batches_of_many_messages(cluster: Callable[..., Cluster]) -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    grads = np.random.default_rng(2).standard_normal((len(keys), DIM)).astype(np.float32)
    here, there = table(), cluster(2).connect()
    there.push(keys, grads)
    here.push(keys, grads)
    out = np.empty((len(keys), DIM), np.float32)
    assert there.pull(keys, out=out) is out
    np.testing.assert_array_equal(out, here.pull(keys))


def test_kinds_counters_refusals_and_rates_travel(cluster: Callable[..., Cluster]) -> None:
    made = cluster(2, lambda: table("adagrad", counters=True))
    there, other = made.connect(), made.connect()
    ids = torch.arange(6)
    rows = there.pull(ids, create=False)
    assert isinstance(rows, torch.Tensor) and sum(len(s.hosts["clicks"].table) for s in made.servers) == 0
    grads = torch.ones(6, DIM)
    grads[2, 1] = float("nan")
    assert there.push(ids, grads, shows=torch.arange(6.0), clicks=torch.ones(6)) == 1
    counts = [s.hosts["clicks"].table.counters(ids.numpy()) for s in made.servers]
    np.testing.assert_array_equal(sum(counts), [[0, 1], [1, 1], [0, 0], [3, 1], [4, 1], [5, 1]])
    other.lr = 0.125
    assert [s.hosts["clicks"].table.lr for s in made.servers] == [0.125, 0.125]
    assert there.keeps_counters and there.rule == Adagrad()


def test_half_floats_on_the_wire(cluster: Callable[..., Cluster]) -> None:
    here, made = table(), cluster(2)
    there = made.connect(wire="fp16")
    keys, grads = batches(1, 3)[0]
    np.testing.assert_array_equal(there.pull(keys), here.pull(keys).astype(np.float16))
    there.push(keys, grads)
    here.push(keys, grads.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(made.connect().pull(KEYS), here.pull(KEYS))
    with pytest.raises(ValueError, match="65504"):
        there.push(keys, np.full_like(grads, 1e6))
    assert there.push(KEYS[:1], np.full((1, DIM), np.inf, np.float32)) == 1  # the table's business, not the wire's


def test_bytes_with_a_scale_a_row_on_the_wire(cluster: Callable[..., Cluster]) -> None:
    """Each number is at most half a step of 1/127 of its row's largest away; nothing else travels in another form."""
    here, made = table(), cluster(2)
    there = made.connect(wire="int8")
    keys, grads = batches(1, 3)[0]
    keys, at = np.unique(keys, return_index=True)
    grads = grads[at]
    grads[0], grads[1] = 0, 1e-30
    rows = here.pull(keys)
    bound = np.abs(rows).max(1, keepdims=True) / 254 * 1.0001
    assert (np.abs(there.pull(keys) - rows) <= bound).all()
    there.push(keys, grads)
    scales = (np.abs(grads).max(1, keepdims=True) / np.float32(127)).astype(np.float64)
    here.push(keys, (np.rint(grads / np.where(scales > 0, scales, 1)) * scales).astype(np.float32))
    np.testing.assert_allclose(made.connect().pull(keys), here.pull(keys), rtol=1e-5)
    bad = np.eye(3, DIM, dtype=np.float32)
    bad[0, 1], bad[1, 0] = np.nan, np.inf
    assert there.push(KEYS[:3], bad) == 2
    assert there.pull(KEYS[:0]).shape == (0, DIM)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_geo_in_rounds_over_servers(cluster: Callable[..., Cluster], wire: str) -> None:
    """Two workers' differences of 40,000 rows, in parts, on two servers: each has its own and the other's."""
    made = cluster(2)
    keys = np.arange(40_000, dtype=np.uint64)
    crew = [Geo(made.connect(wire=wire, rank=rank), every=1, weight=1.0, workers=2, rounds=True) for rank in range(2)]
    before = made.connect().pull(keys)

    def work(geo: Geo) -> np.ndarray:
        for _ in range(2):
            geo.push(keys, np.full((len(keys), DIM), 0.25, np.float32))
        return geo.pull(keys)

    with ThreadPoolExecutor(2) as pool:
        copies = list(pool.map(work, crew))
    rows = made.connect().pull(keys)
    np.testing.assert_allclose(rows - before, -0.5 * 0.25 * 4, atol=1e-5 if wire == "fp32" else 0.02)
    for copy in copies:
        np.testing.assert_allclose(copy, rows, atol=1e-5 if wire == "fp32" else 0.02)
    for geo in crew:
        geo.close()


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_geo_with_few_bits_remembers_what_it_could_not_send(cluster: Callable[..., Cluster], wire: str) -> None:
    """What rounding took from one difference is in the next: the error does not grow with the number of exchanges."""
    made = cluster(1)
    before = made.connect().pull(KEYS[:1])
    geo = Geo(made.connect(wire=wire), every=1, weight=1.0)
    for _ in range(200):
        geo.push(KEYS[:1], np.full((1, DIM), 0.0123, np.float32))
    geo.close()
    np.testing.assert_allclose(made.connect().pull(KEYS[:1]) - before, -0.5 * 0.0123 * 200, atol=1e-4)


def test_an_embedding_trains_on_servers_as_on_a_table(cluster: Callable[..., Cluster]) -> None:
    here, there = table("adagrad"), cluster(2, lambda: table("adagrad")).connect()
    layers = [SparseEmbedding(here), SparseEmbedding(there)]
    for step in range(5):
        ids = torch.randint(0, 50, (8, 3), generator=torch.Generator().manual_seed(step))
        outs = [layer(ids) for layer in layers]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
    layers[1].eval()
    assert torch.equal(layers[1](torch.arange(60).view(20, 3)), layers[0].eval()(torch.arange(60).view(20, 3)))
    assert "dim=4" in repr(layers[1]) and layers[1].state_dict()


@pytest.mark.parametrize("workers", [1, 3])
def test_sync_over_servers_equals_one_worker_with_all_batches(cluster: Callable[..., Cluster], workers: int) -> None:
    rounds, made = 8, cluster(2)
    mine = [batches(rounds, 10 + rank) for rank in range(workers)]

    def work(rank: int) -> None:
        sync = Sync(made.connect(rank=rank), workers=workers, deadline=60)
        for keys, grads in mine[rank]:
            sync.push(keys, grads + 0.1 * sync.pull(keys))
        sync.close()

    together(work, workers)
    alone = table()
    for number in range(rounds):
        parts = [mine[rank][number] for rank in range(workers)]
        grads = [(grads + 0.1 * alone.pull(keys)) / workers for keys, grads in parts]
        alone.push(np.concatenate([keys for keys, _ in parts]), np.concatenate(grads))
    np.testing.assert_allclose(made.connect().pull(KEYS), alone.pull(KEYS), atol=1e-6)


def test_a_missing_worker_is_named_over_the_wire(cluster: Callable[..., Cluster]) -> None:
    sync = Sync(cluster(2).connect(rank=0), workers=2, deadline=0.2)
    sync.push(*batches(1, 20)[0])
    with pytest.raises(WorkerMissing, match=r"round 0 of table 'clicks': worker 1 has not come within 0\.2 s"):
        sync.pull(KEYS)
    assert sync.store.pull(KEYS).shape == (len(KEYS), DIM)  # the connection is as good as before


def test_a_worker_that_died_between_two_servers_is_made_up_for(cluster: Callable[..., Cluster]) -> None:
    made = cluster(2)
    before = made.connect().pull(KEYS)
    steady, dead = Sync(made.connect(rank=0), workers=2, deadline=30), made.connect(rank=1)
    pushes = batches(3, 60)
    steady.push(*pushes[0])
    link = dead._links[0]  # the other server never hears of it
    link.wait(link.send(w.Request(w.CONTRIBUTE, number=0, workers=2), w.LAYOUTS["fp32"].pack(None, None)))
    dead.close()
    assert [server.hosts["clicks"].round for server in made.servers] == [1, 0]
    successor = Sync(made.connect(rank=1), workers=2, deadline=30)
    successor.push(*pushes[1])
    steady.pull(KEYS)
    steady.push(*pushes[2])
    np.testing.assert_allclose(successor.pull(KEYS) - before, moved(pushes) / 2, atol=1e-5)
    assert Sync(successor.store, workers=2)._round == 2


MODES: dict[str, Callable[[RemoteStore], Communicator]] = {
    "direct": Direct,
    "async": lambda store: Async(store, merge=5),
    "half": lambda store: HalfAsync(store, every=3),
    "geo": lambda store: Geo(store, every=4, weight=1.0, overlap=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_lost_or_doubled_while_connections_break(cluster: Callable[..., Cluster], mode: str) -> None:
    """Four workers; somebody cuts their streams again and again, before and after answers."""
    logging.getLogger("plsc.ps.link").setLevel(logging.ERROR)
    made = cluster(2)
    before = made.connect().pull(KEYS)
    stores = [made.connect(rank=rank) for rank in range(4)]
    mine = [batches(60, 100 + rank, 20) for rank in range(4)]
    done = threading.Event()

    def cut_one(rank: int, server: int) -> None:
        if (stream := stores[rank]._links[server]._stream) is not None:
            stream[2].cancel()

    def work(rank: int) -> None:
        with MODES[mode](stores[rank]) as store:
            for number, (keys, grads) in enumerate(mine[rank]):
                store.pull(keys)
                if number % 9 == 4:
                    cut_one(rank, number % 2)
                store.push(keys, grads)

    def cut() -> None:
        random = np.random.default_rng(5)
        while not done.wait(random.uniform(0, 0.02)):
            cut_one(int(random.integers(4)), int(random.integers(2)))

    saboteur = threading.Thread(target=cut)
    saboteur.start()
    try:
        together(work, 4)
    finally:
        done.set()
        saboteur.join()
    assert sum(link.reconnects for store in stores for link in store._links) >= 4
    np.testing.assert_allclose(made.connect().pull(KEYS) - before, sum(moved(each) for each in mine), atol=1e-4)


def test_threads_share_a_store(cluster: Callable[..., Cluster]) -> None:
    """Whoever waits first reads for all: every thread gets its own answers."""
    made = cluster(2)
    store = made.connect()
    before = store.pull(KEYS)
    mine = [batches(30, 200 + number) for number in range(6)]
    constant = np.arange(10**6, 10**6 + 20_000, dtype=np.uint64)
    rows = store.pull(constant)

    def work(number: int) -> None:
        for keys, grads in mine[number]:
            if number % 2:
                store.push(keys, grads)
            else:
                some = constant[number * 100 : number * 100 + int(keys[0] % 9000)]
                np.testing.assert_array_equal(store.pull(some), rows[number * 100 : number * 100 + len(some)])

    together(work, 6)
    np.testing.assert_allclose(store.pull(KEYS) - before, sum(moved(each) for each in mine[1::2]), atol=1e-4)


def test_a_long_log_is_ended_by_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.ps.server.LOG_BYTES", 20_000)
    monkeypatch.setattr("plsc.ps.server.LOOK", 0.01)
    with (
        Server({"clicks": table()}, folder=tmp_path, durability="log") as server,
        connect(server.address, table="clicks") as store,
    ):
        number = 0
        while server.state.newest() is None:
            number += 1
            store.push(*batches(1, number)[0])
            assert number < 10_000


def test_a_retried_push_is_applied_once(cluster: Callable[..., Cluster]) -> None:
    """The server applies a push, its answer is lost, the worker sends it again."""
    made = cluster(1)
    there = made.connect()
    before = there.pull(KEYS)
    host = made.servers[0].hosts["clicks"]
    apply, link = host.table.push, there._links[0]

    def push_and_lose_the_answer(*args: object, **options: object) -> int:
        refused = apply(*args, **options)
        link._stream[2].cancel()
        time.sleep(0.05)
        return refused

    host.table.push = push_and_lose_the_answer
    pushes = batches(3, 30)
    for keys, grads in pushes:
        there.push(keys, grads)
    assert host.duplicates >= 1 and host.writes == 3
    np.testing.assert_allclose(there.pull(KEYS) - before, moved(pushes), atol=1e-5)


def test_a_server_that_does_not_answer_is_asked_again(cluster: Callable[..., Cluster]) -> None:
    made = cluster(1)
    there = made.connect(timeout=0.3)
    host, silent = made.servers[0].hosts["clicks"], threading.Event()
    pull, calls = host.table.pull, []

    def slow_once(*args: object, **options: object) -> object:
        calls.append(0)
        if len(calls) == 1:
            silent.wait(30)
        return pull(*args, **options)

    host.table.pull = slow_once
    rows = there.pull(KEYS)
    silent.set()
    np.testing.assert_array_equal(rows, pull(KEYS))
    assert len(calls) >= 2


@pytest.mark.parametrize("durability", ["log", "save"])
def test_a_server_comes_back_from_its_folder(tmp_path: Path, durability: str) -> None:
    """Workers wait meanwhile. With a log everything acknowledged is there; without, what the last save held."""
    options: dict[str, object] = {"folder": tmp_path / "s", "durability": durability}
    server = Server({"clicks": table("adagrad")}, **options)
    with connect(server.address, table="clicks") as there:
        pushes = batches(6, 40)
        for keys, grads in pushes[:3]:
            there.push(keys, grads)
        there.lr = 0.25
        server.state.save()
        for keys, grads in pushes[3:]:
            there.push(keys, grads)
        expected = there.pull(KEYS)
        server.close()
        again = Server({"clicks": table("adagrad")}, port=server.port, **options)
        try:
            kept = pushes if durability == "log" else pushes[:3]
            alone = table("adagrad")
            for number, (keys, grads) in enumerate(kept):
                alone.lr = 0.5 if number < 3 else 0.25
                alone.push(keys, grads)
            rows = there.pull(KEYS, create=False)
            np.testing.assert_array_equal(rows, alone.pull(KEYS))
            if durability == "log":
                np.testing.assert_array_equal(rows, expected)
            assert again.hosts["clicks"].table.lr == 0.25
        finally:
            again.close()


def test_open_rounds_outlive_a_server(tmp_path: Path) -> None:
    """One of two workers has come to the round; the save, the log and the new server know."""
    options: dict[str, object] = {"folder": tmp_path / "s", "durability": "log"}
    server = Server({"clicks": table()}, **options)
    (first, parts), (_, more) = batches(2, 50)
    with (
        connect(server.address, table="clicks", rank=0) as zero,
        connect(server.address, table="clicks", rank=1) as one,
    ):
        before = zero.pull(KEYS)
        sync = [Sync(store, workers=2, deadline=30) for store in (zero, one)]
        sync[0].push(first, parts)
        server.state.save()
        server.close()
        server = Server({"clicks": table()}, port=server.port, **options)
        sync[1].push(first, more)
        after = sync[0].pull(KEYS)
        np.testing.assert_allclose(after - before, (moved([(first, parts)]) + moved([(first, more)])) / 2, atol=1e-5)
        server.close()
        server = Server({"clicks": table()}, port=server.port, **options)
        np.testing.assert_array_equal(sync[1].pull(KEYS), after)
        server.close()
