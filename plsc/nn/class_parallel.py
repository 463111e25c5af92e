"""What every classifier with classes split over ranks has: the cut weight, its marks, checks, initial rows, copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plsc.comm import Communicator, Shard, mark, world
from plsc.ops.cross_entropy import Workspace
from plsc.ops.optim import RowOptimizer
from plsc.ops.sampling import BLOCK, mix

IGNORE = -1  # label of a sample that takes no part in the loss
_WORK_BYTES = 32 << 20  # aim for the buffers of one block
Self = TypeVar("Self", bound="ClassParallelModule")


class ClassParallelModule(nn.Module):
    """A weight [C_local, (K,) D] of which each rank holds its classes, and the state of its row optimizer."""

    weight: nn.Parameter
    num_steps: Tensor  # training forwards so far: the step of class sampling

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
        seed: int = 0,
        block: int | None = None,
        cache_mb: float = 256.0,
    ) -> None:
        super().__init__()
        counts = {"embedding_size": embedding_size, "num_classes": num_classes, "sub_centers": sub_centers}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}, expected at least 1")
        if not 0.0 <= sample_rate <= 1.0:
            raise ValueError(f"sample_rate is {sample_rate}, expected a share in [0, 1]; 1 is the exact softmax")
        if block is not None and block < 1:
            raise ValueError(f"block is {block}, expected at least 1 class, or None to choose it")
        if not cache_mb >= 0.0:
            raise ValueError(f"cache_mb is {cache_mb}, expected at least 0 MiB")
        self.embedding_size, self.num_classes, self.sub_centers = embedding_size, num_classes, sub_centers
        self.comm = world() if comm is None else comm
        self.shard = Shard.of(num_classes, self.comm)
        self.sample_rate, self.head_optimizer, self.seed = sample_rate, head_optimizer, seed
        self.block, self.cache_mb = block, cache_mb
        self.workspace = Workspace()
        self.weight = nn.Parameter(init_rows(self.shard, (sub_centers, embedding_size), std=std, seed=seed))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        if head_optimizer is not None:
            for name, value in head_optimizer.state(self.weight.detach()).items():
                self.register_buffer(f"row_{name}", value)
        self._mark()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over this rank's samples, a scalar.

        Args:
            embeddings: [B, D] floats, B the same on all ranks; labels: [B] int64 in [0, C), or -1 to ignore a sample.
        """
        with torch.autocast(embeddings.device.type, enabled=False):  # cosines and logits are never rounded to half
            losses, everyone = self._losses(embeddings, labels)
        return mean_over_valid(losses, everyone, self.comm)

    def losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Loss of each of this rank's samples [B], 0 where ignored; for weights a sample or other reductions."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return self._losses(embeddings, labels)[0]

    def _losses(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of this rank's samples [B] and the labels of all ranks [N]."""
        raise NotImplementedError

    def row_state(self) -> dict[str, Tensor]:
        """State of `head_optimizer`, tensors whose rows are this rank's classes."""
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
        return self.block or block_rows(
            num_samples * centers, self.embedding_size * centers, self.weight.element_size()
        )

    def _mark(self) -> None:
        """Marks the cut tensors; again after whatever replaces them (a move, a copy)."""
        mark(self.weight, self.shard)
        for value in self.row_state().values():
            mark(value, self.shard)

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark()
        return self

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


def init_rows(shard: Shard, shape: tuple[int, int], *, std: float, seed: int) -> Tensor:
    """This shard's rows of a N(0, std) weight [C, K, D] ([C, D] if K is 1), the same whatever the world size."""
    centers, dim = shape
    weight = torch.empty(shard.size, centers * dim)
    for block in range(shard.start // BLOCK, -(-shard.stop // BLOCK) if shard.size else 0):
        generator = torch.Generator().manual_seed(int(mix(int(mix(seed)) + block)))
        first, last = block * BLOCK, min((block + 1) * BLOCK, shard.total)
        rows = torch.randn(last - first, centers * dim, generator=generator)
        low, high = max(first, shard.start), min(last, shard.stop)
        weight[low - shard.start : high - shard.start] = rows[low - first : high - first]
    weight *= std
    return weight if centers == 1 else weight.view(shard.size, centers, dim)


def block_rows(num_samples: int, row_size: int, element_size: int) -> int:
    """Classes of one pass so that its buffers stay near 32 MiB: a power of two in [256, 16384]."""
    rows = _WORK_BYTES // (element_size * (num_samples + 2 * row_size))
    return min(max(1 << max(rows, 1).bit_length() - 1, 256), 16384)


def check_batch(embeddings: Tensor, labels: Tensor, weight: Tensor, comm: Communicator) -> None:
    """Shapes, dtypes and, where it is cheap (CPU), the batch size of all ranks."""
    embedding_size = weight.shape[-1]
    if weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"the classifier's weight is {weight.dtype}, expected float32 or float64: its logits must not be rounded "
            "to half precision; leave it in float32 and run the backbone under autocast"
        )
    if embeddings.dim() != 2 or embeddings.shape[1] != embedding_size:
        raise ValueError(f"embeddings have shape {tuple(embeddings.shape)}, expected [batch, {embedding_size}]")
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings are {embeddings.dtype}, expected floats")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}, expected torch.int64 class ids; convert them with .long()")
    if labels.shape != (len(embeddings),):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, expected [{len(embeddings)}] as the embeddings")
    if comm.world_size > 1 and comm.device.type == "cpu":
        sizes = comm.all_gather(torch.tensor([len(labels)])).wait().tolist()
        if len(set(sizes)) > 1:
            other = next(rank for rank, size in enumerate(sizes) if size != sizes[0])
            raise ValueError(
                f"batch sizes differ between ranks: rank 0 has {sizes[0]}, rank {other} has {sizes[other]}; "
                "use drop_last or Fleet.loader"
            )


def check_labels(labels: Tensor, num_classes: int, comm: Communicator) -> None:
    """Labels of the global batch [N] must be class ids or -1; every rank sees the same batch and raises alike."""
    bad = (labels < IGNORE) | (labels >= num_classes)
    if labels.device.type != "cpu":  # no host sync on a GPU: the assertion stops the stream
        torch._assert_async(~bad.any(), f"label outside [0, {num_classes})")
        return
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        batch = len(labels) // comm.world_size
        raise ValueError(
            f"label {int(labels[at])} of sample {at % batch} on rank {at // batch} is out of range, expected 0 to "
            f"{num_classes - 1}, or -1 for a sample to ignore; num_classes must cover the data's labels"
        )


def mean_over_valid(losses: Tensor, labels: Tensor, comm: Communicator) -> Tensor:
    """Mean over this rank's samples such that the mean over ranks is the mean over all valid samples.

    losses: [B] of this rank, labels: [N] of all ranks. sum * W / (number valid); 0 if no sample is valid.
    """
    valid = (labels != IGNORE).sum().clamp_min(1)
    return losses.sum() * (comm.world_size / valid.to(losses.dtype))
