"""Clients that mix bad requests with good ones, and what is to be thought of the answers: for serving.py load."""

import http.client
import os
import socket
import statistics
import struct
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plsc.serve.client import Client, ServiceError

GROWTH = 0.05  # of the memory, from the middle third of a load to its last: more is called a leak


@dataclass
class Tally:
    """What clients saw, together; a thread adds to it without a lock, for each addition is one step."""

    answers: Counter[Any] = field(default_factory=Counter)  # of each status
    wrong: Counter[Any] = field(default_factory=Counter)  # (request, wanted, got)
    seconds: list[float] = field(default_factory=list)  # of good requests


@dataclass(frozen=True)
class Bad:
    """A request that is to be refused, and how."""

    name: str
    status: int
    path: str
    body: bytes = b""
    kind: str = "image/jpeg"
    method: str = "POST"


def verdict(tally: Tally, sizes: list[int]) -> list[str]:
    """Lines that begin with ok or FAIL."""
    third = len(sizes) // 3
    early, late = statistics.median(sizes[third : 2 * third or 1]), statistics.median(sizes[2 * third :])
    p50, p99 = np.percentile(tally.seconds, (50, 99))
    failed = sum(count for status, count in tally.answers.items() if isinstance(status, int) and status >= 500)
    lines = [f"ok: good requests took {p50:.3f} s (p50), {p99:.3f} s (p99)"]
    lines.append(f"{'FAIL' if failed else 'ok'}: {failed} answers of 5xx")
    wrong = dict(tally.wrong.most_common(5))
    lines.append(f"{'FAIL' if wrong else 'ok'}: {sum(tally.wrong.values())} answers other than asked for {wrong or ''}")
    grown = late / early - 1
    words = f"memory {early / 2**20:.1f} MiB in the middle third, {late / 2**20:.1f} MiB in the last ({grown:+.1%})"
    return [*lines, f"{'FAIL' if grown > GROWTH else 'ok'}: {words}"]


def misbehave(url: str, images: list[bytes], seed: int, stop: float, tally: Tally) -> None:
    """A client of which a third of the requests are bad, and one in fifty is left alone half-way."""
    rng, client, refused = np.random.default_rng(seed), Client(url, timeout=120), bad_requests(images[seed])
    host = url.rstrip("/").removeprefix("http://")
    while time.perf_counter() < stop:
        draw, image = rng.random(), images[int(rng.integers(len(images)))]
        try:
            if draw < 0.02:
                leave_half_way(host, image)
            elif draw < 0.34:
                bad = refused[int(rng.integers(len(refused)))]
                status = send(host, bad)
                tally.answers[status] += 1
                if status != bad.status:
                    tally.wrong[bad.name, bad.status, status] += 1
            else:
                started = time.perf_counter()
                behave(client, image, seed, draw)
                tally.seconds.append(time.perf_counter() - started)
                tally.answers[200] += 1
        except ServiceError as error:
            tally.answers[error.status] += 1
            tally.wrong["a good request", 200, error.status] += 1
        except (OSError, http.client.HTTPException) as error:  # an answer that did not come is a wrong one
            tally.answers[type(error).__name__] += 1
            tally.wrong["any", "an answer", type(error).__name__] += 1
            client = Client(url, timeout=120)


def send(host: str, bad: Bad) -> int:
    """The status of the answer. A connection each: one that is kept idle for long is closed by the server, rightly."""
    line = http.client.HTTPConnection(host, timeout=120)
    try:
        line.request(bad.method, bad.path, bad.body, {"Content-Type": bad.kind})
        answer = line.getresponse()
        answer.read()
        return answer.status
    finally:
        line.close()


def behave(client: Client, image: bytes, seed: int, draw: float) -> None:
    if draw < 0.42:
        client.remove(client.add(f"name {seed}", [image])[0])
    elif draw < 0.50:
        client.verify([image, image])
    elif draw < 0.58:
        client.search([image], among="gallery")
    else:
        client.search([image], k=10)


def bad_requests(image: bytes) -> list[Bad]:
    form, numbers = "multipart/form-data; boundary=b", "application/json"
    field = b'--b\r\nContent-Disposition: form-data; name="picture"; filename="x"\r\n\r\nx\r\n--b--\r\n'
    return [
        Bad("cut image", 422, "/v1/embed", image[: len(image) // 2]),
        Bad("noise", 422, "/v1/embed", os.urandom(20_000)),
        Bad("bomb", 422, "/v1/embed", bomb(30_000)),
        Bad("zero bytes", 422, "/v1/embed"),
        Bad("too large", 413, "/v1/embed", b"x" * 3 * 2**20),
        Bad("content type", 415, "/v1/embed", image, "text/plain"),
        Bad("field", 422, "/v1/search", field, form),
        Bad("nan", 422, "/v1/search", b'{"embeddings": [[NaN]]}', numbers),
        Bad("dimension", 422, "/v1/search", b'{"embeddings": [[1, 2]]}', numbers),
        Bad("class", 404, "/v1/classes/1000000", method="GET"),
        Bad("path", 404, "/v1/gallery/..%2f..%2fetc%2fpasswd/thumbnail", method="GET"),
        Bad("id", 404, "/v1/gallery/nobody", method="DELETE"),
        Bad("method", 405, "/v1/embed", method="GET"),
    ]


def leave_half_way(host: str, image: bytes) -> None:
    name, _, port = host.partition(":")
    with socket.create_connection((name, int(port)), timeout=60) as line:
        head = f"POST /v1/embed HTTP/1.1\r\nHost: {host}\r\nContent-Type: image/jpeg\r\n"
        line.sendall(f"{head}Content-Length: {len(image)}\r\n\r\n".encode() + image[: len(image) // 2])


def bomb(size: int) -> bytes:
    """A PNG whose few bytes would decode to gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
