"""Turns glyphs48 (66,358 characters, one image a font design) into a training set and characters never trained on.

    python datasets/glyphs66k/prepare.py glyphs48 train.rec test.rec

The first argument is the folder of glyphs48.json and glyphs48_train_{img,cp,design}.npy.xz; the others' names say what
is written: a folder, list (.txt), .rec, .tar or .parquet. Held-out characters are drawn among those that the gallery
design has; of each, the image of that design comes first, which is what the identification of `plsc-eval` takes as
gallery. The images of the other designs are its probes.
"""

import argparse
import io
import json
import lzma
from pathlib import Path

import numpy as np
from PIL import Image

from plsc.data import convert
from plsc.data.decoding import decode_image


class Glyphs48:
    """Rows of the arrays as PNG files of one bit a pixel, white ink on black, named CODE/CODE_DESIGN.png."""

    def __init__(
        self, images: np.ndarray, codes: np.ndarray, designs: np.ndarray, rows: np.ndarray, names: list[str]
    ) -> None:
        self._images, self._codes, self._designs, self._rows = images, codes, designs, rows
        self._names = names
        known, labels = np.unique(codes[rows], return_inverse=True)
        self.labels = labels.astype(np.int64)
        self.num_classes = len(known)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, i: int) -> str:
        row = self._rows[i]
        code = f"U+{self._codes[row]:05X}"
        return f"{code}/{code}_{self._names[self._designs[row]]}.png"

    def encoded(self, i: int) -> bytes:
        pixels = np.unpackbits(self._images[self._rows[i]]).reshape(48, 48)
        file = io.BytesIO()
        Image.fromarray(pixels * np.uint8(255)).convert("1").save(file, "PNG")
        return file.getvalue()

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return decode_image(self.encoded(i), 48, 1, name=self.name(i)), int(self.labels[i])


def read(path: Path) -> np.ndarray:
    with lzma.open(path) as file:
        return np.load(io.BytesIO(file.read()), allow_pickle=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="glyphs48 as a training set and a set of characters never trained on")
    parser.add_argument("source", type=Path, help="folder of glyphs48.json and its arrays")
    parser.add_argument("train", help="what to write: folder, .txt, .rec, .tar or .parquet")
    parser.add_argument("test")
    parser.add_argument("--held-out", type=int, default=3500, help="characters kept for the test")
    parser.add_argument("--gallery", default="NotoSansCJK", help="the design of the gallery")
    parser.add_argument("--seed", type=int, default=0, help="which characters are held out")
    args = parser.parse_args()
    info = json.loads((args.source / "glyphs48.json").read_text(encoding="utf-8"))
    names = [name for name, _ in info["designs"]]
    if args.gallery not in names:
        parser.error(f"got --gallery {args.gallery}, expected one of {', '.join(names)}")
    images, codes, designs = (read(args.source / f"glyphs48_train_{what}.npy.xz") for what in ("img", "cp", "design"))
    first = designs == names.index(args.gallery)
    candidates = np.unique(codes[first])
    if not 0 < args.held_out < len(candidates):
        parser.error(f"got --held-out {args.held_out}, expected 1 to {len(candidates) - 1}")
    held = np.random.default_rng(args.seed).permutation(candidates)[: args.held_out]
    order = np.lexsort((designs, ~first, codes))  # by character, the gallery's design first
    is_held = np.isin(codes[order], held)
    for target, rows in ((args.train, order[~is_held]), (args.test, order[is_held])):
        data = Glyphs48(images, codes, designs, rows, names)
        convert(data, target)
        print(f"{target}: {len(data)} images of {data.num_classes} characters")


if __name__ == "__main__":
    main()
