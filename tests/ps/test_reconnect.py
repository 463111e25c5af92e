"""Connections that stall, break, or lead somewhere else: who waits is told in time, and no row goes astray."""

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from plsc.ps import Table
from plsc.ps.geo import Geo
from plsc.ps.host import Host, Seat
from plsc.ps.link import Refused, ServerLost
from plsc.ps.remote import RemoteStore, connect
from plsc.ps.server import Server

KEYS = np.arange(10, dtype=np.uint64)
ONES = np.ones((10, 2), np.float32)


def table(dim: int = 2, **options: object) -> Table:
    return Table(**{"dim": dim, "rule": "sgd", "lr": 1.0, "init": "zeros", "locked": True, **options})


class Proxy:
    """A port before a server's: it can pass nothing on after some bytes, cut connections, and lead elsewhere."""

    def __init__(self, server: Server) -> None:
        self.server: Server | None = server  # None: connections are closed as they come
        self.stall_after: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self.stall_after = None
        self._listener.close()
        self.cut()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.server is None:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self.server.port))
                self._open += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65_536):
                passed += len(data)
                while self.stall_after is not None and passed > self.stall_after:
                    time.sleep(0.02)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def behind(stack: ExitStack) -> Callable[..., Proxy]:
    def make(server: Server) -> Proxy:
        stack.callback(server.close)
        proxy = Proxy(server)
        stack.callback(proxy.close)
        return proxy

    return make


def opened(stack: ExitStack, *proxies: Proxy, **options: float) -> RemoteStore:
    where = ",".join(proxy.address for proxy in proxies)
    return stack.enter_context(connect(where, table="clicks", **{"timeout": 1, "patience": 1, **options}))


def test_a_server_that_takes_the_connection_and_says_nothing(behind: Callable[..., Proxy]) -> None:
    proxy = behind(Server({"clicks": table()}))
    proxy.stall_after = 300  # HTTP/2 has been agreed on by then, so that the transport itself waits for ever
    began = time.monotonic()
    with pytest.raises(ServerLost, match="said nothing for 1 s"):
        connect(proxy.address, table="clicks", timeout=1, patience=1)
    assert time.monotonic() - began < 30


def test_waiting_for_a_server_is_said(
    behind: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("plsc.ps.remote.SILENT", 0.0)
    proxy = behind(Server({"clicks": table()}))
    proxy.server = None
    with caplog.at_level(logging.WARNING, logger="plsc.ps.remote"), pytest.raises(ServerLost):
        connect(proxy.address, table="clicks", patience=0.5)
    assert [record.levelno for record in caplog.records if "waiting up to 0.5 s" in record.message] == [logging.WARNING]


def test_servers_that_have_changed_places_are_noticed(behind: Callable[..., Proxy], stack: ExitStack) -> None:
    servers = [Server({"clicks": table()}, index=index, count=2) for index in range(2)]
    first, second = (behind(server) for server in servers)
    store = opened(stack, first, second)
    store.push(KEYS, ONES)
    before = [sorted(np.concatenate([keys for keys, _ in s.hosts["clicks"].table.items()])) for s in servers]
    first.server, second.server = second.server, first.server
    first.cut()
    second.cut()
    with pytest.raises(Refused, match=r"another one is there now, with index 1 \(was 0\)"):
        store.push(KEYS, ONES)
    after = [sorted(np.concatenate([keys for keys, _ in s.hosts["clicks"].table.items()])) for s in servers]
    assert after == before and sorted(before[0] + before[1]) == KEYS.tolist()


@pytest.mark.parametrize("other", [{"dim": 3}, {"rule": "adagrad"}, {"seed": 9}])
def test_another_table_is_noticed(behind: Callable[..., Proxy], stack: ExitStack, other: dict[str, object]) -> None:
    proxy, second = behind(Server({"clicks": table()})), Server({"clicks": table(**other)})
    stack.callback(second.close)
    store = opened(stack, proxy)
    store.pull(KEYS)
    proxy.server = second
    proxy.cut()
    for use in (lambda: store.pull(KEYS), lambda: store.push(KEYS, ONES)):
        with pytest.raises(Refused, match="another one is there now"):
            use()
    assert len(second.hosts["clicks"].table) == 0


def test_a_server_that_has_forgotten_is_said(
    behind: Callable[..., Proxy], stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    proxy, second = behind(Server({"clicks": table()})), Server({"clicks": table()})
    stack.callback(second.close)
    store = opened(stack, proxy)
    proxy.server = second
    proxy.cut()
    with caplog.at_level(logging.WARNING, logger="plsc.ps.link"):
        store.push(KEYS, ONES)
    assert "was started again, from empty tables, for it has no folder" in caplog.text


def test_all_who_wait_hear_at_once_that_a_server_is_lost(behind: Callable[..., Proxy], stack: ExitStack) -> None:
    """Not one after the other, each after a patience of its own."""
    proxy = behind(Server({"clicks": table()}))
    store, ends = opened(stack, proxy, patience=2), []
    proxy.server = None
    proxy.cut()

    def pull() -> None:
        with pytest.raises(ServerLost):
            store.pull(KEYS)
        ends.append(time.monotonic())

    threads = [threading.Thread(target=pull) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 6 and max(ends) - min(ends) < 2


def test_what_was_given_up_is_not_sent_later(behind: Callable[..., Proxy], stack: ExitStack) -> None:
    """Its caller has been told, and may have pushed it again."""
    server = Server({"clicks": table()})
    proxy = behind(server)
    store = opened(stack, proxy)
    store.push(KEYS, ONES)
    proxy.server = None
    proxy.cut()
    with pytest.raises(ServerLost):
        store.push(KEYS, ONES)
    proxy.server = server
    store.push(KEYS, ONES)
    np.testing.assert_array_equal(store.pull(KEYS), -2 * ONES)


def test_rows_too_large_for_half_floats_are_not_sent_as_infinity(stack: ExitStack) -> None:
    server = stack.enter_context(Server({"clicks": table(init="constant", init_scale=1e5)}))
    store = stack.enter_context(connect(server.address, table="clicks", wire="fp16"))
    with pytest.raises(Refused, match="a row holds 100000, expected at most 65504"):
        store.pull(KEYS)


@pytest.mark.parametrize("token", ["pässword-0123456789", "0123456789abcdef\n", " 0123456789abcdef", "x" * 5000])
def test_tokens_that_cannot_travel(stack: ExitStack, token: str) -> None:
    with pytest.raises(ValueError, match="token: got"):
        Server({"clicks": table()}, token=token)
    server = stack.enter_context(Server({"clicks": table()}))
    with pytest.raises(ValueError, match="printable ASCII"):
        connect(server.address, table="clicks", token=token)


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        ([], {}),
        ("127.0.0.1:99999", {}),
        ("127.0.0.1:1", {"rank": -1}),
        ("127.0.0.1:1", {"rank": 70_000}),
        ("127.0.0.1:1", {"timeout": 0.0}),
        ("127.0.0.1:1", {"patience": -1.0}),
    ],
)
def test_senseless_connections_are_refused_at_once(servers: object, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got"):
        connect(servers, table="clicks", **options)


def test_certificates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("not one")
    with pytest.raises(ValueError, match=r"could not listen on 127\.0\.0\.1:0.*bad\.pem, .*bad\.pem"):
        Server({"clicks": table()}, tls=(str(tmp_path / "bad.pem"),) * 2)


def test_exchanges_of_any_size_travel_in_parts(stack: ExitStack) -> None:
    """Geo's difference of a hundred large batches is larger than any request that a server takes."""
    keys = np.arange(100_000, dtype=np.uint64)
    server = stack.enter_context(Server({"clicks": table(4)}, limit_mb=1))
    stores = [stack.enter_context(connect(server.address, table="clicks")) for _ in range(2)]
    watcher = Geo(stores[1], every=1, weight=1.0)
    for some in np.split(keys, 4):
        watcher.pull(some)
    with Geo(stores[0], every=4, weight=1.0) as geo:
        for some in np.split(keys, 4):
            geo.push(some, np.full((len(some), 4), some[0] + 1, np.float32))
    expected = -np.repeat(keys // 25_000 * 25_000 + 1, 4).reshape(-1, 4).astype(np.float32)
    np.testing.assert_array_equal(server.hosts["clicks"].table.pull(keys), expected)
    watcher.push(keys[:1], np.zeros((1, 4), np.float32))  # what the other has changed comes whole, with the last part
    np.testing.assert_array_equal(watcher.pull(keys), expected)
    watcher.close()


def test_a_worker_whose_machine_vanished_is_not_counted(
    behind: Callable[..., Proxy], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stands, and nobody will ever close it. One that only has nothing to ask is counted."""
    monkeypatch.setattr("plsc.ps.host.SILENT", 0.8)
    server = Server({"clicks": table()})
    proxy, host = behind(server), server.hosts["clicks"]
    gone = opened(stack, proxy, timeout=60)
    geo = Geo(stack.enter_context(connect(server.address, table="clicks")), every=1)
    time.sleep(1.0)
    eventually(lambda: host.num_workers == 2)
    proxy.stall_after = 0
    eventually(lambda: host.num_workers == 1)
    geo.push(KEYS, ONES)  # tells this worker how many there are
    geo.push(KEYS, ONES)
    np.testing.assert_array_equal(host.table.pull(KEYS), -2 * ONES)  # with a weight of 1, and the rest of a half
    proxy.stall_after = None
    eventually(lambda: host.num_workers == 2)
    gone.pull(KEYS)
    geo.close()


def test_a_seat_that_was_dropped_is_not_counted() -> None:
    host = Host(table())
    seats = [Seat(host) for _ in range(3)]
    seats[0].close()
    seats[0].close()
    assert host.num_workers == 2
    del seats[1]
    gc.collect()
    assert host.num_workers == 1


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)
