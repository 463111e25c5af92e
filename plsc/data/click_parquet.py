"""Click logs in Parquet files, read through pyarrow (an extra)."""

import importlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plsc.data.click_formats import Hasher, Parsed, Row, dictionary, scaled


@dataclass(frozen=True)
class Parquet:
    """Columns of Parquet files by name: a label (0/1, true/false), numbers (log(1 + x), missing 0), strings or ints."""

    label: str
    dense: Sequence[str]
    sparse: Sequence[str]
    header: bool = False

    @property
    def num_dense(self) -> int:
        return len(self.dense)

    @property
    def num_slots(self) -> int:
        return len(self.sparse)

    def parse(self, line: str) -> Row:
        raise ValueError("Parquet has no lines")

    def open(self, path: str) -> "ParquetRows":
        return ParquetRows(path, [self.label, *self.dense, *self.sparse], num_numbers=1 + self.num_dense)

    def parse_block(self, data: bytes, hasher: Hasher) -> Parsed:
        table = importlib.import_module("pyarrow").ipc.open_stream(data).read_all()
        label = _numbers(table.column(0), -1.0)
        dense = np.empty((len(table), self.num_dense), np.float64)
        for i in range(self.num_dense):
            dense[:, i] = _numbers(table.column(1 + i), 0.0)
        finite = np.isfinite(dense).all(axis=1)
        good = np.flatnonzero(((label == 0) | (label == 1)) & finite)
        ids = np.empty((len(table), self.num_slots), np.int64)
        for slot in range(self.num_slots):
            tokens, where = dictionary(table.column(1 + self.num_dense + slot))
            ids[:, slot] = hasher.column(slot, (token.strip() for token in tokens))[where]
        whys = np.where(finite, "its label is not 0 or 1", "got a number that is not finite")
        bad = [(int(i), str(whys[i])) for i in np.setdiff1d(np.arange(len(table)), good)]
        return Parsed(good, scaled(dense[good]), ids[good], label[good].astype(np.float32), bad)


def _numbers(column: Any, missing: float) -> np.ndarray:
    """float64 [n]; NaN for text that is no number."""
    arrow = importlib.import_module("pyarrow")
    try:
        return column.cast("float64").fill_null(missing).to_numpy()
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError):
        words, at = dictionary(column)
        return np.array([_number(word, missing) for word in words], np.float64)[at]


def _number(word: str, missing: float) -> float:
    try:
        return float(word) if word.strip() else missing
    except ValueError:
        return math.nan


class ParquetRows:
    """A Parquet file's rows, some columns of them (numbers first), a few thousand in memory at a time."""

    def __init__(self, path: str, columns: Sequence[str], num_numbers: int) -> None:
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ValueError(
                "Parquet needs pyarrow, which is not installed; pip install 'plsc-torch[parquet]'"
            ) from error
        self._arrow = importlib.import_module("pyarrow")
        try:
            self._file = parquet.ParquetFile(path)
        except (self._arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is no Parquet file ({error}); check the format, or take another copy") from None
        self._path = path
        missing = [name for name in columns if name not in self._file.schema_arrow.names]
        if missing:
            known = ", ".join(self._file.schema_arrow.names)
            raise ValueError(f"{path}: got no column {', '.join(missing)}; expected some of {known}")
        self._check_columns(columns, num_numbers)
        self._columns = list(columns)
        self._batches: Iterator[Any] | None = None
        self._left: Any = None
        self._group = 0
        self._size, self._taken = os.path.getsize(path), 0

    def _check_columns(self, columns: Sequence[str], num_numbers: int) -> None:
        schema, types = self._file.schema_arrow, self._arrow.types
        for i, name in enumerate(columns):
            if schema.names.count(name) > 1:
                raise ValueError(f"{self._path}: got two columns {name}, expected one; rename one of them")
            kind = schema.field(name).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            if types.is_nested(kind) or (i < num_numbers and types.is_temporal(kind)):
                raise ValueError(
                    f"{self._path}: got column {name} of {kind}, expected "
                    f"{'numbers' if i < num_numbers else 'one string or number in each row'}; convert it first"
                )

    def take(self, count: int) -> Any:
        """Up to so many rows as an Arrow table; of no rows at the end."""
        got, parts = 0, []
        while got < count:
            if self._left is None or len(self._left) == 0:
                self._left = self._next()
                if self._left is None:
                    break
            some = self._left.slice(0, count - got)
            self._left = self._left.slice(len(some))
            got += len(some)
            parts.append(some)
        self._taken += got
        return self._arrow.Table.from_batches(parts) if parts else ()

    def skip(self, count: int) -> int:
        """Past so many rows, of which whole row groups are not read; how many there were."""
        wanted = count
        while self._group < self._file.num_row_groups:
            rows = self._file.metadata.row_group(self._group).num_rows
            if count < rows:
                break
            count -= rows
            self._taken += rows
            self._group += 1
        return wanted - count + (len(self.take(count)) if count else 0)

    def position(self) -> int:
        """About how many bytes of the file were read."""
        return self._size * self._taken // max(1, self._file.metadata.num_rows)

    def close(self) -> None:
        self._file.close()

    def _next(self) -> Any:
        if self._batches is None:
            groups = list(range(self._group, self._file.num_row_groups))
            self._batches = self._file.iter_batches(16_384, row_groups=groups, columns=self._columns)
        try:
            batch = next(self._batches, None)
        except (self._arrow.ArrowException, OSError) as error:
            raise ValueError(f"{self._path} is damaged ({error}); take another copy") from None
        return None if batch is None else batch.select(self._columns)

    def pack(self, table: Any, wanted: np.ndarray) -> tuple[bytes, np.ndarray]:
        """The wanted rows in one piece, and which ones they are."""
        kept = np.flatnonzero(wanted)
        some = table if len(kept) == len(table) else table.take(self._arrow.array(kept))
        sink = io.BytesIO()
        with self._arrow.ipc.new_stream(sink, some.schema) as writer:
            writer.write_table(some)
        return sink.getvalue(), kept
