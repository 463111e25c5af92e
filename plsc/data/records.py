"""Record files (.rec, as mxnet writes them): single records read and written without mxnet, damage found and named.

A record is one part or several: magic, length and kind in one word, data, zeros up to a multiple of four bytes. Where
the payload itself holds the magic at a multiple of four, the writer cuts there and leaves the magic out, so an aligned
magic in a sound file always begins a part. The payload is a header (label, two numbers) and an encoded image.
"""

import mmap
import operator
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from plsc.data.files import OpenFile
from plsc.data.writing import WholeOrNothing, drop

MAGIC = bytes.fromhex("0a23d7ce")
PART = struct.Struct("<4sI")  # magic; kind in the upper 3 bits, length in the lower 29
HEADER = struct.Struct("<IfQQ")  # flag, label, id, id2; flag n > 0: n float32 labels follow and `label` is 0
WHOLE, FIRST, MIDDLE, LAST = range(4)  # kinds of part
MAX_LENGTH = 2**29 - 1
EXACT = 2**24  # the first whole number of which float32 does not tell its neighbour: labels from here stand in id2
MAX_CLASS = 2**53 - 1

Data = mmap.mmap | bytes


@dataclass(frozen=True)
class Record:
    """A payload taken apart. labels: float32 [max(1, flag)]."""

    flag: int
    labels: NDArray[np.float32]
    id: int
    id2: int
    image: bytes

    @property
    def is_header(self) -> bool:
        """Whether it says where images lie (two numbers, no image), as in the files of the InsightFace project."""
        return self.flag == 2 and not self.image


@dataclass(frozen=True)
class Span:
    """A stretch of a record file: a record, or bytes that belong to none (then payload is None, problem says why)."""

    start: int
    stop: int
    payload: bytes | None
    problem: str = ""


def index_path(path: str) -> str:
    """Where the index of a record file is: beside it, named .idx."""
    return os.path.splitext(path)[0] + ".idx"


def open_map(path: str) -> mmap.mmap:
    """The bytes of a file, mapped. ValueError for one that is missing or empty."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        reason = error.strerror if isinstance(error, OSError) else "the file is empty"
        raise ValueError(f"{path}: got no records ({reason}), expected a .rec file; check the path") from error


def read_record(data: Data | OpenFile, start: int, *, strict: bool = False) -> tuple[bytes, int]:
    """The payload of the record at byte `start`, and the byte after the record.

    strict also refuses an aligned magic inside a part (its length is wrong). ValueError says what is there instead.
    """
    pieces: list[bytes] = []
    at, size = start, len(data)
    while True:
        if not 0 <= at <= size - PART.size:
            raise ValueError(f"the file ends at byte {size}, before the record at byte {start} does")
        magic, word = PART.unpack(data[at : at + PART.size])
        kind, length = word >> 29, word & MAX_LENGTH
        if magic != MAGIC:
            raise ValueError(f"got {magic.hex()} at byte {at}, expected a record's magic {MAGIC.hex()}")
        if kind not in ((MIDDLE, LAST) if pieces else (WHOLE, FIRST)):
            what = "the next part of one" if pieces else "the start of a record"
            raise ValueError(f"got a part of kind {kind} at byte {at}, expected {what}")
        first, stop = at + PART.size, at + PART.size + length
        end = stop + -length % 4
        if end > size:
            raise ValueError(f"the file ends at byte {size}, the record at byte {start} reaches to {end}")
        if kind in (FIRST, MIDDLE) and length % 4:
            raise ValueError(f"got a part of {length} bytes at byte {at}, expected a multiple of 4 before another part")
        pieces.append(data[first:stop])
        if strict and (inside := _find_aligned(pieces[-1], 0, length)) >= 0:
            raise ValueError(f"the record at byte {start} holds another at byte {first + inside}: its length is wrong")
        at = end
        if kind in (WHOLE, LAST):
            return MAGIC.join(pieces), at


def unpack(payload: bytes) -> Record:
    """Takes a payload apart; ValueError if it is too short for its header."""
    if len(payload) < HEADER.size:
        raise ValueError(f"got a record of {len(payload)} bytes, expected a header of {HEADER.size}")
    flag, label, number, number2 = HEADER.unpack_from(payload)
    body = HEADER.size + 4 * flag
    if len(payload) < body:
        raise ValueError(f"got a record of {len(payload)} bytes with {flag} labels, expected {body} at least")
    labels = np.frombuffer(payload, "<f4", flag, HEADER.size) if flag else np.array([label], np.float32)
    return Record(flag, labels, number, number2, payload[body:])


def image_of(payload: bytes) -> bytes:
    """The encoded image in a payload alone: half the time of `unpack`."""
    flag = int.from_bytes(payload[:4], "little")
    body = HEADER.size + 4 * flag
    if len(payload) < body:
        raise ValueError(f"got a record of {len(payload)} bytes with {flag} labels, expected {body} at least")
    return payload[body:]


def pack(label: float | Sequence[float] | NDArray[Any], image: bytes, *, id: int = 0, id2: int = 0) -> bytes:
    """A payload: one label in the header (flag 0), or a sequence of labels after it."""
    if isinstance(label, Sequence | np.ndarray):
        labels = np.asarray(label, "<f4").reshape(-1)
        return HEADER.pack(len(labels), 0, id, id2) + labels.tobytes() + image
    return HEADER.pack(0, label, id, id2) + image


def scan(path: str | os.PathLike[str]) -> Iterator[Span]:
    """Every record of a file in order, without the index; damaged stretches too, after which it finds the next record.

    For checking a file and for saving what is left of one. A record whose length was made too small shows as a short
    record with damage after it.
    """
    if os.path.getsize(path) == 0:
        return
    with open_map(os.fspath(path)) as data:
        at, damaged, problem = 0, -1, ""
        while 0 <= at < len(data):
            try:
                payload, end = read_record(data, at, strict=True)
            except ValueError as error:
                if damaged < 0:
                    damaged, problem = at, str(error)
                at = _next_start(data, at)
                continue
            if damaged >= 0:
                yield Span(damaged, at, None, problem)
                damaged = -1
            yield Span(at, end, payload)
            at = end
        if damaged >= 0:
            yield Span(damaged, len(data), None, problem)


def find_records(data: Data) -> "array[int]":
    """Offsets of all records, from headers alone. ValueError where the row of records breaks."""
    offsets = array("q")
    at, size, unpack_from = 0, len(data), PART.unpack_from
    while at < size:
        offsets.append(at)
        if at <= size - PART.size:
            magic, word = unpack_from(data, at)
            end = at + PART.size + (((word & MAX_LENGTH) + 3) & ~3)
            if magic == MAGIC and word >> 29 == WHOLE and end <= size:
                at = end
                continue
        at = read_record(data, at)[1]
    return offsets


def _find_aligned(data: bytes, start: int, stop: int) -> int:
    """The first magic in data[start:stop] at a multiple of 4 from start, -1 if there is none."""
    at = data.find(MAGIC, start, stop)
    while at >= 0 and (at - start) % 4:
        at = data.find(MAGIC, at + 1, stop)
    return at


def _next_start(data: Data, after: int) -> int:
    """Where a record may begin behind a damaged place, -1 if nowhere.

    Bytes may have been lost, so any place will do; one not in step must be followed by another record or the end.
    """
    at = data.find(MAGIC, after + 1)
    while 0 <= at <= len(data) - PART.size:
        word = PART.unpack_from(data, at)[1]
        kind, length = word >> 29, word & MAX_LENGTH
        if kind in (WHOLE, FIRST):
            end = at + PART.size + length + -length % 4
            if (at - after) % 4 == 0 or end == len(data) or data[end : end + 4] == MAGIC:
                return at
        at = data.find(MAGIC, at + 1)
    return -1


class RecordWriter(WholeOrNothing):
    """Writes a record file and its index, byte for byte as mxnet; both appear when closed, nothing after an error.

    dialect "plain": records as they come, keys from 0. "insightface": keys from 1, class after class, then the header
    record (key 0) and one record a class that says where it lies; up to 2**24 records. Labels from 2**24 on, which
    float32 would round, also stand whole in the header's id2, where `RecordIO` finds them (other readers do not look).
    """

    def __init__(self, path: str | os.PathLike[str], *, dialect: str = "plain") -> None:
        if dialect not in ("plain", "insightface"):
            raise ValueError(f"got dialect={dialect!r}, expected 'plain' or 'insightface'")
        self.path = os.fspath(path)
        self._index_path = index_path(self.path)
        if self._index_path == self.path:
            raise ValueError(f"got {self.path}, expected the name of the .rec file")
        self._framed = dialect == "insightface"
        self._key = 0 if self._framed else -1  # the last one written
        self._label, self._starts = -1, array("q")  # insightface: the class under way, the first key of each
        self._drafts = [f"{path}.tmp-{os.getpid()}" for path in (self.path, self._index_path)]
        self._data: BinaryIO = open(self._drafts[0], "wb")  # noqa: SIM115 closed by close()
        self._index: BinaryIO = open(self._drafts[1], "wb")  # noqa: SIM115
        self._offset = 0

    def write(self, label: int | Sequence[float] | NDArray[Any], image: bytes, *, id: int | None = None) -> None:
        """Adds a record: a class (or several numbers, the class first) and an encoded image.

        id: key in the index and number in the header, rising; one more than the last unless given.
        """
        if isinstance(label, Sequence | np.ndarray):
            if len(label) == 0:
                raise ValueError("got no label, expected a class or a sequence that begins with one")
            found = _whole(label[0])
        else:
            found = _whole(label)
        key = self._key + 1 if id is None else operator.index(id)
        if not image:
            raise ValueError(f"got an empty image for key {key}, expected an encoded one")
        if not self._key < key < 2**63 or (self._framed and id is not None):
            keys = "none in the insightface dialect (they count from 1)" if self._framed else f"above {self._key}"
            raise ValueError(f"got id={id}, expected {keys}")
        if self._framed:
            self._begin_class(found, key)
        id2 = found if found >= EXACT else 0
        self._append(key, pack(label, bytes(image), id=key, id2=id2))
        self._key = key

    def close(self) -> None:
        """Finishes both files and puts them in place; the index last, so that a new file never has an old index."""
        if self._data.closed:
            return
        if self._framed:
            first = self._key + 1  # key of the first class's record
            self._append(0, pack([first, first + len(self._starts)], b""))
            for key, (start, stop) in enumerate(pairwise([*self._starts, first]), first):
                self._append(key, pack([start, stop], b"", id=key))
        for file in (self._data, self._index):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if os.path.exists(self._index_path):
            os.remove(self._index_path)
        os.replace(self._drafts[0], self.path)
        os.replace(self._drafts[1], self._index_path)

    def discard(self) -> None:
        """Drops what was written; files of that name from before stay."""
        drop([self._data.close, self._index.close], self._drafts)

    def _begin_class(self, label: int, key: int) -> None:
        if label < max(self._label, 0):
            raise ValueError(
                f"got class {label} after {self._label}, expected each class's images together, in rising order; sort "
                "them, or use dialect='plain'"
            )
        starts = len(self._starts) + (label != self._label)
        if key + starts >= EXACT:
            raise ValueError("got more than 2**24 records, which the insightface dialect cannot count; use 'plain'")
        if label != self._label:
            self._starts.append(key)
            self._label = label

    def _append(self, key: int, payload: bytes) -> None:
        if len(payload) > MAX_LENGTH:
            raise ValueError(f"got a record of {len(payload)} bytes for key {key}, expected at most {MAX_LENGTH}")
        at, pieces, start = self._offset, [], 0
        while (cut := _find_aligned(payload, start, len(payload))) >= 0:
            pieces.append(payload[start:cut])
            start = cut + len(MAGIC)
        pieces.append(payload[start:])
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            kind = (LAST if last else MIDDLE) if number else (WHOLE if last else FIRST)
            part = PART.pack(MAGIC, kind << 29 | len(piece)) + piece + bytes(-len(piece) % 4)
            self._data.write(part)
            self._offset += len(part)
        self._index.write(b"%d\t%d\n" % (key, at))


def _whole(label: float) -> int:
    value = int(label) if label == label and abs(label) <= MAX_CLASS else -2
    if value != label or value < -1:
        raise ValueError(f"got label {label}, expected a whole number from 0 to {MAX_CLASS}, or -1 to ignore a sample")
    return value
