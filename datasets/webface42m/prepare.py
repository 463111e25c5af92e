"""Packs a tree of class folders, at any depth, into a few large files that disks read well.

    python datasets/webface42m/prepare.py WebFace42M 'webface42m-{}.tar'
    python datasets/webface42m/prepare.py WebFace42M train.rec

A class is a folder that holds images; classes are numbered by path. The target's name says what is written: .tar (with
{} in it: archives of 1 GiB), .rec or .parquet. Image bytes are kept.
"""

import argparse
import os
import sys
from array import array
from collections.abc import Iterator

import numpy as np

from plsc.data import convert
from plsc.data.decoding import decode_image
from plsc.data.files import read_file
from plsc.data.images import SUFFIXES, PackedStrings


class Tree:
    """Images below a folder; an index of a path and 16 bytes an image."""

    def __init__(self, root: str) -> None:
        self.root = root
        labels = array("q")
        self._names = PackedStrings(self._walk(labels))
        self.labels = np.frombuffer(labels, np.int64)
        if not labels:
            raise SystemExit(f"no images below {root}")
        self.num_classes = int(self.labels[-1]) + 1

    def _walk(self, labels: "array[int]") -> Iterator[bytes]:
        label = -1
        for folder, below, files in os.walk(self.root):
            below.sort()
            images = sorted(file for file in files if file.lower().endswith(SUFFIXES))
            label += bool(images)
            for file in images:
                labels.append(label)
                yield os.fsencode(os.path.relpath(os.path.join(folder, file), self.root))

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return self._names[i]

    def encoded(self, i: int) -> bytes:
        return read_file(os.path.join(self.root, self._names[i]))

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return decode_image(self.encoded(i), 112, name=self.name(i)), int(self.labels[i])


def main() -> None:
    parser = argparse.ArgumentParser(description="a tree of class folders as a few large files")
    parser.add_argument("root")
    parser.add_argument("target", help=".tar (x-{}.tar: several), .rec or .parquet")
    args = parser.parse_args()
    data = Tree(args.root)
    print(f"{len(data)} images, {data.num_classes} classes", file=sys.stderr)
    convert(data, args.target, progress=lambda done, total: print(f"\r{done}/{total}", end="", file=sys.stderr))
    print(f"\n{args.target} written")


if __name__ == "__main__":
    main()
