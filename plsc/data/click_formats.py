"""How click logs are written: columns of text, LibSVM, multi-slot text; from lines to arrays of hashed ids."""

import codecs
import csv
import gzip
import hashlib
import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

# Clicked, numbers, and a token for every slot (slots * num_ids of them, None where there is none).
Row: TypeAlias = tuple[bool, list[float], Sequence[str | None]]

CACHED_TOKENS = 1_000_000


class Format(Protocol):
    """How a line is read: what a format of your own needs."""

    @property
    def num_dense(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def header(self) -> bool: ...  # the first line of every file is not data

    def parse(self, line: str) -> Row: ...  # ValueError: the line is malformed


class Parsed(NamedTuple):
    """Good records of a piece of a file, and what is wrong with the others."""

    good: np.ndarray  # which records of the piece, int64 [n]
    dense: np.ndarray  # float32 [n, num_dense]
    ids: np.ndarray  # int64 [n, num_slots], or [n, num_slots, num_ids] where slots hold several
    clicked: np.ndarray  # float32 [n]
    bad: list[tuple[int, str]]  # record, why


class _Ids(dict[str | None, int]):
    """Ids of one slot's tokens, computed at first sight."""

    def __init__(self, prefix: str, most: int) -> None:
        super().__init__()
        self._prefix, self._most = prefix, most

    def __missing__(self, token: str | None) -> int:
        if token is None:
            return 0  # no id: what a sparse layer's padding_key=0 leaves out
        if len(self) >= self._most:
            self.clear()
        data = (self._prefix + token).encode("utf-8", "surrogateescape")  # bytes that are no text, as they came
        digest = hashlib.blake2b(data, digest_size=8).digest()
        known = self[token] = int.from_bytes(digest, "little", signed=True)
        return known


class Hasher:
    """64-bit ids of tokens: 8 bytes of BLAKE2b, the same on every machine; those met are kept for the next time."""

    def __init__(self, num_slots: int, *, slots: bool) -> None:
        most = max(1, CACHED_TOKENS // num_slots)
        self._known = [_Ids(f"{slot}\t" if slots else "", most) for slot in range(num_slots if slots else 1)]
        self._slots = slots

    def column(self, slot: int, tokens: Iterable[str | None]) -> np.ndarray:
        """int64 [n] of one slot's tokens [n]."""
        known = self._known[slot if self._slots else 0]
        return np.fromiter(map(known.__getitem__, tokens), np.int64)


def scaled(numbers: np.ndarray) -> np.ndarray:
    """log(1 + x) of numbers in double precision, those below 0 counting as 0; float32."""
    return np.log1p(np.maximum(numbers, 0.0)).astype(np.float32)


def num_ids(format: Format) -> int:
    """How many ids a slot holds; 1 unless the format says otherwise."""
    return int(getattr(format, "num_ids", 1))


def parse_lines(format: Format, lines: Sequence[str], hasher: Hasher) -> Parsed:
    """Lines one by one, in Python: what every format can do."""
    good, clicked, dense, tokens, bad = [], [], [], [], []
    largest = float(np.finfo(np.float32).max)
    for i, line in enumerate(lines):
        try:
            row = format.parse(line)
            if not all(-largest <= x <= largest for x in row[1]):
                raise ValueError("got a number that is not finite as float32")
        except ValueError as error:
            bad.append((i, str(error)))
            continue
        good.append(i)
        clicked.append(row[0])
        dense.append(row[1])
        tokens.append(row[2])
    per_slot = num_ids(format)
    width = format.num_slots * per_slot
    ids = np.empty((len(good), width), np.int64)
    if good:
        for at, column in enumerate(zip(*tokens, strict=True)):
            ids[:, at] = hasher.column(at // per_slot, column)
    return Parsed(
        np.array(good, np.int64),
        np.array(dense, np.float64).reshape(len(good), format.num_dense).astype(np.float32),
        ids if per_slot == 1 else ids.reshape(len(good), format.num_slots, per_slot),
        np.array(clicked, np.float32),
        bad,
    )


class Lines:
    """A text file's lines, .gz too; the records of all formats but Parquet."""

    def __init__(self, path: str, header: bool) -> None:
        self._file = gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")  # noqa: SIM115
        if self._file.peek(3).startswith(codecs.BOM_UTF8):
            self._file.read(3)
        if header:
            self._file.readline()

    def take(self, count: int) -> Sequence[bytes]:
        """Up to so many records; none at the end."""
        return list(islice(self._file, count))

    def skip(self, count: int) -> int:
        """Past so many records; how many there were."""
        return sum(1 for _ in islice(self._file, count))

    def position(self) -> int:
        """Bytes of the file that were read."""
        raw: Any = getattr(self._file, "fileobj", self._file)  # a .gz file's place is that among its packed bytes
        return int(raw.tell())

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def pack(records: Sequence[bytes], wanted: np.ndarray) -> tuple[bytes, np.ndarray]:
        """The wanted records in one piece, without blank lines, and which ones they are."""
        wanted = wanted & np.fromiter((not line.isspace() for line in records), bool, len(records))
        return b"".join(compress(records, wanted.tolist())), np.flatnonzero(wanted)


def split_lines(data: bytes) -> list[str]:
    return [line.rstrip("\r") for line in data.decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")]


@dataclass(frozen=True)
class Columns:
    """Lines of columns, counted from 0. Missing numbers are 0; numbers become log(1 + x), below 0 they count as 0.

    Blanks around a field do not count. quote: the character that may enclose a field, '"' in most CSV files. A line is
    a record: a quoted field cannot hold a line's end. pyarrow reads blocks of lines where it is installed, several
    times as fast as Python; what it refuses is judged line by line, so that both read alike.
    """

    label: int
    dense: Sequence[int]
    sparse: Sequence[int]
    delimiter: str = ","
    header: bool = False
    clicked: str = "1"
    not_clicked: str = "0"
    num_columns: int = 0  # 0: at least as many as are used
    quote: str = ""

    def __post_init__(self) -> None:
        if wrong := [i for i in (self.label, *self.dense, *self.sparse) if not isinstance(i, int) or i < 0]:
            raise ValueError(f"label, dense, sparse: got column {wrong[0]!r}, expected numbers from 0")
        if len(self.delimiter) != 1 or len(self.quote) > 1:
            raise ValueError(f"got delimiter {self.delimiter!r}, quote {self.quote!r}, expected one character each")

    @property
    def num_dense(self) -> int:
        return len(self.dense)

    @property
    def num_slots(self) -> int:
        return len(self.sparse)

    def parse(self, line: str) -> Row:
        if self.quote:
            try:
                split = next(csv.reader([line], delimiter=self.delimiter, quotechar=self.quote), [])
            except csv.Error as error:
                raise ValueError(str(error)) from None
        else:
            split = line.split(self.delimiter)
        words = [word.strip() for word in split]
        least = self.num_columns or 1 + max(self.label, *self.dense, *self.sparse)
        if len(words) < least or (self.num_columns and len(words) > least):
            raise ValueError(f"got {len(words)} columns, expected {least}")
        label = words[self.label]
        if label not in (self.clicked, self.not_clicked):
            raise ValueError(f"got label {label!r}, expected {self.clicked!r} or {self.not_clicked!r}")
        numbers = [float(words[i]) if words[i] else 0.0 for i in self.dense]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("got a number that is not finite")
        return label == self.clicked, [math.log1p(max(x, 0.0)) for x in numbers], [words[i] for i in self.sparse]

    def parse_block(self, data: bytes, hasher: Hasher) -> Parsed:
        """Whole lines at once."""
        try:
            arrow = importlib.import_module("pyarrow")
            reader = importlib.import_module("pyarrow.csv")
        except ImportError:
            return parse_lines(self, split_lines(data), hasher)
        lines = data.removesuffix(b"\n").split(b"\n")
        fast = self._read(arrow, reader, lines, hasher)
        if fast is None and not self.quote:
            # Some line is of another length, or some value no number. The first can be taken out cheaply.
            counts = [line.count(self.delimiter.encode()) for line in lines]
            width = self.num_columns - 1 if self.num_columns else max(set(counts), key=counts.count)
            even = [i for i, count in enumerate(counts) if count == width]
            if 0 < len(even) < len(lines):
                fast = self._read(arrow, reader, [lines[i] for i in even], hasher)
            if fast is not None:
                odd = sorted(set(range(len(lines))) - set(even))
                text = b"\n".join(lines[i] for i in odd)
                return _joined(fast, even, parse_lines(self, split_lines(text), hasher), odd)
        return parse_lines(self, split_lines(data), hasher) if fast is None else fast

    def _read(self, arrow: Any, reader: Any, lines: list[bytes], hasher: Hasher) -> Parsed | None:
        """By pyarrow; None where a line or a value needs a closer look."""
        data = b"\n".join(lines) + b"\n"
        if set(self.dense) & {self.label, *self.sparse} or data.count(b"\r") != data.count(b"\r\n"):
            return None
        if data.startswith(codecs.BOM_UTF8):  # pyarrow would drop it, in the middle of a file too
            return None
        named = [f"f{i}" for i in range(self.num_columns)]
        used = [f"f{i}" for i in sorted({self.label, *self.dense, *self.sparse})]
        dense_names = [f"f{i}" for i in self.dense]
        try:
            table = reader.read_csv(
                arrow.BufferReader(data),
                reader.ReadOptions(
                    use_threads=False, block_size=len(data) + 1, column_names=named, autogenerate_column_names=not named
                ),
                reader.ParseOptions(delimiter=self.delimiter, quote_char=self.quote or False, ignore_empty_lines=False),
                reader.ConvertOptions(
                    check_utf8=False,
                    column_types={name: arrow.float64() if name in dense_names else arrow.binary() for name in used},
                    include_columns=used,
                    null_values=[""],
                    strings_can_be_null=False,
                ),
            )
        except (ValueError, KeyError):  # pyarrow's errors are of these kinds
            return None
        words, at = dictionary(table.column(f"f{self.label}"))
        labels = [word.strip() for word in words]
        dense = np.empty((len(table), self.num_dense), np.float64)
        for place, name in enumerate(dense_names):
            dense[:, place] = table.column(name).fill_null(0.0).to_numpy()
        whole = len(table) == len(lines) and set(labels) <= {self.clicked, self.not_clicked}
        if not whole or not np.isfinite(dense).all():
            return None
        ids = np.empty((len(table), self.num_slots), np.int64)
        for slot, i in enumerate(self.sparse):
            tokens, where = dictionary(table.column(f"f{i}"))
            ids[:, slot] = hasher.column(slot, (token.strip() for token in tokens))[where]
        clicked = np.array([label == self.clicked for label in labels], np.float32)[at]
        return Parsed(np.arange(len(table), dtype=np.int64), scaled(dense), ids, clicked, [])


def _joined(one: Parsed, places: Sequence[int], other: Parsed, other_places: Sequence[int]) -> Parsed:
    """Two parts of one piece in the order of its records, whose places are given."""
    good = np.concatenate([np.array(places, np.int64)[one.good], np.array(other_places, np.int64)[other.good]])
    order = np.argsort(good)
    arrays = [np.concatenate([a, b])[order] for a, b in zip(one[1:4], other[1:4], strict=True)]
    bad = [(other_places[i], why) for i, why in other.bad]
    return Parsed(good[order], arrays[0], arrays[1], arrays[2], bad)


def dictionary(column: Any) -> tuple[list[str], np.ndarray]:
    """The different values of an Arrow column as strings, and which one each row has.

    A value's string is a matter of the value and the column's type alone: missing "", true 1, whole floats as integers,
    other floats in their fewest digits, bytes as UTF-8, dates and times as Arrow writes them.
    """
    types = importlib.import_module("pyarrow").types
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_temporal(column.type):
        column = column.cast("string")
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    if hasattr(encoded, "chunks"):
        encoded = encoded.combine_chunks()
    values = encoded.dictionary.to_pylist()
    if types.is_floating(column.type):
        narrow = column.type.to_pandas_dtype()  # 0.1 as a float32 is 0.1, not what it is as a float64
        words = ["" if value is None else _float_text(narrow(value)) for value in values]
    else:
        words = [_text(value) for value in values]
    return words, encoded.indices.to_numpy(zero_copy_only=False)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return str(int(value)) if isinstance(value, bool) else str(value)


def _float_text(value: Any) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


@dataclass(frozen=True)
class LibSVM:
    """Lines `label index:1 index:1 ...`, label 1 or not, at most num_slots features; fewer are filled up as missing."""

    num_slots: int
    header: bool = False

    @property
    def num_dense(self) -> int:
        return 0

    def parse(self, line: str) -> Row:
        label, *words = line.split()
        tokens = []
        for word in words:
            index, colon, value = word.partition(":")
            if not index.isdigit() or (colon and float(value) != 1.0):
                raise ValueError(f"got {word!r}, expected index:1")
            tokens.append(index)
        if label not in ("1", "+1", "0", "-1") or len(tokens) > self.num_slots:
            raise ValueError(
                f"got label {label!r} and {len(tokens)} features, expected 1, 0 or -1 and {self.num_slots}"
            )
        return label in ("1", "+1"), [], tokens + [""] * (self.num_slots - len(tokens))


@dataclass(frozen=True)
class MultiSlot:
    """Lines in which every slot stands as `count value value ...`, slot after slot, as PaddlePaddle's data feeds read.

    slots       what stands in a line, in order: "label", ("dense", 13) for so many numbers, "ids" for a slot of ids
    num_ids     most ids of a slot that are kept; ids are [B, num_slots, num_ids] then, 0 where there are fewer, for
                a SparseEmbedding with pooling and padding_key=0. 1: [B, num_slots]
    """

    slots: Sequence[str | tuple[str, int]]
    num_ids: int = 1
    header: bool = False

    def __post_init__(self) -> None:
        names = [slot if isinstance(slot, str) else slot[0] for slot in self.slots]
        if names.count("label") != 1 or "ids" not in names or not set(names) <= {"label", "dense", "ids"}:
            raise ValueError(f'slots: got {self.slots}, expected one "label", "ids", and ("dense", n)')
        if self.num_ids < 1:
            raise ValueError(f"num_ids: got {self.num_ids}, expected at least 1")

    @property
    def num_dense(self) -> int:
        return sum(slot[1] for slot in self.slots if not isinstance(slot, str))

    @property
    def num_slots(self) -> int:
        return sum(slot == "ids" for slot in self.slots)

    def parse(self, line: str) -> Row:
        words = iter(line.split())
        clicked, numbers, tokens = False, [], []
        for slot in self.slots:
            count = next(words, "")
            values = list(islice(words, int(count))) if count.isdigit() else []
            if not count.isdigit() or len(values) != int(count):
                raise ValueError(f"got {count!r} as the count of {len(values)} values")
            if slot == "label":
                if values not in (["0"], ["1"]):
                    raise ValueError(f"got label {values}, expected one value, 0 or 1")
                clicked = values == ["1"]
            elif slot == "ids":
                kept = values[: self.num_ids]
                tokens += [*kept, *[None if self.num_ids > 1 else ""] * (self.num_ids - len(kept))]
            else:
                numbers += [float(value) for value in values]
                if len(values) != slot[1] or not all(map(math.isfinite, numbers)):
                    raise ValueError(f"got {values} as numbers, expected {slot[1]}, all finite")
        if next(words, None) is not None:
            raise ValueError(f"got more than the {len(self.slots)} slots")
        return clicked, numbers, tokens


CRITEO = Columns(0, range(1, 14), range(14, 40), delimiter="\t", num_columns=40)
