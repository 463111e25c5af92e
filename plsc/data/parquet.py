"""Labelled images in Parquet files: a column of encoded images and one of labels, read through pyarrow (an extra)."""

import importlib
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.decoding import decode_image
from plsc.data.files import read_file
from plsc.data.images import _check_format, _warn_thin_classes
from plsc.data.parquet_pages import find_values
from plsc.data.tar import find_shards
from plsc.data.writing import WholeOrNothing, drop

ROWS = 256  # of a row group, about 1 MB of 112 x 112 JPEGs
_CACHED = 8  # row groups kept, of those that pyarrow has to read


class ParquetImages:
    """Rows of Parquet files in their order, file after file by name; `path`: a file, a folder of .parquet or a pattern.

    image: a column of bytes (of any of Arrow's kinds), or of structs with a field `bytes` (as the datasets library
    writes them). label: a column of whole numbers from 0, -1 to ignore. A column `name`, if there is one, names the
    samples. Where the images are neither compressed nor in a dictionary (`ParquetWriter`) each is read by itself once
    its row group has been looked into; else a read takes the whole row group, of which the last few are kept, and
    shuffled reading is slow.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        image_size: int = 112,
        channels: int = 3,
        image: str = "image",
        label: str = "label",
    ) -> None:
        _check_format(image_size, channels)
        self.path, self.image_size, self.channels = os.fspath(path), image_size, channels
        self._column, self._label = image, label
        self.files = find_shards(self.path, ".parquet")
        labels: list[NDArray[np.int64]] = []
        groups: list[tuple[int, int, int]] = []  # file, row group in it, rows
        names: list[str | None] = []
        for number, file in enumerate(self.files):
            parquet = _open(file)
            self._check_schema(file, parquet.schema_arrow)
            labels.append(self._read_labels(file, parquet))
            sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]
            groups += [(number, g, rows) for g, rows in enumerate(sizes)]
            if "name" in parquet.schema_arrow.names:
                names += map(_name, _read_column(file, parquet, "name").to_pylist())
        self.labels: NDArray[np.int64] = np.concatenate(labels)
        if not len(self.labels) or self.labels.max() < 0:
            raise ValueError(f"{self.path}: got {len(self.labels)} rows and no label from 0, expected labelled images")
        self._groups = np.array(groups, np.int64)  # [G, 3]
        self._starts = np.concatenate([[0], np.cumsum(self._groups[:, 2])])
        self._file_starts = np.concatenate([[0], np.cumsum([len(each) for each in labels])])
        self._names = names if len(names) == len(self.labels) else None
        self.num_classes = int(self.labels.max()) + 1
        self._offsets = np.zeros(len(self.labels), np.int64)  # 0: not looked into yet; -1: for pyarrow to read
        self._sizes = np.zeros(len(self.labels), np.int32)
        self._opened: dict[int, Any] = {}
        self._kept: OrderedDict[int, Any] = OrderedDict()
        _warn_thin_classes(self.path, self.labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The row's `name`, or file and row."""
        if self._names is not None and (found := self._names[i]) is not None:
            return found
        file = int(np.searchsorted(self._file_starts, i, side="right")) - 1
        return f"{self.files[file]}, row {i - int(self._file_starts[file])}"

    def encoded(self, i: int) -> bytes:
        """The bytes of sample i's image."""
        if not 0 <= i < len(self):
            raise IndexError(f"got sample {i}, expected 0 to {len(self) - 1}")
        if self._offsets[i] == 0:
            self._look_into(int(np.searchsorted(self._starts, i, side="right")) - 1)
        if self._offsets[i] > 0:
            return read_file(self._file_of(i), int(self._offsets[i]), int(self._sizes[i]))
        group = int(np.searchsorted(self._starts, i, side="right")) - 1
        value = self._read_group(group)[i - int(self._starts[group])].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not data:
            raise ValueError(f"{self.path}, sample {i}: got no bytes in column {self._column!r}, expected an image")
        return bytes(data)

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        data = self.encoded(i)
        return decode_image(data, self.image_size, self.channels, name=lambda: self.name(i)), int(self.labels[i])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}, "_kept": OrderedDict()}  # each process opens its own

    def _file_of(self, i: int) -> str:
        """The file that sample i is in."""
        return self.files[int(np.searchsorted(self._file_starts, i, side="right")) - 1]

    def _look_into(self, group: int) -> None:
        """Finds where the images of a row group lie, if each can be read by itself."""
        rows = slice(*self._starts[group : group + 2].tolist())
        file, inside = self._groups[group, :2].tolist()
        parquet = self._open_once(file)
        found = None
        column = next((c for c in range(len(parquet.schema)) if _is_at(parquet.schema.column(c), self._column)), None)
        if column is not None:
            about, kind = parquet.metadata.row_group(inside).column(column), parquet.schema.column(column)
            if about.compression == "UNCOMPRESSED" and not about.has_dictionary_page and not kind.max_repetition_level:
                start = about.data_page_offset
                chunk = read_file(self.files[file], start, about.total_compressed_size)
                found = find_values(chunk, start, levels=int(kind.max_definition_level > 0))
        if found is not None and len(found[0]) == rows.stop - rows.start and found[1].all():
            self._offsets[rows], self._sizes[rows] = found
        else:
            self._offsets[rows] = -1

    def _open_once(self, file: int) -> Any:
        if file not in self._opened:
            self._opened[file] = _open(self.files[file])
        return self._opened[file]

    def _read_group(self, group: int) -> Any:
        kept = self._kept.get(group)
        if kept is not None:
            self._kept.move_to_end(group)
            return kept
        file, inside = self._groups[group, :2].tolist()
        try:
            column = self._open_once(file).read_row_group(inside, columns=[self._column], use_threads=False)
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise ValueError(f"{self.files[file]}: row group {inside} cannot be read ({error})") from error
        self._kept[group] = column.column(0).combine_chunks()
        if len(self._kept) > _CACHED:
            self._kept.popitem(last=False)
        return self._kept[group]

    def _check_schema(self, file: str, schema: Any) -> None:
        types = importlib.import_module("pyarrow").types
        for name in (self._column, self._label):
            if name not in schema.names:
                raise ValueError(
                    f"{file}: got columns {', '.join(schema.names)}, expected one named {name!r}; rename it, "
                    "or name yours: plsc.data.ParquetImages(path, image=..., label=...), plsc-data --image-column and "
                    "--label-column"
                )
        kind = schema.field(self._column).type
        if types.is_struct(kind):
            kind = next((kind.field(k).type for k in range(kind.num_fields) if kind.field(k).name == "bytes"), kind)
        value = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_binary(value) or types.is_large_binary(value) or types.is_binary_view(value)):
            raise ValueError(
                f"{file}: column {self._column!r} is of {kind}, expected binary: the bytes of an encoded image in each "
                "row; write them so"
            )
        if not types.is_integer(schema.field(self._label).type):
            kind = schema.field(self._label).type
            raise ValueError(f"{file}: column {self._label!r} is of {kind}, expected whole numbers")

    def _read_labels(self, file: str, parquet: Any) -> NDArray[np.int64]:
        column = _read_column(file, parquet, self._label)
        if column.null_count:
            raise ValueError(f"{file}: {column.null_count} rows have no {self._label!r}, expected -1 to ignore one")
        labels = column.to_numpy()
        if len(labels) and (labels.min() < -1 or labels.max() >= 2**62):
            raise ValueError(f"{file}: got labels from {labels.min()} to {labels.max()}, expected 0 or more, or -1")
        return np.asarray(labels, np.int64)


def _read_column(file: str, parquet: Any, name: str) -> Any:
    try:
        return parquet.read(columns=[name], use_threads=False).column(0)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{file}: column {name!r} cannot be read ({error}); fetch the file again") from error


def _name(value: Any) -> str | None:
    """A name as text, whatever the column holds."""
    return None if value is None else os.fsdecode(value) if isinstance(value, bytes) else str(value)


def _is_at(column: Any, name: str) -> bool:
    """Whether a leaf column holds the bytes of the images."""
    return column.path in (name, f"{name}.bytes") and column.physical_type == "BYTE_ARRAY"


def _pyarrow_parquet() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow, which is not installed; pip install 'plsc-torch[parquet]'") from error


def _open(path: str) -> Any:
    parquet = _pyarrow_parquet()
    try:
        return parquet.ParquetFile(path, memory_map=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet ({error}); fetch it again") from error


class ParquetWriter(WholeOrNothing):
    """Writes samples into a Parquet file of columns image, label and name; it appears when closed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._parquet = _pyarrow_parquet()
        arrow = importlib.import_module("pyarrow")
        self._table = arrow.table
        self._schema = arrow.schema([("image", arrow.binary()), ("label", arrow.int64()), ("name", arrow.string())])
        self._draft = f"{self.path}.tmp-{os.getpid()}"
        # The images are compressed already; the least and greatest of each group would be two of them again.
        self._writer: Any = self._parquet.ParquetWriter(
            self._draft, self._schema, compression="none", use_dictionary=False, write_statistics=["label"]
        )
        self._rows: list[tuple[bytes, int, str]] = []

    def write(self, name: str, label: int, image: bytes) -> None:
        self._rows.append((image, label, name))
        if len(self._rows) == ROWS:
            self._flush()

    def close(self) -> None:
        if self._writer is not None:
            self._flush()
            self._writer.close()
            self._writer = None
            os.replace(self._draft, self.path)

    def discard(self) -> None:
        """Drops what was written; a file of that name from before stays."""
        if self._writer is not None:
            drop([self._writer.close], [self._draft])
            self._writer = None

    def _flush(self) -> None:
        if self._rows:
            columns = dict(zip(("image", "label", "name"), map(list, zip(*self._rows, strict=True)), strict=True))
            self._writer.write_table(self._table(columns, schema=self._schema), row_group_size=ROWS)
            self._rows = []


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """What a Parquet file says about itself."""
    found = _open(os.fspath(path)).schema_arrow.metadata or {}
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in found.items()}


class EmbeddingWriter(WholeOrNothing):
    """Writes rows of embeddings into a Parquet file, block by block; it appears when closed, nothing after an error.

    Columns id (row number), embedding (a list of `size` float32 of unit length), norm (its length before), label and
    name; the file's metadata name the model by its digest, and hold `about`.
    """

    def __init__(
        self, path: str | os.PathLike[str], size: int, *, digest: str, about: Mapping[str, str] | None = None
    ) -> None:
        parquet, arrow = _pyarrow_parquet(), importlib.import_module("pyarrow")
        self.path, self._arrow = os.fspath(path), arrow
        self._schema = arrow.schema(
            [
                ("id", arrow.int64()),
                ("embedding", arrow.list_(arrow.float32(), size)),
                ("norm", arrow.float32()),
                ("label", arrow.int64()),
                ("name", arrow.string()),
            ],
            metadata={"format": "plsc-embeddings", "model_digest": digest, "normalized": "true", **(about or {})},
        )
        self._draft = f"{self.path}.tmp-{os.getpid()}"
        self._writer: Any = parquet.ParquetWriter(self._draft, self._schema)

    def write(
        self,
        ids: NDArray[np.int64],
        embeddings: NDArray[np.float32],
        norms: NDArray[np.float32],
        labels: NDArray[np.int64],
        names: Sequence[str],
    ) -> None:
        arrow = self._arrow
        flat = arrow.array(np.ascontiguousarray(embeddings, np.float32).reshape(-1))
        columns = [
            arrow.array(ids),
            arrow.FixedSizeListArray.from_arrays(flat, embeddings.shape[1]),
            arrow.array(norms),
            arrow.array(np.asarray(labels, np.int64)),
            arrow.array([name.encode("utf-8", "backslashreplace").decode() for name in names]),
        ]
        self._writer.write_table(arrow.table(columns, schema=self._schema))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            os.replace(self._draft, self.path)

    def discard(self) -> None:
        """Drops what was written; a file of that name from before stays."""
        if self._writer is not None:
            drop([self._writer.close], [self._draft])
            self._writer = None
