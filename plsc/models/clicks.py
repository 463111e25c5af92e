"""Models that tell how likely a click is: logistic regression, Wide & Deep, DeepFM, DCN-v2, over any sparse embedding.

All are called as model(dense, ids): dense [B, num_dense] or None where num_dense is 0, ids int64 [B, num_slots]; they
answer logits [B] for binary_cross_entropy_with_logits. `sparse` is a module that takes ids to rows [B, num_slots,
embedding_dim] and has the attribute `embedding_dim`: nn.Embedding, or plsc.ps.SparseEmbedding with pooling "none" (or
"sum", "mean" for ids [B, num_slots, L], several to a slot).
Column 0 of a row is the feature's own weight, the others are its vector: one look-up serves both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Clicks(nn.Module):
    """What the models share: the look-up, the checks, the linear part."""

    def __init__(self, sparse: nn.Module, num_slots: int, num_dense: int, least_dim: int) -> None:
        super().__init__()
        width: Any = getattr(sparse, "embedding_dim", None)
        if not isinstance(width, int) or width < least_dim:
            raise ValueError(
                f"sparse: got embedding_dim {width}, expected at least {least_dim}: a weight, then the vector"
            )
        if num_slots < 1 or num_dense < 0:
            raise ValueError(f"got num_slots={num_slots}, num_dense={num_dense}, expected at least 1 and 0")
        self.sparse = sparse
        self.num_slots = num_slots
        self.num_dense = num_dense
        self.factors = width - 1
        self.bias = nn.Parameter(torch.zeros(()))
        self.dense_weight = nn.Parameter(torch.zeros(num_dense))

    def rows(self, dense: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Dense [B, num_dense] (of width 0 for None) and rows [B, num_slots, 1 + factors]."""
        if ids.ndim not in (2, 3) or ids.shape[1] != self.num_slots:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected [B, {self.num_slots}]")
        if dense is None:
            dense = self.bias.new_zeros(len(ids), 0)
        if dense.shape != (len(ids), self.num_dense):
            raise ValueError(f"dense: got shape {tuple(dense.shape)}, expected {(len(ids), self.num_dense)}")
        rows = self.sparse(ids)
        if rows.shape != (*ids.shape[:2], 1 + self.factors):
            raise ValueError(
                f"sparse: got rows {tuple(rows.shape)}, expected {(*ids.shape[:2], 1 + self.factors)}; "
                "a SparseEmbedding needs pooling='none' here"
            )
        return dense, rows

    def linear(self, dense: Tensor, rows: Tensor) -> Tensor:
        return self.bias + dense @ self.dense_weight + rows[..., 0].sum(1)  # [B]


class LogisticRegression(_Clicks):
    """A weight for every feature; embedding_dim 1 is enough."""

    def __init__(self, sparse: nn.Module, *, num_slots: int, num_dense: int = 0) -> None:
        super().__init__(sparse, num_slots, num_dense, 1)

    def forward(self, dense: Tensor | None, ids: Tensor) -> Tensor:
        return self.linear(*self.rows(dense, ids))


class WideDeep(_Clicks):
    """Linear part plus a multilayer perceptron on all vectors (Cheng et al. 2016)."""

    def __init__(
        self,
        sparse: nn.Module,
        *,
        num_slots: int,
        num_dense: int = 0,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(sparse, num_slots, num_dense, 2)
        self.deep = perceptron(num_slots * self.factors + num_dense, hidden, dropout)

    def forward(self, dense: Tensor | None, ids: Tensor) -> Tensor:
        dense, rows = self.rows(dense, ids)
        return self.linear(dense, rows) + self.deep(torch.cat([rows[..., 1:].flatten(1), dense], 1)).squeeze(1)


class DeepFM(WideDeep):
    """Wide & Deep plus the inner products of all pairs of vectors (Guo et al. 2017). Dense fields have vectors, too."""

    def __init__(
        self,
        sparse: nn.Module,
        *,
        num_slots: int,
        num_dense: int = 0,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(sparse, num_slots=num_slots, num_dense=num_dense, hidden=hidden, dropout=dropout)
        self.dense_vectors = nn.Parameter(0.01 * torch.randn(num_dense, self.factors))

    def forward(self, dense: Tensor | None, ids: Tensor) -> Tensor:
        dense, rows = self.rows(dense, ids)
        vectors = rows[..., 1:]  # [B, S, k]
        fields = torch.cat([vectors, dense.unsqueeze(2) * self.dense_vectors], 1)  # [B, S + num_dense, k]
        # The sum over pairs is half of (square of the sum - sum of the squares).
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1)  # [B]
        deep = self.deep(torch.cat([vectors.flatten(1), dense], 1)).squeeze(1)
        return self.linear(dense, rows) + pairs + deep


class DCN(_Clicks):
    """Deep & Cross network, version 2 (Wang et al. 2021), stacked: full-rank cross layers, then a perceptron."""

    def __init__(
        self,
        sparse: nn.Module,
        *,
        num_slots: int,
        num_dense: int = 0,
        cross: int = 2,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(sparse, num_slots, num_dense, 2)
        width = num_slots * self.factors + num_dense
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(cross))
        self.deep = perceptron(width, hidden, dropout)

    def forward(self, dense: Tensor | None, ids: Tensor) -> Tensor:
        dense, rows = self.rows(dense, ids)
        x0 = torch.cat([rows[..., 1:].flatten(1), dense], 1)  # [B, width]
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        return self.linear(dense, rows) + self.deep(x).squeeze(1)


CLICK_MODELS: dict[str, Any] = {
    "logistic": LogisticRegression,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dcn": DCN,
}


def perceptron(width: int, hidden: Sequence[int], dropout: float, *, out: int = 1) -> nn.Sequential:
    """ReLU layers, then a linear one to `out` numbers."""
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
        width = units
    return nn.Sequential(*layers, nn.Linear(width, out))
