"""A training step as arithmetic: its seconds from what devices and links do, its memory from what it keeps.

The model is alpha-beta-GEMM: matrix products at a rate, passes over memory at seconds a number, and collectives as
rings of messages that take alpha + bytes / beta each. It knows no device; docs/scaling.md says how far it is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

GB = 10**9


@dataclass(frozen=True)
class Device:
    """What one rank computes with; rates are those that a training step gets, not those of a data sheet."""

    flops: float  # a second, in the head's matrix products
    entry: float  # seconds a cosine takes in one pass beside its products: exponential, sum, margin
    read: float  # seconds a number of a row takes to be read in one pass: length, conversion, gathering
    step: float  # seconds a number of a row takes to be stepped, its momentum included
    training: float = 0.0  # flops a second of a backbone's forward and backward; 0: it was timed instead
    overlaps: bool = False  # sends while it computes, at no cost to either; a CPU sends with the cores it computes with

    def slowed(self, factor: float) -> Device:
        """The same with every core shared by so many ranks."""
        return replace(
            self,
            flops=self.flops / factor,
            entry=self.entry * factor,
            read=self.read * factor,
            step=self.step * factor,
            training=self.training / factor,
        )


@dataclass(frozen=True)
class Links:
    """alpha and beta between hosts and inside of one; a ring over several hosts goes at the pace of those between."""

    latency: float  # seconds a message
    rate: float  # bytes a second that a host sends
    per_host: int = 1
    latency_inside: float = 0.0
    rate_inside: float = math.inf

    def of(self, num_ranks: int) -> tuple[float, float]:
        """alpha and beta of a ring over so many ranks."""
        if num_ranks <= self.per_host:
            return self.latency_inside, self.rate_inside
        return self.latency, min(self.rate, self.rate_inside)


@dataclass(frozen=True)
class Hardware:
    """A device one can buy, with the links it usually has."""

    device: Device
    links: Links
    memory: float  # bytes
    reserve: float = 2.0 * GB  # of them for the CUDA context, libraries and what an allocator leaves unused


def of_gpu(*, flops: float, bandwidth: float, training: float) -> Device:
    """A GPU by its bandwidth in bytes a second: what each pass of the head moves there and back is known."""
    # A cosine is read and written (fp32); a row read in bfloat16 and written in fp32; a step reads weight, momentum and
    # gradient and writes the first two, 20 bytes in fp32.
    return Device(flops, 8 / bandwidth, 6 / bandwidth, 20 / bandwidth, training=training, overlaps=True)


_H200 = Hardware(
    of_gpu(flops=50e12, bandwidth=4e12, training=150e12),
    Links(7e-6, 360e9, per_host=8, latency_inside=3e-6, rate_inside=350e9),
    memory=141 * GB,
)
# Assumed, not measured by us: docs/scaling.md has the source of each number. Products in fp32; TF32 is what
# torch.set_float32_matmul_precision("high") makes of them, BF16 what they are for a split or bfloat16 weight.
HARDWARE = {
    "V100": Hardware(
        of_gpu(flops=13e12, bandwidth=0.75e12, training=25e12),
        Links(15e-6, 10e9, per_host=8, latency_inside=4e-6, rate_inside=110e9),
        memory=32 * GB,
    ),
    "H200": _H200,
    "H200TF32": replace(_H200, device=replace(_H200.device, flops=300e12)),
    "H200BF16": replace(_H200, device=replace(_H200.device, flops=590e12)),
}


@dataclass(frozen=True)
class Work:
    """What a step has to do."""

    num_classes: int
    dim: int
    batch: int  # samples of a rank in one pass
    num_ranks: int
    backbone_bytes: int = 0  # of its gradients, as they travel
    bucket_bytes: int = 25 << 20
    sample_rate: float = 1.0
    cached: float = 0.0  # share of the exponentials that the backward finds ready
    wire: int = 4  # bytes a number of an embedding on its way to the other ranks
    accumulate: int = 1  # passes an optimizer step
    waits: bool = False  # a fused head whose rows are all stepped after the last pass
    norm: float = 0.0  # share of the weight's gradient that is made once more, after its norm

    @property
    def num_samples(self) -> int:
        """Of all ranks in one pass: N."""
        return self.batch * self.num_ranks

    @property
    def num_rows(self) -> float:
        """Of one rank that take part: n."""
        return -(-self.num_classes // self.num_ranks) * self.sample_rate


@dataclass(frozen=True)
class Seconds:
    """What a step is made of; communication as far as it is waited for."""

    backbone: float
    products: float
    entries: float
    reads: float
    rows: float
    gather: float = 0.0  # embeddings and labels, all_gather
    sums: float = 0.0  # two numbers a sample, all_reduce
    scatter: float = 0.0  # gradient of the embeddings, reduce_scatter
    average: float = 0.0  # gradient of the backbone, all_reduce

    @property
    def head(self) -> float:
        return self.products + self.entries + self.reads + self.rows

    @property
    def links(self) -> float:
        return self.gather + self.sums + self.scatter + self.average

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))


def all_gather_seconds(num_bytes: float, num_ranks: int, links: Links) -> float:
    """Each rank gives num_bytes; a ring of num_ranks - 1 messages. A reduce_scatter of such parts takes as long."""
    alpha, beta = links.of(num_ranks)
    return (num_ranks - 1) * (alpha + num_bytes / beta)


def all_reduce_seconds(num_bytes: float, num_ranks: int, links: Links) -> float:
    """A ring for what is large, a tree for what is small."""
    if num_ranks == 1:
        return 0.0
    alpha, beta = links.of(num_ranks)
    ring = 2 * (num_ranks - 1) * (alpha + num_bytes / num_ranks / beta)
    return min(ring, 2 * math.ceil(math.log2(num_ranks)) * (alpha + num_bytes / beta))


def step_seconds(work: Work, device: Device, links: Links, *, backbone: float) -> Seconds:
    """One optimizer step. backbone: seconds of its forward and backward in one pass."""
    cosines, numbers, k = work.num_samples * work.num_rows, work.num_rows * work.dim, work.accumulate
    again = 1.0 - work.cached  # of pass 1, in pass 2
    if work.waits:  # only the last pass finds its exponentials, and only once
        again = (again + max(work.norm - work.cached, 0.0) + (k - 1) * (1 + work.norm)) / k
    products = 2 * cosines * work.dim * (3 + again + work.norm) / device.flops
    entries, reads = cosines * (1 + again) * device.entry, numbers * (1 + again) * device.read
    rows = numbers * device.step
    # Pass 2 is what the weight takes; the reduce_scatter travels behind it.
    second = (2 * cosines * work.dim * (1 + again) / device.flops) + (entries + reads) * again / (1 + again) + rows
    second = 0.0 if work.waits else second
    gather = all_gather_seconds(work.batch * (work.dim * work.wire + 8), work.num_ranks, links)
    sums = all_reduce_seconds(work.num_samples * 8, work.num_ranks, links)
    scatter = all_gather_seconds(work.batch * (work.dim + 2) * 4, work.num_ranks, links)
    average = all_reduce_seconds(work.backbone_bytes, work.num_ranks, links)
    if device.overlaps:  # the last bucket has no backward left to hide behind
        last = all_reduce_seconds(min(work.bucket_bytes, work.backbone_bytes), work.num_ranks, links)
        scatter, average = max(scatter - second, 0.0), max(average - backbone * 2 / 3, last)
    return Seconds(k * backbone, k * products, k * entries, k * reads, rows, k * gather, k * sums, k * scatter, average)


# ---- memory


@dataclass(frozen=True)
class Kept:
    """How a head keeps its classes."""

    bytes_per_class: float  # between steps, a torch optimizer's state included
    fused: bool = True  # rows are stepped in the backward; else the weight's whole gradient waits for the optimizer
    waits: bool = False  # a fused head's rows are stepped after the backward: fp16, clipping, accumulation
    clipped: bool = False
    passes: int = 1  # an optimizer step
    converted: bool = False  # the weight is not what is multiplied, or rows are gathered: a block is copied for that
    half: bool = False  # products have operands in bfloat16
    temporaries: int = 0  # of the whole weight that a torch optimizer's step takes, fp32
    sampled: float = 1.0
    centers: int = 1


def workspace_bytes(
    *,
    num_samples: int,
    dim: int,
    num_rows: int,
    block: int,
    kept: Kept,
    cache_bytes: int = 0,
    cache_half: bool = False,
) -> int:
    """What a head's buffers hold: one block's rows, exponentials and gradient, and the kept exponentials."""
    if num_rows == 0:
        return 0
    step, centers = min(block, num_rows), kept.centers
    num_blocks = -(-num_rows // block)
    apart = cache_half or kept.half  # logits are no place for what is kept of them
    width = 2 if apart else 4
    num_cached = min(cache_bytes // (num_samples * step * centers * width), num_blocks)
    cached_rows = min(num_cached * block, num_rows)
    total = 4 * step * centers + width * num_samples * cached_rows * centers
    rest = min(block, num_rows - num_cached * block)
    again = kept.waits and kept.passes > 1 and kept.sampled == 1.0  # the last pass took the others' exponentials' place
    if apart or again or num_cached < num_blocks:
        total += 4 * num_samples * (step if apart or again else rest) * centers
    if kept.half:  # the exponentials that do not stay, and a block's part of the embeddings' gradient
        total += 2 * num_samples * max(rest, 0) * centers + 4 * num_samples * dim
    if kept.converted:
        total += (2 if kept.half else 4) * step * centers * dim
    if kept.fused and not (kept.waits and kept.sampled < 1.0):
        gradient, num_kept = 4 * step * centers * dim, 0
        if kept.clipped:
            left = cache_bytes - width * num_samples * cached_rows * centers
            num_kept = min(max(left, 0) // gradient, num_blocks)
            total += 4 * centers * dim * max(num_rows - (num_blocks - num_kept) * block, 0) * (num_kept > 0)
        total += gradient * ((num_kept < num_blocks) + (kept.passes > 1))
    return total


def cached_share(*, num_samples: int, num_rows: int, block: int, centers: int, cache_bytes: int, half: bool) -> float:
    """Of the exponentials, how many the backward finds ready."""
    if num_rows == 0:
        return 1.0
    num_cached = cache_bytes // (num_samples * min(block, num_rows) * centers * (2 if half else 4))
    return min(num_cached * block / num_rows, 1.0)


def remade_share(*, num_rows: int, dim: int, block: int, centers: int, left: float) -> float:
    """Of the weight's gradient, how much is made again after its norm, with `left` bytes to keep it in."""
    num_kept = left // (4 * min(block, max(num_rows, 1)) * centers * dim)
    return max(1.0 - num_kept * block / max(num_rows, 1), 0.0)


def head_bytes(shard: int, dim: int, kept: Kept, *, workspace: int, num_samples: int) -> float:
    """The most that a head of `shard` classes of this rank takes during a step, its optimizer's included."""
    whole = 4.0 * shard * dim * kept.centers
    batch = 4 * num_samples * (7 * dim + 20)  # embeddings gathered and scaled, their gradient, what it travels in
    gradient = 0.0
    if not kept.fused:  # that of a sample is put into the whole before the optimizer makes its temporaries
        gradient = whole + whole * max(kept.temporaries, kept.sampled if kept.sampled < 1.0 else 0.0)
    elif kept.waits and kept.sampled < 1.0:
        gradient = whole * _waiting_share(kept.sampled, kept.passes)
    elif kept.waits:  # of each pass what its second sweep is made from
        batch += 4 * num_samples * 6 * dim * (kept.passes - 1)
    numbers = 24.0 * shard * kept.sampled if kept.sampled < 1.0 else 0.0  # int64 rows, drawn, joined and sorted
    return shard * kept.bytes_per_class + workspace + batch + numbers + gradient


def _waiting_share(sampled: float, passes: int) -> float:
    """Of the classes, those whose gradient is there when the last pass joins its sample to those before it."""
    if passes == 1:
        return sampled
    before, after = (1.0 - (1.0 - sampled) ** k for k in (passes - 1, passes))
    return before + sampled + after
