"""The k best classes of each sample, block by block: over rows of this process, or over classes split between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from plsc.comm import Communicator, Shard
from plsc.ops import kernels
from plsc.ops.launching import launcher_for
from plsc.ops.packing import gather_packed

SCORES = 16_384  # of a query that are looked through at once
GROUP = 64  # neighbours of which the greatest is taken first


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

    def blocks() -> Iterator[Tensor]:
        for start in range(0, len(weight), block):
            rows = weight[start : start + block]
            if normalize:
                norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
                rows = rows * torch.where(norm > 0, 1 / norm, 0.0)
            yield rows

    x = x.detach().to(weight.dtype)
    return split_topk(x, blocks(), k, comm=comm, shard=shard, bias=bias)


def split_topk(
    x: Tensor, blocks: Iterable[Tensor], k: int, *, comm: Communicator, shard: Shard, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`block_topk` over all ranks' blocks, for this rank's samples [B, D]; every rank calls it with the same B."""
    (queries,) = gather_packed([x], comm)  # [N, D]
    scores, classes = block_topk(queries, blocks, k, first=shard.start, bias=bias)
    batch, world = len(x), comm.world_size
    all_scores, all_classes = gather_packed([scores, classes], comm)  # [W * N, k]
    mine = slice(comm.rank * batch, (comm.rank + 1) * batch)
    merged = [
        t.view(world, len(queries), k)[:, mine].transpose(0, 1).reshape(batch, -1) for t in (all_scores, all_classes)
    ]
    return kernels.merge_topk(merged[0], merged[1], None, k=k)


def block_topk(
    queries: Tensor,
    blocks: Iterable[Tensor],
    k: int,
    *,
    first: int = 0,
    none: int = -1,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best of rows that come in blocks, numbered from `first` on.

    Args:
        queries: [N, D]; blocks: each [n, (K,) D], the best of K counts; bias: one a row, in the order they come.
    Returns:
        scores [N, k] in falling order and rows [N, k], the lower one first among equals; -inf and `none`, which is the
        number of no row, where there are fewer rows than k.
    """
    best = (
        queries.new_full((len(queries), k), -torch.inf),
        torch.full((len(queries), k), none, dtype=torch.int64, device=queries.device),
    )
    # Products small enough for the cache, and the best picked from many of them at once.
    found = queries.new_empty((len(queries), SCORES))
    filled, start = 0, first
    for rows in blocks:
        done = 0
        while done < len(rows):
            part = rows[done : done + SCORES - filled]
            into = found[:, filled : filled + len(part)]
            if part.dim() == 3:
                into.copy_((queries @ part.flatten(0, 1).T).view(len(queries), len(part), -1).amax(2))
            else:
                torch.mm(queries, part.T, out=into)
            done += len(part)
            filled += len(part)
            if filled == SCORES:
                _improve(*best, found, start, none, bias, start - first)
                start, filled = start + filled, 0
    if filled:
        _improve(*best, found[:, :filled], start, none, bias, start - first)
    return best


def _improve(scores: Tensor, ids: Tensor, found: Tensor, start: int, none: int, bias: Tensor | None, row: int) -> None:
    """Puts into the best so far [N, k] what is better among the scores found [N, n] of the rows from `start` on."""
    if bias is not None:
        found += bias[row : row + found.shape[1]]
    width, k = found.shape[1], scores.shape[1]
    if launcher_for(found.device) is not None and found.dtype != torch.float64:
        merged = kernels.merge_topk(scores, ids, found, k=k, first=start, filler=none)
        scores.copy_(merged[0])
        ids.copy_(merged[1])
        return
    group = GROUP if width % GROUP == 0 and width > 4 * GROUP * k else 1
    peaks = found.unflatten(1, (-1, group)).amax(2) if group > 1 else found  # [N, groups]
    # An equal score has a higher id than the row it would push out: only a greater one counts, or nan, to be seen.
    better = (~(peaks.amax(1) <= scores[:, -1]) | (ids[:, -1] == none)).nonzero().flatten()
    if len(better) == 0:
        return
    best, at = _first_best(found, peaks, better, min(k, width))
    both = torch.cat([scores[better], best], 1), torch.cat([ids[better], at + start], 1)
    scores[better], ids[better] = kernels.merge_topk(*both, None, k=k, filler=none)


def _first_best(found: Tensor, peaks: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each chosen row and where; of several that are equal to the last of them, the first ones.

    peaks: the greatest of each group of neighbours: the k best are in the groups with the k greatest peaks.
    """
    peaks = peaks[chosen]
    best, at = peaks.topk(k, dim=1)
    crowded = (peaks >= best[:, -1:]).sum(1) > k
    group = found.shape[1] // peaks.shape[1]
    if group > 1:
        inside = (at.unsqueeze(2) * group + torch.arange(group, device=at.device)).flatten(1)  # [n, k * group]
        members = (found if len(chosen) == len(found) else found[chosen]).gather(1, inside)
        best, where = members.topk(k, dim=1)
        at = inside.gather(1, where)
        crowded = ((peaks >= best[:, -1:]).sum(1) > k) | ((members >= best[:, -1:]).sum(1) > k)
    tied = crowded.nonzero().flatten()  # as good as the last of the k, and perhaps before it
    if len(tied):
        order = found[chosen[tied]].sort(dim=1, descending=True, stable=True)
        best[tied], at[tied] = order.values[:, :k], order.indices[:, :k]
    return best, at
