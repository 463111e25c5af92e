"""Turns the Adult census file into a log of who earns more than 50,000 a year, and a recipe.

    python datasets/adult/prepare.py adult.data OUT
    plsc-ps train OUT/ctr.toml

.gz files are read as they are. The six numbers are given as numbers and, but for the sampling weight, as buckets.
"""

import argparse
import gzip
from collections.abc import Iterator

from plsc.data.click_sets import bucket, log_bucket, write_click_set

AGE, EDUCATION, GAIN, LOSS, HOURS = 0, 4, 10, 11, 12
NUMBERS = [AGE, 2, EDUCATION, GAIN, LOSS, HOURS]
SETTINGS = {
    "": {"epochs": 6, "batch_size": 256, "out": "runs/adult"},
    "data": {"shuffle": 50_000},
    "model": {"factors": 4, "hidden": [64, 32], "dropout": 0.1},
    "table": {"rule": "adagrad", "lr": 0.02},
}


def rows(path: str) -> Iterator[tuple[bool, list[str], list[str]]]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        for line in file:
            words = [word.strip() for word in line.rstrip(".\n").split(",")]
            if len(words) != 15:
                continue  # an empty last line, the remark on top of adult.test
            tokens = [words[i] for i in range(14) if i not in NUMBERS]
            tokens += [bucket(words[AGE], 5), words[EDUCATION], bucket(words[HOURS], 5)]
            tokens += [log_bucket(words[GAIN]), log_bucket(words[LOSS])]
            yield words[14] == ">50K", [words[i] for i in NUMBERS], tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="the Adult census file as a log")
    parser.add_argument("file")
    parser.add_argument("target", help="folder for clicks.tsv and ctr.toml")
    args = parser.parse_args()
    count, _ = write_click_set(args.target, rows(args.file), title="Adult", settings=SETTINGS)
    print(f"{args.target}: {count} rows; plsc-ps train {args.target}/ctr.toml")


if __name__ == "__main__":
    main()
