"""Turns some rows of Avazu's click-through challenge into a click log and a recipe for few rows.

    python datasets/avazu/prepare.py train.csv OUT [--rows 100000]
    plsc-ps train OUT/ctr.toml

.gz files are read as they are. Of the hour (YYMMDDHH) the hour of the day is kept; the row's id is left out. Added are
three pairs of fields as one, and how often a device's address, its name, and both with its model come in all rows.
"""

import argparse
import csv
import gzip
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from plsc.data.click_sets import log_bucket, write_click_set

SETTINGS = {
    "": {"epochs": 3, "batch_size": 128, "out": "runs/avazu"},
    "data": {"shuffle": 100_000},
    "model": {"factors": 4, "hidden": [16], "dropout": 0.5},
    "table": {"rule": "adagrad", "lr": 0.02, "rule_args": {"weight_decay": 0.01}},
    "dense": {"weight_decay": 1e-4},
}


NO_SITE = "85f751fd"  # what site_id says of an impression in an app
COUNTED = (("device_ip",), ("device_id",), ("device_ip", "device_model"))


def read(path: str, most: int | None) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        yield from islice(csv.DictReader(file), most)


def rows(path: str, most: int | None) -> Iterator[tuple[bool, list[str], list[str]]]:
    often: Counter[tuple[str, ...]] = Counter()
    for row in read(path, most):
        often.update((*names, *(row[name] for name in names)) for names in COUNTED)
    for row in read(path, most):
        tokens = [value[-2:] if name == "hour" else value for name, value in row.items()]
        kind = "app" if row["site_id"] == NO_SITE else "site"
        place, category = row[f"{kind}_id"], row[f"{kind}_category"]
        pairs = [f"{place} {row['C17']}", f"{place} {row['banner_pos']}", f"{category} {row['C21']}"]
        counts = [log_bucket(str(often[(*names, *(row[name] for name in names))])) for names in COUNTED]
        yield row["click"] == "1", [], [*tokens[2:], *pairs, *counts]


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
