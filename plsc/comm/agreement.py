"""Doing something on every rank so that all succeed or all fail alike: nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from plsc.comm.communicator import Communicator

T = TypeVar("T")


class FailedTogether(RuntimeError):
    """Something failed on at least one rank; raised on every rank alike."""


def together(
    comm: Communicator, doing: str, fn: Callable[[], T], *, error: type[FailedTogether] = FailedTogether
) -> list[T]:
    """Calls fn on every rank and returns the results of all; if it failed on any, raises on every rank.

    ValueError where only ValueErrors were raised, else `error`; the message names the ranks. Results are sent as
    objects. A collective call.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = fn()
    except Exception as raised:
        failure = raised
    told = None
    if failure is not None:
        text = str(failure) if isinstance(failure, ValueError) else f"{type(failure).__name__}: {failure}"
        told = (isinstance(failure, ValueError), text)
    heard = comm.gather_objects((result, told))
    failed = {rank: told for rank, (_, told) in enumerate(heard) if told is not None}
    if not failed:
        return [result for result, _ in heard]
    texts = {text for _, text in failed.values()}
    wrong_call = all(is_value_error for is_value_error, _ in failed.values())
    if wrong_call and len(texts) == 1 and len(failed) == comm.world_size:
        raise ValueError(texts.pop()) from failure
    message = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in list(failed.items())[:4])
    message = f"could not {doing}: {message}" + (f"; and {len(failed) - 4} more" if len(failed) > 4 else "")
    raise (ValueError if wrong_call else error)(message) from failure
