"""Font files on this machine, the characters they hold, and pictures of them."""

import importlib.util
import logging
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFont

logger = logging.getLogger(__name__)

SUFFIXES = (".ttf", ".otf", ".ttc", ".otc")
_SYSTEM_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "/Library/Fonts", "/System/Library/Fonts")
# Control, format, surrogate, private, unassigned, and the three kinds of blank.
_LEFT_OUT = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"))
_NOT_A_CHARACTER = "\uffff"  # no font maps it: draws the face's mark for a missing character


@dataclass(frozen=True)
class Face:
    """One face of a font file and the code points to draw from it."""

    path: str
    index: int  # within a collection (.ttc)
    name: str  # full name, such as "DejaVu Sans Bold"
    codes: tuple[int, ...]


def find_fonts(fonts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Font files, sorted by file name: those of "matplotlib", of the "system" (with matplotlib's), or of given paths.

    A path may be a file or a folder, which is searched through. ValueError if nothing is found.
    """
    if fonts == "matplotlib":
        roots = [_matplotlib_folder()]
    elif fonts == "system":
        roots = [Path(folder) for folder in _SYSTEM_FOLDERS if os.path.isdir(folder)]
        if importlib.util.find_spec("matplotlib"):
            roots.append(_matplotlib_folder())
    else:
        roots = [Path(path) for path in ([fonts] if isinstance(fonts, (str, os.PathLike)) else fonts)]
    files: list[Path] = []
    for root in roots:
        if not root.exists():
            raise ValueError(f"{root}: no such font file or folder; give 'matplotlib', 'system' or paths")
        found = [root] if root.is_file() else [path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES]
        files += sorted(found, key=lambda path: (path.name, str(path)))
    if not files:
        raise ValueError(
            f"no font files ({', '.join(SUFFIXES)}) in {', '.join(map(str, roots)) or 'the system folders'}"
        )
    return files


def list_faces(files: Sequence[Path]) -> list[Face]:
    """The faces of font files that can be drawn and that map Unicode, each full name once (the first file wins).

    Left out, with a line in the log: fonts without outlines, symbol encodings, faces whose glyph names contradict
    their map (Computer Modern puts arrows on ASCII letters) and Last Resort, which maps every code to a placeholder.
    """
    from fontTools.ttLib import TTCollection, TTFont, TTLibError

    faces: dict[str, Face] = {}
    for file in files:
        try:
            collection = file.suffix.lower() in (".ttc", ".otc")
            count = len(TTCollection(str(file), lazy=True)) if collection else 1
            for index in range(count):
                with TTFont(str(file), fontNumber=index, lazy=True) as font:
                    face = _read_face(file, index, font)
                if face is not None and face.name not in faces:
                    faces[face.name] = face
        except (TTLibError, OSError, KeyError, AssertionError) as error:
            logger.warning("%s: left out, cannot be read (%s)", file, error)
    return list(faces.values())


@dataclass(frozen=True)
class Drawn:
    """Pictures of n characters of one face. Equal pictures have equal digests, and so have equal outlines."""

    codes: NDArray[np.uint32]  # [n]
    pictures: NDArray[np.uint8]  # [n, image_size, image_size]
    picture_digests: NDArray[np.uint64]  # [n]
    outline_digests: NDArray[np.uint64]  # [n]


def draw(face: Face, codes: Sequence[int], image_size: int) -> Drawn:
    """Draws characters as grey pictures, ink 255 on 0, each centred by the box of its ink.

    The em is three quarters of the picture; what is larger than the picture is scaled down to it. Characters without
    ink and those that show the face's mark of a missing character are left out.
    """
    font = ImageFont.truetype(
        face.path, round(0.75 * image_size), index=face.index, layout_engine=ImageFont.Layout.BASIC
    )
    mark = _picture(font, _NOT_A_CHARACTER, image_size)
    outlines, outline_of_mark = _outlines(face, codes)
    kept, pictures = [], []
    for k, code in enumerate(codes):
        picture = _picture(font, chr(code), image_size)
        if picture is not None and picture != mark and outlines[k] != outline_of_mark:
            kept.append(k)
            pictures.append(picture)
    flat = np.frombuffer(b"".join(pictures), np.uint8) if pictures else np.empty(0, np.uint8)
    return Drawn(
        codes=np.array(codes, np.uint32)[kept],
        pictures=flat.reshape(-1, image_size, image_size),
        picture_digests=np.array([_digest(picture) for picture in pictures], np.uint64),
        outline_digests=np.array(outlines, np.uint64)[kept],
    )


def _outlines(face: Face, codes: Sequence[int]) -> tuple[list[int], int]:
    """A digest of the outline of each character, wherever it lies in its cell, and that of the missing mark.

    Pictures are fitted to the pixels, and by other rules for other scripts: outlines tell what they hide. In fonts of
    PostScript outlines only characters that share a glyph are found alike: reading those would take too long.
    """
    from fontTools.ttLib import TTFont

    with TTFont(face.path, fontNumber=face.index, lazy=True) as font:
        mapped, table = font.getBestCmap(), font.get("glyf")

        def outline(glyph: str) -> int:
            if table is None:
                return _digest(glyph.encode())
            points, ends, on_curve = table[glyph].getCoordinates(table)
            place = np.array(points, np.int32).reshape(-1, 2)
            place -= place.min(axis=0, initial=2**15)
            return _digest(place.tobytes() + bytes(on_curve) + str(list(ends)).encode())

        return [outline(mapped[code]) for code in codes], outline(font.getGlyphOrder()[0])


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _matplotlib_folder() -> Path:
    """Where matplotlib keeps its fonts, found without importing it (Debian keeps them elsewhere: then it is asked)."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ValueError("fonts='matplotlib' needs matplotlib installed; install it or give paths of font files")
    folder = Path(spec.origin).parent / "mpl-data"
    if not folder.is_dir():
        from matplotlib import get_data_path

        folder = Path(get_data_path())
    return folder / "fonts" / "ttf"


def _read_face(file: Path, index: int, font: Any) -> Face | None:
    name = font["name"].getDebugName(4) or f"{file.stem} {index}"
    mapped: dict[int, str] | None = font.getBestCmap() if "cmap" in font else None
    if not mapped or not {"glyf", "CFF ", "CFF2"} & set(font.keys()):
        logger.debug("%s: %s left out, no outlines or no Unicode map", file, name)
        return None
    if name.startswith("Last Resort") or _contradicts(mapped):
        logger.debug("%s: %s left out, its map does not follow Unicode", file, name)
        return None
    empty = font.getGlyphOrder()[0]  # glyph 0 marks a missing character
    codes = sorted(code for code, glyph in mapped.items() if glyph != empty)
    return Face(str(file), index, name, tuple(c for c in codes if unicodedata.category(chr(c)) not in _LEFT_OUT))


def _contradicts(mapped: dict[int, str]) -> bool:
    """Whether more than one in a hundred glyph names say another character than the one they are mapped from."""
    from fontTools import agl

    wrong = 0
    for code, glyph in mapped.items():
        said = agl.toUnicode(glyph)  # "" for a name that says nothing
        if said and said != chr(code) and unicodedata.category(chr(code)) != "Co":
            wrong += unicodedata.normalize("NFKC", said) != unicodedata.normalize("NFKC", chr(code))
    return 100 * wrong > len(mapped)


def _picture(font: ImageFont.FreeTypeFont, text: str, image_size: int) -> bytes | None:
    """The bytes of a picture, or None if there is no ink."""
    core = font.getmask(text, mode="L")
    if 0 in core.size:
        return None
    ink = Image.frombytes("L", core.size, bytes(core))
    box = ink.getbbox()
    if box is None:
        return None
    ink = ink.crop(box)
    if max(ink.size) > image_size:
        share = image_size / max(ink.size)
        size = (max(1, round(ink.width * share)), max(1, round(ink.height * share)))
        ink = ink.resize(size, Image.Resampling.BOX)
    picture = Image.new("L", (image_size, image_size))
    picture.paste(ink, ((image_size - ink.width) // 2, (image_size - ink.height) // 2))
    return picture.tobytes()
