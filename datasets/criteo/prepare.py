"""Turns some rows of Criteo's Display Advertising Challenge into a click log and a recipe for few rows.

    python datasets/criteo/prepare.py train.txt OUT [--rows 100000]
    plsc-ps train OUT/ctr.toml

.gz files are read as they are. The 13 counts become tokens beside the 26 that there are. The full set needs no
preparing: `plsc-ps train ctr --data.kind criteo --data.train day_*.gz`.
"""

import argparse
import gzip
from collections.abc import Iterator
from itertools import islice

from plsc.data.click_sets import log_bucket, write_click_set

SETTINGS = {
    "": {"epochs": 3, "batch_size": 256, "out": "runs/criteo"},
    "data": {"shuffle": 100_000},
    "model": {"factors": 2, "hidden": [16], "dropout": 0.5},
    "table": {"rule": "adagrad", "lr": 0.01, "admit_after": 4},
}


def rows(path: str, most: int | None) -> Iterator[tuple[bool, list[str], list[str]]]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        for line in islice(file, most):
            words = line.rstrip("\n").split("\t")
            yield words[0] == "1", [], [*map(log_bucket, words[1:14]), *words[14:]]


def main() -> None:
    parser = argparse.ArgumentParser(description="rows of Criteo's challenge as a click log")
    parser.add_argument("file")
    parser.add_argument("target", help="folder for clicks.tsv and ctr.toml")
    parser.add_argument("--rows", type=int, help="so many at most")
    args = parser.parse_args()
    count, _ = write_click_set(args.target, rows(args.file, args.rows), title="Criteo", settings=SETTINGS)
    print(f"{args.target}: {count} rows; plsc-ps train {args.target}/ctr.toml")


if __name__ == "__main__":
    main()
