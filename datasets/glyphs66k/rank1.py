"""Rank-1 identification of characters never trained on, with each font design in turn as the gallery.

    plsc-embed runs/glyphs66k test.tar --out test.safetensors
    python datasets/glyphs66k/rank1.py test.safetensors

A gallery holds one image a character, of one design; the images of all other designs of the same characters are the
probes. Characters that a design lacks stand in neither.
"""

import argparse
from pathlib import PurePosixPath

import numpy as np

from plsc.train.export import read_embeddings
from plsc.train.metrics import rank_k


def main() -> None:
    parser = argparse.ArgumentParser(description="rank-1 with each design as the gallery")
    parser.add_argument("embeddings", help="what plsc-embed wrote of the test set")
    args = parser.parse_args()
    found = read_embeddings(args.embeddings)
    if found.names is None:
        parser.error(f"{args.embeddings} has no names; embed the .tar that prepare.py wrote, not a .rec")
    designs = np.array([PurePosixPath(name).stem.rpartition("_")[2] for name in found.names])
    print(f"{'gallery':16}{'characters':>12}{'probes':>10}{'rank-1':>10}{'rank-5':>10}")
    for design in sorted(set(designs)):
        gallery = designs == design
        probes = ~gallery & np.isin(found.labels, found.labels[gallery])
        shares = rank_k(
            found.embeddings[gallery],
            found.labels[gallery],
            found.embeddings[probes],
            found.labels[probes],
            ks=(1, 5),
        )
        print(f"{design:16}{gallery.sum():12,}{probes.sum():10,}{shares[1]:10.4f}{shares[5]:10.4f}")


if __name__ == "__main__":
    main()
