"""What every classifier with classes split over ranks has: the cut weight, its marks, checks, initial rows, copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plsc.comm import Communicator, Shard, mark, world
from plsc.ops import host, native
from plsc.ops.checks import checked, whole
from plsc.ops.formats import PRODUCT_DTYPES, WEIGHT_DTYPES, Rounding, is_wide, join, split
from plsc.ops.lag import LIMIT as LAG_LIMIT
from plsc.ops.lag import Lag
from plsc.ops.optim import RowOptimizer
from plsc.ops.packing import gather_batch
from plsc.ops.problem import Workspace
from plsc.ops.sampling import BLOCK, mix

IGNORE = -1  # label of a sample that takes no part in the loss
_WORK_BYTES = 8 << 20  # aim for the buffers of one block on a CPU
_GPU_WORK_BYTES = 256 << 20  # a block is some twenty launches of 5 us and more: it should be work for longer
_SALT = 0x6A09E667  # else seed 0 repeats what torch.manual_seed(0) draws for a user's own tensors
Self = TypeVar("Self", bound="ClassParallelModule")


class ClassParallelModule(nn.Module):
    """A weight [C_local, (K,) D] of which each rank holds its classes, and the state of its row optimizer."""

    weight: nn.Parameter
    num_steps: Tensor  # training forwards so far: the step of class sampling; on the host, wherever the weight is

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        comm: Communicator | None,
        sub_centers: int = 1,
        std: float = 0.01,
        sample_rate: float = 1.0,
        head_optimizer: RowOptimizer | None = None,
        weight_dtype: str = "fp32",
        seed: int = 0,
        block: int | None = None,
        cache_mb: float = 256.0,
        cache_dtype: str = "fp32",
        product_dtype: str = "auto",
    ) -> None:
        super().__init__()
        embedding_size = whole("embedding_size", embedding_size, 1)
        num_classes, sub_centers = whole("num_classes", num_classes, 1), whole("sub_centers", sub_centers, 1)
        seed = whole("seed", seed, -(2**63), 2**63 - 1)
        std = checked("std", std, 0.0, math.inf)
        sample_rate = checked("sample_rate", sample_rate, 0.0, 1.0, hint="; 1 is the exact softmax")
        block = None if block is None else whole("block", block, 1, hint="; None chooses it")
        cache_mb = checked("cache_mb", cache_mb, 0.0, math.inf, hint=" MiB")
        if comm is not None and not isinstance(comm, Communicator):
            raise ValueError(
                f"comm is a {type(comm).__name__}, expected a Communicator such as fleet.comm, or None for all ranks; "
                "plsc.comm.connect(NAME) makes one"
            )
        if head_optimizer is not None and not isinstance(head_optimizer, RowOptimizer):
            raise ValueError(
                f"head_optimizer is a {type(head_optimizer).__name__}, expected plsc.SGD, plsc.AdamW or plsc.LARS, "
                "which step rows inside the backward pass; a torch optimizer is given head.parameters() as usual"
            )
        if cache_dtype not in ("fp32", "bf16"):
            raise ValueError(f"cache_dtype is {cache_dtype!r}, expected fp32 or bf16")
        if product_dtype not in PRODUCT_DTYPES:
            raise ValueError(f"product_dtype is {product_dtype!r}, expected one of {', '.join(PRODUCT_DTYPES)}")
        if weight_dtype not in WEIGHT_DTYPES:
            raise ValueError(f"weight_dtype is {weight_dtype!r}, expected one of {', '.join(WEIGHT_DTYPES)}")
        if weight_dtype != "fp32" and head_optimizer is None:
            raise ValueError(
                f"weight_dtype {weight_dtype!r} needs a head_optimizer (plsc.SGD, ...): a torch optimizer would add to "
                "bfloat16 numbers, and what it adds is mostly too small to change them"
            )
        self.embedding_size, self.num_classes, self.sub_centers = embedding_size, num_classes, sub_centers
        self.comm = world() if comm is None else comm
        self.shard = Shard.of(num_classes, self.comm)
        self.sample_rate, self.head_optimizer, self.seed = sample_rate, head_optimizer, seed
        self.block, self.cache_mb, self.cache_dtype = block, cache_mb, cache_dtype
        self.weight_dtype, self.product_dtype = weight_dtype, product_dtype
        self.workspace = Workspace()
        self._batch_size: int | None = None  # of the last forward: equal on all ranks
        self._make_weight((sub_centers, embedding_size), std)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64, device="cpu"))
        if head_optimizer is not None:
            for name, value in head_optimizer.state(self.weight.detach()).items():
                self.register_buffer(f"row_{name}", value)
        self.lag: Lag | None = None
        if head_optimizer is not None and sample_rate < 1.0 and head_optimizer.unsampled_rows == "decayed":
            head_optimizer.idle()
            self.lag = Lag(torch.zeros(self.shard.size, dtype=torch.int32))
            self.register_state_dict_pre_hook(_before_state_dict)
        self._mark()

    def _make_weight(self, shape: tuple[int, int], std: float) -> None:
        """The initial rows, block by block into tensors of their kind; `row_low`: lower halves of a split weight."""
        size = (self.shard.size, *shape) if shape[0] > 1 else (self.shard.size, shape[1])
        high = torch.empty(size, dtype=torch.float32 if self.weight_dtype == "fp32" else torch.bfloat16)
        low = torch.empty(size, dtype=torch.int16) if self.weight_dtype == "split" else None
        for at, rows in () if high.is_meta else init_blocks(self.shard, shape, std=std, seed=self.seed):
            if low is None:
                high[at] = rows
            else:
                high[at], low[at] = split(rows)
        self.weight = nn.Parameter(high)
        if low is not None:
            self.register_buffer("row_low", low)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over this rank's samples, a scalar.

        Args:
            embeddings: [B, D] floats, B the same on all ranks; labels: [B] int64 in [0, C), or -1 to ignore a sample.
        """
        self._check_first()
        with torch.autocast(embeddings.device.type, enabled=False):  # cosines and logits are never rounded to half
            return self._loss(embeddings, labels, "sum")

    def _check_first(self) -> None:
        """A forward pass that a backward pass repeats would sample other classes and count another step."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the head runs again inside a backward pass, as under torch.utils.checkpoint; leave it outside: it "
                "keeps no [batch, classes] to save, and computes its blocks anew by itself (cache_mb)"
            )

    def losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Loss of each of this rank's samples [B], 0 where ignored; for weights a sample or other reductions."""
        self._check_first()
        with torch.autocast(embeddings.device.type, enabled=False):
            return self._loss(embeddings, labels, "none")

    def _loss(self, embeddings: Tensor, labels: Tensor, reduction: str) -> Tensor:
        """Loss of each of this rank's samples [B], or their mean as `sample_factors` has it for reduction "sum"."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """What losses are computed in, whatever the weight is kept in."""
        return self.weight.dtype if is_wide(self.weight) else torch.float32

    @property
    def half_products(self) -> bool:
        """Whether products are made of operands in bfloat16, where the weight is now."""
        if self.product_dtype == "auto":
            return self.weight_dtype != "fp32" and native.multiplies_halves(self.weight.device)
        return self.product_dtype == "bf16"

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of this rank's weight as floats: [n, (K,) D], as exact as they are kept; no gradient."""
        self.catch_up()
        kept, low = self.weight.detach()[start:stop], self.row_state().get("low")
        return kept.to(self.dtype) if low is None else join(kept, low[start:stop])

    def bytes_per_class(self) -> float:
        """Bytes a class takes between steps: its row of the weight and of the row optimizer's state."""
        kept = [self.weight, *self.row_state().values(), *([] if self.lag is None else [self.lag.touched])]
        return float(sum(math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in kept))

    def catch_up(self, rows: Tensor | None = None) -> None:
        """Takes the steps that rows [R] (None: all) have missed while they were not sampled; local, no collective.

        Happens by itself before a row is used in a loss or a search, in eval() and before a state_dict is made.
        """
        if self.lag is None:
            return
        weight, state, rounding = self.weight.data, self.row_state(), self._rounding(again=True)
        if rows is None or self.lag.clock >= LAG_LIMIT:
            self.lag.catch_up_all(weight, state, rounding)
        else:
            self.lag.catch_up(weight, state, rows, rounding)

    def train(self: Self, mode: bool = True) -> Self:
        if not mode:
            self.catch_up()
        return super().train(mode)

    def _applied(self, rows: Tensor | None) -> None:
        """Hears which rows were stepped."""
        if self.lag is not None:
            assert self.head_optimizer is not None
            self.lag.met(self.head_optimizer, rows)

    def _rounding(self, *, again: bool = False) -> Rounding | None:
        """Where the random bits of this step come from, if the weight or its state loses any; `again`: other ones."""
        lossy = (torch.bfloat16, torch.int8)
        kept = [value.dtype for value in self.row_state().values()]
        if self.weight_dtype != "bf16" and not any(dtype in lossy for dtype in kept):
            return None
        step = int(self.num_steps)
        return Rounding(self.seed, ~step if again else step, self.shard.start)

    def _gather(self, *tensors: Tensor) -> list[Tensor]:
        """All ranks' rows of these, in one collective; equal batches are checked where that is cheap."""
        gathered, self._batch_size = gather_batch(tensors, self.comm, known=self._batch_size)
        return gathered

    def row_state(self) -> dict[str, Tensor]:
        """State of `head_optimizer`, tensors whose rows are this rank's classes; "low" too of a split weight."""
        return {name[4:]: buffer for name, buffer in self.named_buffers(recurse=False) if name.startswith("row_")}

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_size} -> {self.num_classes} classes, rows [{self.shard.start}, {self.shard.stop}) "
            f"of rank {self.comm.rank} of {self.comm.world_size}, sample_rate={self.sample_rate}, "
            f"sub_centers={self.sub_centers}"
        )

    def _place(self, labels: Tensor) -> Tensor:
        """Row of each label within the shard, or -1: [N]."""
        mine = (labels >= self.shard.start) & (labels < self.shard.stop)
        return torch.where(mine, labels - self.shard.start, -1)

    def _block_for(self, num_samples: int) -> int:
        centers = self.sub_centers
        device = self.weight.device.type
        return self.block or block_rows(num_samples * centers, self.embedding_size * centers, device=device)

    def _mark(self) -> None:
        """Marks the cut tensors; again after whatever replaces them (a move, a copy)."""
        mark(self.weight, self.shard)
        for value in self.row_state().values():
            mark(value, self.shard)

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        kinds = {tensor.dtype for tensor in (self.weight, *self.row_state().values())}
        if torch.bfloat16 in kinds and any(fn(torch.empty(0, dtype=kind)).dtype != kind for kind in kinds):
            raise ValueError(
                "a head whose weight or state is kept in bfloat16 cannot change its dtype; move it with .to(device), "
                "and choose what it is kept in by weight_dtype and state_dtype"
            )
        num_steps = self.num_steps
        super()._apply(fn, recurse)
        self.num_steps = num_steps  # to read it on a GPU the host would wait
        if self.lag is not None:
            self.lag.touched = fn(self.lag.touched)
            self.lag.products = self.lag.products.to(self.lag.touched.device)
        self._mark()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:  # of the arguments that torch gives, the last are error_msgs
        """Loads into rows that have missed no step, and no numbers that are kept otherwise."""
        self.catch_up()
        kept = [*self.named_parameters(recurse=False), *((f"row_{name}", t) for name, t in self.row_state().items())]
        other = [
            f"{prefix}{name}: the state_dict has {saved.dtype}, the head {live.dtype}; make the head with the "
            "weight_dtype and state_dtype that were saved"
            for name, live in kept
            if isinstance(saved := state_dict.get(prefix + name), Tensor)
            and saved.dtype != live.dtype
            and not (is_wide(saved) and is_wide(live))
        ]
        args[-1].extend(other)
        if not other:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            self._mark()

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():  # the ranks stay shared, everything else is copied
            twin.__dict__[name] = value if name == "comm" else copy.deepcopy(value, memo)
        twin._mark()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "comm"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))
        self.comm = world()
        if (self.comm.rank, self.comm.world_size) != (self.shard.rank, self.shard.world_size):
            raise ValueError(
                f"the module was pickled on rank {self.shard.rank} of {self.shard.world_size} and read on rank "
                f"{self.comm.rank} of {self.comm.world_size}; move it between worlds with plsc.save and plsc.load"
            )
        self._mark()


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """What is saved has missed nothing: whoever loads it begins to count anew."""
    assert isinstance(module, ClassParallelModule)
    module.catch_up()


def init_blocks(shard: Shard, shape: tuple[int, int], *, std: float, seed: int) -> Iterator[tuple[slice, Tensor]]:
    """This shard's rows of a N(0, std) weight [C, K, D] ([C, D] if K is 1) in blocks; no world size changes it."""
    centers, dim = shape
    for block in range(shard.start // BLOCK, -(-shard.stop // BLOCK) if shard.size else 0):
        generator = torch.Generator().manual_seed(int(mix(int(mix(seed ^ _SALT)) + block)))
        first, last = block * BLOCK, min((block + 1) * BLOCK, shard.total)
        rows = torch.randn(last - first, centers * dim, generator=generator, device="cpu") * std
        low, high = max(first, shard.start), min(last, shard.stop)
        part = rows[low - first : high - first]
        yield slice(low - shard.start, high - shard.start), part if centers == 1 else part.view(-1, centers, dim)


def block_rows(num_samples: int, row_size: int, *, device: str = "cpu") -> int:
    """Classes of one pass: a power of two whose buffers stay near 8 MiB (GPU: 256), from 256 to 16384 (GPU: 65536)."""
    budget, most = (_WORK_BYTES, 16384) if device == "cpu" else (_GPU_WORK_BYTES, 65536)
    rows = budget // (4 * (num_samples + 2 * row_size))
    return min(max(1 << max(rows, 1).bit_length() - 1, 256), most)


def check_weight(weight: Tensor, weight_dtype: str) -> None:
    """The weight must be what it was made as, or double."""
    if not is_wide(weight) and weight_dtype == "fp32":
        raise ValueError(
            f"the classifier's weight is {weight.dtype}, expected float32 or float64: its logits must not be rounded "
            "to half precision; leave it in float32 and run the backbone under autocast, or make the head with "
            "weight_dtype 'bf16' or 'split'"
        )


def check_batch(embeddings: Tensor, labels: Tensor, weight: Tensor) -> None:
    """Shapes and dtypes of this rank's part."""
    check_embeddings(embeddings, weight.shape[-1])
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels is a {type(labels).__name__}, expected a tensor")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}, expected torch.int64 class ids; convert them with .long()")
    if labels.shape != (len(embeddings),):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, expected [{len(embeddings)}] as the embeddings")


def check_embeddings(embeddings: Tensor, embedding_size: int) -> None:
    if not isinstance(embeddings, Tensor):
        raise ValueError(f"embeddings is a {type(embeddings).__name__}, expected a tensor")
    if embeddings.dim() != 2 or embeddings.shape[1] != embedding_size:
        raise ValueError(f"embeddings have shape {tuple(embeddings.shape)}, expected [batch, {embedding_size}]")
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings are {embeddings.dtype}, expected floats")


def check_queries(embeddings: Tensor, k: int, module: ClassParallelModule) -> None:
    """What a search for the k nearest classes is given."""
    check_embeddings(embeddings, module.embedding_size)
    whole("k", k, 1, module.num_classes, hint=" = num_classes")


def check_labels(labels: Tensor, num_classes: int, comm: Communicator) -> None:
    """Labels of the global batch [N] must be class ids or -1; every rank sees the same batch and raises alike."""
    bad = (labels < IGNORE) | (labels >= num_classes)
    if not host.reads_freely(labels):  # the assertion stops the stream
        torch._assert_async(~bad.any(), f"label outside [0, {num_classes})")
        return
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        batch = len(labels) // comm.world_size
        raise ValueError(
            f"label {int(labels[at])} of sample {at % batch} on rank {at // batch} is out of range, expected 0 to "
            f"{num_classes - 1}, or -1 for a sample to ignore; num_classes must cover the data's labels"
        )


def sample_factors(labels: Tensor, comm: Communicator, dtype: torch.dtype, reduction: str) -> Tensor:
    """What each loss of the global batch is multiplied by, [N]: 0 where the sample is ignored, else 1 for "none".

    For "sum" W / (number of valid samples): then the mean over ranks of their sums is the mean over all valid samples.
    """
    valid = labels != IGNORE
    factors = valid.to(dtype)
    return factors if reduction == "none" else factors * (comm.world_size / factors.sum().clamp_min(1))
