"""A server of tables: Arrow Flight in front of Hosts, with tokens or certificates, limits, saves and a metrics page."""

import hmac
import ipaddress
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from plsc.ps import host as hosts
from plsc.ps import wire as w
from plsc.ps.host import Client, Closing, Host
from plsc.ps.log import DURABILITY, State
from plsc.ps.metrics import Meter, page, serve_page
from plsc.ps.rules import describe
from plsc.ps.store import WorkerMissing
from plsc.ps.table import Table

logger = logging.getLogger(__name__)

LOOK = 0.5  # seconds between two looks at whether to save
LOG_BYTES = 4 << 30  # of a log after which a save is made unasked
REST = 60.0  # seconds after a save that failed; while one is tried, writes may have to wait
QUIET = 10.0  # seconds that close() waits for requests under way
BEATS = 4  # a worker with nothing to say says so this often within the time after which it is not counted
PULL_KEYS = 16_384  # keys whose rows go as one message: the table fills one while the last travels


class Server:
    """Serves tables until closed; `with Server({"clicks": Table(...)}) as server: ... server.address`.

    tables      by name; several workers push at once, so make them with locked=True unless lost steps are welcome
    host, port  where to listen; 0: any free port. Beyond this machine only with a token or client certificates
    index, count   which of the run's servers this is
    folder, durability, sync   see State; without a folder nothing is saved
    save_every  seconds between saves; None: only when asked, and where the log has reached 4 GiB
    run         refuses workers of another run; "" takes all
    token       what workers must show. tls: files (certificate, key). client_ca: file of the authority that signs
                workers' certificates; then each worker needs one
    limit_mb    the largest request
    metrics_port   where to answer /metrics and /healthz, on `host`; None: nowhere
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        index: int = 0,
        count: int = 1,
        folder: str | PathLike[str] | None = None,
        durability: str = "save",
        sync: bool = False,
        save_every: float | None = None,
        load_options: Mapping[str, dict[str, Any]] | None = None,
        run: str = "",
        token: str | None = None,
        tls: tuple[str, str] | None = None,
        client_ca: str | None = None,
        limit_mb: int = 256,
        metrics_port: int | None = None,
    ) -> None:
        _check_access(host, token, tls, client_ca)
        if not 0 <= index < count:
            raise ValueError(f"got index {index} of {count} servers, expected 0 to {count - 1}")
        if not 1 <= limit_mb <= 1024:
            raise ValueError(f"limit_mb: got {limit_mb}, expected 1 to 1024")
        for name, value in (("port", port), ("metrics_port", metrics_port or 0)):
            if not 0 <= value <= 65_535:
                raise ValueError(f"{name}: got {value}, expected 1 to 65535, or 0 for any free one")
        if durability not in DURABILITY:
            raise ValueError(f"durability: got {durability!r}, expected one of {', '.join(DURABILITY)}")
        if save_every is not None and (folder is None or not save_every > 0):
            why = "no folder to save to" if folder is None else f"{save_every} seconds"
            raise ValueError(f"save_every: got {why}, expected a folder and seconds above 0, or no save_every")
        if folder is None and durability == "log":
            raise ValueError("durability 'log' needs a folder to write the log to, got none")
        if port and not _is_free(host, port):  # Flight would share it, and each server would get some of the workers
            raise ValueError(f"port {port} of {host} is taken, or not of this machine; give another, or 0 for any")
        self.index, self.count, self.run = index, count, run
        self.limit = limit_mb << 20
        self.durability = durability if folder is not None else "none"
        self.state: State | None = None
        with ExitStack() as undo:  # a server that did not come up leaves its folder and its port to another
            if folder is None:
                self.hosts = {name: Host(table, name=name) for name, table in tables.items()}
            else:
                self.state = State(folder, durability=durability, index=index, count=count, sync=sync)
                undo.callback(self.state.close)
                options = load_options or {name: {"locked": True} for name in tables}
                self.hosts = self.state.load(tables, options)
            self.meters = {name: Meter() for name in self.hosts}
            self.closing = threading.Event()
            self._service = _service(self, host, port, token, tls, client_ca)
            undo.callback(self._service.shutdown)
            self._host, self.port = host, int(self._service.port)
            self.address = f"{f'[{host}]' if ':' in host else host}:{self.port}"
            self._page = None if metrics_port is None else serve_page(host, metrics_port, self.metrics)
            undo.pop_all()
        self.metrics_port = None if self._page is None else self._page.server_address[1]
        if self.state is not None:
            threading.Thread(target=self._save_often, args=(save_every,), daemon=True).start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Until closed by another thread."""
        self.closing.wait()

    def close(self, *, save: bool = False) -> None:
        """Takes no more requests; with `save`, saves once more. Streams still open end at their next request."""
        if self.closing.is_set():
            return
        self.closing.set()
        for host in self.hosts.values():
            host.close()
        if self._page is not None:
            self._page.shutdown()
            self._page.server_close()
        # Flight's shutdown waits for streams whose workers may be idle for hours; its port is free before.
        threading.Thread(target=self._service.shutdown, daemon=True).start()
        until = time.monotonic() + QUIET
        while time.monotonic() < until and (
            any(meter.running for meter in self.meters.values()) or not _is_free(self._host, self.port)
        ):
            time.sleep(0.01)
        if self.state is not None:
            try:
                if save:
                    self.state.save()
            finally:
                self.state.close()

    def stats(self) -> dict[str, Any]:
        """What `plsc-ps stat` shows."""
        tables = {name: {**host.stats(), **self.meters[name].summary()} for name, host in self.hosts.items()}
        return {"index": self.index, "count": self.count, "durability": self.durability, "tables": tables}

    def metrics(self) -> str:
        return page({name: (host.stats(), self.meters[name]) for name, host in self.hosts.items()})

    def _save_often(self, seconds: float | None) -> None:
        """By the clock, and whenever the log has grown long: it is read at a restart, and fills the disk."""
        assert self.state is not None
        last, failed = time.monotonic(), -REST
        while not self.closing.wait(LOOK):
            log, now = self.state.log, time.monotonic()
            if (log is None or log.size < LOG_BYTES) and (seconds is None or now - last < seconds):
                continue
            if now - failed < REST:
                continue
            last = now
            try:
                self.state.save()
            except Closing:
                return
            except Exception:
                failed = time.monotonic()
                logger.exception("could not save; training goes on, the last save stands")

    # ---- one worker's stream

    def greet(self, asked: dict[str, Any]) -> tuple[Host, Client, dict[str, Any]]:
        """The table asked for, and what the worker must know of it."""
        kinds = {"protocol": int, "table": str, "run": str, "client": str, "rank": int, "wire": str}
        if not isinstance(asked, dict) or any(type(asked.get(name)) is not kind for name, kind in kinds.items()):
            raise w.Malformed("the stream's descriptor is not that of a worker")
        if asked["protocol"] != w.PROTOCOL:
            raise w.Malformed(f"got protocol {asked['protocol']}, expected {w.PROTOCOL}; use one plsc everywhere")
        if self.run and asked["run"] != self.run:
            raise w.Malformed(f"this server is of run {self.run!r}, the worker of {asked['run']!r}; check addresses")
        host = self.hosts.get(asked["table"])
        if host is None:
            raise w.Malformed(f"got table {asked['table']!r}, expected one of {', '.join(self.hosts)}")
        if asked["wire"] not in w.WIRES or not 0 <= asked["rank"] < 65_536 or not 0 < len(asked["client"]) <= 64:
            raise w.Malformed(f"got wire {asked['wire']!r}, rank {asked['rank']}, client {asked['client'][:64]!r}")
        client = host.join(asked["client"], asked["rank"])
        rule, table = host.table.rule, host.table
        hello = {
            "dim": table.dim,
            "rule": describe(rule),
            "lr": table.lr,
            "counters": table.keeps_counters,
            "keeps_rows": table.keeps_rows,
            "birth": table.birth(),
            "last_save": table.last_save,
            "index": self.index,
            "count": self.count,
            "durability": self.durability,
            "epoch": host.epoch,
            "version": client.seen,
            "round": host.next_round(client),
            "workers": host.num_workers,
            "beat": hosts.SILENT / BEATS,
        }
        return host, client, hello

    def exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """The life of one stream. What is wrong with a request is answered; what is wrong with the stream ends it.

        It ends by returning: Flight would send the traceback of an exception to whoever is at the other end.
        """
        layout = w.LAYOUTS["fp32"]
        try:
            schema = reader.schema  # has come when the worker can read what it is told
            if descriptor.command is None or len(descriptor.command) > 4096:
                raise w.Malformed("the stream has no descriptor of a worker")
            asked = json.loads(descriptor.command)
            wire = asked["wire"] if isinstance(asked, dict) and asked.get("wire") in w.WIRES else "fp32"
            layout = w.LAYOUTS[wire]
            if not schema.equals(layout.schema):
                raise w.Malformed(f"got schema {str(schema)[:200]!r}, expected {str(layout.schema)!r}")
            host, client, hello = self.greet(asked)
        except (ValueError, TypeError, RecursionError, w.pa.ArrowException, w.flight.FlightError) as error:
            writer.begin(layout.schema)
            writer.write_metadata(json.dumps({"error": str(error)[:1000]}).encode())
            return
        try:
            writer.begin(layout.schema)
            writer.write_metadata(json.dumps(hello).encode())
            while True:
                client.heard = time.monotonic()
                chunk = reader.read_chunk()
                client.heard = math.inf
                self._answer(host, client, chunk, layout, writer, context)
        except (StopIteration, Closing):
            pass
        except (w.Malformed, w.pa.ArrowException, w.flight.FlightError) as error:
            logger.debug("ending the stream of %s: %s", client.id, error)
        finally:
            host.leave(client)

    def _answer(self, host: Host, client: Client, chunk: Any, layout: w.Layout, writer: Any, context: Any) -> None:
        began = time.perf_counter()
        request = w.Request.unpack(chunk.app_metadata)  # who cannot write a head is not talked to
        if request.kind == w.BEAT:
            return
        meter = self.meters[host.name]
        meter.begin()
        keys, received, sent, stale = 0, 0, 0, None
        try:
            if self.closing.is_set():  # looked at after begin(), so that close() can wait for those who saw it open
                raise Closing(host.name)
            came = layout.unpack(chunk.data)
            received = sum(array.nbytes for array in came)
            if received > self.limit:
                raise w.Malformed(
                    f"got a request of {received} bytes, expected at most {self.limit}; "
                    "make batches smaller or limit_mb larger"
                )
            arrays = _shaped(*came, host, request, layout)
            keys = len(arrays[0])
            if request.kind == w.PUSH:
                stale = max(0, host.writes - client.pulled)
            sent = self._do(host, client, request, arrays, layout, writer, context)
        except WorkerMissing as error:
            writer.write_metadata(w.Reply(request.id, w.MISSING, text=str(error)).pack())
        except (ValueError, OverflowError) as error:
            writer.write_metadata(w.Reply(request.id, w.REFUSED, text=str(error)).pack())
        except (Closing, w.pa.ArrowException, w.flight.FlightError):
            raise
        except Exception as error:  # a worker must hear of it, else it would ask again for ever
            logger.exception("table %s: a %s failed", host.name, w.KINDS[request.kind])
            writer.write_metadata(w.Reply(request.id, w.FAILED, text=f"{type(error).__name__}: {error}").pack())
        finally:
            seconds = time.perf_counter() - began
            kind = w.KINDS[request.kind]
            meter.end(kind, keys=keys, received=received, sent=sent, seconds=seconds, stale=stale)

    def _do(
        self, host: Host, client: Client, request: w.Request, arrays: Any, layout: w.Layout, writer: Any, context: Any
    ) -> int:
        """Does what a request asks and answers it; bytes of the answer."""
        keys, values, counts = arrays
        reply = w.Reply(request.id, workers=host.num_workers)
        if request.kind == w.PULL:
            return self._pull(host, client, request, keys, layout, writer)
        if request.kind == w.EXCHANGE and request.flags & w.PART:
            host.add(client, request.sequence, keys, values)
        elif request.kind == w.EXCHANGE:
            found, rows, version, behind = host.exchange(
                client, request.sequence, keys, values, epoch=request.epoch, since=request.number
            )
            reply.number, reply.text, reply.flags = version, host.epoch, w.BEHIND if behind else 0
            rows = _on_wire(rows, layout)
            batch = layout.pack(found, rows)
            writer.write_with_metadata(batch, reply.pack())
            return int(found.nbytes + rows.nbytes)
        elif request.kind == w.PUSH:
            shows, clicks = (None, None) if counts is None else np.ascontiguousarray(counts.T)
            reply.number = host.push(client, request.sequence, keys, values, shows=shows, clicks=clicks)
        elif request.kind == w.CONTRIBUTE:
            host.contribute(client, request.sequence, keys, values, round=request.number, workers=request.workers)
        elif request.kind == w.WAIT_ROUND:
            if not 0 < request.value <= 86_400:
                raise w.Malformed(f"got a deadline of {request.value} s, expected more than 0, at most a day")
            host.wait_round(request.number, deadline=request.value, wanted=lambda: not context.is_cancelled())
            reply.number = host.round
        else:
            host.set_lr(client, request.sequence, request.value)
        writer.write_metadata(reply.pack())
        return 0

    def _pull(
        self, host: Host, client: Client, request: w.Request, keys: np.ndarray, layout: w.Layout, writer: Any
    ) -> int:
        dim, create, sent = host.table.dim, bool(request.flags & w.CREATE), 0
        row = layout.width(dim) * layout.dtype.itemsize  # bytes
        if len(keys) * row > 4 * self.limit:
            raise w.Malformed(f"{len(keys)} rows of dim {dim} are too much for one answer; pull fewer keys at once")
        for start in range(0, max(len(keys), 1), PULL_KEYS):
            some = keys[start : start + PULL_KEYS]
            rows = w.empty_floats(len(some) * dim, np.dtype(np.float32)).reshape(len(some), dim)
            host.pull(client, some, rows, create=create)
            flags = w.MORE if start + PULL_KEYS < len(keys) else 0
            batch = layout.pack(None, _on_wire(rows, layout))
            writer.write_with_metadata(batch, w.Reply(request.id, flags=flags, workers=host.num_workers).pack())
            sent += len(some) * row
        return sent

    # ---- questions outside a stream

    def act(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name == "health":
            return {"status": "closing" if self.closing.is_set() else "serving"}
        if name == "stat":
            return self.stats()
        if name == "save":
            if self.state is None:
                raise ValueError("this server has no folder to save to; start it with one")
            save = body.get("name")
            if save is not None and not isinstance(save, str):
                raise ValueError(f"name of a save: got {save!r}, expected a string")
            path, rows = self.state.save(save)
            return {"path": str(path), "rows": rows}
        raise ValueError(f"got action {name[:64]!r}, expected health, stat or save")


def _on_wire(rows: np.ndarray, layout: w.Layout) -> np.ndarray:
    """Rows as this stream has them; ValueError where a number is too large for its halves."""
    values = layout.encode(rows)
    if values.dtype == np.float16 and not np.isfinite(values).all():
        raise ValueError(
            f"a row holds {np.abs(rows).max():g}, expected at most 65504 for wire='fp16'; connect with wire='fp32'"
        )
    return values


def _shaped(
    keys: np.ndarray, values: np.ndarray, counts: np.ndarray, host: Host, request: w.Request, layout: w.Layout
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """keys [K], values float32 [K, dim], counts [K, 2] or None, as the request's kind wants them."""
    dim = host.table.dim
    if request.kind in (w.PUSH, w.CONTRIBUTE, w.EXCHANGE):
        if len(values) != (wanted := len(keys) * layout.width(dim)):
            raise w.Malformed(
                f"got {len(values)} numbers for {len(keys)} keys, expected {wanted}: table {host.name!r} has dim {dim}"
            )
        values = layout.decode(values, dim)
    elif len(values):
        raise w.Malformed(f"a {w.KINDS[request.kind]} brings no values, got {len(values)}")
    if len(counts) not in (0, 2 * len(keys)) or (len(counts) and request.kind != w.PUSH):
        raise w.Malformed(f"got {len(counts)} counts, expected 2 for each of {len(keys)} keys of a push, or none")
    return keys, values, counts.reshape(-1, 2) if len(counts) else None


def _check_access(host: str, token: str | None, tls: tuple[str, str] | None, client_ca: str | None) -> None:
    if client_ca is not None and tls is None:
        raise ValueError("client_ca: workers' certificates need tls; give tls=(certificate, key)")
    if token is not None and len(token) < 16:
        raise ValueError(f"token: got {len(token)} characters, expected at least 16, as of `openssl rand -hex 16`")
    if token is not None:
        w.check_token(token)
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if local:
        return
    if token is None and client_ca is None:
        raise ValueError(
            f"host: got {host!r}, which other machines can reach, with neither a token nor client_ca; "
            "anybody could train and read the tables. Give a token (and tls), or listen on 127.0.0.1"
        )
    if tls is None:
        logger.warning("listening on %s without tls: the token and all rows can be read on the network", host)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _service(
    server: Server, host: str, port: int, token: str | None, tls: tuple[str, str] | None, client_ca: str | None
) -> Any:
    options: dict[str, Any] = {}
    if token is not None:
        options["middleware"] = {"token": _TokenFactory(token)}
    if tls is not None:
        options["tls_certificates"] = [tuple(Path(file).read_bytes() for file in tls)]
        if client_ca is not None:
            options["verify_client"], options["root_certificates"] = True, Path(client_ca).read_bytes()
    scheme = "grpc+tls" if tls is not None else "grpc"
    address = f"[{host}]" if ":" in host else host
    try:
        return _Service(server, f"{scheme}://{address}:{port}", options)
    except w.pa.ArrowException as error:
        named = ", ".join(file for file in (*(tls or ()), client_ca) if file)
        files = f"; are {named} PEM files that belong together?" if named else ""
        raise ValueError(f"could not listen on {address}:{port}: {error}{files}") from None


class _TokenFactory(w.flight.ServerMiddlewareFactory):
    """Looks at every call's token before anything else does."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = b"Bearer " + token.encode()

    def start_call(self, info: Any, headers: Any) -> None:
        got = headers.get("authorization") or [""]
        if not hmac.compare_digest(str(got[0]).encode(), self._expected):
            raise w.flight.FlightUnauthenticatedError("wrong token, or none; give connect(token=...) the server's")


class _Service(w.flight.FlightServerBase):
    """Flight's face of a Server: a stream a worker and table, and a few actions."""

    def __init__(self, server: Server, location: str, options: dict[str, Any]) -> None:
        self._server = server
        super().__init__(location, **options)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self._server.exchange(context, descriptor, reader, writer)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        try:
            if action.body.size > 4096:
                raise ValueError("the question is too long")
            body = json.loads(action.body.to_pybytes() or b"{}")
            if not isinstance(body, dict):
                raise ValueError("the question is not a JSON object")
            return [json.dumps(self._server.act(action.type, body)).encode()]
        except (ValueError, OSError, RecursionError, Closing) as error:
            return [json.dumps({"error": str(error)[:1000]}).encode()]
