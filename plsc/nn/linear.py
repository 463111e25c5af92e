"""A plain softmax classifier (weights and bias, no margin) whose classes are split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plsc.comm import Communicator, mark
from plsc.nn.class_parallel import (
    ClassParallelModule,
    check_batch,
    check_labels,
    check_queries,
    check_weight,
    sample_factors,
)
from plsc.ops.checks import whole
from plsc.ops.cross_entropy import sharded_cross_entropy
from plsc.ops.problem import Problem, Scoring
from plsc.ops.topk import class_topk


class ClassParallelLinear(ClassParallelModule):
    """Linear layer and softmax cross-entropy over classes split between ranks: `loss = classifier(features, labels)`.

    Logits are x @ weight.T + bias, as torch.nn.Linear with cross_entropy; the gradient law is ClassParallelHead's.

    Args:
        embedding_size: D.  num_classes: C, over all ranks.  bias: one number a class.
        std: spread of the initial weights, N(0, std); default 1 / sqrt(D).
        comm, seed, block, cache_mb: as ClassParallelHead.
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        bias: bool = True,
        comm: Communicator | None = None,
        std: float | None = None,
        seed: int = 0,
        block: int | None = None,
        cache_mb: float = 256.0,
    ) -> None:
        std = whole("embedding_size", embedding_size, 1) ** -0.5 if std is None else std
        super().__init__(embedding_size, num_classes, comm=comm, std=std, seed=seed, block=block, cache_mb=cache_mb)
        self.register_parameter("bias", nn.Parameter(torch.zeros(self.shard.size)) if bias else None)
        self.bias: nn.Parameter | None
        self._mark()

    def _loss(self, embeddings: Tensor, labels: Tensor, reduction: str) -> Tensor:
        check_weight(self.weight, self.weight_dtype)
        check_batch(embeddings, labels, self.weight)
        x, y = self._gather(embeddings, labels)  # [N, D], [N]
        check_labels(y, self.num_classes, self.comm)
        if self.training and torch.is_grad_enabled():
            self.num_steps += 1
        problem = Problem(
            comm=self.comm,
            scoring=Scoring(normalize=False, bound=torch.inf),
            x=x.to(self.weight.dtype),
            place=self._place(y),
            norms=None,
            num_classes=self.num_classes,
            grad_scale=1.0 / self.comm.world_size,
            block=self._block_for(len(x)),
            cache_bytes=int(self.cache_mb * 2**20),
            cache_half=self.cache_dtype == "bf16",
            workspace=self.workspace,
        )
        local = embeddings.to(self.weight.dtype)
        factors = sample_factors(y, self.comm, local.dtype, reduction)
        return sharded_cross_entropy(local, None, self.weight, self.bias, problem, factors=factors, reduction=reduction)

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most likely classes: logits [B, k] and global class ids [B, k]; all ranks call it with the same B."""
        check_queries(embeddings, k, self)
        x = embeddings.to(self.weight.dtype)
        return class_topk(x, self.weight, k, comm=self.comm, shard=self.shard, bias=self.bias, normalize=False)

    def _mark(self) -> None:
        super()._mark()
        bias = getattr(self, "bias", None)
        if bias is not None:
            mark(bias, self.shard)
