"""Who is blamed for a verb that failed, on ranks that share a store inside one process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from plsc.comm.communicator import Call
from plsc.comm.heartbeat import Heartbeat

MEMBERS = (0, 1, 2)


@pytest.fixture
def ranks() -> Iterator[list[Heartbeat]]:
    store = dist.HashStore()
    made = [Heartbeat(store, r, world_size=3, holds_store=r == 0, holder="rank 0") for r in MEMBERS]
    for rank in made:
        rank.note("world", 7, Call("all_reduce", (2,), "float32", op="sum"))
    yield made
    for rank in reversed(made):
        rank.stop()


def test_nobody_to_blame(ranks: list[Heartbeat]) -> None:
    assert ranks[0].explain("world", MEMBERS) == "all ranks are alive and have come to the same verb"


def test_own_record_is_never_stale(ranks: list[Heartbeat]) -> None:
    """The judge's own thread may not have written since its last verb: the others' beats alone end the wait."""
    ranks[0]._write = lambda state: None  # type: ignore[method-assign]  # as if its thread were never scheduled
    for rank in ranks:
        rank.note("world", 8, Call("barrier"))
    assert ranks[0].explain("world", MEMBERS) == "all ranks are alive and have come to the same verb"


def test_behind_and_the_first_verdict_stands(ranks: list[Heartbeat]) -> None:
    for rank in (0, 2):
        ranks[rank].note("world", 8, Call("barrier"))
    ranks[1].note("world/0.0", 99, Call("barrier"))  # another group's verbs do not count
    expected = (
        "all ranks are alive; rank 1 behind, while others are at verb 8; "
        "last verb of rank 1: all_reduce sum of float32 (2,) (verb 7)"
    )
    assert ranks[0].explain("world", MEMBERS) == expected
    ranks[1].stop()
    assert ranks[0].explain("world", MEMBERS) == expected
    assert ranks[2].explain("world", MEMBERS) == f"{expected} (found by rank 0)"


def test_ended(ranks: list[Heartbeat]) -> None:
    ranks[2].stop()
    ranks[2].stop()
    assert ranks[1].explain("world", MEMBERS).startswith("rank 2 ended and took no more part; last verb of rank 2:")
