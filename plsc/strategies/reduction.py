"""How a flat tensor of gradients is averaged over the ranks: in which precision it travels, and where it is added up.

A compression is a reduction around a reduction: Half(Accumulated()) casts, and what is inside it sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plsc.comm import Communicator, Shard, Work
from plsc.comm.background import Background
from plsc.ops import kernels

REDUCE_DTYPES = ("fp32", "bf16", "fp16")
ACCUMULATE = ("native", "fp32")
HALF_TYPES = (torch.float16, torch.bfloat16)


class Reduction(ABC):
    """Sums a flat tensor over the ranks. One of your own is a class with the method `start`.

    staged: it waits for one verb before it issues the next. A Reducer runs such a one in the background.
    name: what a checkpoint calls it; a run that resumes with another one does not continue bit for bit.
    """

    staged = False

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
        """Begins to replace flat [n] by its sum over the ranks / divisor, in place; wait() gives flat.

        All ranks end with the same bits. An element that is not finite on one rank is not finite on any in the end.
        """

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of a dtype travel in."""
        return dtype


class Plain(Reduction):
    """In the tensor's own type, as the communicator adds: gloo and NCCL round half types at every hop."""

    def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
        return comm.all_reduce(flat if divisor == 1 else flat.div_(divisor))


class Accumulated(Reduction):
    """Every rank adds up a part of the elements in float32 or wider and gives it to all: half types round once.

    As many bytes as a ring sends, in an all_to_all and an all_gather; the error does not grow with the ranks.
    """

    staged = True

    def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
        sizes = Shard.of(len(flat), comm).sizes()
        part = comm.reduce_scatter(flat if divisor == 1 else flat.div_(divisor), sizes=sizes)
        return part.then(lambda mine: flat.copy_(comm.all_gather(mine, sizes=sizes).wait()))


class Full(Reduction):
    """In float32; float64 as it is. Gradients of half types are widened before they are divided and added."""

    name = "fp32"

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
        wide = flat.to(self.wire(flat.dtype))  # flat itself where that is its type
        work = comm.all_reduce(wide if divisor == 1 else wide.div_(divisor))
        return work if wide is flat else work.then(flat.copy_)


class Bf16(Reduction):
    """In bfloat16, divided before it is rounded, so that no sum leaves the range. Error about 2**-9."""

    def __init__(self, around: Reduction | None = None) -> None:
        self.around = Plain() if around is None else around
        self.staged = self.around.staged

    @property
    def name(self) -> str:
        return "bf16" if isinstance(self.around, Plain) else f"bf16 {self.around.name}"

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
        narrow = kernels.cast_scaled(flat, torch.bfloat16, divisor=divisor)
        return self.around.start(narrow, comm).then(flat.copy_)


class Fp16(Reduction):
    """In float16, scaled by the power of two that brings the largest element of all ranks to just below 2**15.

    Small gradients keep their digits and large ones stay in range: error about 2**-12 at any scale. Costs one more
    all_reduce, of one number. Where that is not finite nothing is scaled, and what is not finite reaches every rank.
    """

    staged = True

    def __init__(self, around: Reduction | None = None) -> None:
        self.around = Plain() if around is None else around

    @property
    def name(self) -> str:
        return "fp16" if isinstance(self.around, Plain) else f"fp16 {self.around.name}"

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
        if not flat.numel():
            return Work.done(flat)
        # No element of the sum is larger than the largest of all ranks times their number / divisor.
        bound = kernels.largest_magnitude(flat) * (comm.world_size / divisor)
        largest = comm.all_reduce(bound, "max").wait()
        narrow = kernels.cast_scaled(flat, torch.float16, largest=largest, divisor=divisor)
        work = self.around.start(narrow, comm)
        return work.then(lambda total: flat.copy_(kernels.cast_scaled(total, flat.dtype, largest=largest, down=True)))


def make_reduction(dtype: str = "fp32", *, accumulate: str = "native") -> Reduction:
    """The reduction by name: what travels, "fp32", "bf16" or "fp16", and where half types are added up.

    accumulate: "native" (as the communicator does) or "fp32" (Accumulated); of no consequence for "fp32".
    """
    if dtype not in REDUCE_DTYPES:
        raise ValueError(f"reduce_dtype: got {dtype!r}, expected one of {', '.join(REDUCE_DTYPES)}")
    if accumulate not in ACCUMULATE:
        raise ValueError(f"reduce_accumulate: got {accumulate!r}, expected one of {', '.join(ACCUMULATE)}")
    if dtype == "fp32":
        return Full()
    around = Accumulated() if accumulate == "fp32" else Plain()
    return Bf16(around) if dtype == "bf16" else Fp16(around)


class Lanes:
    """Averages flat tensors over communicators taken in turn, several at once: what a Reducer sends its buckets on.

    A staged reduction gets a communicator and a background of its own in every lane.
    """

    def __init__(self, reduction: Reduction, comm: Communicator, *, lanes: int = 1) -> None:
        """Collective where lanes > 1 or the reduction is staged."""
        if lanes < 1 or (lanes > 2 and comm.name in ("nccl", "cupy_nccl")):
            raise ValueError(f"lanes: got {lanes}, expected at least 1, and at most 2 on NCCL, where more may deadlock")
        self.reduction, self.world_size = reduction, comm.world_size
        own = (lanes > 1 or reduction.staged) and comm.world_size > 1
        everyone = [list(range(comm.world_size))]
        self.comms = [comm.split(everyone) for _ in range(lanes)] if own else [comm]
        self._backgrounds = [Background(comm.device) for _ in self.comms] if reduction.staged else []

    def start(self, flat: Tensor, *, turn: int = 0) -> Work[Tensor]:
        """Begins to replace flat by its mean over the ranks, on lane turn % lanes.

        Collective: all ranks start the same tensors in the same order.
        """
        if self.world_size == 1:
            return Work.done(flat)
        lane = turn % len(self.comms)
        comm = self.comms[lane]
        if not self._backgrounds:
            return self.reduction.start(flat, comm, divisor=self.world_size)
        return self._backgrounds[lane].submit(lambda: self.reduction.start(flat, comm, divisor=self.world_size).wait())


def as_ddp_hook(reduction: Reduction, comm: Communicator) -> Callable[[object, Any], torch.futures.Future[Tensor]]:
    """A reduction for your own DistributedDataParallel: ddp.register_comm_hook(None, as_ddp_hook(Fp16(), comm)).

    Collective: it takes a communicator of its own from comm, which must span the ranks of the DDP. Buckets travel in
    the order DDP hands them over, while the backward goes on.
    """
    lanes = Lanes(reduction, comm.split([list(range(comm.world_size))]))
    background = Background(comm.device)

    def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:  # DDP looks for the name `bucket`
        flat: Tensor = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        work = lanes.start(flat)

        def settle() -> None:
            try:
                future.set_result(work.wait())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch declares a result

        background.submit(settle)
        return future

    hook.__annotations__.clear()  # DDP compares them with types, and these are text
    return hook
