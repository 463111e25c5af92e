"""How a dimension is cut among ranks, and the mark that a cut parameter bears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from plsc.comm.communicator import Communicator

TensorT = TypeVar("TensorT", bound=Tensor)


@dataclass(frozen=True)
class Shard:
    """One rank's part [start, stop) of `total` rows, cut by ceil division as torch.chunk and DTensor cut.

    The last ranks may get fewer rows, or none: 5 rows on 4 ranks are 2, 2, 1, 0.
    """

    total: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.total < 0 or self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"Shard: got total {self.total}, rank {self.rank} of {self.world_size}; "
                "expected total >= 0 and 0 <= rank < world_size"
            )

    @classmethod
    def of(cls, total: int, comm: Communicator) -> Shard:
        """The part of this rank of `comm`."""
        return cls(total, comm.rank, comm.world_size)

    @property
    def step(self) -> int:
        """Rows of a full shard: row i belongs to rank i // step."""
        return -(-self.total // self.world_size)

    @property
    def start(self) -> int:
        return min(self.rank * self.step, self.total)

    @property
    def stop(self) -> int:
        return min((self.rank + 1) * self.step, self.total)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def sizes(self) -> list[int]:
        """Rows of every rank, in rank order; the sizes the verbs take."""
        return [Shard(self.total, rank, self.world_size).size for rank in range(self.world_size)]


def mark(param: TensorT, shard: Shard) -> TensorT:
    """Notes on the tensor that it is this shard of a larger one (dim 0), and returns it.

    The mark stays through .to() and .data, not through copy.deepcopy or a new Parameter.
    """
    if param.dim() == 0 or param.shape[0] != shard.size:
        raise ValueError(f"mark: got shape {tuple(param.shape)}, expected {shard.size} rows for {shard}")
    param.plsc_shard = shard  # type: ignore[attr-defined]
    return param


def shard_of(param: Tensor) -> Shard | None:
    """The shard that the tensor was marked as, None where it is whole on every rank."""
    shard: Shard | None = getattr(param, "plsc_shard", None)
    return shard
