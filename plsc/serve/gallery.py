"""The people a service knows beside its classes: entries that are added and removed while it runs, and kept."""

from __future__ import annotations

import json
import logging
import re
import secrets
import struct
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plsc.data.embeddings import open_embeddings
from plsc.serve.checks import check_kind, check_shapes
from plsc.serve.index import GrowingIndex, Index, Rows, Scores, check_queries
from plsc.serve.journal import Journal

logger = logging.getLogger(__name__)

MAX_NAME = 256
UNIT_TOLERANCE = 2e-4  # of an embedding's length
JOINERS = "\u200c\u200d"  # zero-width: Persian words, Indic letters and composed emoji need them
TAGS = {chr(code) for code in range(0xE0020, 0xE0080)}  # spell the region of a flag after a black one
_FLAG = re.compile("\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f?$")
BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols that are drawn as nothing
COMPACT_BYTES = 16 * 2**20  # of removed entries before the file is written anew, if they are the half of it


class UnknownEntry(LookupError):
    """No entry has that id."""


class ReadOnly(ValueError):
    """The gallery is a file of embeddings that is only read."""


class Taken(ValueError):
    """An entry has that id already."""


@dataclass(frozen=True)
class Entry:
    """One image, or one embedding, of somebody."""

    id: str
    name: str


@dataclass(frozen=True)
class NewEntry:
    """What to add. id: one is made up unless given. thumbnail: a small JPEG, or b""."""

    name: str
    embedding: NDArray[np.float32]  # [D], unit length
    id: str = ""
    thumbnail: bytes = b""


@dataclass(frozen=True)
class _Change:
    """One record of the journal: entries that came and ids that went, all at once."""

    added: Sequence[Entry] = ()
    rows: NDArray[np.float32] | None = None  # [len(added), D]
    thumbnails: Sequence[bytes] = ()
    removed: Sequence[str] = ()

    def pack(self) -> bytes:
        """Length of the JSON, the JSON, the rows, the thumbnails, and an end that is no zero byte."""
        about = {
            "add": [[entry.id, entry.name] for entry in self.added],
            "thumbnails": [len(one) for one in self.thumbnails],
            "remove": list(self.removed),
        }
        text = json.dumps(about).encode()
        rows = b"" if self.rows is None else self.rows.astype("<f4").tobytes()
        return struct.pack("<I", len(text)) + text + rows + b"".join(self.thumbnails) + b"\n"

    @classmethod
    def unpack(cls, record: bytes, dim: int) -> _Change:
        (length,) = struct.unpack_from("<I", record)
        about = json.loads(record[4 : 4 + length])
        added = [Entry(id, name) for id, name in about["add"]]
        at = 4 + length
        rows = np.frombuffer(record, "<f4", len(added) * dim, at).reshape(len(added), dim).astype(np.float32)
        at += rows.nbytes
        thumbnails = []
        for size in about["thumbnails"]:
            thumbnails.append(record[at : at + size])
            at += size
        return cls(added, rows, thumbnails, about["remove"])


class Gallery(Protocol):
    """What the service needs of a gallery."""

    dim: int
    writable: bool

    def __len__(self) -> int: ...
    def search(self, queries: ArrayLike, k: int) -> tuple[Scores, Rows, list[list[Entry]]]: ...
    def entries(self, *, offset: int = 0, limit: int = 100, text: str = "") -> tuple[int, list[Entry]]: ...
    def thumbnail(self, id: str) -> bytes | None: ...
    def add(self, new: Sequence[NewEntry]) -> list[Entry]: ...
    def remove(self, ids: Sequence[str]) -> None: ...
    def close(self) -> None: ...


def open_gallery(path: str | Path, *, dim: int, digest: str) -> Gallery:
    """A file of embeddings, to be searched only, or a folder of entries that come and go (made where it is missing)."""
    place = Path(path)
    return (
        FileGallery(place, dim=dim, digest=digest) if place.is_file() else FolderGallery(place, dim=dim, digest=digest)
    )


def check_folder(folder: Path) -> None:
    """Raises ValueError for a place that is no gallery's and cannot become one: a file, or a folder of other files."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder or a file of embeddings")
    others = sorted(path.name for path in folder.iterdir() if path.name not in ("journal.lock", "lost+found"))
    others = [name for name in others if not name.startswith(".")]
    if others and not (folder / "journal").is_file():
        raise ValueError(
            f"{folder}: got a folder of {', '.join(others[:3])}{' and more' if len(others) > 3 else ''}, expected a "
            f"gallery, or a new or empty folder, such as {folder / 'gallery'}"
        )


class FileGallery:
    """A file as plsc-embed writes it, by memory map: millions of rows open at once, and none is added or removed."""

    writable = False

    def __init__(self, path: Path, *, dim: int, digest: str) -> None:
        if path.suffix == ".parquet":
            raise ValueError(
                f"{path}: a gallery is read from .safetensors; write one with plsc-embed --out x.safetensors"
            )
        self._file = open_embeddings(path)
        check_kind(self._file, path, centres=False)
        check_shapes(self._file, path)
        if self._file.digest != digest:
            raise ValueError(
                f"{path} was made by the model {self._file.digest[:12]}, the bundle holds {digest[:12]}; embed the "
                "images again with the run of this bundle"
            )
        if self._file.embeddings.ndim != 2:
            raise ValueError(f"{path}: got sub-centres {self._file.embeddings.shape}, expected embeddings [N, D]")
        self._index = Index.open(path)
        if self._index.dim != dim:
            raise ValueError(f"{path}: got embeddings of size {self._index.dim}, expected {dim}")
        self.dim = dim

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: ArrayLike, k: int) -> tuple[Scores, Rows, list[list[Entry]]]:
        if len(self) == 0:
            return _nothing(check_queries(queries, self.dim))
        scores, rows = self._index.search(queries, min(k, len(self)))
        return scores, rows, [[self._entry(row) for row in one] for one in rows.tolist()]

    def entries(self, *, offset: int = 0, limit: int = 100, text: str = "") -> tuple[int, list[Entry]]:
        if not text:
            rows = range(offset, min(offset + limit, len(self)))
            return len(self), [self._entry(row) for row in rows]
        names = self._file.names or ()
        found = [row for row, name in enumerate(names) if text.lower() in name.lower()]
        return len(found), [self._entry(row) for row in found[offset : offset + limit]]

    def thumbnail(self, id: str) -> bytes | None:
        if not (id.isascii() and id.isdigit() and len(id) < 19 and int(id) < len(self)):
            raise UnknownEntry(f"gallery: no entry {id!r}; ids are 0 to {len(self) - 1}")
        return None

    def add(self, new: Sequence[NewEntry]) -> list[Entry]:
        raise ReadOnly("gallery: it is a file, which is only read; start plsc-serve with --gallery FOLDER to add to it")

    def remove(self, ids: Sequence[str]) -> None:
        raise ReadOnly("gallery: it is a file, which is only read; start plsc-serve with --gallery FOLDER to remove")

    def close(self) -> None:
        """Nothing is open."""

    def _entry(self, row: int) -> Entry:
        names = self._file.names
        return Entry(id=str(row), name=names[row] if names is not None else f"label {self._file.labels[row]}")


class FolderGallery:
    """Entries in a journal of their own folder and in memory; safe to use from several threads.

    add() and remove() return once the change is on the disk, all of it or none. One process at a time: a second one is
    refused. All entries were made by one model, whose digest the folder keeps.
    """

    writable = True

    def __init__(self, folder: Path, *, dim: int, digest: str) -> None:
        check_folder(folder)
        self.dim, self._digest = dim, digest
        self._journal = Journal(folder)
        try:
            self._lock = threading.Lock()  # of what is in memory: held for moments
            self._writing = threading.Lock()  # held while the disk takes its time
            self._index = GrowingIndex(dim)
            self._rows: dict[str, int] = {}
            self._entries: list[Entry] = []
            self._thumbnails: dict[str, bytes] = {}
            self._bytes: dict[str, int] = {}  # that an entry takes in the file
            records = self._journal.read()
            if not records:
                self._journal.append(self._about())
            else:
                self._check(records[0], folder)
                for record in records[1:]:
                    self._apply(_Change.unpack(record, dim))
        except BaseException:
            self._journal.close()
            raise

    def __len__(self) -> int:
        return len(self._entries)

    def search(self, queries: ArrayLike, k: int) -> tuple[Scores, Rows, list[list[Entry]]]:
        with self._lock:
            scores, rows = self._index.search(queries, k)
            return scores, rows, [[self._entries[row] for row in one] for one in rows.tolist()]

    def entries(self, *, offset: int = 0, limit: int = 100, text: str = "") -> tuple[int, list[Entry]]:
        with self._lock:
            found = [one for one in self._entries if text.lower() in one.name.lower()] if text else self._entries
            return len(found), list(found[offset : offset + limit])

    def thumbnail(self, id: str) -> bytes | None:
        with self._lock:
            if id not in self._rows:
                raise UnknownEntry(f"gallery: no entry {id!r}")
            return self._thumbnails.get(id)

    def add(self, new: Sequence[NewEntry]) -> list[Entry]:
        """Adds all or none; ValueError for a name, id or embedding that will not do, Taken for an id in use."""
        entries = [Entry(one.id or secrets.token_hex(8), check_name(one.name)) for one in new]
        rows = check_queries([one.embedding for one in new], self.dim)
        off = np.abs(np.linalg.norm(rows.astype(np.float64), axis=1) - 1)
        if off.max() > UNIT_TOLERANCE:
            raise ValueError(f"embeddings: got length off 1 by {off.max():.1e}, expected at most {UNIT_TOLERANCE}")
        ids = [check_name(entry.id, what="id") for entry in entries]
        with self._writing:
            taken = [id for number, id in enumerate(ids) if id in self._rows or id in ids[:number]]
            if taken:
                raise Taken(f"gallery: id {taken[0]!r} is taken; give another, or none")
            self._commit(_Change(entries, rows, [one.thumbnail for one in new]))
        return entries

    def remove(self, ids: Sequence[str]) -> None:
        """Removes all or none; UnknownEntry names the first that is not there."""
        with self._writing:
            for id in ids:
                if id not in self._rows:
                    raise UnknownEntry(f"gallery: no entry {id!r}")
            self._commit(_Change(removed=list(dict.fromkeys(ids))))
            waste = self._journal.size - sum(self._bytes.values())
            if waste > COMPACT_BYTES and 2 * waste > self._journal.size:
                try:
                    self._compact()
                except OSError as error:  # what was asked for is done; the file is only larger than it need be
                    logger.warning("%s: cannot write it anew without what was removed: %s", self._journal.path, error)

    def close(self) -> None:
        with self._writing:
            self._journal.close()

    # ---- inside, one writer at a time

    def _commit(self, change: _Change) -> None:
        """To the disk first, then to memory: a search sees nothing that could be lost."""
        self._journal.append(change.pack())
        with self._lock:
            self._apply(change)

    def _apply(self, change: _Change) -> None:
        for entry, thumbnail in zip(change.added, change.thumbnails, strict=True):
            self._rows[entry.id] = len(self._entries)
            self._entries.append(entry)
            self._bytes[entry.id] = 4 * self.dim + len(thumbnail) + len(entry.id) + len(entry.name)
            if thumbnail:
                self._thumbnails[entry.id] = thumbnail
        if change.rows is not None:
            self._index.add(change.rows)
        for id in change.removed:
            row = self._rows.pop(id)
            last = self._entries.pop()
            if last.id != id:  # the last row moves into its place, in the index too
                self._entries[row] = last
                self._rows[last.id] = row
            self._index.remove(row)
            self._thumbnails.pop(id, None)
            del self._bytes[id]

    def _compact(self) -> None:
        """Writes the entries there are into a new file, without what was removed."""

        def bodies() -> Iterator[bytes]:
            yield self._about()
            for row, entry in enumerate(self._entries):
                yield _Change([entry], self._index.row(row)[None], [self._thumbnails.get(entry.id, b"")]).pack()

        self._journal.rewrite(bodies())

    def _about(self) -> bytes:
        return json.dumps({"model_digest": self._digest, "embedding_size": self.dim}).encode()

    def _check(self, record: bytes, folder: Path) -> None:
        about = json.loads(record)
        if about["model_digest"] != self._digest:
            raise ValueError(
                f"{folder} holds embeddings of the model {about['model_digest'][:12]}, the bundle holds "
                f"{self._digest[:12]}; give another folder, and add the images again"
            )
        if about["embedding_size"] != self.dim:
            raise ValueError(
                f"{folder} holds embeddings of size {about['embedding_size']}, expected {self.dim}; give another "
                "folder, and add the images again"
            )


def check_name(name: str, *, what: str = "name") -> str:
    """A name as it may be kept and shown; it never becomes part of a path. ValueError for an unfit one."""
    if not 1 <= len(name) <= MAX_NAME or any(_is_hidden(name, at) for at in range(len(name))):
        raise ValueError(f"{what}: got {name[:40]!r}, expected 1 to {MAX_NAME} characters, none that cannot be seen")
    if all(c in BLANK or unicodedata.category(c)[0] in "ZCM" for c in name):
        raise ValueError(f"{what}: got {name[:40]!r}, expected a character that can be seen")
    return name


def _is_hidden(name: str, at: int) -> bool:
    """Whether a character there has no place in a name; joiners have one between others, tags in a flag."""
    kind = unicodedata.category(name[at])
    if name[at] in JOINERS:
        before = unicodedata.category(name[at - 1]) if at else "Cc"
        after = unicodedata.category(name[at + 1]) if at + 1 < len(name) else "Cc"
        return before[0] in "ZC" or (after[0] in "ZC" and before[0] != "M")
    if name[at] in TAGS:
        return not _FLAG.search(name[: at + 1])
    return kind in ("Cc", "Cs", "Cf", "Zl", "Zp")


def _nothing(queries: NDArray[np.float32]) -> tuple[Scores, Rows, list[list[Entry]]]:
    empty = np.empty((len(queries), 0))
    return empty.astype(np.float32), empty.astype(np.int64), [[] for _ in queries]
