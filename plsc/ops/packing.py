"""Several tensors of the same number of rows in one all_gather, each row as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plsc.comm import Communicator


def gather_packed(tensors: Sequence[Tensor], comm: Communicator) -> list[Tensor]:
    """All ranks' rows of each tensor, in rank order, through one collective; no gradient.

    Args:
        tensors: each [B, ...], the same B on every rank.
    Returns:
        each [B * world_size, ...] in its own dtype.
    """
    rows = len(tensors[0])
    if rows == 0:
        raise ValueError("got an empty batch, expected at least one sample on every rank")
    return _unpack(comm.all_gather(_pack(tensors)).wait(), tensors)


def gather_batch(tensors: Sequence[Tensor], comm: Communicator, *, known: int | None) -> tuple[list[Tensor], int]:
    """`gather_packed` for batches that may differ between ranks by mistake, and the size they have, B.

    known: B of the last call, the same on all ranks, or None. Beside the rows travels how many there are; a rank that
    has another number than `known` sends rows of zeros, so that messages fit. One collective; two where B has changed.
    Where B differs ValueError is raised on every rank. On a GPU, where reading the numbers would stop the host, and for
    a rank alone it is `gather_packed`.
    """
    size = len(tensors[0])
    if comm.world_size == 1 or comm.device.type != "cpu":
        return gather_packed(tensors, comm), size
    if known is None:
        return _after_check(tensors, comm, comm.all_gather(torch.tensor([size])).wait().tolist())
    packed = _pack(tensors) if size == known else torch.zeros(known, _width(tensors), dtype=torch.uint8)
    sizes = torch.full((known, 1), size, dtype=torch.int64).view(torch.uint8)
    gathered = comm.all_gather(torch.cat([sizes, packed], 1)).wait()
    found = gathered[::known, :8].contiguous().view(torch.int64).flatten().tolist()
    if any(other != known for other in found):
        return _after_check(tensors, comm, found)
    return _unpack(gathered[:, 8:], tensors), size


def _after_check(tensors: Sequence[Tensor], comm: Communicator, sizes: list[int]) -> tuple[list[Tensor], int]:
    if len(set(sizes)) > 1:
        other = next(rank for rank, size in enumerate(sizes) if size != sizes[0])
        raise ValueError(
            f"batch sizes differ between ranks: rank 0 has {sizes[0]}, rank {other} has {sizes[other]}; "
            "use drop_last or Fleet.loader"
        )
    return gather_packed(tensors, comm), sizes[0]


def _width(tensors: Sequence[Tensor]) -> int:
    """Bytes of a row of all tensors."""
    return sum(math.prod(t.shape[1:]) * t.element_size() for t in tensors)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    rows = len(tensors[0])
    return torch.cat([t.detach().reshape(rows, t[0].numel()).contiguous().view(torch.uint8) for t in tensors], 1)


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    out = []
    for tensor, part in zip(tensors, packed.split([_width([t]) for t in tensors], 1), strict=True):
        aligned = part.flatten().clone()  # a copy even of a single row: a wider dtype needs an aligned start
        out.append(aligned.view(tensor.dtype).view(len(packed), *tensor.shape[1:]))
    return out
