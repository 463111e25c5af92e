"""Frames that no worker would send, many of them: the server neither falls nor grows, and serves who comes next."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from plsc.ps import wire
from plsc.ps.launch import serve_command
from plsc.ps.remote import connect

LAYOUT = wire.LAYOUTS["fp32"]
EXCHANGE = "/arrow.flight.protocol.FlightService/DoExchange"
ASKED = {"protocol": 1, "table": "clicks", "run": "", "client": "c", "rank": 0, "wire": "fp32"}


class Served:
    """A server process, for what might kill one."""

    def __init__(self, folder: Path) -> None:
        settings = folder / "tables.toml"
        settings.write_text("[tables.clicks]\ndim = 4\n")
        self.child = subprocess.Popen(
            serve_command(settings),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        assert self.child.stdout is not None
        self.address = self.child.stdout.readline().split()[3].rstrip(",")

    def serves(self) -> bool:
        with connect(self.address, table="clicks", patience=20) as store:
            return self.child.poll() is None and store.pull(np.arange(9, dtype=np.uint64)).shape == (9, 4)

    def memory(self) -> int:
        return int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    os.killpg(made.child.pid, signal.SIGKILL)
    made.child.wait()
    made.child.stdout.close()


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def flight_data(message: bytes | None, metadata: bytes = b"", descriptor: bytes = b"") -> bytes:
    """FlightData (Flight.proto) around an Arrow message as `serialize` gives it."""
    out = field(1, descriptor) if descriptor else b""
    if message is not None:
        size = int.from_bytes(message[4:8], "little")
        out += field(2, message[8 : 8 + size]) + field(1000, message[8 + size :])
    return out + (field(3, metadata) if metadata else b"")


def frames(random: np.random.Generator) -> list[bytes]:
    """A stream as a worker would send it, of which one frame or several are then damaged."""
    descriptor = b"\x08\x02" + field(2, json.dumps(ASKED).encode())
    out = [flight_data(LAYOUT.schema.serialize().to_pybytes(), descriptor=descriptor)]
    for number in range(1, 20):
        count = int(random.integers(0, 6))
        keys = random.integers(0, 99, count).astype(np.uint64)
        kind = int(random.choice([wire.PULL, wire.PUSH, wire.EXCHANGE, wire.SET_LR]))
        values = None if kind in (wire.PULL, wire.SET_LR) else np.ones(4 * count, np.float32)
        head = wire.Request(kind, id=number, sequence=number, value=0.05).pack()
        out.append(flight_data(LAYOUT.pack(keys, values).serialize().to_pybytes(), head))
    return out


def damaged(frame: bytes, random: np.random.Generator) -> bytes:
    data = bytearray(frame)
    for _ in range(int(random.integers(1, 5))):
        what, at = int(random.integers(4)), int(random.integers(len(data) + 1))
        if what == 0 and at < len(data):
            data[at] ^= 1 << int(random.integers(8))
        elif what == 1:
            data[at : at + int(random.integers(1, 9))] = random.bytes(int(random.integers(0, 9)))
        elif what == 2:
            del data[at:]
        else:
            data[at:at] = random.bytes(int(random.integers(1, 40)))
    return bytes(data)


def storm(served: Served, total: int, seed: int) -> None:
    """Streams of 20 frames, each stream damaged somewhere, until `total` frames have gone."""
    random = np.random.default_rng(seed)
    with grpc.insecure_channel(served.address) as channel:
        exchange = channel.stream_stream(EXCHANGE)  # bytes in, bytes out
        for _ in range(total // 20):
            sent = frames(random)
            for at in random.integers(0, 20, int(random.integers(1, 4))):
                sent[at] = damaged(sent[at], random)
            if random.random() < 0.1:
                sent[int(random.integers(20))] = random.bytes(int(random.integers(0, 300)))
            try:
                for _ in exchange(iter(sent), timeout=20):
                    pass
            except grpc.RpcError as error:
                assert error.code() != grpc.StatusCode.DEADLINE_EXCEEDED, "the server did not answer"


@pytest.mark.slow
def test_a_hundred_thousand_damaged_frames(served: Served) -> None:
    storm(served, 10_000, 0)
    before = served.memory()
    for seed in range(1, 10):
        storm(served, 10_000, seed)
        assert served.serves()
    assert served.memory() - before < 40e6


@pytest.mark.slow
def test_random_bytes_at_the_port(served: Served) -> None:
    host, port = served.address.split(":")
    random = np.random.default_rng(0)
    for number in range(2000):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b""
            raw.sendall(start + random.bytes(int(random.integers(0, 2000))))
    assert served.serves()


@pytest.mark.slow
def test_a_thousand_idle_connections(served: Served) -> None:
    """Open sockets cost a worker nothing, and open streams a thread each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    host, port = served.address.split(":")
    raw = [socket.create_connection((host, int(port)), timeout=20) for _ in range(1000)]
    assert served.serves()
    for each in raw:
        each.close()
    program = (
        "import sys; from plsc.ps.remote import connect\n"
        "stores = [connect(sys.argv[1], table='clicks', patience=60) for _ in range(200)]\n"
        "print(max(store.pull(__import__('numpy').arange(3, dtype='u8')).shape for store in stores))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, served.address], capture_output=True, text=True, timeout=200)
    assert done.stdout == "(3, 4)\n", done.stderr
    assert served.serves()
