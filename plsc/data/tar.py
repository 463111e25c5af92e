"""Labelled images in tar archives laid out as WebDataset does: members KEY.jpg and KEY.cls (or .json) side by side.

Archives are scanned once, header by header, and then read at random places: shuffling and exact resume work as for any
other data set. Compressed archives cannot be read so.
"""

import glob
import io
import json
import logging
import os
import re
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.decoding import decode_image
from plsc.data.files import read_file
from plsc.data.images import SUFFIXES, PackedStrings, _check_format, _warn_thin_classes
from plsc.data.writing import WholeOrNothing, drop

logger = logging.getLogger(__name__)

BLOCK = 512
_CACHE_VERSION = 1
_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}", re.ASCII)
_MOST_SHARDS = 1_000_000
_LABELS = (".cls", ".json")
_MOST_META = 2**20  # bytes of a label, a long name or a table of extended headers
_END_BLOCKS = 20  # of zeros that writers close an archive with, at most
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_REFUSED = {b"1": "a link", b"2": "a link", b"K": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


class TarShards:
    """Samples of tar archives in their order, archive after archive by name; `path`: a .tar, a folder or a pattern.

    A sample is a run of members with one key (the path up to the file name's first dot): an image and its label, a
    whole number from 0 (-1: ignore) in KEY.cls or as {"label": n} in KEY.json; members of other kinds are left out.
    cache: a .npz file to keep the index in, read instead of the archives' headers while these are as they were.
    ValueError names archive and byte: truncated, absolute paths or "..", links, samples without image or label.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        image_size: int = 112,
        channels: int = 3,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_format(image_size, channels)
        self.path, self.image_size, self.channels = os.fspath(path), image_size, channels
        self.shards = find_shards(self.path, ".tar")
        index = None if cache is None else _load_index(cache, self.shards)
        if index is None:
            index = _scan_all(self.path, self.shards)
            if cache is not None:
                _save_index(cache, self.shards, index)
        self.labels: NDArray[np.int64] = index["labels"]
        self._shard, self._offset, self._size = index["shards"], index["offsets"], index["sizes"]
        self._names = PackedStrings.of(index["names"], index["name_ends"])
        self.num_classes = int(self.labels.max()) + 1
        if self.num_classes == 0:
            raise ValueError(f"{self.path}: every label is -1 (ignore), expected labels from 0")
        _warn_thin_classes(self.path, self.labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The image's path in its archive."""
        return self._names[i]

    def encoded(self, i: int) -> bytes:
        """The bytes of sample i's image."""
        return read_file(self.shards[self._shard[i]], int(self._offset[i]), int(self._size[i]))

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        data = self.encoded(i)
        return decode_image(data, self.image_size, self.channels, name=lambda: self._place(i)), int(self.labels[i])

    def _place(self, i: int) -> str:
        return f"{self.shards[self._shard[i]]}, {self.name(i)} at byte {self._offset[i]}"


def find_shards(path: str, suffix: str) -> list[str]:
    """The files that a path means: itself, those with the suffix in a folder, or those that match a pattern; sorted.

    Patterns hold * ? [], ranges {000..015}, of which each must be there, or {} for any (as writers name several).
    """
    if os.path.isfile(path):
        return [path]
    patterns = [os.path.join(glob.escape(path), f"*{suffix}")] if os.path.isdir(path) else _ranges(path)
    found = []
    for pattern in patterns:
        files = sorted(file for file in glob.glob(pattern.replace("{}", "*")) if os.path.isfile(file))
        if not files and len(patterns) > 1:
            raise ValueError(f"{path}: {pattern} is missing; fetch it, or name a range that is there")
        found += files
    if not found:
        raise ValueError(
            f"{path}: no {suffix} files; expected a file, a folder of them or a pattern such as 'x-*{suffix}'"
        )
    return found


def _ranges(path: str) -> list[str]:
    """The patterns that a pattern with ranges {first..last} means; numbers as wide as the first."""
    match = _RANGE.search(path)
    if match is None:
        return [path]
    first, last = match.groups()
    if not 0 <= int(last) - int(first) < _MOST_SHARDS:
        raise ValueError(f"{path}: got the range {match[0]}, expected one of 1 to {_MOST_SHARDS} rising numbers")
    head, tail = path[: match.start()], path[match.end() :]
    numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return [head + number + rest for number in numbers for rest in _ranges(tail)]


Index = dict[str, NDArray[Any]]  # a row a sample; names as one run of bytes and their ends


def _scan_all(path: str, shards: list[str]) -> Index:
    columns = _Columns()
    names = PackedStrings(name for number, shard in enumerate(shards) for name in columns.scan(number, shard))
    if not columns.labels:
        raise ValueError(f"{path}: no samples; expected members KEY.jpg (png, webp, bmp) and KEY.cls or KEY.json")
    return {
        "labels": np.frombuffer(columns.labels, np.int64),
        "shards": np.frombuffer(columns.shards, np.int32),
        "offsets": np.frombuffer(columns.offsets, np.int64),
        "sizes": np.frombuffer(columns.sizes, np.int64),
        "names": names.blob,
        "name_ends": names.ends,
    }


def _stamp(shards: list[str]) -> NDArray[np.int64]:
    """What an index depends on: names, sizes and times of the archives."""
    found = [_CACHE_VERSION, len(shards)]
    for shard in shards:
        about = os.stat(shard)
        found += [zlib.crc32(os.fsencode(os.path.basename(shard))), about.st_size, about.st_mtime_ns]
    return np.array(found, np.int64)


def _load_index(cache: str | os.PathLike[str], shards: list[str]) -> Index | None:
    """The index kept in a cache; None if there is none of these archives."""
    if not os.path.exists(cache):
        return None
    try:
        with np.load(cache, allow_pickle=False) as file:
            if not np.array_equal(file["stamp"], _stamp(shards)):
                logger.info("%s: of other archives, made anew", cache)
                return None
            return {name: file[name] for name in ("labels", "shards", "offsets", "sizes", "names", "name_ends")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("%s: cannot be read (%s), made anew", cache, error)
        return None


def _save_index(cache: str | os.PathLike[str], shards: list[str], index: Index) -> None:
    draft = f"{os.fspath(cache)}.tmp-{os.getpid()}"
    try:
        with open(draft, "wb") as file:
            np.savez(file, allow_pickle=False, **{"stamp": _stamp(shards), **index})
        os.replace(draft, cache)
    except OSError as error:
        logger.warning("%s: cannot be written (%s), the next start reads every header again", cache, error)
    finally:
        drop([], [draft])


class _Columns:
    """What the scan of archives collects, a row a sample."""

    def __init__(self) -> None:
        self.labels, self.offsets, self.sizes, self.shards = array("q"), array("q"), array("q"), array("i")

    def scan(self, number: int, path: str) -> Iterator[bytes]:
        """Yields the names of an archive's images; fills the columns on the way."""
        key: bytes | None = None
        image: tuple[bytes, int, int] | None = None
        label: int | None = None
        for name, offset, size, data in _members(path):
            file = name.rpartition(b"/")[2]
            _, dot, kind = file.partition(b".")
            suffix = os.fsdecode(dot + kind).lower()
            is_image = suffix.endswith(SUFFIXES) and not file.startswith(b".")
            if not is_image and suffix not in _LABELS:
                continue
            here = name[: len(name) - len(dot + kind)]
            if here != key:
                if key is not None:
                    yield self._add(path, key, number, image, label)
                key, image, label = here, None, None
            if is_image:
                if image is not None:
                    raise ValueError(f"{path}: {_show(key)} has two images side by side, expected one")
                image = (name, offset, size)
            else:
                found = _label(path, name, data)
                label = found if label is None or suffix == ".cls" else label
        if key is not None:
            yield self._add(path, key, number, image, label)

    def _add(
        self, path: str, key: bytes, number: int, image: tuple[bytes, int, int] | None, label: int | None
    ) -> bytes:
        if image is None or label is None:
            lacks = "image (.jpg, .png, .webp, .bmp)" if image is None else "label (.cls or .json)"
            raise ValueError(
                f"{path}: {_show(key)} has no {lacks} beside it; a sample's members must follow each other"
            )
        self.labels.append(label)
        self.shards.append(number)
        self.offsets.append(image[1])
        self.sizes.append(image[2])
        return image[0]


def _members(path: str) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Name, first byte, size and, of small ones, content of the plain files of an archive."""
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if os.pread(file.fileno(), 4, 0).startswith(_PACKED):
            raise ValueError(f"{path}: the archive is compressed, not to be read at random; unpack it to a plain .tar")
        at, long_name, long_size = 0, b"", -1
        while at + BLOCK <= length:
            block = os.pread(file.fileno(), 4 * BLOCK, at)
            header = block[:BLOCK]
            if header == bytes(BLOCK):
                if os.pread(file.fileno(), _END_BLOCKS * BLOCK, at).strip(b"\0"):
                    logger.warning(
                        "%s: %d bytes behind the archive's end at byte %d are not read; two archives in one? Part them",
                        path,
                        length - at,
                        at,
                        extra={"once": True},
                    )
                return
            size = _check_header(path, header, at)
            kind = header[156:157]
            name = header[:100].partition(b"\0")[0]
            if header[257:263] == b"ustar\0" and (prefix := header[345:500].partition(b"\0")[0]):
                name = prefix + b"/" + name
            special = kind in (b"L", b"x", b"g")
            if not special:
                name, size = long_name or name, size if long_size < 0 else long_size
                long_name, long_size = b"", -1
            first = at + BLOCK
            at = first + -(-size // BLOCK) * BLOCK
            if first + size > length:
                raise ValueError(
                    f"{path}: the file ends at byte {length}, {_show(name)} reaches to {first + size}; it is cut short"
                )
            if special:
                if size > _MOST_META:
                    raise ValueError(f"{path}: got {size} bytes of extended header at byte {first}, expected a few")
                data = os.pread(file.fileno(), size, first)
                if kind == b"L":
                    long_name = data.partition(b"\0")[0]
                elif kind == b"x":
                    table = _extended(path, data, first)
                    long_name, long_size = table.get(b"path", long_name), int(table.get(b"size", -1))
                continue
            if kind == b"5":
                continue
            _check_name(path, name, kind)
            data = block[BLOCK : BLOCK + size] if size <= 3 * BLOCK else b""
            if not data and size <= _MOST_META and name.lower().endswith((b".cls", b".json")):
                data = os.pread(file.fileno(), size, first)
            yield name, first, size, data
        if at < length:
            raise ValueError(f"{path}: the file ends at byte {length} within a header; it is cut short")
        if length:
            logger.warning("%s: the archive has no end mark; is it cut short?", path, extra={"once": True})


def _check_header(path: str, header: bytes, at: int) -> int:
    """The size that a header states. ValueError if it is none."""
    try:
        stated = int(header[148:156].strip(b"\0 ") or b"0", 8)
        field = header[124:136]
        size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else int(field.strip(b"\0 ") or b"0", 8)
    except ValueError:
        stated, size = -1, 0
    if stated != sum(header[:148]) + 8 * 32 + sum(header[156:]) or size < 0:
        raise ValueError(f"{path}: got no tar header at byte {at} (its checksum is wrong); the archive is damaged")
    return size


def _extended(path: str, data: bytes, at: int) -> dict[bytes, bytes]:
    """The lines `length key=value` of a pax header."""
    table: dict[bytes, bytes] = {}
    place = 0
    while place < len(data):
        digits, blank, _ = data[place : place + 20].partition(b" ")
        if not blank or not digits.isdigit() or int(digits) <= len(digits) + 1:
            raise ValueError(f"{path}: got no extended header at byte {at + place}; the archive is damaged")
        key, _, value = data[place + len(digits) + 1 : place + int(digits) - 1].partition(b"=")
        if key == b"size" and not value.isdigit():
            raise ValueError(f"{path}: got size {value[:20]!r} at byte {at + place}, expected a number")
        table[key] = value
        place += int(digits)
    return table


def _check_name(path: str, name: bytes, kind: bytes) -> None:
    if kind not in (b"0", b"\0", b"7"):
        what = _REFUSED.get(kind, f"of kind {kind!r}")
        raise ValueError(f"{path}: {_show(name)} is {what}, expected plain files; pack the archive again")
    if name.startswith(b"/") or b".." in name.split(b"/"):
        raise ValueError(f"{path}: {_show(name)} leads out of the archive, expected relative paths; pack it again")


def _label(path: str, name: bytes, data: bytes) -> int:
    text: Any = data.strip()
    try:
        if name.lower().endswith(b".json"):
            found = json.loads(text)
            text = found.get("label") if isinstance(found, dict) else None
            value = text if type(text) is int else None
        else:
            value = int(text) if text == b"-1" or (text.isdigit() and len(text) < 19) else None
    except (ValueError, RecursionError):  # json's for lists in lists in lists
        value = None
    if value is None or not -1 <= value < 2**63:
        got = text[:80] if isinstance(text, bytes) else text
        raise ValueError(f"{path}: got {got!r} as the label in {_show(name)}, expected a whole number from 0, or -1")
    return value


def _show(name: bytes) -> str:
    return ascii(os.fsdecode(name[:200]))[1:-1]


class TarWriter(WholeOrNothing):
    """Writes samples into a tar archive as WebDataset has them; it appears when closed, nothing after an error.

    max_bytes: begin another archive when one grows so large; `path` then holds a `{}` for its number.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        self.path, self._max_bytes = os.fspath(path), max_bytes
        if (max_bytes is not None) != ("{}" in self.path):
            raise ValueError(
                f"got {self.path} and max_bytes={max_bytes}, expected a {{}} in the path for several archives"
            )
        self._done: list[tuple[str, str]] = []  # drafts and their names
        self._tar: tarfile.TarFile | None = None
        self._keys: set[str] = set()

    def write(self, key: str, suffix: str, label: int, image: bytes) -> None:
        """Adds a sample; key: a relative path whose last part has no dot; suffix: of the image, such as ".jpg"."""
        if key in self._keys:
            raise ValueError(f"got key {key!r} twice, expected each once")
        if "." in PurePosixPath(key).name or key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"got key {key!r}, expected a relative path whose last part has no dot")
        if self._tar is not None and self._max_bytes is not None and self._tar.offset + len(image) > self._max_bytes:
            self._tar.close()
            self._tar = None
        if self._tar is None:
            target = self.path.replace("{}", f"{len(self._done):06d}")
            self._done.append((f"{target}.tmp-{os.getpid()}", target))
            self._tar = tarfile.open(self._done[-1][0], "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._keys.add(key)
        for name, data in ((key + suffix, image), (f"{key}.cls", b"%d" % label)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))

    def close(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar = None
        for draft, target in self._done:
            os.replace(draft, target)
        self._done = []

    def discard(self) -> None:
        """Drops what was written; archives of that name from before stay."""
        drop([] if self._tar is None else [self._tar.close], [draft for draft, _ in self._done])
        self._tar, self._done = None, []
