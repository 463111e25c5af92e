"""The process around the service: address, TLS, token, slow clients, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from plsc.serve.app import create_app
from plsc.serve.gate import is_loopback
from plsc.serve.service import Service

logger = logging.getLogger(__name__)

HEAD_SECONDS = 10.0  # for a connection to send the head of its request
ANSWER_SECONDS = 30.0  # for a client to take what it asked for
THREADS_SECONDS = 1.0  # for threads to end, once all is answered
END_SECONDS = 30  # for what has come to be answered, once the server is told to stop
MIN_TOKEN = 16
BACKLOG = 512
TOKEN_VARIABLE = "PLSC_TOKEN"


@dataclass(frozen=True)
class Address:
    """Where a server listens, and who may ask."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    max_connections: int = 512

    def check(self) -> None:
        """Raises ValueError for an address that others reach without a token, and for TLS files that will not do."""
        if not is_loopback(self.host) and self.token is None:
            raise ValueError(
                f"host: {self.host} can be reached by other machines and no token is set; expected one in "
                f"--token-file FILE or {TOKEN_VARIABLE}, or the default 127.0.0.1"
            )
        if self.token is not None:
            check_token(self.token)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS: got only one of --tls-certificate and --tls-key, expected both or none")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port: got {self.port}, expected 0 to 65535")
        if self.tls_certificate is not None and self.tls_key is not None:
            _check_tls(self.tls_certificate, self.tls_key)

    @property
    def url(self) -> str:
        """What to open on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        scheme = "http" if self.tls_certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/"


def read_token(path: str | None) -> str | None:
    """The token of a file, or else of the environment: every user of a machine sees the command line."""
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE) or None
        if token is not None:
            check_token(token, what=TOKEN_VARIABLE)
        return token
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path}: is no file, expected one with the token")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"{path}: others may read it (mode {mode & 0o777:o}); chmod 600 it")
        token = Path(path).read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: got bytes that are no text, expected one line with the token") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); expected a file with the token") from error
    check_token(token, what=path)
    return token


def check_token(token: str, *, what: str = "token") -> None:
    """Raises ValueError for a token that is short, or that no header can carry; it is never shown."""
    if len(token) < MIN_TOKEN or not token.isascii():
        raise ValueError(f"{what}: got {len(token)} characters, expected {MIN_TOKEN} or more of ASCII")
    if not token.isprintable() or token != token.strip():
        raise ValueError(
            f"{what}: got a token with a line break, a control character or a space at an end; expected one line "
            "without them"
        )


def _check_tls(certificate: str, key: str) -> None:
    for path in (certificate, key):
        if not os.path.isfile(path):
            raise ValueError(f"TLS: {path} is no file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # "": asks nobody
    except (ssl.SSLError, OSError) as error:
        raise ValueError(
            f"TLS: {certificate} and {key} do not go together ({error}); expected a certificate and its key, both PEM, "
            "the key without a password"
        ) from error


def _listen(address: Address) -> list[socket.socket]:
    """Sockets on all addresses of the host's name; ValueError where the port is taken or the host is not this one."""
    found: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, _, protocol, _, where in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            port = found[0].getsockname()[1] if found else address.port
            try:
                found.append(_bound(family, protocol, (where[0], port, *where[2:])))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error  # such as ::1 of "localhost", where there is no IPv6
        if not found and missing is not None:
            raise missing
    except OSError as error:
        for one in found:
            one.close()
        raise ValueError(
            f"{address.host}:{address.port}: cannot listen there ({error.strerror or error}); expected an address of "
            "this machine and a free port; give another --port or --host"
        ) from error
    return found


def _bound(family: int, protocol: int, where: tuple[Any, ...]) -> socket.socket:
    """A socket that listens. Its protocol is named: asyncio looks at that before it turns Nagle's delay off, 40 ms."""
    found = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(where)
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def serve(start: Callable[[], Service], address: Address, *, ready: Callable[[str], Any] | None = None) -> None:
    """Serves until SIGTERM or Ctrl-C, then answers what has come and returns; a second one ends the process at once.

    ready: called with the URL.
    """
    address.check()
    any_host = address.token is not None
    app = create_app(
        start,
        token=address.token,
        any_host=any_host,
        crowded=lambda: len(server.server_state.connections) > address.max_connections,
    )
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=END_SECONDS,
        h11_max_incomplete_event_size=32 * 1024,
        ssl_certfile=address.tls_certificate,
        ssl_keyfile=address.tls_key,
    )
    server = _Server(config, ready, address)
    server.run(_listen(address))
    if not server.came_up:
        raise OSError("the service did not start; its log has the reason")
    _leave_threads()


def _leave_threads() -> None:
    """Ends the process where a thread of the service still works for nobody: Python would wait for it, however long."""
    late = time.monotonic() + THREADS_SECONDS
    busy = [one for one in threading.enumerate() if one.name.startswith("plsc-")]
    for thread in busy:
        thread.join(max(0.0, late - time.monotonic()))
    if count := sum(thread.is_alive() for thread in busy):
        logger.warning("%d threads are left at work on what was given up", count)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


class _Server(uvicorn.Server):
    """Says once where it listens; a second signal ends it."""

    _told: float | None = None  # when it was told to stop

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], Any] | None, address: Address) -> None:
        super().__init__(config)
        self._ready, self._address = ready, address
        self.came_up = False

    async def _serve(self, sockets: Any = None) -> None:
        await super()._serve(sockets)
        self._captured_signals.clear()  # obeyed: uvicorn would raise them again, and the exit status be theirs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told is None:
            self._told = time.monotonic()
        elif time.monotonic() - self._told > 1:  # sooner it may be the same one: to the process, and to its group
            name, count = signal.Signals(sig).name, len(self.server_state.tasks)
            os.write(2, f"ended by a second {name}: {count} requests unanswered\n".encode())  # print may be under way
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        count = len(self.server_state.tasks)
        logger.info("stopping: %d requests to answer, for up to %d s; a second signal ends it", count, END_SECONDS)
        await super().shutdown(sockets)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.came_up = True
            if self._ready is not None:
                port = self.servers[0].sockets[0].getsockname()[1]
                self._ready(self._address.url.replace(f":{self._address.port}/", f":{port}/"))


class PatientProtocol(H11Protocol):
    """HTTP of uvicorn with an end to patience: connections are cut that take too long to ask, or to hear the answer.

    HEAD_SECONDS for the head of a request, whether in one piece or drop by drop; ANSWER_SECONDS for bytes that wait to
    be taken, or a client that does not read would hold its request for good.
    """

    _timer: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None  # the client, what we wrote

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # so that pause and resume tell whether any byte waits
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._idle() and self._timer is None:
            self._wait()
        super().data_received(data)
        if not self._idle():
            self._stop()

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP, and so never comes to a route: it is counted here."""
        self.config.app.state.service().requests.add(path="other", method="other", status="400")  # type: ignore[union-attr]
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._taken()
        super().connection_lost(exc)

    def _idle(self) -> bool:
        """No request's head has come since the last answer."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _taken(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _expire(self) -> None:
        self._timer = None
        if self._idle() and not self.transport.is_closing():
            self.transport.close()
