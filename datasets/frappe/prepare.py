"""Turns libfm files of Frappe into a click log and a recipe.

    python datasets/frappe/prepare.py frappe.validation.libfm OUT
    plsc-ps train OUT/ctr.toml

.gz files are read as they are. The ten fields stand in one order in every line: user, app, and the context.
"""

import argparse
import gzip
from collections.abc import Iterator

from plsc.data.click_sets import write_click_set

SETTINGS = {
    "": {"epochs": 10, "batch_size": 512, "out": "runs/frappe"},
    "data": {"group": 0, "shuffle": 100_000},  # within users
    "model": {"factors": 16, "hidden": [256, 128], "dropout": 0.2},
    "table": {"rule": "adagrad", "lr": 0.05},
}


def rows(paths: list[str]) -> Iterator[tuple[bool, list[str], list[str]]]:
    for path in paths:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
            for line in file:
                label, *features = line.split()
                yield label == "1", [], [feature.partition(":")[0] for feature in features]


def main() -> None:
    parser = argparse.ArgumentParser(description="Frappe's libfm files as a click log")
    parser.add_argument("files", nargs="+")
    parser.add_argument("target", help="folder for clicks.tsv and ctr.toml")
    args = parser.parse_args()
    count, _ = write_click_set(args.target, rows(args.files), title="Frappe", settings=SETTINGS)
    print(f"{args.target}: {count} rows; plsc-ps train {args.target}/ctr.toml")


if __name__ == "__main__":
    main()
