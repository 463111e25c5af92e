"""What must hold in a file of embeddings before anybody is answered from it; looked at by blocks, when it opens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.data.embeddings import Array, EmbeddingFile, Names

ROWS = 8_192  # that are looked at once
UNIT_SLACK = 1e-3  # of a row's length: half precision rounds it by half of that


def check_kind(file: EmbeddingFile, path: Path, *, centres: bool) -> None:
    """Raises ValueError for embeddings where class centres are wanted or the other way, and for rows of any length."""
    found, wanted = file.metadata["format"], "plsc-centres" if centres else "plsc-embeddings"
    if found != wanted:
        remedy = (
            "export the bundle again"
            if centres
            else "write one with plsc-embed; a search among the classes finds class centres"
        )
        raise ValueError(f"{path}: got {found}, expected {wanted}; {remedy}")
    if not file.normalized:
        raise ValueError(f"{path}: got rows that are not of unit length; write the file again")


def check_rows(file: EmbeddingFile, path: Path) -> None:
    """Raises ValueError for a row without a direction, or whose length is not 1. Reads all rows."""
    for start in range(0, len(file.embeddings), ROWS):
        rows = file.embeddings[start : start + ROWS].astype(np.float32, copy=False)
        lengths = np.sqrt(np.einsum("...d,...d->...", rows, rows, dtype=np.float32))
        if file.scales is not None:
            lengths *= file.scales[start : start + ROWS]
        bad = np.argwhere(~(np.abs(lengths - 1) <= UNIT_SLACK))
        if len(bad):
            raise ValueError(
                f"{path}: row {start + int(bad[0][0])} has length {lengths[tuple(bad[0])]:g}, expected 1; write the "
                "file again"
            )


def check_numbers(numbers: NDArray[np.int64], path: Path, *, what: str) -> None:
    """Raises ValueError where they are not 0, 1, 2 and so on: rows are named by their place."""
    for start in range(0, len(numbers), ROWS):
        block = numbers[start : start + ROWS]
        if wrong := np.flatnonzero(block != np.arange(start, start + len(block))).tolist():
            at = wrong[0]
            raise ValueError(f"{path}: got {what} {block[at]} in row {start + at}, expected {start + at}")


def check_shapes(file: EmbeddingFile, path: Path) -> None:
    """Raises ValueError where the parts of the file are not of as many rows, or of other types."""
    count = len(file.embeddings)
    for what, part, kind in (("labels", file.labels, np.int64), ("ids", file.ids, np.int64)):
        if part.shape != (count,) or part.dtype != kind:
            raise ValueError(f"{path}: got {what} {part.dtype} {list(part.shape)}, expected int64 {[count]}")
    if isinstance(file.names, Names):
        check_offsets(file.names.offsets, file.names.blob, count, path, what="names")
        try:
            for start in range(0, count, ROWS):
                _decode(file.names, start, min(start + ROWS, count))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: got a name that is no UTF-8 ({error}); write the file again") from None


def check_offsets(offsets: Array, blob: Array, count: int, path: Path, *, what: str) -> None:
    """Raises ValueError where offsets [count + 1] do not cut the bytes of the blob into pieces, from its start on."""
    if offsets.dtype != np.int64 or offsets.shape != (count + 1,) or blob.dtype != np.uint8 or blob.ndim != 1:
        raise ValueError(
            f"{path}: got {what} as {blob.dtype} {list(blob.shape)} with offsets {offsets.dtype} "
            f"{list(offsets.shape)}, expected bytes with int64 {[count + 1]}; write the file again"
        )
    ends = (int(offsets[0]), int(offsets[-1]))
    falls = any((np.diff(offsets[start : start + ROWS + 1]) < 0).any() for start in range(0, count, ROWS))
    if ends != (0, len(blob)) or falls:
        raise ValueError(
            f"{path}: the offsets of its {what} go from {ends[0]} to {ends[1]}, or back, expected 0 to {len(blob)} "
            "without a step back; write the file again"
        )


def _decode(names: Names, start: int, stop: int) -> None:
    """UnicodeDecodeError where some names are no UTF-8: all together are not, or one begins inside of a letter."""
    first, last = names.offsets[start], names.offsets[stop]
    text = names.blob[first:last].tobytes()
    text.decode()
    for at in (names.offsets[start:stop] - first).tolist():
        if at < len(text) and text[at] & 0xC0 == 0x80:
            raise UnicodeDecodeError("utf-8", text[at : at + 1], 0, 1, "a name begins inside of a letter")
