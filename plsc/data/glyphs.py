"""A large set of real classes without a download: the characters of font files, one image for each face.

A class is a character, or several that look alike: those whose pictures or outlines coincide in more than half of the
faces they share, and in two at least (Latin A, Greek Alpha, Cyrillic A), are one. A shape that two classes still show
in one face is left to one of them. Pictures are drawn once into a cache and read by mmap.
"""

import contextlib
import json
import logging
import os
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import features

from plsc.data.fonts import Drawn, Face, draw, find_fonts, list_faces

logger = logging.getLogger(__name__)

_VERSION = 2  # of the drawing and the cache's layout: part of the key
_CHUNK = 8192  # characters of a drawing task
_PLACEHOLDER = 64  # a shape that so many characters of a face share stands for none of them
_POOL_FROM = 200_000  # pictures from which drawing in several processes pays

_DRAWN = np.dtype([("code", "u4"), ("face", "u2"), ("picture", "u8"), ("outline", "u8")])  # a picture drawn

Progress = Callable[[int, int], None]


class Glyphs:
    """Characters of fonts as grey images uint8 [image_size, image_size, channels], ink 255 on 0; label = character.

    fonts: "matplotlib" (those it ships: about 3,000 classes in 8 faces or more), "system" (and all installed ones; CJK
    fonts give tens of thousands) or paths of font files and folders. A class needs `min_faces` images.
    split: "train", "test" (classes never in train, about `test_share` of all, chosen by seed and code point, whatever
    the fonts and min_faces) or "all". repeats: "drop" leaves out images equal to one of an earlier face of the class.
    cache: folder (else $PLSC_CACHE, else ~/.cache/plsc). The first use draws, with `workers` processes (by size),
    reporting to `progress(done, total)`; a script that asks for several needs the `if __name__ == "__main__"` guard.
    """

    def __init__(
        self,
        *,
        image_size: int = 48,
        channels: int = 1,
        fonts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "matplotlib",
        min_faces: int = 8,
        split: str = "train",
        test_share: float = 0.15,
        seed: int = 0,
        repeats: str = "keep",
        cache: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not 8 <= image_size <= 512:
            raise ValueError(f"got image_size={image_size}, expected 8 to 512")
        if channels not in (1, 3):
            raise ValueError(f"got channels={channels}, expected 1 or 3 (the grey three times)")
        if min_faces < 2:
            raise ValueError(f"got min_faces={min_faces}, expected 2 or more: a class of one image teaches nothing")
        if split not in ("train", "test", "all") or repeats not in ("keep", "drop"):
            raise ValueError(f"got {split=}, {repeats=}; expected split train, test or all and repeats keep or drop")
        if not 0 <= test_share < 1:
            raise ValueError(f"got test_share={test_share}, expected a share from 0 to below 1")
        self.image_size, self.channels = image_size, channels
        self.folder = _prepare(find_fonts(fonts), image_size, cache, workers, progress)
        info = json.loads((self.folder / "info.json").read_text(encoding="utf-8"))
        index = np.load(self.folder / "index.npy")  # [M] of (group, face, digest)
        self.face_names: list[str] = [face["name"] for face in info["faces"]]

        keep = np.ones(len(index), np.bool_)
        if repeats == "drop":
            keep[:] = False
            keep[np.unique(index[["group", "digest"]], return_index=True)[1]] = True
        chosen = np.bincount(index["group"][keep], minlength=len(info["classes"])) >= min_faces
        codes = np.array([members[0] for members in info["classes"]], np.int64)
        if split != "all":
            chosen &= (_draw_share(codes, seed) < test_share) == (split == "test")
        if not chosen.any():
            raise ValueError(
                f"no character of split {split!r} has {min_faces} images in {len(self.face_names)} faces; "
                "use a smaller min_faces or more fonts"
            )
        self._rows = np.flatnonzero(keep & chosen[index["group"]])  # [N] pictures in the cache, by class, then face
        self._faces = index["face"][self._rows]
        self.labels: NDArray[np.int64] = (np.cumsum(chosen, dtype=np.int64) - 1)[index["group"][self._rows]]
        self.codes = codes[chosen]  # [num_classes] the lowest code point of each class
        self.num_classes = len(self.codes)
        self.class_names = [_describe(info["classes"][group]) for group in np.flatnonzero(chosen).tolist()]
        self._pictures: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """Code point and face, such as "U+0041 DejaVu Sans Bold"."""
        return f"U+{self.codes[self.labels[i]]:04X} {self.face_names[self._faces[i]]}"

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        if self._pictures is None:
            self._pictures = np.load(self.folder / "pictures.npy", mmap_mode="r")
        picture = np.asarray(self._pictures[self._rows[i]])
        return np.repeat(picture[:, :, None], self.channels, axis=2), int(self.labels[i])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pictures": None}  # a worker maps the file itself


def _describe(members: Sequence[int]) -> str:
    name = f"U+{members[0]:04X} {unicodedata.name(chr(members[0]), '')}".rstrip()
    alike = " ".join(f"U+{code:04X}" for code in members[1:])
    return f"{name} (and {alike})" if alike else name


def _draw_share(codes: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each code point that depends on it and the seed only (splitmix64's mixing)."""
    x = codes.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / 2.0**53


def _prepare(
    files: Sequence[Path],
    image_size: int,
    cache: str | os.PathLike[str] | None,
    workers: int | None,
    progress: Progress | None,
) -> Path:
    """The cache folder of these fonts, drawn first if missing. Safe when several processes come at once."""
    root = Path(cache or os.environ.get("PLSC_CACHE") or "~/.cache/plsc").expanduser()
    folder = root / f"glyphs-{_key(files, image_size)}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock")) as alone:
        if folder.is_dir():  # another process drew it while this one waited
            return folder
        if alone:
            for left in root.glob(f"{folder.name}.tmp-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=root))
        try:
            _draw_all(draft, files, image_size, workers, progress)
            draft.chmod(0o755)  # mkdtemp makes it private
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else, where locks do not work, another process was first: use its
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _key(files: Sequence[Path], image_size: int) -> str:
    """Changes with whatever changes the pictures or their order."""
    versions = [_VERSION, image_size, PIL.__version__, features.version("freetype2"), unicodedata.unidata_version]
    key = sha256(json.dumps(versions).encode())
    for file in files:
        key.update(file.name.encode() + sha256(file.read_bytes()).digest())
    return key.hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Holds a file lock that ends with the process; yields False where the system or file system has none."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone


def _draw_all(
    folder: Path, files: Sequence[Path], image_size: int, workers: int | None, progress: Progress | None
) -> None:
    """Draws every character of every face, groups those that coincide and writes pictures, index and info."""
    faces = list_faces(files)
    tasks = [
        _Task(number, face, start, image_size)
        for number, face in enumerate(faces)
        for start in range(0, len(face.codes), _CHUNK)
    ]
    total = sum(len(face.codes) for face in faces)
    if workers is None:
        workers = (os.cpu_count() or 1) if total >= _POOL_FROM else 1
    logger.info("drawing %d characters of %d faces into %s", total, len(faces), folder)
    parts, done = [], 0
    with open(folder / "raw", "wb") as raw:
        for task, result in zip(tasks, _run(tasks, workers), strict=True):
            raw.write(result.pictures.tobytes())
            part = np.zeros(len(result.codes), _DRAWN)
            part["code"], part["face"] = result.codes, task.number
            part["picture"], part["outline"] = result.picture_digests, result.outline_digests
            parts.append(part)
            done += min(_CHUNK, len(task.face.codes) - task.start)
            if progress is not None:
                progress(done, total)
    drawn = np.concatenate([*parts, np.zeros(0, _DRAWN)])
    if not len(drawn):
        raise ValueError(f"none of {len(files)} font files has characters to draw; give others")
    classes, rows, groups = _group(drawn)
    index = np.zeros(len(rows), [("group", "i4"), ("face", "u2"), ("digest", "u8")])
    index["group"], index["face"], index["digest"] = groups, drawn["face"][rows], drawn["picture"][rows]
    np.save(folder / "index.npy", index)
    source = np.memmap(folder / "raw", np.uint8, "r", shape=(len(drawn), image_size, image_size))
    pictures = np.lib.format.open_memmap(folder / "pictures.npy", "w+", np.uint8, (len(rows), image_size, image_size))
    for at in range(0, len(rows), _CHUNK):
        pictures[at : at + _CHUNK] = source[rows[at : at + _CHUNK]]
    pictures.flush()
    del pictures, source
    (folder / "raw").unlink()
    names = [{key: value for key, value in asdict(face).items() if key in ("name", "index")} for face in faces]
    info = {"image_size": image_size, "faces": names, "classes": classes}
    (folder / "info.json").write_text(json.dumps(info), encoding="utf-8")


@dataclass(frozen=True)
class _Task:
    """A run of characters of one face, to draw in one go."""

    number: int
    face: Face
    start: int
    image_size: int


def _draw_task(task: _Task) -> Drawn:
    return draw(task.face, task.face.codes[task.start : task.start + _CHUNK], task.image_size)


def _run(tasks: Sequence[_Task], workers: int) -> Iterator[Drawn]:
    if workers <= 1:
        yield from map(_draw_task, tasks)
        return
    # Spawned, not forked: the caller may hold threads of a communicator or a CUDA context.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        try:
            yield from pool.map(_draw_task, tasks)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a drawing process ended; start the script under `if __name__ == '__main__':`, or give workers=1"
            ) from error


def _group(drawn: NDArray[Any]) -> tuple[list[list[int]], NDArray[np.int64], NDArray[np.int64]]:
    """Groups characters that look alike and picks one picture of a group in each face.

    Returns the code points of each group [G][...], lowest first and groups by lowest; the chosen rows of `drawn` [M],
    by group, then face; and their groups [M]. Groups of fewer than two pictures are left out.
    """
    sets = _coincidences(drawn, "picture") + _coincidences(drawn, "outline")
    alike = [rows for rows in sets if len(rows) < _PLACEHOLDER]
    usable = np.ones(len(drawn), np.bool_)
    for rows in sets:
        if len(rows) >= _PLACEHOLDER:
            usable[rows] = False
            logger.debug("left out a shape that %d characters of one face share", len(rows))
    leader = _merge(drawn, alike, usable)
    group_faces: dict[int, set[int]] = {}
    for code, face in drawn[["code", "face"]][usable].tolist():
        group_faces.setdefault(leader[code], set()).add(face)
    # A shape that two groups still show in one face belongs to the one that stands in more faces.
    for rows in alike:
        owners = {row: leader[int(drawn["code"][row])] for row in rows.tolist() if usable[row]}
        if len(set(owners.values())) > 1:
            keeper = min(set(owners.values()), key=lambda code: (-len(group_faces[code]), code))
            usable[[row for row, owner in owners.items() if owner != keeper]] = False
    rows = np.flatnonzero(usable)
    leaders = np.array([leader[code] for code in drawn["code"][rows].tolist()], np.int64)
    order = np.lexsort((drawn["code"][rows], drawn["face"][rows], leaders))
    rows, leaders = rows[order], leaders[order]
    first = np.ones(len(rows), np.bool_)  # of a group in a face: the picture of its lowest code point there
    first[1:] = (leaders[1:] != leaders[:-1]) | (drawn["face"][rows[1:]] != drawn["face"][rows[:-1]])
    rows, leaders = rows[first], leaders[first]
    kept, count = np.unique(leaders, return_counts=True)
    kept = kept[count >= 2]
    members: dict[int, list[int]] = {code: [] for code in kept.tolist()}
    for code in sorted(leader):
        if leader[code] in members:
            members[leader[code]].append(code)
    stays = np.isin(leaders, kept)
    return list(members.values()), rows[stays], np.searchsorted(kept, leaders[stays])


def _coincidences(drawn: NDArray[Any], what: str) -> list[NDArray[np.int64]]:
    """The sets of two rows or more, by ascending code, that have the same picture or outline in the same face."""
    order = np.lexsort((drawn["code"], drawn[what], drawn["face"]))
    face, digest = drawn["face"][order], drawn[what][order]
    new = np.flatnonzero((face[1:] != face[:-1]) | (digest[1:] != digest[:-1])) + 1
    return [rows for rows in np.split(order, new) if len(rows) > 1]


def _merge(drawn: NDArray[Any], alike: list[NDArray[np.int64]], usable: NDArray[np.bool_]) -> dict[int, int]:
    """The lowest code point of the group of each usable code point.

    Two join if they coincide in more than half of the faces that have both, and in two at least: once may be a slip of
    a font, and "most" lets a script's own designs differ in a few. What two joined ones join is joined (union-find).
    """
    faces: dict[int, int] = {}  # a bit for each face
    for code, face in drawn[["code", "face"]][usable].tolist():
        faces[code] = faces.get(code, 0) | 1 << face
    together: dict[tuple[int, int], int] = {}  # the faces in which two coincide
    for rows in alike:
        face = 1 << int(drawn["face"][rows[0]])
        codes = drawn["code"][rows[usable[rows]]].tolist()
        for k, a in enumerate(codes):
            for b in codes[k + 1 :]:
                together[a, b] = together.get((a, b), 0) | face
    leader = {code: code for code in faces}

    def find(code: int) -> int:
        while leader[code] != code:
            leader[code] = leader[leader[code]]
            code = leader[code]
        return code

    for (a, b), where in together.items():
        if where.bit_count() >= 2 and 2 * where.bit_count() > (faces[a] & faces[b]).bit_count():
            low, high = sorted((find(a), find(b)))
            leader[high] = low
    return {code: find(code) for code in leader}
