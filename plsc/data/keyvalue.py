"""Labelled images in an LMDB file, one value each, read at random places through the lmdb library (an extra).

Keys are text, samples count from 1 in nine digits or more: `num-samples`, and for each sample `image-000000001` (the
encoded image), `label-000000001` (a whole number) and, if there are names, `name-000000001`. That is how recognition
projects lay theirs out; `labels`, all of them as 8-byte little-endian numbers, is ours and opens large files at once.
"""

import importlib
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.decoding import decode_image
from plsc.data.images import _check_format, _warn_thin_classes
from plsc.data.writing import WholeOrNothing, drop

_FIRST_SIZE = 2**26  # bytes of address space of a new file; doubled as it fills
_BATCH = 512  # samples written in one transaction


class LMDBImages:
    """The samples of an LMDB file, or folder with data.mdb, in the order of their numbers.

    ValueError: no such file, keys of another layout, labels that are no whole numbers from 0 (-1: ignore).
    """

    def __init__(self, path: str | os.PathLike[str], *, image_size: int = 112, channels: int = 3) -> None:
        _check_format(image_size, channels)
        self.path, self.image_size, self.channels = os.fspath(path), image_size, channels
        self._file: _File | None = None
        count = _number(self._get(b"num-samples"), f"{self.path}, num-samples")
        if count < 1:
            raise ValueError(
                f"{self.path}: got {count} as num-samples, expected the keys num-samples, image-000000001, "
                "label-000000001 and so on"
            )
        if count > (keys := self._opened().num_keys):  # before memory is taken for what a damaged number asks for
            raise ValueError(
                f"{self.path}: got {count} as num-samples, but the file holds {keys} keys in all; expected "
                "a key image-000000001 and so on for each; fetch the file again"
            )
        self.labels = self._read_labels(count)
        if self.labels.min() < -1 or self.labels.max() < 0:
            raise ValueError(
                f"{self.path}: got labels from {self.labels.min()} to {self.labels.max()}, expected 0 or more, or -1"
            )
        self.num_classes = int(self.labels.max()) + 1
        _warn_thin_classes(self.path, self.labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The sample's name, or its key."""
        found = self._get(_key("name", i))
        return _key("image", i).decode() if found is None else os.fsdecode(found)

    def encoded(self, i: int) -> bytes:
        """The bytes of sample i's image."""
        if not 0 <= i < len(self):
            raise IndexError(f"got sample {i}, expected 0 to {len(self) - 1}")
        found = self._get(_key("image", i))
        if not found:
            raise ValueError(f"{self.path}: got nothing under {_key('image', i).decode()}, expected an encoded image")
        return found

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        data = self.encoded(i)
        return decode_image(data, self.image_size, self.channels, name=lambda: self._place(i)), int(self.labels[i])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def _place(self, i: int) -> str:
        return f"{self.path}, {_key('image', i).decode()}"

    def _opened(self) -> "_File":
        if self._file is None:
            self._file = _open(self.path)
        return self._file

    def _get(self, key: bytes) -> bytes | None:
        return self._opened().get(key)

    def _read_labels(self, count: int) -> NDArray[np.int64]:
        packed = self._get(b"labels")
        if packed is not None and len(packed) == 8 * count:
            return np.frombuffer(packed, "<i8").astype(np.int64)
        labels = np.empty(count, np.int64)
        for i in range(count):
            key = _key("label", i)
            labels[i] = _number(self._get(key), f"{self.path}, {key.decode()}")
        return labels


def _key(what: str, i: int) -> bytes:
    return b"%s-%09d" % (what.encode(), i + 1)


def _number(text: bytes | None, where: str) -> int:
    if text is None or not (text.isdigit() or text == b"-1") or len(text) > 18:
        got = "nothing" if text is None else ascii(text[:40])
        raise ValueError(f"{where}: got {got}, expected a whole number as text")
    return int(text)


def _lmdb() -> Any:
    try:
        return importlib.import_module("lmdb")
    except ImportError as error:
        raise ValueError("LMDB needs lmdb, which is not installed; pip install 'plsc-torch[lmdb]'") from error


class _File:
    """An open file. Read-only and without locks it may be used on after a fork, for it is but a memory map."""

    def __init__(self, path: str, environment: Any) -> None:
        self._path, self._environment = path, environment
        self.num_keys: int = environment.stat()["entries"]

    def get(self, key: bytes) -> bytes | None:
        try:
            with self._environment.begin() as transaction:
                found: bytes | None = transaction.get(key)
        except _lmdb().Error as error:
            raise ValueError(f"{self._path}: {key.decode()} cannot be read ({error}); fetch the file again") from error
        return found


# LMDB refuses to open a file twice in one process: data sets of one file share it.
_OPEN: weakref.WeakValueDictionary[str, _File] = weakref.WeakValueDictionary()


def _open(path: str) -> _File:
    lmdb = _lmdb()
    if not os.path.exists(path):
        raise ValueError(f"{path}: expected an LMDB file or a folder with data.mdb; check the path")
    known = os.path.realpath(path)
    found = _OPEN.get(known)
    if found is None:
        is_folder = os.path.isdir(path)
        try:
            made = lmdb.open(path, subdir=is_folder, readonly=True, lock=False, readahead=False, meminit=False)
        except lmdb.Error as error:
            raise ValueError(f"{path}: cannot be read as LMDB ({error}); fetch it again") from error
        _check_whole(path, made)
        found = _OPEN[known] = _File(path, made)
    return found


def _check_whole(path: str, environment: Any) -> None:
    """Refuses a file cut short: reading what is mapped beyond its end would kill the process."""
    wanted = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    size = os.path.getsize(os.path.join(path, "data.mdb") if os.path.isdir(path) else path)
    if size < wanted:
        environment.close()
        raise ValueError(f"{path}: the file ends at byte {size} of {wanted}, it is cut short; fetch it again")


class LMDBWriter(WholeOrNothing):
    """Writes samples into one LMDB file; it appears when closed, nothing after an error."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lmdb = _lmdb()
        self._draft = f"{self.path}.tmp-{os.getpid()}"
        self._size = _FIRST_SIZE
        try:
            self._environment: Any = self._lmdb.open(
                self._draft, subdir=False, map_size=self._size, lock=False, sync=False
            )
        except self._lmdb.Error as error:
            drop([], [self._draft])
            raise self._full(error) from error
        self._waiting: list[tuple[bytes, bytes]] = []
        self._labels: list[int] = []

    def write(self, name: str, label: int, image: bytes) -> None:
        i = len(self._labels)
        self._labels.append(label)
        self._waiting += [
            (_key("image", i), image),
            (_key("label", i), b"%d" % label),
            (_key("name", i), os.fsencode(name)),
        ]
        if len(self._waiting) >= 3 * _BATCH:
            self._flush()

    def close(self) -> None:
        if self._environment is None:
            return
        self._waiting.append((b"labels", np.array(self._labels, "<i8").tobytes()))
        self._waiting.append((b"num-samples", b"%d" % len(self._labels)))
        self._flush()
        try:
            self._environment.sync(True)
        except self._lmdb.Error as error:
            raise self._full(error) from error
        self._environment.close()
        self._environment = None
        os.replace(self._draft, self.path)

    def discard(self) -> None:
        """Drops what was written; a file of that name from before stays."""
        if self._environment is not None:
            drop([self._environment.close], [self._draft])
            self._environment = None

    def _full(self, error: Exception) -> ValueError:
        return ValueError(f"{self.path}: cannot be written ({error}); is there space on the disk?")

    def _flush(self) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for key, value in self._waiting:
                        transaction.put(key, value)
            except self._lmdb.MapFullError:
                self._size *= 2
                self._environment.set_mapsize(self._size)
                continue
            except self._lmdb.Error as error:
                raise self._full(error) from error
            self._waiting = []
            return
