"""The k best classes of each sample over classes split between ranks, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from plsc.comm import Communicator, Shard
from plsc.ops.packing import gather_packed


@torch.no_grad()
def class_topk(
    x: Tensor,
    weight: Tensor,
    k: int,
    *,
    comm: Communicator,
    shard: Shard,
    bias: Tensor | None = None,
    normalize: bool = True,
    block: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Highest scores and their global class ids for this rank's samples; every rank calls it with the same B.

    Args:
        x: [B, D] embeddings (unit length when cosines are wanted); weight: [C_local, (K,) D] rows of `shard`.
    Returns:
        scores [B, k] in falling order and classes [B, k]; among equal scores the lower class id comes first.
    """
    if not 1 <= k <= shard.total:
        raise ValueError(f"k is {k}, expected 1 to num_classes = {shard.total}")
    x = x.detach()
    (queries,) = gather_packed([x.to(weight.dtype)], comm)  # [N, D]
    scores = queries.new_full((len(queries), k), -torch.inf)
    classes = torch.full((len(queries), k), shard.total, dtype=torch.int64, device=x.device)
    for start in range(0, len(weight), block):
        rows = weight[start : start + block]
        if normalize:
            norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            rows = rows * torch.where(norm > 0, 1 / norm, 0.0)
        found = queries @ rows.flatten(0, -2).T
        if rows.dim() == 3:
            found = found.view(len(queries), len(rows), -1).amax(2)
        if bias is not None:
            found += bias[start : start + block]
        ids = torch.arange(shard.start + start, shard.start + start + len(rows), device=x.device).expand_as(found)
        scores, classes = _best(torch.cat([scores, found], 1), torch.cat([classes, ids], 1), k)
    batch, world = len(x), comm.world_size
    all_scores, all_classes = gather_packed([scores, classes], comm)  # [W * N, k]
    mine = slice(comm.rank * batch, (comm.rank + 1) * batch)
    merged = [
        t.view(world, len(queries), k)[:, mine].transpose(0, 1).reshape(batch, -1) for t in (all_scores, all_classes)
    ]
    return _best(merged[0], merged[1], k)


def _best(scores: Tensor, classes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row, equal scores by rising class id."""
    scores, at = scores.topk(k, dim=1)
    classes = classes.gather(1, at)
    by_class = classes.argsort(dim=1, stable=True)
    scores, classes = scores.gather(1, by_class), classes.gather(1, by_class)
    order = scores.argsort(dim=1, descending=True, stable=True)
    return scores.gather(1, order), classes.gather(1, order)
