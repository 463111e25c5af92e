"""Turns the photographs of Labeled Faces in the Wild into squares of the face, in folders plsc-train reads.

    python datasets/lfw/prepare.py lfw-deepfunneled lfw112

The photographs are 250 x 250 with the face in the middle: the middle `--crop` pixels are cut out and scaled. That is no
alignment by landmarks: see README.md.
"""

import argparse
from pathlib import Path

from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(description="middles of LFW's photographs")
    parser.add_argument("source", type=Path, help="folder of NAME/NAME_0001.jpg")
    parser.add_argument("target", type=Path)
    parser.add_argument("--crop", type=int, default=140, help="pixels of the middle to keep")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--quality", type=int, default=92, help="of the JPEGs written")
    args = parser.parse_args()
    photographs = sorted(args.source.glob("*/*.jpg"))
    if not photographs:
        parser.error(f"no NAME/NAME_0001.jpg in {args.source}; see datasets/lfw/README.md")
    for path in photographs:
        with Image.open(path) as image:
            left, top = (image.width - args.crop) // 2, (image.height - args.crop) // 2
            face = image.convert("RGB").crop((left, top, left + args.crop, top + args.crop))
        target = args.target / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        face.resize((args.image_size, args.image_size), Image.Resampling.LANCZOS).save(target, quality=args.quality)
    people = len({path.parent.name for path in photographs})
    print(f"{args.target}: {len(photographs)} images of {people} people (LFW has 13,233 of 5,749)")


if __name__ == "__main__":
    main()
