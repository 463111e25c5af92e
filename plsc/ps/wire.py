"""What travels between workers and servers: Arrow batches of lists, each with a small fixed head; no pickle."""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import pyarrow as pa
    from pyarrow import flight as flight
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"tables on servers travel by Arrow Flight, and pyarrow is missing ({error}); pip install 'plsc-torch[ps]'"
    ) from None

PROTOCOL = 1
WIRES: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "int8": np.dtype("i1")}

PULL, PUSH, CONTRIBUTE, WAIT_ROUND, EXCHANGE, SET_LR, BEAT = range(1, 8)
KINDS = {PULL: "pull", PUSH: "push", CONTRIBUTE: "contribute", WAIT_ROUND: "wait_round", EXCHANGE: "exchange"}
KINDS |= {SET_LR: "set_lr", BEAT: "beat"}  # a beat has no answer: it says that the worker is there
WRITES = (PUSH, CONTRIBUTE, EXCHANGE, SET_LR)

OK, REFUSED, MISSING, FAILED = range(4)  # of a reply: done; a bad request; a worker is missing; the server failed
MORE, BEHIND = 1, 2  # flags of a reply: another part follows; the worker has missed changes
CREATE = 1  # flag of a pull
PART = 1  # flag of an exchange: the rest follows, and what others changed is answered with the last

# Little-endian. Request: magic, kind, flags, workers, id, sequence, number (round or version), value (deadline, rate),
# epoch.
_REQUEST = struct.Struct("<4sBBHQQQd32s")
# Reply: magic, status, flags, workers, id, number (refused, round or version); then a sentence, or the epoch.
_REPLY = struct.Struct("<4sBBHQQ")
_MAGIC_REQUEST, _MAGIC_REPLY = b"PSq1", b"PSa1"

_TYPES = {np.dtype("<u8"): pa.uint64(), np.dtype("<f4"): pa.float32(), np.dtype("<f2"): pa.float16()}
_TYPES[np.dtype("i1")] = pa.int8()


def check_token(token: str) -> None:
    """ValueError where it could not travel as a header."""
    if len(token) > 4096 or not (token.isascii() and token.isprintable()) or token != token.strip():
        raise ValueError(
            f"token: got {len(token)} characters, expected at most 4096, printable ASCII without blanks at the ends, "
            "as of `openssl rand -hex 16`"
        )


def bearer(token: str | None) -> list[tuple[bytes, bytes]]:
    """The headers that show a token."""
    if token is None:
        return []
    check_token(token)
    return [(b"authorization", b"Bearer " + token.encode())]


class Malformed(ValueError):
    """A message that does not follow the protocol."""


@dataclass
class Request:
    kind: int
    id: int = 0
    sequence: int = 0
    number: int = 0
    value: float = 0.0
    flags: int = 0
    workers: int = 0
    epoch: str = ""

    def pack(self) -> bytes:
        return _REQUEST.pack(
            _MAGIC_REQUEST,
            self.kind,
            self.flags,
            self.workers,
            self.id,
            self.sequence,
            self.number,
            self.value,
            self.epoch.encode(),
        )

    @classmethod
    def unpack(cls, data: Any) -> "Request":
        if data is None or data.size != _REQUEST.size:
            raise Malformed(f"a request's head has {0 if data is None else data.size} bytes, expected {_REQUEST.size}")
        magic, kind, flags, workers, id, sequence, number, value, epoch = _REQUEST.unpack(data)
        if magic != _MAGIC_REQUEST or kind not in KINDS:
            raise Malformed(f"a request begins with {magic!r}, kind {kind}; expected {_MAGIC_REQUEST!r}, 1 to 7")
        text = epoch.rstrip(b"\0").decode("ascii", "replace")
        return cls(kind, id, sequence, number, value, flags, workers, text)


@dataclass
class Reply:
    id: int
    status: int = OK
    flags: int = 0
    workers: int = 0
    number: int = 0
    text: str = ""

    def pack(self) -> bytes:
        head = _REPLY.pack(_MAGIC_REPLY, self.status, self.flags, min(self.workers, 65535), self.id, self.number)
        return head + self.text.encode()

    @classmethod
    def unpack(cls, data: Any) -> "Reply":
        raw = b"" if data is None else data.to_pybytes()
        if len(raw) < _REPLY.size or raw[:4] != _MAGIC_REPLY:
            raise Malformed("a reply has another head than expected; is a plsc server of this version at that address?")
        _, status, flags, workers, id, number = _REPLY.unpack_from(raw)
        return cls(id, status, flags, workers, number, raw[_REPLY.size :].decode("utf-8", "replace"))


class Layout:
    """Batches of one wire: one row of lists, keys [K], values [K * width] in its type, counts (shows, clicks) [2 K].

    The width of a row is its dim; of int8 it is 4 more, for the fp32 scale behind it.
    """

    def __init__(self, wire: str) -> None:
        self.dtype = WIRES[wire]
        self._dtypes: tuple[np.dtype[Any], ...] = (np.dtype("<u8"), self.dtype, np.dtype("<f4"))
        self._inner = [_TYPES[dtype] for dtype in self._dtypes]
        self._lists = [pa.list_(each) for each in self._inner]
        self._empty = [pa.array([[]], each) for each in self._lists]
        self.schema = pa.schema(list(zip(("keys", "values", "counts"), self._lists, strict=True)))

    def width(self, dim: int) -> int:
        return dim + 4 if self.dtype == np.int8 else dim

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Rows float32 [K, dim] as they travel, [K, width]. What is not finite stays so."""
        if self.dtype == np.float32:
            return np.ascontiguousarray(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dtype == np.float16:
                return rows.astype(self.dtype)
            dim = rows.shape[1]
            made = np.empty((len(rows), dim + 4), np.int8)
            scales = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
            made[:, :dim] = np.rint(rows / np.where(scales > 0, scales, 1)[:, None])
            made[:, dim:] = scales.astype("<f4")[:, None].view(np.int8)
            return made

    def decode(self, values: np.ndarray, dim: int) -> np.ndarray:
        """Rows float32 [K, dim], of values flat or [K, width]; on their memory where nothing is to be done."""
        if values.size % self.width(dim):
            raise Malformed(f"got {values.size} numbers, expected rows of {self.width(dim)}")
        rows = values.reshape(-1, self.width(dim))
        if self.dtype != np.int8:
            return rows.astype(np.float32, copy=False)
        with np.errstate(invalid="ignore"):
            return rows[:, :dim] * np.ascontiguousarray(rows[:, dim:]).view("<f4")

    def pack(self, keys: np.ndarray | None, values: np.ndarray | None, counts: np.ndarray | None = None) -> Any:
        """A batch on the memory of the arrays, which may have any shape."""
        columns = list(self._empty)
        for i, array in enumerate((keys, values, counts)):
            if array is not None and array.size:
                assert array.dtype == self._dtypes[i] and array.flags.c_contiguous
                inner = pa.Array.from_buffers(self._inner[i], array.size, [None, pa.py_buffer(array)])
                offsets = pa.py_buffer(np.array((0, array.size), np.int32))
                columns[i] = pa.Array.from_buffers(self._lists[i], 1, [None, offsets], children=[inner])
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def unpack(self, batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """keys, values, counts, flat, on the batch's memory. The batch may come from anybody: all of it is checked."""
        if batch is None or batch.num_rows != 1 or not batch.schema.equals(self.schema):
            raise Malformed("a batch has another shape than one row of keys, values, counts")
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise Malformed(f"a batch is damaged: {error}") from None
        arrays = []
        for column, dtype in zip(batch.columns, self._dtypes, strict=True):
            inner = column.values
            if column.null_count or inner.null_count:
                raise Malformed("a batch has nulls")
            _, offsets, _, data = column.buffers()
            start, stop = np.frombuffer(offsets, np.int32, 2, 4 * column.offset).tolist()
            first = inner.offset + start
            if stop > start:
                array = np.frombuffer(data, dtype, stop - start, first * dtype.itemsize)
                arrays.append(array if array.flags.aligned else array.copy())
            else:
                arrays.append(np.empty(0, dtype))
        return arrays[0], arrays[1], arrays[2]


LAYOUTS = {wire: Layout(wire) for wire in WIRES}


def empty_floats(size: int, dtype: np.dtype) -> np.ndarray:
    """From Arrow's pool, which keeps the pages of what it gets back: fresh ones cost as much as the rows."""
    return np.frombuffer(pa.allocate_buffer(size * dtype.itemsize), dtype)
