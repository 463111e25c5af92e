"""Writes a click log and the recipe that trains on it: what the programs under datasets/ end with."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.data.click_formats import Columns
from plsc.data.embeddings import atomic_file

MISSING = ("", "-", "\\N", "?")


def write_click_set(
    folder: str | os.PathLike[str],
    rows: Iterable[tuple[bool, Sequence[str], Sequence[str]]],
    *,
    title: str,
    settings: Mapping[str, Mapping[str, Any]],
) -> tuple[int, Columns]:
    """clicks.tsv of rows (clicked, numbers, tokens) and ctr.toml, which `plsc-ps train` takes; how many, in what form.

    settings: tables of the recipe with their values, to which [data] is added; "" holds the values of no table. A fifth
    of the lines is held out, drawn by line number.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    count = num_dense = num_slots = 0
    with atomic_file(folder / "clicks.tsv") as file:
        for clicked, numbers, tokens in rows:
            if count == 0:
                num_dense, num_slots = len(numbers), len(tokens)
            if (len(numbers), len(tokens)) != (num_dense, num_slots):
                raise ValueError(
                    f"{title}, row {count + 1}: got {len(numbers)} numbers and {len(tokens)} tokens, "
                    f"expected {num_dense} and {num_slots} as in the first one"
                )
            words = ["" if word in MISSING else word.replace("\t", " ") for word in (*numbers, *tokens)]
            file.write(("\t".join(["1" if clicked else "0", *words]) + "\n").encode())
            count += 1
        if count == 0:
            raise ValueError(f"{title}: got no rows; is it the right file?")
    data = {
        "kind": "columns",
        "train": [(folder / "clicks.tsv").resolve().as_posix()],
        "delimiter": "\t",
        "dense": [f"1-{num_dense}"] if num_dense else [],
        "sparse": [f"{1 + num_dense}-{num_dense + num_slots}"],
        "test_share": 0.2,
        **settings.get("data", {}),
    }
    text = [f"# {title}: click prediction, a fifth of the lines held out.", "#", "#   plsc-ps train ctr.toml", ""]
    tables = {"": {"task": "ctr", **settings.get("", {})}, "data": data}
    for name, table in {**tables, **{k: v for k, v in settings.items() if k not in tables}}.items():
        text += [*([f"[{name}]"] if name else []), *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    (folder / "ctr.toml").write_text("\n".join(text), encoding="utf-8")
    return count, Columns(0, range(1, 1 + num_dense), range(1 + num_dense, 1 + num_dense + num_slots), delimiter="\t")


def bucket(word: str, width: float) -> str:
    """A number as a token for all within `width` of each other; what is no number stays as it is."""
    try:
        return str(int(float(word) // width))
    except ValueError:
        return word


def log_bucket(word: str) -> str:
    """A count as a token: small ones as they are, larger ones by the square of their logarithm (usual for Criteo)."""
    try:
        number = int(word)
    except ValueError:
        return word
    return str(number) if number <= 2 else f"l{int(math.log(number) ** 2)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
