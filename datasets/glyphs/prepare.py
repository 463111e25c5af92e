"""Draws the glyph data set into its cache and says what it holds.

    python datasets/glyphs/prepare.py                          # matplotlib's fonts, 48 x 48
    python datasets/glyphs/prepare.py --fonts system           # and all fonts installed on this machine
    python datasets/glyphs/prepare.py --fonts DIR FILE.ttf --image-size 112

Not needed: the first use of `plsc.data.Glyphs` draws too. Worth it for many fonts, before a run of many ranks, or on a
machine where the cache is shared.
"""

import argparse
import os
import sys

from plsc.data import Glyphs


def show(done: int, total: int) -> None:
    print(f"\r{done:,} of {total:,} characters", end="\n" if done == total else "", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="draws the glyph data set into its cache")
    parser.add_argument("--fonts", nargs="+", default=["matplotlib"], help="matplotlib, system, or files and folders")
    parser.add_argument("--image-size", type=int, default=48)
    parser.add_argument("--cache", help="folder (default: $PLSC_CACHE, else ~/.cache/plsc)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="drawing processes")
    args = parser.parse_args()
    fonts = args.fonts[0] if args.fonts in (["matplotlib"], ["system"]) else args.fonts
    print("min_faces  repeats    classes     images")
    for min_faces in (2, 4, 6, 8, 12):
        for repeats in ("keep", "drop"):
            try:
                data = Glyphs(
                    image_size=args.image_size,
                    fonts=fonts,
                    min_faces=min_faces,
                    split="all",
                    repeats=repeats,
                    cache=args.cache,
                    workers=args.workers,
                    progress=show,
                )
            except ValueError as error:
                sys.exit(str(error))
            print(f"{min_faces:9}  {repeats:7}  {data.num_classes:9,}  {len(data):9,}")
    print(f"drawn from {len(data.face_names)} faces into {data.folder}")


if __name__ == "__main__":
    main()
