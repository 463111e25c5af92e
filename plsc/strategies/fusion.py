"""How large buckets should be: from what a sum over the ranks costs to start, and what each of its bytes costs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.comm import Communicator

log = logging.getLogger(__name__)

SIZES = (2**8, 2**18)  # float32 elements of the two sums that are measured
TURNS = 4  # the quickest counts
GAIN = 7 / 3  # times start / byte: from there on a sum of twice the size takes at least 1.7 times as long
LARGEST_MB = 25.0  # where the start costs nothing: more would only begin to send later
PARTS = 4  # that a model is cut into at least where that costs little


@dataclass(frozen=True)
class Costs:
    """start: seconds that a sum takes whatever its size; byte: seconds of each byte more."""

    start: float
    byte: float

    def bucket_mb(self, total_mb: float) -> tuple[float, float]:
        """MiB of a bucket and of the first, for gradients of total_mb: powers of two, so that noise rarely shows."""
        least = GAIN * self.start / self.byte / 2**20
        bucket = max(least, min(LARGEST_MB, total_mb / PARTS), 2.0**-6)
        bucket = min(2.0 ** math.ceil(math.log2(bucket) - 1e-9), 256.0)
        return bucket, min(bucket, max(1.0, 2.0 ** math.ceil(math.log2(max(least, 2.0**-6)) - 1e-9)))


def measure(comm: Communicator) -> Costs:
    """A few sums, by the slowest rank; rank 0's numbers count for all. Collective; a second on an ordinary link."""
    if comm.world_size == 1:
        return Costs(0.0, 1e-12)
    seconds = torch.full((len(SIZES),), math.inf, dtype=torch.float64)
    for index, size in enumerate(SIZES):
        flat = torch.zeros(size, device=comm.device)
        for turn in range(TURNS + 1):
            comm.barrier()
            start = time.perf_counter()
            comm.all_reduce(flat).wait()
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)
            if turn:
                seconds[index] = min(float(seconds[index]), time.perf_counter() - start)
    small, large = comm.all_reduce(seconds.to(comm.device), "max").wait().tolist()
    byte = max(large - small, 1e-9) / (4 * (SIZES[1] - SIZES[0]))
    costs: Costs = comm.gather_objects(Costs(max(small - 4 * SIZES[0] * byte, 0.0), byte))[0]
    return costs


def measured_buckets(tensors: Sequence[Tensor], comm: Communicator) -> tuple[float, float]:
    """bucket_mb and first_bucket_mb for tensors like these; collective."""
    costs = measure(comm)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
    bucket, first = costs.bucket_mb(total)
    if comm.rank == 0:
        log.info(
            "buckets: %g MiB, the first %g (a sum over %d ranks takes %.2f ms and %.2f ms a MiB)",
            bucket,
            first,
            comm.world_size,
            1e3 * costs.start,
            1e3 * costs.byte * 2**20,
        )
    return bucket, first
