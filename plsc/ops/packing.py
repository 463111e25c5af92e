"""Several tensors of the same number of rows in one all_gather, each row as bytes."""

from __future__ import annotations

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
    parts = [t.detach().reshape(rows, t[0].numel()).contiguous().view(torch.uint8) for t in tensors]
    gathered = comm.all_gather(torch.cat(parts, 1)).wait()
    out = []
    for tensor, part in zip(tensors, gathered.split([p.shape[1] for p in parts], 1), strict=True):
        aligned = part.flatten().clone()  # a copy even of a single row: a wider dtype needs an aligned start
        out.append(aligned.view(tensor.dtype).view(len(gathered), *tensor.shape[1:]))
    return out
