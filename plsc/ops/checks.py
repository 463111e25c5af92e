"""Checks of the numbers that users give: what was got, and what is expected."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any


def checked(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False, hint: str = ""
) -> float:
    """`value` as a float if it is finite and in [low, high], without the ends that are open; else ValueError."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if number and low <= value <= high and not (open_low and value == low) and not (open_high and value == high):
        return float(value)
    ends = "(" if open_low else "[", ")" if open_high or math.isinf(high) else "]"
    raise ValueError(f"{name} is {value!r}, expected a finite number in {ends[0]}{low:g}, {high:g}{ends[1]}{hint}")


def whole(name: str, value: Any, low: int, high: int | None = None, *, hint: str = "") -> int:
    """`value` as an int if it is a whole number, of whatever library, from low to high (None: any); else ValueError."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and low <= number and (high is None or number <= high):
        return number
    end = f"at least {low}" if high is None else f"{low} to {high}"
    raise ValueError(f"{name} is {value!r}, expected a whole number, {end}{hint}")
