"""Labelled images on disk: a folder (or zip archive) with one sub-folder a class, or a text list of paths and labels.

The index takes a name's bytes and 16 more an image (two numpy arrays and one blob), so that tens of millions of images
fit in memory and worker processes share the pages instead of copying a Python list.
"""

import functools
import logging
import os
import struct
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import overload

import numpy as np
from numpy.typing import NDArray

from plsc.data.decoding import decode_image
from plsc.data.files import read_file
from plsc.data.lists import SUFFIXES, scan_list

logger = logging.getLogger(__name__)

_ZIP_STORED, _ZIP_DEFLATED = 0, 8
_LOOKED_FOR = 100  # files of a list, before it is said that none is there
_MOST_BYTES = 2**29  # of an encoded image in an archive, as in a record


class PackedStrings(Sequence[str]):
    """A sequence of strings held as one blob of bytes and int64 offsets: 8 bytes a string beside its own."""

    def __init__(self, strings: Iterable[bytes]) -> None:
        blob, ends = bytearray(), array("q", [0])
        for string in strings:
            blob += string
            ends.append(len(blob))
        self.blob = np.frombuffer(blob, np.uint8)
        self.ends = np.frombuffer(ends, np.int64)

    @classmethod
    def of(cls, blob: NDArray[np.uint8], ends: NDArray[np.int64]) -> "PackedStrings":
        """From the blob and ends of another."""
        made = cls(())
        made.blob, made.ends = blob, ends
        return made

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if index < 0 or index >= len(self):
            raise IndexError(f"got string {index}, expected 0 to {len(self) - 1}")
        start, stop = self.ends[index : index + 2].tolist()
        return os.fsdecode(self.blob[start:stop].tobytes())


@dataclass(frozen=True)
class _ZipIndex:
    """Where the members of an archive lie; reads open the file anew, so threads and forked workers share nothing."""

    path: str
    offset: NDArray[np.int64]  # [N] of the local header
    packed: NDArray[np.int64]  # [N] bytes
    size: NDArray[np.int64]  # [N] bytes when unpacked
    method: NDArray[np.uint8]  # [N]
    crc: NDArray[np.uint32]  # [N]

    def read(self, i: int) -> bytes:
        packed, size = int(self.packed[i]), int(self.size[i])
        if max(packed, size) > _MOST_BYTES:
            raise ValueError(
                f"{self.path}: the member at byte {self.offset[i]} has {max(packed, size)} bytes, more than the "
                f"{_MOST_BYTES} of the largest image; remove it"
            )
        with open(self.path, "rb") as file:
            file.seek(int(self.offset[i]))
            header = file.read(30)
            if len(header) < 30 or header[:4] != b"PK\3\4":
                raise ValueError(
                    f"{self.path}: no member at byte {self.offset[i]}; the archive changed or is cut short"
                )
            name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
            file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
            data = file.read(packed)
        if self.method[i] == _ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)  # what it says, or a bomb
            except zlib.error as error:
                raise ValueError(
                    f"{self.path}: the member at byte {self.offset[i]} is damaged ({error}); fetch it again"
                ) from error
        if len(data) != size or zlib.crc32(data) != self.crc[i]:
            raise ValueError(
                f"{self.path}: size or checksum of the member at byte {self.offset[i]} differs; fetch it again"
            )
        return data


class ImageFolder:
    """Images in root/NAME/*.jpg (jpeg, png, webp, bmp); `root` may be a .zip archive of the same layout.

    Classes are the folder names in sorted order, samples are sorted by class, then file name, whatever order the file
    system gives. Hidden files are left out. ValueError: no images, or a class folder without any.
    """

    def __init__(self, root: str | os.PathLike[str], *, image_size: int = 112, channels: int = 3) -> None:
        _check_format(image_size, channels)
        self.root, self.image_size, self.channels = os.fspath(root), image_size, channels
        self._zip: _ZipIndex | None = None
        classes: list[str] = []
        labels = array("q")
        if os.path.isdir(self.root):
            self._files = PackedStrings(_scan_folder(self.root, classes, labels))
        elif zipfile.is_zipfile(self.root):
            members = _scan_zip(self.root)
            self._files = PackedStrings(_label_members(members, classes, labels))
            self._zip = _zip_index(self.root, [info for _, _, info in members])
        else:
            got = "a file that is no whole .zip archive" if os.path.lexists(self.root) else "nothing there"
            raise ValueError(
                f"{self.root}: got {got}, expected a folder or a .zip archive of NAME/image.jpg; check the path. Other "
                "data are known by their names: .rec, .tar (not compressed), .parquet, .lmdb, .txt, .lst, .tsv, .bin"
            )
        if not labels:
            raise ValueError(f"{self.root}: no images found; expected {self.root}/NAME/*.jpg (or png, webp, bmp)")
        self.labels: NDArray[np.int64] = np.frombuffer(labels, np.int64)
        self.class_names = PackedStrings(map(os.fsencode, classes))
        self.num_classes = len(classes)
        _warn_thin_classes(self.root, self.labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The path of sample i below root: NAME/file.jpg."""
        return f"{self.class_names[int(self.labels[i])]}/{self._files[i]}"

    @property
    def names(self) -> Sequence[str]:
        """File names of all samples, in order and without their folder (for `read_pairs`)."""
        return self._files

    def encoded(self, i: int) -> bytes:
        """The bytes of sample i's file."""
        return self._zip.read(i) if self._zip is not None else read_file(f"{self.root}/{self.name(i)}")

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        label = int(self.labels[i])
        path = f"{self.root}/{self.class_names[label]}/{self._files[i]}"
        data = self._zip.read(i) if self._zip is not None else read_file(path)
        return decode_image(data, self.image_size, self.channels, name=path), label


class ImageList:
    """Images named in a text file of lines `path label`, separated by a space or tab; paths may hold spaces.

    The first line of a .lst or .tsv file with more columns, separated by tabs, tells which: number, label (several),
    path (im2rec's) or number, path, label and more (the InsightFace project's; names of columns are skipped). Relative
    paths start at `root` (the folder of the list if not given). Labels are integers from 0, or -1 for a sample
    to ignore; blank lines, CRLF and a byte order mark are allowed. Samples keep the order of the file.
    `num_classes` is the largest label + 1 unless given. ValueError names the line that is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        image_size: int = 112,
        channels: int = 3,
        num_classes: int | None = None,
    ) -> None:
        _check_format(image_size, channels)
        self.path, self.image_size, self.channels = os.fspath(path), image_size, channels
        self.root = os.path.dirname(os.path.abspath(self.path)) if root is None else os.fspath(root)
        if not os.path.isdir(self.root):
            raise ValueError(f"{self.root}: expected the folder that relative paths start at; check root")
        if not os.path.isfile(self.path):
            raise ValueError(f"{self.path}: expected a text file of lines `path label`; check the path")
        labels, blanks = array("q"), array("q")
        self._files = PackedStrings(scan_list(self.path, labels, blanks))
        if not labels:
            raise ValueError(f"{self.path}: no lines of the form `path label`")
        self.labels: NDArray[np.int64] = np.frombuffer(labels, np.int64)
        # Blank line j (from 0) has blanks[j] - 1 - j samples before it.
        self._samples_before_blank = np.frombuffer(blanks, np.int64) - 1 - np.arange(len(blanks))
        found = int(self.labels.max()) + 1
        if num_classes is not None and num_classes < found:
            raise ValueError(
                f"num_classes={num_classes}, but {self.path} has a label {found - 1}: give at least {found} classes"
            )
        if found == 0 and num_classes is None:
            raise ValueError(f"{self.path}: every label is -1 (ignore); give num_classes or labels from 0")
        self.num_classes = found if num_classes is None else num_classes
        _warn_thin_classes(self.path, self.labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The path of sample i as the list writes it."""
        return self._files[i]

    def line(self, i: int) -> int:
        """The line of the list, from 1, that sample i comes from."""
        return i + 1 + int(np.searchsorted(self._samples_before_blank, i, side="right"))

    def encoded(self, i: int) -> bytes:
        """The bytes of sample i's file."""
        path = os.path.join(self.root, self.name(i))
        try:
            return read_file(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._some_are_there:
                first = os.path.join(self.root, self.name(0))
                raise ValueError(
                    f"{self.path}: no file of the list was found, such as {first}; check data.root, the folder that "
                    "relative paths start at"
                ) from error
            raise ValueError(
                f"{self.path}, line {self.line(i)}: cannot read {path} ({error.strerror}); check data.root and the list"
            ) from error

    @functools.cached_property
    def _some_are_there(self) -> bool:
        """Whether any of a few paths, evenly spaced, leads to a file."""
        chosen = np.linspace(0, len(self) - 1, _LOOKED_FOR).astype(np.int64).tolist()
        return any(os.path.exists(os.path.join(self.root, self.name(i))) for i in chosen)

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        path = os.path.join(self.root, self.name(i))
        return decode_image(self.encoded(i), self.image_size, self.channels, name=path), int(self.labels[i])


def _check_format(image_size: int, channels: int) -> None:
    if image_size < 1:
        raise ValueError(f"got image_size={image_size}, expected at least 1")
    if channels not in (1, 3):
        raise ValueError(f"got channels={channels}, expected 3 (RGB) or 1 (grey)")


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _scan_folder(root: str, classes: list[str], labels: "array[int]") -> Iterator[bytes]:
    """Yields the file names of all samples in order; fills `classes` and `labels` on the way."""
    with os.scandir(root) as entries:
        classes += sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        strays = [name for name in os.listdir(root) if _is_image(name) and name not in classes]
    empty = []
    for label, name in enumerate(classes):
        with os.scandir(os.path.join(root, name)) as entries:
            files, others = list[str](), list[str]()
            for entry in entries:
                (files if _is_image(entry.name) and entry.is_file() else others).append(entry.name)
        files.sort()
        strays += [f"{name}/{other}" for other in others if not other.startswith(".")]
        if not files:
            empty.append(name)
        for file in files:
            labels.append(label)
            yield os.fsencode(file)
    _warn_strays(root, strays)
    if labels:
        _refuse_empty(root, empty)


def _refuse_empty(root: str, folders: list[str]) -> None:
    if folders:
        shown = ", ".join(folders[:5]) + (", ..." if len(folders) > 5 else "")
        raise ValueError(f"{root}: {len(folders)} class folders hold no images: {shown}; remove them")


def _warn_strays(root: str, strays: list[str]) -> None:
    """Says in the log what a folder or archive holds that is not read, for it may have been meant to be."""
    if strays:
        text = "%s: %d entries are left out, such as %s; read are %s in class folders, and links to such"
        shown, known = ascii(min(strays))[1:-1], ", ".join(SUFFIXES)
        logger.warning(text, root, len(strays), shown, known, extra={"once": True})


def _scan_zip(path: str) -> list[tuple[str, str, zipfile.ZipInfo]]:
    """The images of an archive as sorted (class, file, info), by the rules of a folder.

    Folders above the classes must be the same for all.
    """
    members, parents, folders, strays = [], set(), set[tuple[str, ...]](), []
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{path}: cannot be read as a .zip archive ({error}); fetch it again") from error
    with archive:
        for info in archive.infolist():
            parts = PurePosixPath(info.filename).parts
            if not parts or parts[0] == "__MACOSX" or any(part.startswith(".") for part in parts):
                continue
            folders.add(parts if info.is_dir() else parts[:-1])
            if info.is_dir():
                continue
            if not _is_image(parts[-1]):
                strays += [info.filename] if len(parts) > 1 else []
                continue
            if len(parts) < 2:
                raise ValueError(f"{path}: {info.filename} lies in no class folder; expected NAME/image.jpg")
            if info.flag_bits & 1 or info.compress_type not in (_ZIP_STORED, _ZIP_DEFLATED):
                raise ValueError(f"{path}: {info.filename} is encrypted or not stored/deflated; pack the archive again")
            parents.add(parts[:-2])
            members.append((parts[-2], parts[-1], info))
    _warn_strays(path, strays)
    if len(parents) > 1:
        shown = ", ".join(sorted("/".join(parent) or "(top)" for parent in parents)[:3])
        raise ValueError(f"{path}: class folders lie in {len(parents)} places ({shown}); expected one")
    for parent in parents:
        level = len(parent)
        beside = {folder[level] for folder in folders if len(folder) > level and folder[:level] == parent}
        _refuse_empty(path, sorted(beside - {name for name, _, _ in members}))
    members.sort(key=lambda member: member[:2])
    for one, other in pairwise(members):
        if one[:2] == other[:2]:
            raise ValueError(f"{path}: {'/'.join(one[:2])} is there more than once, expected it once; pack it anew")
    return members


def _label_members(
    members: list[tuple[str, str, zipfile.ZipInfo]], classes: list[str], labels: "array[int]"
) -> Iterator[bytes]:
    for name, file, _ in members:
        if not classes or classes[-1] != name:
            classes.append(name)
        labels.append(len(classes) - 1)
        yield os.fsencode(file)


def _zip_index(path: str, infos: list[zipfile.ZipInfo]) -> _ZipIndex:
    return _ZipIndex(
        path=str(Path(path).absolute()),
        offset=np.array([info.header_offset for info in infos], np.int64),
        packed=np.array([info.compress_size for info in infos], np.int64),
        size=np.array([info.file_size for info in infos], np.int64),
        method=np.array([info.compress_type for info in infos], np.uint8),
        crc=np.array([info.CRC for info in infos], np.uint32),
    )


def _warn_thin_classes(source: str, labels: NDArray[np.int64], num_classes: int) -> None:
    """Says in the log how many classes have no image or only one: their centres learn nothing, or little."""
    known = labels[labels >= 0]
    if num_classes <= 4 * len(known) + 1_000_000:
        counts = np.bincount(known, minlength=num_classes)
        empty = int((counts == 0).sum())
    else:  # labels far apart: do not count over the gaps
        counts = np.unique(known, return_counts=True)[1]
        empty = num_classes - len(counts)
    single = int((counts == 1).sum())
    once = {"once": True}  # every rank finds this: commands let one of them say it
    if single:
        logger.warning("%s: %d of %d classes have one image only", source, single, num_classes, extra=once)
    if empty:
        logger.warning("%s: %d of %d classes have no image", source, empty, num_classes, extra=once)
