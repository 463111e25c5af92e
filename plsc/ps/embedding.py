"""An embedding layer whose rows live in a sparse table: pulled in forward, trained by the table's rule in backward."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plsc.ps.arrays import as_keys
from plsc.ps.merging import unique_keys
from plsc.ps.rules import PythonRule, Rule
from plsc.ps.store import Store
from plsc.ps.table import Table

logger = logging.getLogger(__name__)

POOLINGS = ("sum", "mean", "none")
TOLD = 512  # bytes of what a state_dict says of the table: as many before and after a save, for shapes are compared


class _Pulled(torch.autograd.Function):
    """Rows of unique keys; their gradient, merged over repeated ids by then, is pushed when backward reaches it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, layer: "SparseEmbedding", keys: Tensor) -> Tensor:
        ctx.layer, ctx.keys = layer, keys
        return layer.table.pull(keys).to(anchor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        grad = grads[0].detach().float().cpu()  # [K, dim]
        if ctx.layer.grad_scale != 1.0:
            grad = grad / ctx.layer.grad_scale
        ctx.layer.table.push(ctx.keys, grad)
        return None, None, None


class SparseEmbedding(nn.Module):
    """nn.EmbeddingBag over a table's keys: forward(input, offsets, per_sample_weights) as there, of any vocabulary.

    input: ids (int64, int32, uint64), 1-D with offsets [B], or a list of B tensors: bags of any length -> [B, dim].
    2-D [B, L]: rows are bags -> [B, dim].
    3-D [B, S, L]: S slots of L ids -> [B, S, dim]. pooling "none": any shape -> [*shape, dim].
    ids equal to padding_key count for nothing and get no row. per_sample_weights: ids' shape, with pooling "sum" only.

    The table's rule steps rows inside backward, so only the dense weights go to an optimizer: a row steps once for each
    call of the layer that used it, so join the ids of one training step in one call. In eval(), frozen by
    requires_grad_(False) (the layer's own), and where no gradient is recorded, nothing is created or trained. Rows are
    saved by `table.save`; state_dict tells which save, and torch.save takes that, not the layer. torch.compile leaves
    the layer as it is and compiles around it.
    """

    _anchor: Tensor

    def __init__(self, table: Store, *, pooling: str = "sum", padding_key: int | None = None) -> None:
        super().__init__()
        if not all(hasattr(table, name) for name in ("pull", "dim")):  # what Served has, which is read only
            raise ValueError(f"table: got {type(table).__name__}, expected a plsc.ps.Table or what stands in its place")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: got {pooling!r}, expected one of {', '.join(POOLINGS)}")
        self.table = table
        self.pooling = pooling
        self.padding_key = None if padding_key is None else _as_signed(padding_key)
        self._frozen = False
        self.grad_scale = 1.0  # with torch.amp.GradScaler set it to scaler.get_scale() before backward
        self.register_buffer("_anchor", torch.zeros((), requires_grad=True), persistent=False)

    @property
    def embedding_dim(self) -> int:
        """As nn.Embedding calls it."""
        return self.table.dim

    @classmethod
    def from_bag(cls, bag: nn.EmbeddingBag, *, rule: str | Rule | PythonRule, lr: float) -> "SparseEmbedding":
        """A layer that starts with the weights of `bag`, under its row numbers as keys."""
        if not isinstance(bag, nn.EmbeddingBag) or bag.mode not in POOLINGS:
            raise ValueError(f"bag: got {bag}, expected an nn.EmbeddingBag with mode sum or mean")
        for name, ours in (("max_norm", None), ("scale_grad_by_freq", False), ("include_last_offset", False)):
            if getattr(bag, name) != ours:
                raise ValueError(
                    f"bag: got {name}={getattr(bag, name)}, expected {ours}: a table has no such thing; "
                    "clip by the rule's clip_norm, give offsets without their last"
                )
        table = Table(bag.embedding_dim, rule=rule, lr=lr)
        table.assign(torch.arange(bag.num_embeddings), bag.weight.detach().float().cpu())
        return cls(table, pooling=bag.mode, padding_key=bag.padding_idx)

    def forward(
        self,
        input: Tensor | Sequence[Tensor],
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling():  # here and not as a decorator, which would import the compiler for everybody
            return torch.compiler.disable(self.forward)(input, offsets, per_sample_weights)
        ids, offsets = (input, offsets) if isinstance(input, Tensor) else _joined(input, offsets)
        if ids.dtype == torch.uint64:
            ids = ids.view(torch.int64)
        elif ids.dtype == torch.int32:
            ids = ids.long()
        weights = per_sample_weights
        self._check(ids, offsets, weights)
        unique, at = _unique(ids)  # [K], ids' shape
        if self.padding_key is not None:
            counts = unique != self.padding_key
            unique = unique[counts]
            at = torch.where(counts, counts.cumsum(0) - 1, len(unique))[at]  # padding is after the last row
        rows = self._rows(unique.cpu(), ids.device)  # [K, dim]
        if self.padding_key is not None:
            rows = torch.cat([rows, rows.new_zeros(1, self.table.dim)])
        if self.pooling == "none":
            return F.embedding(at, rows)
        if ids.ndim == 1:
            return self._bags(at, rows, offsets, weights)
        flat = None if weights is None else weights.reshape(-1)
        length = ids.shape[-1]
        starts = torch.arange(0, ids.numel(), max(length, 1), device=ids.device)
        if length == 0:
            starts = torch.zeros(ids.shape[:-1].numel(), dtype=torch.int64, device=ids.device)
        return self._bags(at.reshape(-1), rows, starts, flat).reshape(*ids.shape[:-1], self.table.dim)

    def requires_grad_(self, requires_grad: bool = True) -> "SparseEmbedding":
        """False: rows are read only, as in eval(). It has no parameter, so a module around it does not reach here."""
        self._frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a SparseEmbedding cannot be copied or pickled: its rows are in a table; save its state_dict() and "
            "table.save(path), and make it anew over Table.load(path)"
        )

    def _rows(self, keys: Tensor, device: torch.device) -> Tensor:
        if self.training and not self._frozen and torch.is_grad_enabled():
            anchor = (
                self._anchor if self._anchor.device == device else self._anchor.detach().to(device).requires_grad_()
            )
            return _Pulled.apply(anchor, self, keys)
        return self.table.pull(keys, create=False).to(device)

    def _bags(self, at: Tensor, rows: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        assert offsets is not None
        if rows.shape[0] == 0:  # no ids at all: every bag is empty, though a result of rows, to go backward from
            return rows.new_zeros(len(offsets), self.table.dim) + rows.sum()
        padding = None if self.padding_key is None else rows.shape[0] - 1  # left out of sums and of means
        with torch.autocast(rows.device.type, enabled=False):
            return F.embedding_bag(
                at, rows, offsets, mode=self.pooling, per_sample_weights=weights, padding_idx=padding
            )

    def _check(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
        for name, given in (("ids", ids), ("offsets", offsets), ("per_sample_weights", weights)):
            if given is not None and (not isinstance(given, Tensor) or given.layout != torch.strided):
                what = given.layout if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(f"{name}: got a {what}, expected a dense tensor")
        if ids.dtype != torch.int64:
            raise ValueError(f"ids: got {ids.dtype}, expected int64, int32 or uint64; call .long() first")
        if self.pooling != "none":
            if not 1 <= ids.ndim <= 3:
                raise ValueError(f"ids: got {ids.ndim} dimensions, expected 1 with offsets, 2 [B, L] or 3 [B, S, L]")
            if (ids.ndim == 1) != (offsets is not None):
                raise ValueError("offsets go with ids in one dimension, and only with those, as in nn.EmbeddingBag")
            if offsets is not None:
                _check_offsets(offsets, len(ids))
        elif offsets is not None:
            raise ValueError("offsets: got some, expected none, for pooling 'none' makes no bags")
        if weights is not None and (self.pooling != "sum" or weights.shape != ids.shape):
            raise ValueError(
                f"per_sample_weights: got shape {tuple(weights.shape)} with pooling {self.pooling!r}, "
                f"expected {tuple(ids.shape)} with pooling 'sum'"
            )
        if weights is not None and weights.dtype != torch.float32:
            raise ValueError(
                f"per_sample_weights: got {weights.dtype}, expected float32 as rows are; call .float() first"
            )

    def get_extra_state(self) -> Tensor:
        """Which table this is, as the bytes of a JSON text in a tensor: checkpoints need no pickle for it."""
        rule = getattr(self.table, "rule", None)  # what only serves has none, and no save
        told = {
            "dim": self.table.dim,
            "rule": getattr(rule, "name", None),
            "save": getattr(self.table, "last_save", None),
        }
        text = json.dumps(told)
        return torch.frombuffer(bytearray(text.encode().ljust(TOLD)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        told = json.loads(bytes(state.tolist()))
        if told["dim"] != self.table.dim:
            raise ValueError(
                f"the checkpoint's table has dim {told['dim']}, got a table of dim {self.table.dim}; load its save"
            )
        save = getattr(self.table, "last_save", told["save"])
        if told["save"] != save:
            logger.warning("the checkpoint was made beside table save %s, this table is %s", told["save"], save)

    def extra_repr(self) -> str:
        return f"{self.table!r}, pooling={self.pooling!r}"


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids [K], and which of them each is, in the ids' shape."""
    if ids.device.type != "cpu":
        return torch.unique(ids, return_inverse=True)
    unique, at = unique_keys(as_keys(ids.reshape(-1)))
    return torch.from_numpy(unique.view(np.int64)), torch.from_numpy(at).view(ids.shape)


def _joined(bags: Sequence[Tensor], offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bags one after the other, and where each begins."""
    if (
        offsets is not None
        or not isinstance(bags, list | tuple)
        or not bags
        or any(not isinstance(bag, Tensor) or bag.ndim != 1 for bag in bags)
    ):
        raise ValueError(
            f"ids: got a {type(bags).__name__}, expected a tensor, or a list of one tensor in one dimension for each "
            "bag, and no offsets with it"
        )
    lengths = torch.tensor([0, *(len(bag) for bag in bags[:-1])], device=bags[0].device)
    return torch.cat(list(bags)), lengths.cumsum(0)


def _check_offsets(offsets: Tensor, count: int) -> None:
    """Where bags begin: torch reads beyond its memory where they go down, and takes any where there are no ids."""
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.ndim != 1:
        raise ValueError(f"offsets: got {offsets.dtype} {tuple(offsets.shape)}, expected int64 [B], where bags begin")
    if len(offsets) == 0 and count == 0:
        return
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] > count or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"offsets: got {offsets.tolist()[:8]}..., expected where each bag begins among {count} ids: 0 first, then "
            "never smaller than the one before"
        )


def _as_signed(key: int) -> int:
    """A key as int64 has it, bit for bit."""
    if not isinstance(key, int) or isinstance(key, bool) or not -(2**63) <= key < 2**64:
        raise ValueError(f"padding_key: got {key!r}, expected a key, a whole number of 64 bits")
    return key - 2**64 if key >= 2**63 else key
