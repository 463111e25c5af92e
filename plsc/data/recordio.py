"""Labelled images in a record file with an index (train.rec, train.idx), read without mxnet.

Both kinds of file that face recognition uses are read: one record an image, and the InsightFace project's, where
records without an image say which keys belong to a class. The index lives in numpy arrays, 24 bytes an image.
"""

import filecmp
import logging
import mmap
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from plsc.data.decoding import decode_image
from plsc.data.files import OpenFile
from plsc.data.images import _check_format, _warn_thin_classes
from plsc.data.record_index import REBUILD, read_index
from plsc.data.records import (
    EXACT,
    FIRST,
    HEADER,
    MAGIC,
    MAX_CLASS,
    MAX_LENGTH,
    PART,
    WHOLE,
    Record,
    find_records,
    image_of,
    index_path,
    open_map,
    read_record,
    unpack,
)
from plsc.data.writing import drop

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_BLOCK = 65_536  # records whose headers are looked at together
_HEAD_WORDS = 9  # magic, length, flag, label, id (2), id2 (2), first of several labels
_CACHE_VERSION = 1
_STAMP = 2  # columns of a cache that say what it was made of


class RecordIO:
    """The images of a record file, in the order of their keys; `path` is the .rec file or a folder with train.rec.

    Keys need not begin at 0 nor be dense. The class is the record's label, or the first of several; from 2**24 on,
    where float32 rounds, it is the header's id2, which must round to the label (`RecordWriter` writes it so). Records
    of two numbers and no image (flag 2, empty body) are the InsightFace project's headers and are left out. A file
    `property` beside a train.rec may state more classes than have images.
    index: "auto" reads the .idx file, or makes one if it is missing; "rebuild" makes it anew. A made index takes keys
    from the records' ids where these differ, else counts. cache: a .npy file to keep index and labels in; later opens
    and worker processes map it instead of reading every header. ValueError names the key and byte that is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        image_size: int = 112,
        channels: int = 3,
        index: str = "auto",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_format(image_size, channels)
        if index not in ("auto", "rebuild"):
            raise ValueError(f"got index={index!r}, expected 'auto' or 'rebuild'")
        self.path = os.path.join(path, "train.rec") if os.path.isdir(path) else os.fspath(path)
        self.image_size, self.channels = image_size, channels
        self._file: OpenFile | None = None
        self._cache = None if cache is None else os.fspath(cache)
        rows = _load_cache(self._cache, self.path) if self._cache and index == "auto" else None
        if rows is None:
            rows = _read_rows(self.path, rebuild=index == "rebuild")
            if self._cache:
                _save_cache(self._cache, self.path, rows)
                mapped = _load_cache(self._cache, self.path)
                rows = rows if mapped is None else mapped
        self._stamp = _stamp(self.path)
        self._adopt(rows)
        _warn_thin_classes(self.path, self.labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The file and the sample's key in it."""
        return f"{self.path}, key {self._keys[i]}"

    def record(self, i: int) -> Record:
        """Sample i as the file holds it: header and encoded image."""
        return self._read(i, unpack)

    def encoded(self, i: int) -> bytes:
        """The encoded image of sample i, without its header."""
        return self._read(i, image_of)

    def _read(self, i: int, take: Callable[[bytes], T]) -> T:
        if not 0 <= i < len(self):
            raise IndexError(f"got sample {i}, expected 0 to {len(self) - 1}")
        try:
            if self._file is None:  # opened anew in each process that reads
                self._file = OpenFile(self.path)
            return take(read_record(self._file, int(self._offsets[i]))[0])
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._place(i)}: {error}") from error

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        image = self._read(i, image_of)
        return decode_image(image, self.image_size, self.channels, name=lambda: self._place(i)), int(self.labels[i])

    def _place(self, i: int) -> str:
        return f"{self.name(i)}, byte {self._offsets[i]}"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_file": None}
        if isinstance(self._rows, np.memmap):  # a worker process maps the cache rather than getting a copy
            for name in ("_rows", "_keys", "_offsets", "labels"):
                del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "labels" not in state:
            assert self._cache is not None
            rows = _load_cache(self._cache, self.path)
            if rows is None or self._stamp != _stamp(self.path):
                raise ValueError(f"{self._cache}: the cache or {self.path} changed since the data set was opened")
            self._adopt(rows)

    def _adopt(self, rows: Ints) -> None:
        self._rows = rows  # [3, N]
        self._keys: Ints
        self._offsets: Ints
        self.labels: Ints
        self._keys, self._offsets, self.labels = (np.asarray(row) for row in rows)
        found = int(self.labels.max()) + 1
        self.num_classes = max(found, _stated_classes(self.path, found))


def _stated_classes(path: str, found: int) -> int:
    """The number of classes in the `property` file beside a train.rec (`classes,height,width`), 0 without one.

    More than have images are believed, for the head then is of the size that others' is; fewer are not.
    """
    place = os.path.join(os.path.dirname(path), "property")
    if os.path.basename(path) != "train.rec" or not os.path.isfile(place):
        return 0
    with open(place, "rb") as file:
        first = file.readline(200)
    stated = re.fullmatch(rb"\s*(\d{1,15})\s*(,\s*\d+\s*)*", first)
    if stated is None:
        logger.warning("%s: got %r, expected `classes,height,width`; not used", place, first[:40])
        return 0
    classes = int(stated[1])
    if classes != found:
        logger.warning("%s: says %d classes, the records have labels up to %d", place, classes, found - 1)
    return classes


def _read_rows(path: str, *, rebuild: bool) -> Ints:
    """Key, offset and label of every image, in the order of keys  [3, N]."""
    data = open_map(path)
    index = index_path(path)
    made = rebuild or not os.path.exists(index)
    rows = _make_index(data, path, index) if made else read_index(index)
    keys, offsets, labels = rows
    if len(keys) == 0:
        raise ValueError(f"{index}: the index is empty; {REBUILD}")
    if not _rises(keys):
        rows[:2] = rows[:2, np.argsort(keys, kind="stable")]
        if (twice := np.flatnonzero(keys[1:] == keys[:-1])).size:
            raise ValueError(
                f"{index}: key {keys[twice[0]]} stands more than once ({twice.size} lines too many), expected each key "
                f"once; {REBUILD}"
            )
    _check_offsets(data, path, keys, offsets)
    if _rises(offsets):
        is_image = _Heads(data, path, keys, offsets).read(labels)
    else:  # the file is read from front to back
        order = np.argsort(offsets, kind="stable")
        found, is_image = np.empty_like(labels), np.empty(len(keys), np.bool_)
        is_image[order] = _Heads(data, path, keys[order], offsets[order]).read(found)
        labels[order] = found
    if not is_image.any():
        raise ValueError(f"{path}: got {len(keys)} records without an image, expected images")
    if keys[0] == 0 and not is_image[0]:
        _check_count(path, unpack(read_record(data, int(offsets[0]))[0]), int(is_image.sum()), made=made)
    rows = rows if is_image.all() else rows[:, is_image]
    if rows[2].max() < 0:
        raise ValueError(f"{path}: every label is -1 (ignore), expected labels from 0")
    return rows


def _rises(values: Ints) -> bool:
    return bool((values[1:] > values[:-1]).all())


def _make_index(data: mmap.mmap, path: str, index: str) -> Ints:
    """An index from the file itself, written beside it where that is allowed; as `read_index` gives it."""
    try:
        offsets = np.frombuffer(find_records(data), np.int64)
    except ValueError as error:
        raise ValueError(
            f"{path}: cannot make an index, {error}; fetch the file again, or save the sound records with "
            "plsc.data.records.scan"
        ) from error
    keys = np.arange(len(offsets))
    ids = _Heads(data, path, keys, offsets).ids()
    if int(ids.max()) < 2**63 and len(np.unique(ids)) == len(ids):
        keys = ids.astype(np.int64)
    draft = f"{index}.tmp-{os.getpid()}"
    try:
        with open(draft, "wb") as file:
            for start in range(0, len(keys), _BLOCK):
                block = slice(start, start + _BLOCK)
                lines = zip(keys[block].tolist(), offsets[block].tolist(), strict=True)
                file.write(b"".join(b"%d\t%d\n" % line for line in lines))
        # Where another rank was faster, or it was right, caches of it stay good.
        if not (os.path.exists(index) and filecmp.cmp(draft, index, shallow=False)):
            os.replace(draft, index)
        logger.info("%s: made anew from %d records of %s", index, len(keys), path)
    except OSError as error:
        logger.warning("%s: made an index of %d records for this run, cannot write it: %s", index, len(keys), error)
    finally:
        drop([], [draft])
    return np.stack([keys, offsets, offsets])


def _check_offsets(data: mmap.mmap, path: str, keys: Ints, offsets: Ints) -> None:
    wrong = np.flatnonzero((offsets % 4 != 0) | (offsets > len(data) - PART.size))
    if wrong.size:
        raise ValueError(
            f"{path}: got key {keys[wrong[0]]} at byte {offsets[wrong[0]]} ({wrong.size} such keys), expected a "
            f"multiple of 4 within the file's {len(data)} bytes; the file is cut short or the index is of another: "
            f"{REBUILD}"
        )


def _check_count(path: str, header: Record, images: int, *, made: bool) -> None:
    """Compares with the number of images that a header record states, where float32 can state it."""
    stated = float(header.labels[0]) - 1
    if not stated < EXACT - 1 or stated == images:
        return
    if images < stated and not made:
        raise ValueError(f"{path}: the index lists {images} images, the header record says {stated:.0f}; {REBUILD}")
    logger.warning("%s: found %d images, the header record says %.0f", path, images, stated)


class _Heads:
    """The headers of the records at rising offsets, looked at in blocks without a loop over records."""

    def __init__(self, data: mmap.mmap, path: str, keys: Ints, offsets: Ints) -> None:
        self._data, self._path, self._keys, self._offsets = data, path, keys, offsets
        self._words = np.frombuffer(data, "<u4", len(data) // 4)

    def read(self, labels: Ints) -> Bools:
        """Puts the label of each record into labels [n] and returns whether it holds an image  [n]."""
        is_image = np.empty(len(self._keys), np.bool_)
        unlisted, reached = 0, 0
        for start in range(0, len(self._keys), _BLOCK):
            block = slice(start, start + _BLOCK)
            heads, lengths, ends = self._block(block)
            is_image[block] = (heads[:, 2] != 2) | (lengths != HEADER.size + 8)
            labels[block] = self._classes(block, heads, is_image[block])
            gaps = self._offsets[block] - np.concatenate([[reached], ends[:-1]])
            self._refuse(block, gaps < 0, "begins inside the record before it")
            unlisted, reached = unlisted + int(gaps.sum()), int(ends[-1])
        unlisted += len(self._data) - reached
        if unlisted:
            logger.warning("%s: %d bytes are not in the index; %s", self._path, unlisted, REBUILD)
        return is_image

    def ids(self) -> NDArray[np.uint64]:
        """The id in each record's header  [n]."""
        ids = np.empty(len(self._keys), np.uint64)
        for start in range(0, len(self._keys), _BLOCK):
            block = slice(start, start + _BLOCK)
            ids[block] = _long(self._block(block)[0], 4)
        return ids

    def _block(self, block: slice) -> tuple[NDArray[np.uint32], Ints, Ints]:
        """First words [n, 9], payload length [n] and end [n] of records, each checked to be one."""
        offsets = self._offsets[block]
        heads = self._first_words(offsets // 4)
        kinds, lengths = heads[:, 1] >> 29, (heads[:, 1] & MAX_LENGTH).astype(np.int64)
        ends = offsets + PART.size + (lengths + 3) // 4 * 4
        self._refuse(block, heads[:, 0] != int.from_bytes(MAGIC, "little"), "is no record")
        self._refuse(block, kinds > FIRST, "is the middle of a record")
        self._refuse(block, ends > len(self._data), "reaches beyond the end of the file")
        for row in np.flatnonzero(kinds != WHOLE).tolist():  # the payload holds the magic: very rare
            key, start = int(self._keys[block][row]), int(offsets[row])
            try:
                payload, ends[row] = read_record(self._data, start)
            except ValueError as error:
                raise ValueError(f"{self._path}, key {key}: {error}; {REBUILD}") from error
            words = np.frombuffer(payload[: 4 * (_HEAD_WORDS - 2)].ljust(4 * (_HEAD_WORDS - 2), b"\0"), "<u4")
            heads[row, 2:], lengths[row] = words, len(payload)
        needed = HEADER.size + 4 * heads[:, 2].astype(np.int64)
        self._refuse(block, (lengths < HEADER.size) | (lengths < needed), "is too short for its header")
        return heads, lengths, ends

    def _first_words(self, places: Ints) -> NDArray[np.uint32]:
        """The 9 words from each of rising places on  [n, 9]; those beyond the file repeat its last and are not used."""
        count = len(self._words) - _HEAD_WORDS + 1
        inside = int(np.searchsorted(places, count))
        heads = np.empty((len(places), _HEAD_WORDS), "<u4")
        if inside:  # each as one element: many times as fast as word by word
            whole = np.ndarray(count, f"V{4 * _HEAD_WORDS}", self._words, strides=(4,))
            heads[:inside] = whole[places[:inside]].view("<u4").reshape(-1, _HEAD_WORDS)
        at = places[inside:, None] + np.arange(_HEAD_WORDS)
        heads[inside:] = self._words[np.minimum(at, len(self._words) - 1)]
        return heads

    def _classes(self, block: slice, heads: NDArray[np.uint32], is_image: Bools) -> Ints:
        """The class [n] of each image."""
        floats = heads.view("<f4")
        label = np.where(heads[:, 2] > 0, floats[:, 8], floats[:, 3])
        id2 = _long(heads, 6)
        exact = np.abs(label) < EXACT  # false for NaN
        value = np.where(exact, label, 0).astype(np.int64)
        told = ~exact & (id2 <= MAX_CLASS)
        told &= id2.astype(np.float64).astype(np.float32) == label
        rounded = np.isfinite(label) & (label >= EXACT)
        self._refuse(
            block,
            is_image & rounded & ~told,
            "has a label that float32 may have rounded (2**24 or more) and no class in id2 that agrees",
            label,
            remedy="write the file anew with the class in id2, as plsc.data.RecordWriter does",
        )
        self._refuse(
            block,
            is_image & ~rounded & ~(exact & (value == label) & (value >= -1)),
            "has a label that is no class",
            label,
            remedy="classes are whole numbers from 0, or -1 to ignore a record: write the file anew with such labels",
        )
        return np.where(exact, value, np.where(told, id2, 0).astype(np.int64))

    def _refuse(
        self,
        block: slice,
        wrong: Bools,
        why: str,
        labels: NDArray[np.float32] | None = None,
        remedy: str = REBUILD,
    ) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            key, offset = self._keys[block][row], self._offsets[block][row]
            got = "" if labels is None else f" (label {labels[row]!s})"
            raise ValueError(
                f"{self._path}: what stands at byte {offset} for key {key} {why}{got}; {int(wrong.sum())} such of "
                f"{len(wrong)} looked at; {remedy}"
            )


def _long(heads: NDArray[np.uint32], column: int) -> NDArray[np.uint64]:
    """The 64-bit number in two columns  [n]."""
    return heads[:, column].astype(np.uint64) | heads[:, column + 1].astype(np.uint64) << np.uint64(32)


def _stamp(path: str) -> list[int]:
    """What a cache depends on: the record file and its index."""
    stamp = [_CACHE_VERSION]
    for file in (path, index_path(path)):
        found = os.stat(file) if os.path.exists(file) else None
        stamp += [found.st_size, found.st_mtime_ns] if found else [-1, -1]
    return stamp


def _load_cache(cache: str, path: str) -> Ints | None:
    """The rows kept in a cache, mapped; None if there is none for these files."""
    if not os.path.exists(cache):
        return None
    try:
        table = np.load(cache, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        logger.warning("%s: cannot be read (%s), made anew", cache, error)
        return None
    whole = table.dtype == np.int64 and table.ndim == 2 and table.shape[0] == 3 and table.shape[1] > _STAMP
    if not whole or table[:, :_STAMP].ravel()[:5].tolist() != _stamp(path):
        logger.info("%s: of another record file or index, made anew", cache)
        return None
    rows: Ints = table[:, _STAMP:]
    return rows


def _save_cache(cache: str, path: str, rows: Ints) -> None:
    stamp = np.array([*_stamp(path), 0], np.int64).reshape(3, _STAMP)
    draft = f"{cache}.tmp-{os.getpid()}"
    try:
        with open(draft, "wb") as file:
            shape = (len(rows), _STAMP + rows.shape[1])
            write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})
            for head, row in zip(stamp, rows, strict=True):  # not put together first: a gigabyte of a large set
                file.write(head.astype("<i8").data)
                file.write(row.astype("<i8", copy=False).data)
        os.replace(draft, cache)
    except OSError as error:
        logger.warning("%s: cannot be written (%s), the next start reads every header again", cache, error)
    finally:
        drop([], [draft])
