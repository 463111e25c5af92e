"""Checks a label file (lines `path label`) against the files on disk and writes one that plsc-train takes.

    python datasets/plsc/prepare.py label.txt list.txt --root IMAGES

Lines whose file is missing are left out and counted; labels are made dense, from 0, in their numeric order.
"""

import argparse
import os

import numpy as np

from plsc.data import ImageList


def main() -> None:
    parser = argparse.ArgumentParser(description="a label file, checked and with dense labels")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--root", help="folder that its paths start at (default: the list's own)")
    args = parser.parse_args()
    data = ImageList(args.source, root=args.root)
    rows = [i for i in range(len(data)) if os.path.isfile(os.path.join(data.root, data.name(i)))]
    labels = data.labels[rows]
    known = np.unique(labels[labels >= 0])
    dense = np.where(labels >= 0, np.searchsorted(known, labels), -1).tolist()
    with open(args.target, "wb") as file:
        for i, label in zip(rows, dense, strict=True):
            file.write(os.fsencode(f"{os.path.abspath(os.path.join(data.root, data.name(i)))} {label}\n"))
    print(f"{args.target}: {len(rows)} images of {len(known)} classes; {len(data) - len(rows)} files are missing")


if __name__ == "__main__":
    main()
