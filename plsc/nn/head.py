"""The class-parallel margin head: a cosine classifier whose classes are split over the ranks of a communicator."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plsc.comm import Communicator
from plsc.nn.class_parallel import (
    IGNORE,
    ClassParallelModule,
    check_batch,
    check_labels,
    check_queries,
    check_weight,
    sample_factors,
)
from plsc.nn.margins import ArcFace, Margin
from plsc.nn.row_store import RowStore
from plsc.ops.checks import checked
from plsc.ops.cross_entropy import sharded_cross_entropy
from plsc.ops.formats import is_wide
from plsc.ops.kernels import sample_classes
from plsc.ops.optim import RowOptimizer
from plsc.ops.problem import Problem, Scoring
from plsc.ops.topk import class_topk, split_topk

TOPK_ROWS = 4096  # of a weight in fewer bits that are turned into floats at once


class ClassParallelHead(ClassParallelModule):
    """Margin softmax over classes split between ranks; called as `loss = head(embeddings, labels)`.

    The loss is the mean over this rank's own samples (label -1 is ignored), the objective is the mean over ranks:
    with backbone gradients averaged over ranks (DDP or plsc's Reducer) every world size takes the same step.

    Args:
        embedding_size: D.  num_classes: C, over all ranks.
        margin: ArcFace(), CosFace(), ... (plsc.nn.margins).
        comm: the ranks that share the classes; default plsc.comm.world().
        sample_rate: share of the classes that take part in a training step; positives always do (partial FC).
        sub_centers: K centres a class, the nearest counts (Deng et al., ECCV 2020); weight is then [C_local, K, D].
        filter_threshold: negatives with a larger cosine count as cosine 0 (inter-class filtering of partial FC).
        head_optimizer: plsc.SGD/AdamW/LARS: updates the rows that took part inside the backward pass. The weight's
            `.grad` then stays None, and unsampled rows and their state stay untouched, or as its `unsampled` says;
            a torch optimizer over the whole weight would move them by weight decay and momentum, and read them all.
        weight_dtype: how the weight is kept, "fp32" | "split" (exact floats; products are made with their upper halves,
            bfloat16) | "bf16" (rounded at random); the last two need a head_optimizer. See also SGD's state_dtype.
        weight: None: the centres are a parameter. A store of rows (plsc.ps.Table, a table on servers): they lie there
            and its rule steps them, with sample_rate below 1; see plsc.nn.stored.StoredHead and docs/ps.md.
        seed: initial centres and class sampling depend on (seed, class id, step) alone, never on the rank.
        block: classes of one pass, by default from a memory budget.
        cache_mb: exponentials kept for the backward at most (MiB), and where steps are clipped gradients between norm
            and step; the rest is computed anew.
        cache_dtype: "fp32" | "bf16": twice as many of them, and gradients of the weight to three digits.
        product_dtype: what matrix products are made of, "fp32" | "bf16" (embeddings, weight and exponentials are
            rounded, logits and sums are not) | "auto": bf16 for a weight in "split" or "bf16" on a GPU of compute
            capability 8.0 or newer, else fp32.
    """

    over_store: ClassVar[type[ClassParallelHead]]  # which one of these is made for weight=; plsc.nn.stored says it

    def __new__(cls, *args: Any, weight: RowStore | None = None, **options: Any) -> ClassParallelHead:
        return super().__new__(cls.over_store if weight is not None and cls is ClassParallelHead else cls)

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Margin | None = None,
        comm: Communicator | None = None,
        sample_rate: float = 1.0,
        sub_centers: int = 1,
        filter_threshold: float | None = None,
        head_optimizer: RowOptimizer | None = None,
        weight: RowStore | None = None,
        weight_dtype: str = "fp32",
        seed: int = 0,
        block: int | None = None,
        cache_mb: float = 256.0,
        cache_dtype: str = "fp32",
        product_dtype: str = "auto",
    ) -> None:
        if weight is not None:
            self._check_options(head_optimizer, weight_dtype, sample_rate)
        super().__init__(
            embedding_size,
            num_classes,
            comm=comm,
            sub_centers=sub_centers,
            sample_rate=sample_rate,
            head_optimizer=head_optimizer,
            weight_dtype=weight_dtype,
            seed=seed,
            block=block,
            cache_mb=cache_mb,
            cache_dtype=cache_dtype,
            product_dtype=product_dtype,
        )
        if filter_threshold is not None:
            filter_threshold = checked("filter_threshold", filter_threshold, -1.0, 1.0, open_low=True)
        if margin is not None and not isinstance(margin, Margin):
            raise ValueError(f"margin is {margin!r}, expected a plsc.Margin such as plsc.ArcFace()")
        self.margin = ArcFace() if margin is None else margin
        self.filter_threshold = filter_threshold
        if weight is not None:
            self._attach(weight)

    def _check_options(self, head_optimizer: RowOptimizer | None, weight_dtype: str, sample_rate: float) -> None:
        """ValueError where these do not go with a store."""
        raise ValueError(
            f"{type(self).__name__} keeps its classes in memory; got weight=, expected ClassParallelHead or a "
            "subclass of plsc.nn.stored.StoredHead"
        )

    def _attach(self, store: RowStore) -> None:
        raise NotImplementedError

    def _check_inputs(self, embeddings: Tensor, labels: Tensor) -> None:
        check_weight(self.weight, self.weight_dtype)
        check_batch(embeddings, labels, self.weight)

    def _loss(self, embeddings: Tensor, labels: Tensor, reduction: str) -> Tensor:
        self._check_inputs(embeddings, labels)
        margin, dtype = self.margin, self.dtype
        differentiable = torch.is_grad_enabled()
        training = self.training and differentiable
        unit, norms = normalize(embeddings.to(dtype))
        half, kind = self.half_products, embeddings.dtype
        wire = unit.to(torch.bfloat16 if half else kind) if half or kind in (torch.float16, torch.bfloat16) else unit
        x, y, all_norms = self._gather(wire, labels, norms)  # [N, D], [N], [N]
        check_labels(y, self.num_classes, self.comm)
        rows, place = None, self._place(y)
        if training and self.sample_rate < 1.0:
            step = int(self.num_steps)
            rows, place = sample_classes(y, self.shard, rate=self.sample_rate, seed=self.seed, step=step)
        self.catch_up(rows)
        rounding = self._rounding() if differentiable else None
        if training or rounding is not None:  # each step has random bits of its own
            self.num_steps += 1
        scoring = Scoring(
            scale=margin.scale,
            target=margin.target,
            others=margin.others if margin.moves_others else None,
            bound=max(margin.bound, 1.0),
            filter_threshold=self.filter_threshold,
        )
        problem = Problem(
            comm=self.comm,
            scoring=scoring,
            x=x.to(dtype),
            place=place,
            norms=all_norms if margin.needs_norms else None,
            num_classes=self.num_classes,
            grad_scale=1.0 / self.comm.world_size,
            rows=rows,
            block=self._block_for(len(x)),
            cache_bytes=int(self.cache_mb * 2**20),
            cache_half=self.cache_dtype == "bf16",
            half=half,
            optimizer=self.head_optimizer,
            state=self.row_state(),
            rounding=rounding,
            applied=self._applied,
            observe=(lambda own: self._observe(own, y, all_norms, scoring)) if differentiable else None,
            workspace=self.workspace,
        )
        factors = sample_factors(y, self.comm, unit.dtype, reduction)
        own_norms = norms if margin.needs_norms else None
        loss = self._cross_entropy(unit, own_norms, problem, factors=factors, reduction=reduction)
        extra = margin.regularizer(norms)
        if extra is None:
            return loss
        extra = extra * factors[self.comm.rank * len(labels) :][: len(labels)]
        return loss + (extra.sum() if reduction == "sum" else extra)

    def _cross_entropy(
        self, unit: Tensor, norms: Tensor | None, problem: Problem, *, factors: Tensor, reduction: str
    ) -> Tensor:
        return sharded_cross_entropy(unit, norms, self.weight, None, problem, factors=factors, reduction=reduction)

    def _observe(self, own: Tensor | None, labels: Tensor, norms: Tensor, scoring: Scoring) -> None:
        """Lets the margin of a head in training update its statistics, from the valid samples of the global batch.

        The step's blocks are scored by the margin as it is now, when made anew later too.
        """
        margin = self.margin
        if self.training:
            own, valid = norms if own is None else own, labels != IGNORE
            if margin.takes_valid:
                margin.update(own, norms, valid)  # type: ignore[call-arg]
            elif type(margin).update is not Margin.update and bool(valid.any()):
                margin.update(own[valid], norms[valid])
        if margin.moves_others:
            scoring.others = margin.frozen().others

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest classes: cosines [B, k] and global class ids [B, k]; all ranks call it with the same B."""
        check_queries(embeddings, k, self)
        self.catch_up()
        unit, _ = normalize(embeddings.to(self.dtype))
        if is_wide(self.weight):
            return class_topk(unit, self.weight, k, comm=self.comm, shard=self.shard)
        starts = range(0, self.shard.size, TOPK_ROWS)
        blocks = (F.normalize(self.rows(at, at + TOPK_ROWS), dim=-1) for at in starts)
        return split_topk(unit, blocks, k, comm=self.comm, shard=self.shard)


def normalize(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows [B, D] and their former lengths [B]; a zero row stays zero and gets no gradient."""
    peak = embeddings.detach().abs().amax(1)
    usual = (peak > 1e-15) & (peak < 1e15)  # squares of others vanish or overflow
    shrink = torch.where(usual, 1.0, 1 / peak.clamp_min(torch.finfo(peak.dtype).tiny))
    scaled = embeddings * shrink[:, None]
    norms = torch.linalg.vector_norm(scaled, dim=1)
    return scaled / torch.where(norms > 0, norms, torch.inf)[:, None], norms / shrink
