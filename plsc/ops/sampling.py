"""Which classes take part in a step: the positives and a random share of the rest (partial FC)."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from plsc.comm import Shard
from plsc.ops import host

BLOCK = 1024  # classes that share one permutation; fixed, so that a sample never depends on the world size
_HALF_BITS = 5  # a block has 10 bits of id: the Feistel network swaps halves of 5
_ROUNDS = 6
_MASK = 0xFFFFFFFF


def mix(x: Tensor | int) -> Tensor:
    """Hash of the low 32 bits of each entry (int64 in, int64 out in [0, 2**32)); a two-multiply finaliser."""
    h = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device="cpu")) & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def block_keys(seed: int, step: int, blocks: Tensor) -> Tensor:
    """One 32-bit key for each block of classes, from (seed, step, block) alone."""
    return mix(blocks ^ int(step_key(seed, step)))


def step_key(seed: int, step: int) -> Tensor:
    """A 32-bit key from (seed, step)."""
    low, high = struct.unpack("<II", struct.pack("<q", seed))
    return mix(mix(mix(low) ^ high) ^ step)


def permute(keys: Tensor, position: Tensor) -> Tensor:
    """Where the keyed permutation of [0, 1024) sends each position: a Feistel network, no table. Shapes broadcast."""
    half = (1 << _HALF_BITS) - 1
    left, right = position >> _HALF_BITS, position & half
    for turn in range(_ROUNDS):
        left, right = right, left ^ (mix(keys + (turn * 0x9E3779B9 + right * 0x85EBCA6B)) & half)
    return (left << _HALF_BITS) | right


def sample_classes(labels: Tensor, shard: Shard, *, rate: float, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The classes of this shard that take part in a step, positives always among them.

    Classes are drawn without replacement in fixed blocks of 1,024 global ids by a counter-based permutation of
    (seed, step, block), so every world size draws the same classes at a cost proportional to the sample.

    Args:
        labels: [N] int64 global class ids of the whole batch; entries outside the shard are ignored.
        rate: share of the classes to draw, in [0, 1]; the expected number is rate * num_classes, plus positives.
    Returns:
        rows: [R] sorted row numbers within the shard; and, for each label, its place in `rows` or -1: [N].
    Source: partial FC (An et al., ICCVW 2021); the permutation is a Feistel network (Luby and Rackoff 1988).
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"sample rate is {rate}, expected a share in [0, 1]")
    mine = (labels >= shard.start) & (labels < shard.stop)
    chosen = [(labels, mine), *_draw(shard, rate, seed, step, labels.device)]
    if host.reads_freely(labels):
        rows = torch.unique(torch.cat([ids[keep] for ids, keep in chosen])) - shard.start  # sorted
    else:
        marks = torch.zeros(shard.size + 1, dtype=torch.bool, device=labels.device)  # the last one: of other ranks
        for ids, keep in chosen:
            marks[torch.where(keep, ids - shard.start, shard.size)] = True
        rows = marks[:-1].nonzero().squeeze(1)  # the one wait: how many they are
    place = torch.searchsorted(rows, labels - shard.start)
    return rows, torch.where(mine, place, -1)


def _draw(shard: Shard, rate: float, seed: int, step: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Global ids from the blocks that touch this shard [blocks, m], and which of them are drawn and of this shard."""
    if shard.size == 0 or rate == 0.0:
        return []
    last = (shard.stop - 1) // BLOCK
    blocks = torch.arange(shard.start // BLOCK, last + 1, device=device)
    keys = block_keys(seed, step, blocks)
    last_size = shard.total % BLOCK
    ragged = last_size != 0 and last == shard.total // BLOCK
    full = blocks[:-1] if ragged else blocks
    drawn = [_draw_blocks(full, keys[: len(full)], BLOCK, rate)]
    if ragged:
        drawn.append(_draw_blocks(blocks[-1:], keys[-1:], last_size, rate))
    return [(ids, keep & (ids >= shard.start) & (ids < shard.stop)) for ids, keep in drawn]


def _draw_blocks(blocks: Tensor, keys: Tensor, size: int, rate: float) -> tuple[Tensor, Tensor]:
    """Ids of each block [blocks, m] and which are drawn: rate * size, rounded up or down at random by key."""
    exact = rate * size
    lottery = mix(keys ^ 0x5BD1E995).to(torch.float64) / 2.0**32
    count = torch.floor(exact + lottery).to(torch.int64).clamp_(max=size)  # [blocks]
    if size == BLOCK:
        most = min(size, math.floor(exact) + 1)
        ids = permute(keys[:, None], torch.arange(most, device=keys.device)[None])  # [blocks, most]
        keep = torch.arange(most, device=keys.device)[None] < count[:, None]
    else:  # the last block of the classes is short: walk the whole permutation and drop what lies outside
        ids = permute(keys[:, None], torch.arange(BLOCK, device=keys.device)[None])
        inside = ids < size
        keep = inside & (inside.cumsum(1) <= count[:, None])
    return ids + blocks[:, None] * BLOCK, keep
