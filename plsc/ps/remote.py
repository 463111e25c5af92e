"""A table on servers, as a store: one stream a server, requests to all at once, lost connections made anew."""

import atexit
import functools
import logging
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.ps import wire as w
from plsc.ps.arrays import Array, as_floats, as_keys, as_output, empty_like_kind
from plsc.ps.discovery import SCHEMES, lookup
from plsc.ps.link import BROKEN, LONGEST_PAUSE, Access, Call, Link, Refused, ServerLost, sentence
from plsc.ps.rules import RULES, PythonRule, Rule
from plsc.ps.store import Changes, place

PUSH_KEYS = 16_384  # keys of a push that go as one message: the server applies one while the next travels


ASK = 2.0  # seconds that whoever knows the servers' addresses is waited for when one is lost
SILENT = 3.0  # seconds that a server which is not there yet is waited for without a word

logger = logging.getLogger(__name__)


class RemoteStore:
    """A table whose rows are spread over servers; what `connect` returns. Threads may share it."""

    def __init__(self, links: Sequence[Link], *, wire: str) -> None:
        self._links = links
        self._layout = w.LAYOUTS[wire]
        hello = links[0].hello
        self.dim: int = hello["dim"]
        self.rule: Rule | PythonRule = _rule_of(hello["rule"])
        self.keeps_counters: bool = hello["counters"]
        self.keeps_rows: bool = hello["keeps_rows"]
        self._lr: float = hello["lr"]
        self._since = [(link.hello["epoch"], link.hello["version"]) for link in links]
        self._rounds = [link.hello["round"] for link in links]
        self._exchanging = threading.Lock()
        self._watch = threading.Event()
        # A server in this process would wait at its end for streams that nobody closed. Modes send what waits before.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        threading.Thread(target=_watchdog, args=(weakref.ref(self), self._watch), daemon=True).start()

    # ---- a store

    @property
    def last_save(self) -> str | None:
        return self._links[0].hello["last_save"]

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        """On the servers, for every worker."""
        if not np.isfinite(lr) or lr <= 0:
            raise ValueError(f"lr: got {lr}, expected a positive number")
        self._to_all(lambda: w.Request(w.SET_LR, value=lr))
        self._lr = float(lr)

    def birth(self) -> dict[str, Any]:
        return dict(self._links[0].hello["birth"])

    def pull(self, keys: Array, *, create: bool = True, out: Array | None = None) -> Array:
        array = as_keys(keys)
        shape = (len(array), self.dim)
        if out is None:
            out, memory = empty_like_kind(keys, shape)
        else:
            memory = as_output(out, shape)
        flags = w.CREATE if create else 0
        if len(self._links) == 1:
            self._fill(self._links[0], array, memory, flags)
            return out
        calls = []
        for link, at in self._shares(array):
            assert isinstance(at, np.ndarray)
            if len(at):
                part = np.empty((len(at), self.dim), np.float32)
                batch = self._layout.pack(array[at], None)
                calls.append((link, at, part, link.send(w.Request(w.PULL, flags=flags), batch, part.reshape(-1))))
        for link, at, part, call in calls:
            self._whole(link.wait(call))
            memory[at] = part
        return out

    def _fill(self, link: Link, keys: np.ndarray, memory: np.ndarray, flags: int) -> None:
        if len(keys):
            batch = self._layout.pack(keys, None)
            self._whole(link.wait(link.send(w.Request(w.PULL, flags=flags), batch, memory.reshape(-1))))

    def _whole(self, call: Call) -> None:
        assert call.out is not None
        if call.filled != len(call.out):
            raise RuntimeError(f"a server answered {call.filled} numbers where {len(call.out)} were asked for")

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int:
        array = as_keys(keys)
        floats = self._on_wire(as_floats(grads, (len(array), self.dim), "grads"))
        counts = None
        if shows is not None or clicks is not None:
            if not self.keeps_counters:
                raise ValueError("got shows or clicks, but this table keeps no counters; make it with counters=True")
            ones, zeros = np.ones(len(array), np.float32), np.zeros(len(array), np.float32)
            given = (ones if shows is None else shows, zeros if clicks is None else clicks)
            counts = np.stack([as_floats(x, array.shape, "shows or clicks") for x in given], axis=1)
        calls = []
        for link, at in self._shares(array):
            for some in _pieces(at, PUSH_KEYS):
                batch = self._layout.pack(array[some], floats[some], None if counts is None else counts[some])
                calls.append((link, link.send(w.Request(w.PUSH), batch)))
        return sum(_number(link.wait(call)) for link, call in calls)

    # ---- a shared store

    @property
    def num_workers(self) -> int:
        return max(link.workers for link in self._links)

    @property
    def next_round(self) -> int:
        return max(self._rounds)

    def contribute(self, keys: np.ndarray, grads: np.ndarray, *, round: int, workers: int) -> None:
        values = self._on_wire(grads)
        calls = []
        for number, (link, at) in enumerate(self._shares(keys)):
            # Who was this worker before may have died when some servers had its part of a round and others had not.
            for missed in range(self._rounds[number], round):
                request = w.Request(w.CONTRIBUTE, number=missed, workers=workers)
                calls.append((link, link.send(request, self._layout.pack(None, None))))
            self._rounds[number] = round + 1
            request = w.Request(w.CONTRIBUTE, number=round, workers=workers)
            calls.append((link, link.send(request, self._layout.pack(keys[at], values[at]))))
        for link, call in calls:
            link.wait(call)

    def wait_round(self, round: int, *, deadline: float) -> None:
        self._to_all(lambda: w.Request(w.WAIT_ROUND, number=round, value=deadline))

    def add(self, keys: np.ndarray, deltas: np.ndarray) -> np.ndarray:
        values, calls = self._on_wire(deltas), []
        for link, at in self._shares(keys):
            for some in _pieces(at, PUSH_KEYS):
                request = w.Request(w.EXCHANGE, flags=w.PART)
                calls.append((link, link.send(request, self._layout.pack(keys[some], values[some]))))
        for link, call in calls:
            link.wait(call)
        return self._layout.decode(values, self.dim)

    def exchange(self, keys: np.ndarray, deltas: np.ndarray) -> Changes:
        values = self._on_wire(deltas)
        with self._exchanging:
            calls, parts = [], []
            for number, (link, at) in enumerate(self._shares(keys)):
                epoch, since = self._since[number]
                *most, last = _pieces(at, PUSH_KEYS) or [slice(0)]
                for some in most:
                    request = w.Request(w.EXCHANGE, flags=w.PART)
                    parts.append((link, link.send(request, self._layout.pack(keys[some], values[some]))))
                request = w.Request(w.EXCHANGE, number=since, epoch=epoch)
                calls.append((link, link.send(request, self._layout.pack(keys[last], values[last]))))
            for link, call in parts:
                link.wait(call)
            found, rows, behind = [], [], False
            for number, (link, call) in enumerate(calls):
                reply = link.wait(call).reply
                assert reply is not None and call.keys is not None and call.values is not None
                self._since[number] = (reply.text or link.hello["epoch"], reply.number)
                behind = behind or bool(reply.flags & w.BEHIND)
                found.append(call.keys)
                rows.append(self._layout.decode(call.values, self.dim))
        arrived = self._layout.decode(values, self.dim)
        return Changes(np.concatenate(found), np.concatenate(rows), arrived, behind=behind)

    # ---- beyond

    def save(self, name: str) -> int:
        """Has every server save under this name in its folder; rows in all."""
        return sum(link.act("save", {"name": name}, timeout=3600)["rows"] for link in self._links)

    def stats(self) -> list[dict[str, Any]]:
        """What each server says of itself, by index."""
        return [link.act("stat", timeout=10) for link in self._links]

    def close(self) -> None:
        self._watch.set()
        atexit.unregister(self._at_exit)
        for link in self._links:
            link.close()

    def __enter__(self) -> "RemoteStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = ",".join(link.address for link in self._links)
        return f"RemoteStore({where}, dim={self.dim}, rule={self.rule!r})"

    def _shares(self, keys: np.ndarray) -> list[tuple[Link, slice | np.ndarray]]:
        """Positions of each server's keys."""
        if len(self._links) == 1:
            return [(self._links[0], slice(0, len(keys)))]
        where = place(keys, len(self._links))
        return [(link, np.flatnonzero(where == number)) for number, link in enumerate(self._links)]

    def _on_wire(self, floats: np.ndarray) -> np.ndarray:
        values = self._layout.encode(floats)
        if values.dtype == np.float16 and not np.isfinite(values).all() and np.isfinite(floats).all():
            raise ValueError(
                f"got a number of magnitude {np.abs(floats).max():g}, expected at most 65504 for wire='fp16'; "
                "scale the loss down, or connect with wire='fp32'"
            )
        return values

    def _to_all(self, make: Any) -> None:
        calls = [(link, link.send(make(), self._layout.pack(None, None))) for link in self._links]
        for link, call in calls:
            link.wait(call)


def _pieces(at: slice | np.ndarray, size: int) -> list[slice | np.ndarray]:
    """Positions, at most `size` at a time; of one server's they are slices, and nothing is copied."""
    if isinstance(at, slice):
        return [slice(start, min(start + size, at.stop)) for start in range(0, at.stop, size)]
    return [at[start : start + size] for start in range(0, len(at), size)]


def _number(call: Call) -> int:
    assert call.reply is not None
    return call.reply.number


class ServersRule(PythonRule):
    """Stands for a rule of Python that the servers have and this process has not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state_size(self, dim: int) -> int:
        raise ValueError(
            f"the servers step rows by a rule {self.name!r} of their own; give Geo a rule= it can use here"
        )

    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        raise AssertionError("rows are stepped on the servers")


def _rule_of(described: dict[str, Any]) -> Rule | PythonRule:
    options = {name: value for name, value in described.items() if name != "name"}
    kind = RULES.get(described["name"])
    return ServersRule(described["name"]) if kind is None else kind(**options)


def _close(ref: "weakref.ref[RemoteStore]") -> None:
    if (store := ref()) is not None:
        store.close()


def _watchdog(ref: "weakref.ref[RemoteStore]", stop: threading.Event) -> None:
    pause = 0.0
    while not stop.wait(pause):
        store = ref()
        if store is None:
            return
        pause = 1.0
        for link in store._links:
            link.check_time()
            link.beat()
            pause = min(pause, link.hello.get("beat", pause))
        del store


def connect(
    servers: str | Sequence[str] | None = None,
    *,
    table: str,
    rank: int | None = None,
    run: str | None = None,
    wire: str = "fp32",
    token: str | None = None,
    tls: str | None = None,
    certificate: tuple[str, str] | None = None,
    server_name: str | None = None,
    timeout: float = 60.0,
    patience: float = 300.0,
) -> RemoteStore:
    """The table of this name on servers ("host:port,host:port", in any order), as a store; see docs/ps.md.

    servers      or "tcpstore://host:port" or "etcd://host:port", where servers say where they are; default:
                 PLSC_PS_SERVERS
    rank         this worker's number, for Sync (default: RANK, as torchrun sets it, else 0)
    run          refuses servers of another run (default: PLSC_PS_RUN, else "")
    wire         what values and gradients travel as: fp32, fp16, or int8 with a scale a row
    token        (default: PLSC_PS_TOKEN) tls: file of the certificate authority; certificate: files of the worker's
                 own certificate and key, where servers ask for one; server_name: what theirs says, if not the address
    timeout      seconds without an answer after which a connection is made anew
    patience     seconds that a lost server is waited for; then ServerLost
    """
    servers = os.environ.get("PLSC_PS_SERVERS") if servers is None else servers
    if servers is None:
        raise ValueError("got no servers and no PLSC_PS_SERVERS in the environment; give connect('host:port,...')")
    run = os.environ.get("PLSC_PS_RUN", "") if run is None else run
    addresses = servers.split(",") if isinstance(servers, str) else list(servers)
    addresses = [address.strip() for address in addresses]
    find = None
    if len(addresses) == 1 and addresses[0].startswith(SCHEMES):
        find = functools.partial(_find, addresses[0], run)
        addresses = lookup(addresses[0], run=run, seconds=patience)
    if wire not in w.WIRES:
        raise ValueError(f"wire: got {wire!r}, expected one of {', '.join(w.WIRES)}")
    for address in addresses or [""]:
        found = re.fullmatch(r"[^\s/]+:(\d{1,5})", address)
        if found is None or int(found[1]) > 65_535:
            raise ValueError(f"servers: got {address!r}, expected host:port, several separated by commas")
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    if not 0 <= rank < 65_536 or not timeout > 0 or not patience >= 0:
        raise ValueError(
            f"got rank {rank}, timeout {timeout}, patience {patience}; expected 0 to 65535, seconds above 0, seconds"
        )
    token = os.environ.get("PLSC_PS_TOKEN") if token is None else token
    options: dict[str, Any] = {}
    if tls is not None:
        options["tls_root_certs"] = Path(tls).read_bytes()
        if certificate is not None:
            options["cert_chain"], options["private_key"] = (Path(file).read_bytes() for file in certificate)
        if server_name is not None:
            options["override_hostname"] = server_name
    elif certificate is not None:
        raise ValueError("got a certificate without tls; give tls= the authority that signed the servers'")
    access = Access(
        table=table,
        run=run,
        client=uuid.uuid4().hex,
        rank=rank,
        wire=wire,
        options=options,
        headers=w.bearer(token),
        tls=tls is not None,
        timeout=timeout,
        patience=patience,
        find=find,
    )
    links: list[Link] = []
    try:
        for address in addresses:
            links.append(_link(address, access))
        return RemoteStore(_in_order(links), wire=wire)
    except BaseException:
        for link in links:
            link.close()
        raise


def _find(endpoint: str, run: str, index: int) -> str:
    return lookup(endpoint, run=run, seconds=ASK)[index]


def _link(address: str, access: Access) -> Link:
    """Waits for a server that is not there yet."""
    began, pause, told = time.monotonic(), 0.05, False
    while True:
        try:
            return Link(address, access)
        except BROKEN as error:
            if not told and time.monotonic() - began > SILENT:
                told = True
                logger.warning(
                    "server %s is not there yet (%s); waiting up to %g s", address, sentence(error), access.patience
                )
            if time.monotonic() - began > access.patience:
                raise ServerLost(
                    f"server {address} was not reached for {access.patience:g} s ({sentence(error)}); "
                    "is it running there, and are both with TLS or both without?"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _in_order(links: list[Link]) -> list[Link]:
    """Servers by the index that each says it is, which every worker must see alike."""
    said = {link.address: (link.hello["index"], link.hello["count"]) for link in links}
    expected = [(index, len(links)) for index in range(len(links))]
    if sorted(said.values()) != expected:
        words = "; ".join(f"{address} is {index} of {count}" for address, (index, count) in said.items())
        raise Refused(
            f"got {len(links)} servers that are not 0 to {len(links) - 1} of {len(links)}: {words}. "
            "Name every server of the run once; each is started with an index of its own and the same count"
        )
    return sorted(links, key=lambda link: link.hello["index"])
