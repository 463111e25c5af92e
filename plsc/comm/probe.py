"""What can be known of ranks before they work together: who is there, who reaches whom, how fast, by what clock."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from plsc.comm.communicator import ranks_text
from plsc.comm.launch import Launch, launcher_holds_store, number_of_start

PAYLOAD = 2**20  # bytes that each pair of ranks exchanges
PINGS = 5  # the quickest of them tells the delay, and the clocks' difference
PAIR_SECONDS = 10.0  # that a peer gets to answer
_SIOCGIFADDR = 0x8915


class Unreachable(RuntimeError):
    """A rank did not come, or does not answer."""


@dataclass(frozen=True)
class Link:
    """What one rank found out about another."""

    peer: int
    error: str = ""  # why it was not reached; what follows means nothing then
    delay: float = 0.0  # seconds there and back
    rate: float = 0.0  # bytes a second, there and back counted
    ahead: float = 0.0  # seconds that the peer's clock is ahead


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one."""
    found = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_address(backend: str, towards: str) -> tuple[str, str]:
    """The address that the other ranks are going to be told, and where it comes from, in words.

    towards: the address where ranks meet. ValueError where the environment names an interface that is not there.
    """
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    asked = os.environ.get(variable, "").split(",")[0].lstrip("=")
    if asked:
        known = interfaces()
        name = next((name for name in known if name == asked or name.startswith(asked)), "")
        if not name:
            raise ValueError(f"{variable} is {asked!r}, expected one of {', '.join(known)}")
        return known[name], f"{name}, as {variable} says"
    if backend == "gloo":
        name = socket.gethostname()
        try:
            return socket.gethostbyname(name), f"what the host's name {name} resolves to"
        except OSError:
            return "127.0.0.1", f"the host's name {name} does not resolve"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing: it only chooses the way
        return probe.getsockname()[0], f"the way to {towards}"


class Responder:
    """Answers the other ranks' exchanges until it is closed; a context manager."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, name="plsc responder", daemon=True).start()

    def __enter__(self) -> Responder:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        """Each message is a length and as many bytes; the answer is this host's clock and the same bytes."""
        with suppress(OSError, EOFError), peer:
            peer.settimeout(PAIR_SECONDS)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                (length,) = struct.unpack("!Q", _read(peer, 8))
                body = _read(peer, min(length, PAYLOAD))
                peer.sendall(struct.pack("!d", time.time()) + body)


def visit(peer: int, address: str, port: int) -> Link:
    """Exchanges bytes with a peer's Responder."""
    body = bytes(range(256)) * (PAYLOAD // 256)
    try:
        with socket.create_connection((address, port), timeout=PAIR_SECONDS) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pings = [_exchange(link, b"") for _ in range(PINGS)]
            delay, ahead = min(pings)
            took, _ = _exchange(link, body)
    except (OSError, EOFError) as error:
        return Link(peer, error="no answer" if isinstance(error, TimeoutError) else str(error) or "it hung up")
    return Link(peer, delay=delay, rate=2 * PAYLOAD / took, ahead=ahead)


def meet(launch: Launch, *, seconds: float) -> Store:
    """Where the ranks leave what they know; waits for nobody but rank 0, or the launcher, who holds it."""
    held = launcher_holds_store()
    try:
        store = TCPStore(
            launch.address,
            int(launch.port),
            is_master=not held and launch.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        what = str(error).strip().splitlines()[0]
        raise Unreachable(
            f"rank {launch.rank} (host {socket.gethostname()}) cannot reach {launch.address}:{launch.port}, where the "
            f"ranks are to meet: {what}; see that MASTER_ADDR and MASTER_PORT are those of rank 0, that it has "
            "started, and that no firewall closes the port"
        ) from error
    return PrefixStore(f"plsc probe {number_of_start()}", store)


def share(store: Store, rank: int, what: str, facts: Any) -> None:
    """Leaves what a rank knows for the others; JSON-able."""
    store.set(f"{what}/{rank}", json.dumps(facts))


def collect(store: Store, ranks: Iterable[int], what: str, *, seconds: float) -> list[Any]:
    """What the ranks have left; raises Unreachable, which names those that have not come in time."""
    deadline, found, late = time.monotonic() + seconds, [], []
    for rank in ranks:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            store.wait([f"{what}/{rank}"], timedelta(seconds=left))
            found.append(json.loads(store.get(f"{what}/{rank}")))
        except RuntimeError:
            late.append(rank)
    if late:
        raise Unreachable(f"{ranks_text(late)} did not come within {seconds:g} s: not started, ended, or cut off")
    return found


def _exchange(link: socket.socket, body: bytes) -> tuple[float, float]:
    """Seconds there and back, and how far the peer's clock is ahead."""
    start, clock = time.perf_counter(), time.time()
    link.sendall(struct.pack("!Q", len(body)) + body)
    (theirs,) = struct.unpack("!d", _read(link, 8))
    back = _read(link, len(body))
    took = time.perf_counter() - start
    if back != body:
        raise OSError("the bytes came back changed")
    return took, theirs - (clock + took / 2)


def _read(link: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = link.recv(min(length, 2**16))
        if not part:
            raise EOFError("it hung up")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
