"""Looks at a folder of the InsightFace project's data: what plsc-train would find in it, and the command for it.

    python datasets/insightface/prepare.py faces_emore

Nothing is converted: train.rec with train.idx and the .bin pairs are read as they are.
"""

import argparse
from pathlib import Path

from plsc.data import RecordIO, VerificationSet


def main() -> None:
    parser = argparse.ArgumentParser(description="what is in a folder of InsightFace's data")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    data = RecordIO(args.folder)
    print(f"{data.path}: {len(data)} images, {data.num_classes} classes")
    stated = args.folder / "property"
    if stated.is_file():
        lines = stated.read_text(encoding="utf-8").split()
        print(f"property says: {' '.join(lines)} (classes, height, width, then images where it says so)")
    sets = sorted(args.folder.glob("*.bin"))
    for path in sets:
        pairs = VerificationSet(path)
        print(f"{path.name}: {len(pairs.pairs)} pairs, the first image decodes to {pairs[0][0].shape}")
    test = next((path for path in sets if path.stem == "lfw"), sets[0] if sets else None)
    measure = f" --eval.kind bin --eval.path {test}" if test else " --eval.task none"
    print(f"\nplsc-train faces --data.kind rec --data.path {args.folder} --data.image-size 112{measure}")


if __name__ == "__main__":
    main()
