"""A worker's connection to one server: requests in order, answers to whoever waits, a lost connection made anew."""

import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plsc.ps import wire as w
from plsc.ps.store import ServerLost, WorkerMissing

logger = logging.getLogger(__name__)

MOST_TRIES = 50  # of one request, each ended by a lost connection
ASK_AGAIN = 10.0  # seconds between two questions where a lost server is
MOST_BEATS = 400  # one after the other: a server that hangs takes 64 KiB, then whoever writes would wait
LONGEST_PAUSE = 2.0  # seconds between two attempts to reach a server


class Refused(ValueError):
    """The server does not take this worker or this request; trying again would not help."""


@dataclass
class Call:
    """One request and its answer; kept until answered, so that it can be sent again."""

    request: w.Request
    batch: Any
    out: np.ndarray | None = None  # values of the answer go here, flat
    filled: int = 0
    keys: np.ndarray | None = None  # of the answer
    values: np.ndarray | None = None
    reply: w.Reply | None = None
    failure: Exception | None = None  # why there will be no answer
    tries: int = 0
    sent: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Access:
    """What it takes to be let in."""

    table: str
    run: str
    client: str
    rank: int
    wire: str
    options: dict[str, Any]
    headers: list[tuple[bytes, bytes]]
    tls: bool
    timeout: float
    patience: float
    find: Callable[[int], str] | None = None  # asks where the server of an index is now


class Link:
    """The connection to one server. Any thread may send; whoever waits first reads for all that wait."""

    def __init__(self, address: str, access: Access) -> None:
        self.address = address
        self.hello: dict[str, Any] = {}
        self.workers = 1
        self.reconnects = 0
        self._access = access
        self._layout = w.LAYOUTS[access.wire]
        self._write = threading.RLock()
        self._state = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._ids = itertools.count(1)
        self._sequence = itertools.count(1)
        self._reading = False
        self._spoke = time.monotonic()  # when something was last sent
        self._beats = 0  # since the last request
        self._generation = 0
        self._failure: Exception | None = None  # the last time that the server was given up
        self._stream: tuple[Any, Any, Any] | None = None  # client, writer, reader
        self._open()

    # ---- requests

    def send(self, request: w.Request, batch: Any, out: np.ndarray | None = None) -> Call:
        call, known = Call(request, batch, out), self._failure
        with self._write:
            if self._failure is not known:  # while this request waited for its turn
                raise _again(self._failure)
            request.id = next(self._ids)
            if request.kind in w.WRITES:
                request.sequence = next(self._sequence)
            with self._state:
                self._calls[request.id] = call
            generation = self._generation
            try:
                self._emit(call)
            except BROKEN as error:
                self._recover(generation, error)
        return call

    def wait(self, call: Call) -> Call:
        """The answered call; raises what the server answered instead."""
        while call.reply is None:
            with self._state:
                if call.failure is not None:
                    raise _again(call.failure)
                if call.reply is not None:
                    break
                if self._reading:
                    self._state.wait()
                    continue
                self._reading = True
                generation = self._generation
            try:
                self._read()
            except BROKEN as error:
                self._recover(generation, error)
            finally:
                with self._state:
                    self._reading = False
                    self._state.notify_all()
        status, text = call.reply.status, call.reply.text
        if status == w.MISSING:
            raise WorkerMissing(text)
        if status != w.OK:
            raise (Refused if status == w.REFUSED else RuntimeError)(f"server {self.address}: {text}")
        return call

    def act(self, name: str, body: dict[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
        """One question outside the stream, such as save or stat."""
        access = self._access
        return question(
            self.address, name, body, tls=access.tls, options=access.options, headers=access.headers, timeout=timeout
        )

    def close(self) -> None:
        with self._write:
            self._drop()

    def check_time(self) -> None:
        """Cuts a connection whose server has not answered in time; who waits then makes it anew and asks again."""
        now = time.monotonic()
        with self._state:
            late = any(now - call.sent > self._access.timeout + call.request.value for call in self._calls.values())
            stream = self._stream
        if late and stream is not None:
            logger.warning("server %s has not answered for %g s; connecting anew", self.address, self._access.timeout)
            stream[2].cancel()

    def beat(self) -> None:
        """Tells a server that has heard nothing for a while that this worker is there. Never waits."""
        if time.monotonic() - self._spoke < self.hello.get("beat", math.inf) or not self._write.acquire(blocking=False):
            return
        try:
            if self._stream is not None and not self._calls and self._beats < MOST_BEATS:
                self._spoke = time.monotonic()
                self._beats += 1
                self._stream[1].write_metadata(w.Request(w.BEAT).pack())
        except BROKEN as error:  # the next request connects anew
            logger.debug("server %s: no beat (%s)", self.address, sentence(error))
        finally:
            self._write.release()

    # ---- the stream

    def _connect(self) -> Any:
        scheme = "grpc+tls" if self._access.tls else "grpc"
        return w.flight.FlightClient(f"{scheme}://{self.address}", **self._access.options)

    def _open(self) -> None:
        access = self._access
        client = self._connect()
        try:
            asked = {
                "protocol": w.PROTOCOL,
                "table": access.table,
                "run": access.run,
                "client": access.client,
                "rank": access.rank,
                "wire": access.wire,
            }
            descriptor = w.flight.FlightDescriptor.for_command(json.dumps(asked).encode())
            options = w.flight.FlightCallOptions(headers=access.headers)
            writer, reader = client.do_exchange(descriptor, options)
            with _at_most(access.timeout, reader):
                writer.begin(self._layout.schema)
                first = reader.read_chunk()
            hello = json.loads(first.app_metadata.to_pybytes())
        except (w.flight.FlightUnauthenticatedError, w.flight.FlightUnauthorizedError) as error:
            client.close()
            raise Refused(f"server {self.address}: {sentence(error)}") from None
        except BaseException:
            client.close()
            raise
        if "error" in hello:
            client.close()
            raise Refused(f"server {self.address}: {hello['error']}")
        if self.hello and (other := [name for name in _SAME if hello[name] != self.hello[name]]):
            _end(client, writer, reader)
            words = ", ".join(f"{name} {hello[name]!r} (was {self.hello[name]!r})" for name in other)
            raise Refused(
                f"server {self.address}: another one is there now, with {words}; rows would go astray. "
                "Start the one that was there again, or connect anew"
            )
        if self.hello and hello["epoch"] != self.hello["epoch"] and hello["durability"] != "log":
            what = "its last save" if hello["durability"] == "save" else "empty tables, for it has no folder"
            logger.warning("server %s was started again, from %s", self.address, what)
        self.hello, self.workers = hello, hello["workers"]
        with self._state:
            self._stream = (client, writer, reader)

    def _drop(self) -> None:
        with self._state:
            stream, self._stream = self._stream, None
        if stream is None:
            return
        _end(*stream)

    def _emit(self, call: Call) -> None:
        if self._stream is None:
            raise ConnectionError("not connected")
        call.sent = self._spoke = time.monotonic()
        self._beats = 0
        call.filled = 0
        call.tries += 1
        self._stream[1].write_with_metadata(call.batch, call.request.pack())

    def _read(self) -> None:
        stream = self._stream
        if stream is None:
            raise ConnectionError("not connected")
        chunk = stream[2].read_chunk()
        reply = w.Reply.unpack(chunk.app_metadata)
        parts = None if chunk.data is None else self._layout.unpack(chunk.data)
        with self._state:
            if stream is not self._stream:  # all that has no answer was asked again on another
                raise ConnectionError("not connected")
            call = self._calls.get(reply.id)
            if call is None:
                return
            if parts is not None:
                keys, values, _ = parts
                if call.out is None:
                    call.keys, call.values = keys, values
                else:
                    rows = self._layout.decode(values, self.hello["dim"]).reshape(-1)
                    if call.filled + len(rows) > len(call.out):
                        raise w.Malformed(f"server {self.address} answered more rows than were asked for")
                    call.out[call.filled : call.filled + len(rows)] = rows
                    call.filled += len(rows)
            if not reply.flags & w.MORE:
                del self._calls[reply.id]
                self.workers = max(1, reply.workers)
                call.reply = reply

    def _recover(self, generation: int, error: BaseException) -> None:
        """A new connection, and on it every call without an answer, in order. What was applied is not applied again."""
        with self._write:
            if generation != self._generation:
                return
            try:
                self._reopen(error)
            except (ServerLost, Refused) as lost:
                self._give_up(lost)
                raise

    def _reopen(self, error: BaseException) -> None:
        """Tries for as long as patience lasts; then everything without an answer is asked again, in order."""
        self._drop()
        began, pause = time.monotonic(), 0.02
        asked = began - ASK_AGAIN
        logger.warning("server %s: connection lost (%s); waiting for it", self.address, sentence(error))
        while True:
            try:
                self._open()
                for call in sorted(self._calls.values(), key=lambda each: each.request.id):
                    if call.tries > MOST_TRIES:
                        raise ServerLost(
                            f"server {self.address} ended the connection {call.tries} times over one "
                            f"{w.KINDS[call.request.kind]}; its log says why"
                        )
                    self._emit(call)
                break
            except ServerLost:
                raise
            except BROKEN as again:
                self._drop()
                if time.monotonic() - began > self._access.patience:
                    raise ServerLost(
                        f"server {self.address} was not reached for {self._access.patience:g} s "
                        f"({sentence(again)}); start it again from its folder, or give a longer patience"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                if time.monotonic() - asked >= ASK_AGAIN:
                    asked = time.monotonic()
                    self._find()
        with self._state:
            self._generation += 1
            self.reconnects += 1
        logger.warning("server %s: connected again after %.1f s", self.address, time.monotonic() - began)

    def _find(self) -> None:
        """A server that was started again may have come up elsewhere."""
        if self._access.find is None:
            return
        try:
            self.address = self._access.find(self.hello["index"])
        except (ValueError, OSError) as error:  # who knows of the servers may be lost as well
            logger.debug("server %s: %s", self.address, error)

    def _give_up(self, failure: Exception) -> None:
        """Whoever waits hears of it now; what has no answer is forgotten, and the next request connects anew."""
        self._drop()
        with self._state:
            self._failure = failure
            self._generation += 1
            for call in self._calls.values():
                call.failure = failure
            self._calls.clear()
            self._state.notify_all()


_SAME = ("index", "count", "dim", "rule", "birth", "counters")  # of a server, as long as workers are connected
BROKEN = (w.flight.FlightError, w.pa.ArrowException, OSError, StopIteration, w.Malformed)


def _again(failure: Exception | None) -> Exception:
    """For another thread: an exception that is raised twice mixes its tracebacks."""
    assert failure is not None
    return type(failure)(*failure.args)


def _end(client: Any, writer: Any, reader: Any) -> None:
    try:
        writer.done_writing()
        reader.cancel()
        writer.close()
    except BROKEN:
        pass
    client.close()


@contextmanager
def _at_most(seconds: float, reader: Any) -> Iterator[None]:
    """Cuts a stream whose first answer is not there in time: a server may take a connection and say nothing."""
    was_cut = threading.Event()

    def cut() -> None:
        was_cut.set()
        reader.cancel()

    late = threading.Timer(seconds, cut)
    late.daemon = True
    late.start()
    try:
        yield
    except BROKEN:
        if was_cut.is_set():
            raise ConnectionError(f"it took the connection and said nothing for {seconds:g} s") from None
        raise
    finally:
        late.cancel()


def sentence(error: BaseException) -> str:
    """Without gRPC's debug context."""
    if isinstance(error, StopIteration):
        return "the server ended the stream"
    text = str(error).split(". gRPC client debug context")[0].split(". Detail:")[0]
    return text.split("with message: ")[-1] or type(error).__name__


def question(
    address: str,
    name: str,
    body: dict[str, Any] | None,
    *,
    tls: bool,
    options: dict[str, Any],
    headers: list[tuple[bytes, bytes]],
    timeout: float,
) -> dict[str, Any]:
    """A server's answer to health, stat or save, on a connection of its own."""
    with w.flight.FlightClient(f"grpc{'+tls' if tls else ''}://{address}", **options) as client:
        call = w.flight.FlightCallOptions(timeout=timeout, headers=headers)
        try:
            (answer,) = client.do_action(w.flight.Action(name, json.dumps(body or {}).encode()), call)
        except w.flight.FlightUnauthenticatedError as error:
            raise Refused(f"server {address}: {sentence(error)}") from None
        except BROKEN as error:
            raise ServerLost(f"server {address} was not reached: {sentence(error)}") from None
        found: dict[str, Any] = json.loads(answer.body.to_pybytes())
        if "error" in found:
            raise Refused(f"server {address}: {found['error']}")
        return found
