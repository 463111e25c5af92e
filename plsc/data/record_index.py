"""The index of a record file as text: lines `key TAB offset`, parsed in blocks without a loop over lines."""

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from plsc.data import native

Ints = NDArray[np.int64]

REBUILD = "if the record file itself is sound, delete the .idx or pass index='rebuild', and it is made anew"
_TEXT_BLOCK = 2**23  # bytes parsed together
_LINE = re.compile(rb"\s*(-?\d{1,20})\s+(-?\d{1,20})\s*")


def read_index(path: str) -> Ints:
    """Keys and offsets of an index file, as it orders them, and a row for labels  [3, N]."""
    with open(path, "rb") as file:
        lines = 1 + sum(np.count_nonzero(codes == 10) for codes in _blocks(file))
        file.seek(0)
        if file.read(3) != codecs.BOM_UTF8:
            file.seek(0)
        rows, count, line, rest = np.empty((3, lines), np.int64), 0, 0, b""
        for block in _blocks(file):
            text = rest + block.tobytes()
            end = text.rfind(b"\n") + 1
            if end == 0 and len(text) > _TEXT_BLOCK:
                raise ValueError(f"{path}, line {line + 1}: got {len(text)} bytes without an end of line; {REBUILD}")
            table, passed = _parse_lines(text[:end], path, line)
            rows[:2, count : count + len(table)] = table.T
            count, line, rest = count + len(table), line + passed, text[end:]
        table, _ = _parse_lines(rest + b"\n", path, line)
        rows[:2, count : count + len(table)] = table.T
    return rows[:, : count + len(table)]


def _blocks(file: BinaryIO) -> Iterator[NDArray[np.uint8]]:
    while block := file.read(_TEXT_BLOCK):
        yield np.frombuffer(block, np.uint8)


def _parse_lines(text: bytes, path: str, lines_before: int) -> tuple[Ints, int]:
    """Whole lines `key TAB offset` as numbers [n, 2], and how many lines there are, empty ones included."""
    table = parse_plain(text)
    if table is not None:
        return table, len(table)
    rows = []
    for number, line in enumerate(text.split(b"\n"), lines_before + 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        values = [int(group) for group in match.groups()] if match else []
        if not values or not all(0 <= value < 2**63 for value in values):
            got = line[:80].decode(errors="replace")
            raise ValueError(
                f"{path}, line {number}: got {got!r}, expected `key offset`, the offset a byte of the file; {REBUILD}"
            )
        rows.append(values)
    return np.array(rows, np.int64).reshape(-1, 2), text.count(b"\n")


def parse_plain(text: bytes) -> Ints | None:
    """What `_parse_lines` returns, for text of nothing but digits, single tabs and newlines; else None."""
    codes = np.frombuffer(text, np.uint8)
    if native.kernels is not None:
        pairs = np.empty((len(codes) // 4, 2), np.int64)  # the shortest line has four bytes
        found = native.kernels.parse_pairs(codes.ctypes.data, len(codes), pairs.ctypes.data, len(pairs))
        return pairs[:found] if found >= 0 else None
    ends = np.flatnonzero(codes < 32)  # of numbers
    if len(ends) % 2 or (codes[ends[::2]] != 9).any() or (codes[ends[1::2]] != 10).any():
        return None
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts
    digits = codes - np.uint8(48)
    if lengths.min() < 1 or lengths.max() > 18 or int((digits < 10).sum()) != len(codes) - len(ends):
        return None
    values = np.zeros(len(ends), np.int64)
    for place in range(int(lengths.max())):
        longer = lengths > place
        values[longer] = 10 * values[longer] + digits[starts[longer] + place]
    return values.reshape(-1, 2)
