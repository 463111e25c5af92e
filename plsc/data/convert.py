"""Labelled images moved between folder, list, .rec, tar, Parquet and LMDB, bytes untouched; splits by identity."""

import functools
import glob
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plsc.data.images import SUFFIXES, ImageFolder, ImageList
from plsc.data.keyvalue import LMDBImages, LMDBWriter
from plsc.data.parquet import ParquetImages, ParquetWriter
from plsc.data.recordio import RecordIO
from plsc.data.records import MAGIC, RecordWriter
from plsc.data.tar import TarShards, TarWriter
from plsc.data.verification import VerificationSet
from plsc.data.writing import name_full_disk

logger = logging.getLogger(__name__)

SHARD_BYTES = 2**30  # of a tar, when several are written
_NO_FOLDERS = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".csv", ".json", ".jsonl", ".idx", ".npz", ".h5")
_MAGIC = ((b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"RIFF", ".webp"), (b"BM", ".bmp"))
_OPTIONS = {"list": ("root",), "rec": ("index", "cache"), "tar": ("cache",), "parquet": ("image", "label")}
Progress = Callable[[int, int], None]


class Encoded(Protocol):
    """A data set whose images can be had as their files hold them."""

    @property
    def labels(self) -> NDArray[np.int64]: ...

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> tuple[NDArray[np.uint8], int]: ...

    def name(self, i: int, /) -> str: ...

    def encoded(self, i: int, /) -> bytes:
        """The bytes of sample i's image."""
        ...


class Subset:
    """Some samples of another data set, with labels of their own."""

    def __init__(self, data: Encoded, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        self._data, self._rows, self.labels = data, rows, labels
        self.num_classes = int(labels.max()) + 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        return self._data[int(self._rows[i])][0], int(self.labels[i])

    def name(self, i: int) -> str:
        return self._data.name(int(self._rows[i]))

    def encoded(self, i: int) -> bytes:
        return self._data.encoded(int(self._rows[i]))


def kind_of(path: str) -> str:
    """What lies at a path, or is to: folder, list, rec, tar, parquet, lmdb or bin, by name, else by content."""
    suffix = os.path.splitext(path)[1].lower()
    by_suffix = {
        ".rec": "rec",
        ".tar": "tar",
        ".parquet": "parquet",
        ".lmdb": "lmdb",
        ".bin": "bin",
        ".txt": "list",
        ".lst": "list",
        ".tsv": "list",
    }
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "data.mdb")):
            return "lmdb"
        for name in os.listdir(path):
            if name == "train.rec" or name.endswith((".tar", ".parquet")):
                return by_suffix[os.path.splitext(name)[1]]
        return "folder"
    return by_suffix.get(suffix) or content_kind(path) or "folder"


def content_kind(path: str) -> str:
    """What a file is by its first bytes: rec, tar, parquet, lmdb, bin or (a .zip) folder; "" where they do not tell."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        head = file.read(512)
    known = ((MAGIC, 0, "rec"), (b"ustar", 257, "tar"), (b"PAR1", 0, "parquet"), (b"\xde\xc0\xef\xbe", 16, "lmdb"))
    pickled = ((b"\x80" + bytes([protocol]), 0, "bin") for protocol in range(2, 6))
    for magic, at, kind in (*known, *pickled, (b"PK\3\4", 0, "folder")):
        if head[at : at + len(magic)] == magic:
            return kind
    return ""


def open_images(
    path: str | os.PathLike[str], *, image_size: int = 112, channels: int = 3, **options: str | os.PathLike[str]
) -> Encoded:
    """The data set at a path, of whichever kind `kind_of` finds.

    options: of the kind's class, `root` of lists, `index` and `cache` of .rec, `cache` of tar, `image` and `label` of
    Parquet. ValueError for an option that it has not, and for a name that says another kind than the content.
    """
    path = os.fspath(path)
    makers: dict[str, Callable[..., Encoded]] = {
        "folder": ImageFolder,
        "list": ImageList,
        "rec": RecordIO,
        "tar": TarShards,
        "parquet": ParquetImages,
        "lmdb": LMDBImages,
        "bin": functools.partial(VerificationSet, folds=1),
    }
    kind = kind_of(path)
    if unknown := [name for name in options if name not in _OPTIONS.get(kind, ())]:
        known = ", ".join(_OPTIONS.get(kind, ())) or "none"
        raise ValueError(f"{path}: got the option {unknown[0]} for data of kind {kind!r}, expected of these: {known}")
    try:
        return makers[kind](path, image_size=image_size, channels=channels, **options)
    except ValueError as error:
        found = content_kind(path)
        if found in ("", kind):
            raise
        raise ValueError(
            f"{path}: its name says kind {kind!r}, its content {found!r}; expected a name that fits, rename it (as "
            f"{kind!r}: {error})"
        ) from error


def convert(data: Encoded, target: str | os.PathLike[str], *, progress: Progress | None = None) -> str:
    """Writes the samples at `target`; its name says how: .rec, .tar ({}: several), .parquet, .lmdb, .txt, a folder.

    Bytes, labels and order stay; so does the end FOLDER/FILE of a name where the target has names, it is no other's and
    safe in a list (else FOLDER/FOLDER_0001.jpg, with a line in the log). A list's images go to the folder of its name.
    A folder sorts by class, so
    other orders change there, with a line in the log. ValueError: something is there already, labels a folder cannot
    hold.
    """
    target = os.fspath(target)
    kind = kind_of(target)
    if kind == "bin":
        raise ValueError(f"{target}: .bin sets are only read; write .rec, .tar, .parquet, .lmdb, .txt or a folder")
    if kind == "folder" and target.lower().endswith(_NO_FOLDERS):
        raise ValueError(
            f"{target}: got no folder's name, expected one, or .rec, .tar (not compressed), .parquet, .lmdb or .txt"
        )
    check_free(target)
    if len(data) == 0:
        raise ValueError(f"nothing to write into {target}: the data set is empty")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    samples = _progressing(len(data), progress)
    if kind == "rec":
        with RecordWriter(target) as records:
            for i in samples:
                if not (image := data.encoded(i)):
                    raise ValueError(f"{data.name(i)}: got an empty image, which a .rec cannot hold; remove it")
                records.write(int(data.labels[i]), image)
            check_free(target)
    elif kind == "parquet":
        with ParquetWriter(target) as rows:
            names = _names(data, target)
            for i in samples:
                name = names[i].encode("utf-8", "backslashreplace").decode()
                rows.write(name, int(data.labels[i]), data.encoded(i))
            check_free(target)
    elif kind == "lmdb":
        names = _names(data, target)
        with LMDBWriter(target) as values:
            for i in samples:
                values.write(names[i], int(data.labels[i]), data.encoded(i))
            check_free(target)
    elif kind == "tar":
        keys = _keys(data, target)
        with TarWriter(target, max_bytes=SHARD_BYTES if "{}" in target else None) as tar:
            for i in samples:
                tar.write(*keys[i], int(data.labels[i]), data.encoded(i))
            check_free(target)
    else:
        _write_files(data, target, kind, samples)
    if kind == "folder" and not np.array_equal(np.sort(data.labels, kind="stable"), data.labels):
        logger.warning("%s: the samples are in another order than before, by class", target)
    return target


def check_free(target: str) -> None:
    """Refuses a name that is taken, at the start and again before files get theirs: another may have written it."""
    taken = [target] if "{}" not in target else glob.glob(glob.escape(target).replace("{}", "[0-9]*"))
    for path in taken:
        if os.path.lexists(path):
            raise ValueError(f"{path} exists already; remove it or give another name")


def split(
    data: Encoded, targets: Sequence[str | os.PathLike[str]], *, share: float = 0.1, seed: int = 0
) -> tuple[int, int]:
    """Writes about `share` of the classes to the second target, the others to the first; none is in both.

    Labels count from 0 in each; ignored samples (-1) go to the first. Returns how many classes each has.
    """
    if len(targets) != 2 or not 0 < share < 1:
        raise ValueError(
            f"got {len(targets)} targets and share={share}, expected two targets and a share within 0 to 1"
        )
    for name in targets:
        check_free(os.fspath(name))
    classes = np.unique(data.labels[data.labels >= 0])
    if len(classes) < 2:
        raise ValueError(f"got {len(classes)} classes with images, expected at least two to split")
    number = min(max(1, round(share * len(classes))), len(classes) - 1)
    second = np.isin(data.labels, np.random.default_rng(seed).permutation(classes)[:number])
    for target, rows in zip(targets, (np.flatnonzero(~second), np.flatnonzero(second)), strict=True):
        labels = np.asarray(data.labels)[rows]
        known = np.unique(labels[labels >= 0])
        labels = np.where(labels >= 0, np.searchsorted(known, labels), -1)
        convert(Subset(data, rows, labels.astype(np.int64)), target)
    return len(classes) - number, number


def _progressing(total: int, progress: Progress | None) -> Iterator[int]:
    for i in range(total):
        yield i
        if progress is not None and (i % 256 == 255 or i == total - 1):
            progress(i + 1, total)


def suffix_of(data: bytes) -> str:
    """What a file of these bytes is to be called: .jpg, .png, .webp, .bmp."""
    for magic, suffix in _MAGIC:
        if data.startswith(magic):
            return suffix
    return ".jpg"  # broken or unknown: found again when it is decoded


def _names(data: Encoded, target: str) -> list[str]:
    """A relative path FOLDER/FILE for each sample: the end of its own name, or another where that is unsafe or taken.

    The others stay in their folder if its name is safe, else go to one of their label's number.
    """
    names = ["/".join(PurePosixPath(data.name(i)).parts[-2:]) for i in range(len(data))]
    number_of = Counter(names)
    others = [i for i, name in enumerate(names) if number_of[name] > 1 or not _is_safe(name)]
    taken = set(names) - {names[i] for i in others}
    width = len(str(max(data.num_classes - 1, 0)))
    counts: Counter[str] = Counter()
    old = {i: names[i] for i in others if names[i].lower().endswith(SUFFIXES)}  # a .rec's name no files
    for i in others:
        label, folder = int(data.labels[i]), names[i].rpartition("/")[0]
        if i not in old or not _is_safe(f"{folder}/x{SUFFIXES[0]}"):
            folder = f"{label:0{width}d}" if label >= 0 else "ignored"
        suffix = suffix_of(data.encoded(i))
        while True:
            counts[folder] += 1
            names[i] = f"{folder}/{folder}_{counts[folder]:04d}{suffix}"
            if names[i] not in taken:
                break
    if old:
        first, name = next(iter(old.items()))
        text = "%s: %d of %d samples get other names, such as %s for %s"
        logger.warning(text, target, len(old), len(names), names[first], ascii(name))
    return names


def _is_safe(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return (
        len(parts) == 2
        and not name.startswith("/")
        and not any(part.startswith(".") or part != part.strip() for part in parts)
        and not any(character in name for character in "\n\r\t\0")  # what lists part names by
        and name.lower().endswith(SUFFIXES)
    )


def _keys(data: Encoded, target: str) -> list[tuple[str, str]]:
    """Key and suffix of each sample of a tar: a key has no dot in its last part."""
    found = []
    for name in _names(data, target):
        folder, _, file = name.rpartition("/")
        stem, suffix = os.path.splitext(file)
        found.append((f"{folder}/{stem.replace('.', '_')}", suffix))
    number_of, width = Counter(key for key, _ in found), len(str(len(found)))
    return [(f"{key}_{i:0{width}d}" if number_of[key] > 1 else key, suffix) for i, (key, suffix) in enumerate(found)]


def _write_files(data: Encoded, target: str, kind: str, samples: Iterable[int]) -> None:
    """A folder of class folders, or a list with such a folder beside it; put in place when whole."""
    root = os.path.splitext(target)[0] if kind == "list" else target
    check_free(root)
    names = _names(data, target)
    if kind == "folder" and not _sorts_as(names, data.labels):
        present = np.unique(data.labels)
        if present[0] < 0 or len(present) != data.num_classes:
            raise ValueError(
                f"{target}: {data.num_classes - int((present >= 0).sum())} of {data.num_classes} labels have no image, "
                f"{int((np.asarray(data.labels) < 0).sum())} samples are ignored (-1), which folders cannot say; write "
                "a list, .rec, .tar or .parquet"
            )
        logger.warning("%s: samples are named by their class, whose folders else sort in another order", target)
        names = _names(_Nameless(data), target)
    draft = f"{root}.tmp-{os.getpid()}"
    try:
        for i in samples:
            path = Path(draft, names[i])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.encoded(i))
        if kind == "list":
            folder = os.path.basename(root)
            lines = (f"{folder}/{name} {label}\n" for name, label in zip(names, data.labels.tolist(), strict=True))
            Path(f"{draft}.txt").write_bytes(os.fsencode("".join(lines)))
        check_free(root)
        check_free(target)
        os.rename(draft, root)
        if kind == "list":
            os.replace(f"{draft}.txt", target)
    except OSError as error:
        name_full_disk(error, target)
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        Path(f"{draft}.txt").unlink(missing_ok=True)


class _Nameless(Subset):
    """A data set whose names say nothing, so that others are made."""

    def __init__(self, data: Encoded) -> None:
        super().__init__(data, np.arange(len(data)), np.asarray(data.labels))

    def name(self, i: int) -> str:
        return ""


def _sorts_as(names: list[str], labels: NDArray[np.int64]) -> bool:
    """Whether ImageFolder would find these labels for these names."""
    folders = [name.rpartition("/")[0] for name in names]
    number = {folder: k for k, folder in enumerate(sorted(set(folders)))}
    return bool((np.array([number[folder] for folder in folders]) == labels).all())
