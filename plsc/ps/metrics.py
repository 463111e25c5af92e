"""What a server counts of itself, and its page for Prometheus (text format 0.0.4)."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WRITES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The bound below which that share of the values lies; 0 where there are none."""
        wanted, seen = share * self.count, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen >= wanted:
                return bound if self.count else 0.0
        return float("inf")

    def lines(self, name: str, labels: str) -> Iterator[str]:
        seen = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {seen}'
        yield f"{name}_sum{{{labels}}} {self.total:.9g}"
        yield f"{name}_count{{{labels}}} {seen}"


class Meter:
    """Requests of one table by kind: how many, how many keys and bytes, how long, how stale. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running = 0
        self.keys: dict[str, int] = {}
        self.bytes = {"in": 0, "out": 0}
        self.seconds: dict[str, Histogram] = {}
        self.staleness = Histogram(WRITES)

    def begin(self) -> None:
        with self._lock:
            self.running += 1

    def end(self, kind: str, *, keys: int, received: int, sent: int, seconds: float, stale: int | None) -> None:
        with self._lock:
            self.running -= 1
            self.keys[kind] = self.keys.get(kind, 0) + keys
            self.bytes["in"] += received
            self.bytes["out"] += sent
            self.seconds.setdefault(kind, Histogram(SECONDS)).add(seconds)
            if stale is not None:
                self.staleness.add(stale)

    def summary(self) -> dict[str, Any]:
        with self._lock:
            return {
                "running": self.running,
                "bytes_in": self.bytes["in"],
                "bytes_out": self.bytes["out"],
                "keys": dict(self.keys),
                "requests": {kind: each.count for kind, each in self.seconds.items()},
                "p99_seconds": {kind: each.quantile(0.99) for kind, each in self.seconds.items()},
                "staleness_p50": self.staleness.quantile(0.5),
            }

    def lines(self, table: str) -> Iterator[str]:
        label = f'table="{table}"'
        with self._lock:
            yield f"plsc_ps_requests_running{{{label}}} {self.running}"
            for kind, count in self.keys.items():
                yield f'plsc_ps_keys_total{{{label},kind="{kind}"}} {count}'
            for way, size in self.bytes.items():
                yield f'plsc_ps_bytes_total{{{label},way="{way}"}} {size}'
            for kind, each in self.seconds.items():
                yield from each.lines("plsc_ps_seconds", f'{label},kind="{kind}"')
            yield from self.staleness.lines("plsc_ps_staleness_writes", label)


GAUGES = {
    "rows": "plsc_ps_rows",
    "payload_bytes": "plsc_ps_payload_bytes",
    "index_bytes": "plsc_ps_index_bytes",
    "arena_bytes": "plsc_ps_arena_bytes",
    "workers": "plsc_ps_workers",
    "round": "plsc_ps_round",
    "born": "plsc_ps_rows_born_total",
    "evicted": "plsc_ps_rows_evicted_total",
    "refused": "plsc_ps_gradients_refused_total",
    "contended": "plsc_ps_stripes_contended_total",
    "writes": "plsc_ps_writes_total",
    "duplicates": "plsc_ps_duplicates_total",
}


def page(tables: dict[str, tuple[dict[str, Any], Meter]]) -> str:
    """All tables' figures; the share of pulled keys that had a row is 1 - born / keys pulled."""
    out = []
    for table, (stats, meter) in tables.items():
        out += [f'{name}{{table="{table}"}} {stats[key]}' for key, name in GAUGES.items()]
        out += meter.lines(table)
    return "\n".join(out) + "\n"


def serve_page(host: str, port: int, make: Any) -> ThreadingHTTPServer:
    """Answers GET /metrics with make() and /healthz with ok, from threads of its own."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            text = {"/metrics": make, "/healthz": lambda: "ok\n"}.get(self.path)
            body = b"" if text is None else text().encode()
            self.send_response(404 if text is None else 200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ValueError(f"metrics_port: {port} of {host}: {error.strerror or error}; give another, or 0") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server
