"""Turns some rows of Avazu's click-through challenge into a click log and a recipe for few rows.

    python datasets/avazu/prepare.py train.csv OUT [--rows 100000]
    plsc-ps train OUT/ctr.toml

.gz files are read as they are. Of the hour (YYMMDDHH) the hour of the day is kept; the row's id is left out.
"""

import argparse
import csv
import gzip
from collections.abc import Iterator
from itertools import islice

from plsc.data.click_sets import write_click_set

SETTINGS = {
    "": {"epochs": 5, "batch_size": 128, "out": "runs/avazu"},
    "data": {"shuffle": 100_000},
    "model": {"factors": 2, "hidden": [16], "dropout": 0.5},
    "table": {"rule": "adagrad", "lr": 0.02, "admit_after": 2, "rule_args": {"weight_decay": 0.01}},
    "dense": {"weight_decay": 1e-4},
}


def rows(path: str, most: int | None) -> Iterator[tuple[bool, list[str], list[str]]]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        for row in islice(csv.DictReader(file), most):
            tokens = [value[-2:] if name == "hour" else value for name, value in row.items()]
            yield row["click"] == "1", [], tokens[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description="rows of Avazu's challenge as a click log")
    parser.add_argument("file")
    parser.add_argument("target", help="folder for clicks.tsv and ctr.toml")
    parser.add_argument("--rows", type=int, help="so many at most")
    args = parser.parse_args()
    count, _ = write_click_set(args.target, rows(args.file, args.rows), title="Avazu", settings=SETTINGS)
    print(f"{args.target}: {count} rows; plsc-ps train {args.target}/ctr.toml")


if __name__ == "__main__":
    main()
