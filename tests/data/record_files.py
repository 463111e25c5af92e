"""Record files written by plsc and by hand, and their slow reader, for tests."""

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from plsc.data import RecordIO, RecordWriter


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def write(path: Path, labels: list, *, dialect: str = "plain") -> Path:
    with RecordWriter(path, dialect=dialect) as writer:
        for k, label in enumerate(labels):
            writer.write(label, png(k))
    return path


def write_raw(path: Path, payloads: list[bytes], keys: list[int] | None = None) -> Path:
    """Frames payloads without cutting (they hold no magic) and writes the index, straight from the format's text."""
    data, lines = b"", ""
    for key, payload in zip(keys or range(len(payloads)), payloads, strict=True):
        lines += f"{key}\t{len(data)}\n"
        data += struct.pack("<II", 0xCED7230A, len(payload)) + payload + bytes(-len(payload) % 4)
    path.write_bytes(data)
    path.with_suffix(".idx").write_text(lines)
    return path


def slow_records(data: bytes) -> dict[int, bytes]:
    """The format read by its definition, a word at a time: payload by offset."""
    found, at = {}, 0
    while at < len(data):
        start, payload, first = at, b"", True
        while True:
            magic, word = struct.unpack("<II", data[at : at + 8])
            assert magic == 0xCED7230A
            kind, length = word >> 29, word % 2**29
            payload += (b"" if first else struct.pack("<I", magic)) + data[at + 8 : at + 8 + length]
            at, first = at + 8 + (length + 3) // 4 * 4, False
            if kind in (0, 3):
                break
        found[start] = payload
    return found


def lines(path: Path) -> list[tuple[int, int]]:
    return [tuple(map(int, line.split())) for line in path.with_suffix(".idx").read_text().splitlines()]


def reindex(path: Path, entries: list[tuple[object, object]]) -> None:
    path.with_suffix(".idx").write_text("".join(f"{key}\t{offset}\n" for key, offset in entries))


def images(dataset: RecordIO) -> list[tuple[bytes, int]]:
    return [(dataset.record(i).image, int(dataset.labels[i])) for i in range(len(dataset))]
