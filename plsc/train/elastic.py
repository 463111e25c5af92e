"""A run that loses ranks begins again from its newest checkpoint, with as many ranks as are left."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from plsc.train.launch import Outcome


def run_again(
    start: Callable[[int], Outcome],
    nproc: int,
    *,
    max_restarts: int,
    final_codes: Collection[int],
    newest: Callable[[], object],
    batch_parts: int,
    say: Callable[[str], None],
) -> Outcome:
    """start(nproc) and again, until it ends well or is stopped, or max_restarts are used up; how it ended at last.

    A second failure without a new checkpoint in between is taken for a lack of room on this machine: from then on there
    are fewer ranks. Never more than there are GPUs left.

    final_codes: exit codes of failures that would only come again; newest: the newest checkpoint, None where there is
    none; batch_parts: a number that the ranks must divide.
    """
    world, idle = nproc, 0
    for restart in range(1, max_restarts + 1):
        before = newest()
        outcome = start(world)
        if outcome.code == 0 or outcome.stopped or outcome.code in final_codes:
            return outcome
        idle = 0 if newest() != before else idle + 1
        world = ranks_left(world - 1 if idle > 1 else world, batch_parts)
        place = newest()
        say(
            f"{outcome.message}\nrestart {restart} of {max_restarts} on {world} rank{'s' if world > 1 else ''}, "
            f"{f'from {place}' if place else 'from the start, for there is no checkpoint yet'}"
        )
    return start(world)


def ranks_left(most: int, batch_parts: int) -> int:
    """The largest number of ranks up to `most` that the batch can be cut for, with a GPU each if there are any."""
    if torch.cuda.is_available():
        most = min(most, torch.cuda.device_count())
    return next((ranks for ranks in range(max(most, 1), 1, -1) if batch_parts % ranks == 0), 1)
