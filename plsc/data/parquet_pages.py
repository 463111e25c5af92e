"""Where the values of a plain column of bytes lie in a Parquet file, so that one is read without its row group.

Holds for chunks that are neither compressed nor encoded by a dictionary; others are left to pyarrow. A page begins with
a header in Thrift's compact protocol (format/parquet.thrift of apache/parquet-format), then come the levels, then the
values, each after its length in 4 bytes.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_TYPE, _BYTES_AFTER, _DATA, _DATA_2 = 1, 3, 5, 8  # fields of a page header
_DATA_PAGE, _DATA_PAGE_2, _PLAIN = 0, 3, 0
_MOST_DEPTH = 4  # of structs in a page header


def find_values(chunk: bytes, start: int, *, levels: int) -> tuple[Ints, Ints] | None:
    """First byte in the file and length of each value [n], [n] of a column chunk that lies at byte `start`.

    levels: the kinds of levels that stand before the values of a page (0 for a required column). None where a page is
    encoded otherwise, or holds nulls.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    at = 0
    try:
        while at < len(chunk):
            header, at = _struct(chunk, at, 0)
            first, at = at, at + header[_BYTES_AFTER]
            if at > len(chunk) or at < first:
                return None
            found = _values_at(chunk, first, header, levels)
            if found is None:
                return None
            place, count = found
            for _ in range(count):
                (size,) = struct.unpack_from("<i", chunk, place)
                place += 4
                if size < 0 or place + size > at:
                    return None
                offsets.append(start + place)
                sizes.append(size)
                place += size
            if place != at:
                return None
    except (KeyError, TypeError, IndexError, struct.error, _NoHeader):
        return None
    return np.array(offsets, np.int64), np.array(sizes, np.int64)


class _NoHeader(Exception):
    """Bytes that are no header of a page."""


def _values_at(chunk: bytes, first: int, header: dict[int, Any], levels: int) -> tuple[int, int] | None:
    """Where the first value of a page lies, and how many there are; None if it is no plain page of values."""
    if header[_TYPE] == _DATA_PAGE:
        data = header[_DATA]
        if data[2] != _PLAIN:
            return None
        for _ in range(levels):
            (size,) = struct.unpack_from("<I", chunk, first)
            first += 4 + size
        return first, data[1]
    if header[_TYPE] == _DATA_PAGE_2:
        data = header[_DATA_2]
        if data[4] != _PLAIN or data[2]:
            return None
        return first + data[5] + data[6], data[1]
    return None


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by number, and the byte after it."""
    if depth > _MOST_DEPTH:
        raise _NoHeader
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(data, at)
        fields[number], at = _value(data, at, head & 15, depth)


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # a truth value is its own type
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _zigzag(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at)
        return None, at + size
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise _NoHeader


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _NoHeader
