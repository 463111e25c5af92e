"""What a table's arguments are held against: errors that say what was got and what was expected."""

from collections.abc import Sequence

import numpy as np


def between(name: str, value: int, low: int, high: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, expected a whole number from {low} to {high}")
    return int(value)


def number(name: str, value: float, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a float, at least `low` (above: more than that, as a float32 too) and at most `high`."""
    numeric = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (numeric and low <= value <= high) or (above and np.float32(value) == low):
        least = "a positive number" if above and low == 0.0 else f"a number from {low:g}"
        raise ValueError(f"{name}: got {value!r}, expected {least}, at most {high:g}")
    return float(value)


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")


def flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, expected True or False")
