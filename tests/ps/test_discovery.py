"""Servers that say where they are, in torch's TCPStore or in etcd, and workers that find them there."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import plsc.ps.discovery as discovery
from plsc.ps import Server, Table, connect
from plsc.ps.discovery import lookup, publish
from plsc.ps.launch import free_ports


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """An etcd of its own: etcd://host:port."""
    pytest.importorskip("etcd3gw", reason="the client is missing: pip install etcd3gw")
    if shutil.which("etcd") is None:
        pytest.skip("etcd is missing: apt install etcd-server")
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    flags = ["--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with open(tmp_path / "etcd.log", "wb") as log, subprocess.Popen(["etcd", *flags], stdout=log, stderr=log) as child:
        try:
            yield client.replace("http", "etcd")
        finally:
            child.kill()


def test_servers_are_found_through_a_tcp_store() -> None:
    (port,) = free_ports(1)
    endpoint = f"127.0.0.1:{port}"
    found_by_all(endpoint, f"tcpstore://{endpoint}")
    again = publish(endpoint, run="day", index=0, count=2, address="127.0.0.1:1")  # the store is there already
    with pytest.raises(ValueError, match=r"did not name all servers of run 'day' within 0\.3 s(.|\n)*--rendezvous 127"):
        connect(f"tcpstore://{endpoint}", table="clicks", run="day", patience=0.3)
    del again


def test_a_tcp_store_that_was_lost_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives in server 0: when that is started again, its new one knows nothing of the others."""
    monkeypatch.setattr(discovery, "TELL", 0.2)
    (port,) = free_ports(1)
    first, second = (publish(f"127.0.0.1:{port}", run="r", index=i, count=2, address=f"a:{i}") for i in range(2))
    first._store = None  # as it is when its process has died
    time.sleep(1)
    first = publish(f"127.0.0.1:{port}", run="r", index=0, count=2, address="a:7")
    assert lookup(f"tcpstore://127.0.0.1:{port}", run="r", seconds=30) == ["a:7", "a:1"]
    del first, second


def test_a_server_that_comes_back_elsewhere_is_found(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def start() -> tuple[Server, object]:
        table = Table(3, rule="sgd", lr=1.0, init="zeros", locked=True)
        made = Server({"clicks": table}, folder=tmp_path / "state", durability="log")
        return made, publish(f"127.0.0.1:{port}", run="", index=0, count=1, address=made.address)

    first, held = start()
    keys, ones = np.arange(5, dtype=np.uint64), np.ones((5, 3), np.float32)
    with connect(f"tcpstore://127.0.0.1:{port}", table="clicks", patience=60) as store:
        store.push(keys, ones)
        first.close()
        second, again = start()
        assert second.address != first.address
        store.push(keys, ones)
        np.testing.assert_array_equal(store.pull(keys), -2 * ones)
        second.close()
    del held, again


def test_servers_are_found_through_etcd(etcd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LEASE", 2)
    until = time.monotonic() + 30
    while True:
        try:
            publish(etcd, run="first", index=0, count=1, address="a:1").close()
            break
        except ValueError:
            assert time.monotonic() < until
            time.sleep(0.1)
    leases = found_by_all(etcd, etcd)
    time.sleep(3)  # longer than a lease: it was kept
    assert len(lookup(etcd, run="night", seconds=1)) == 2
    leases[1].close()
    with pytest.raises(ValueError, match=r"did not name all servers of run 'night' within 0\.3 s \(no plsc_ps/night/"):
        lookup(etcd, run="night", seconds=0.3)
    leases[0].close()


def found_by_all(endpoint: str, servers: str) -> list[object]:
    """A worker that comes first waits; the order in which servers come does not matter."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(Server({"clicks": Table(3, locked=True)}, index=index, count=2)) for index in range(2)
        ]
        found: list[list[str]] = []
        waiting = threading.Thread(target=lambda: found.append(lookup(servers, run="night", seconds=60)))
        waiting.start()
        held = [
            publish(endpoint, run="night", index=index, count=2, address=made[index].address)
            for index in ((0, 1) if servers.startswith("tcp") else (1, 0))
        ]
        waiting.join(60)
        assert found == [[server.address for server in made]]
        with connect(servers, table="clicks", run="night") as store:
            assert store.num_workers == 1
        with connect([servers], table="clicks", run="night") as store:  # as Strategy(servers=[...]) has it
            assert store.dim == 3
        return held


@pytest.mark.parametrize("endpoint", ["tcpstore://nowhere", "etcd://:2379", "etcd://a:b"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ValueError, match="expected host:port, tcpstore://host:port or etcd://host:port"):
        connect(endpoint, table="clicks")


def test_no_etcd_there() -> None:
    pytest.importorskip("etcd3gw", reason="the client is missing: pip install etcd3gw")
    (port,) = free_ports(1)
    with pytest.raises(ValueError, match=r"was not reached \((.|\n)*is etcd there"):
        publish(f"etcd://127.0.0.1:{port}", run="", index=0, count=1, address="a:1")
    with pytest.raises(ValueError, match=r"within 0\.2 s"):
        lookup(f"etcd://127.0.0.1:{port}", run="", seconds=0.2)
