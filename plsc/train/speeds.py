"""What a step of a recipe costs on this machine: rates of its head, time and memory of its backbone, the loopback.

All by doing it, small: a few blocks of classes, a few images. Nothing here depends on the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from plsc.comm import LocalCommunicator
from plsc.comm.probe import Responder, visit
from plsc.fleet import Fleet
from plsc.nn import ClassParallelHead
from plsc.nn.class_parallel import block_rows
from plsc.ops import native
from plsc.ops.optim import apply_rows, remove_radial
from plsc.strategies import build_optimizer
from plsc.train import build
from plsc.train.config import Config
from plsc.train.scaling import Device, Links

REPEATS = 5  # the quickest counts: what others do on the machine only ever adds
WEIGHT_BYTES = 32 << 20  # of a head to measure with: more than caches hold, less than takes long
ENOUGH = 512  # samples of a global batch: products go no faster with more
SECONDS = 3.0  # that the larger batch of a backbone may take


@dataclass(frozen=True)
class Backbone:
    """A whole step of a recipe with next to no classes, as far as it grows with the batch."""

    seconds: float  # with no images: optimizer and all that is done once a step
    seconds_an_image: float
    num_bytes: float  # of the process with no images: code, weights, gradients, optimizer
    bytes_an_image: float
    num_weights: int
    flops: float  # of one image, forward

    def seconds_of(self, batch: int) -> float:
        return self.seconds + batch * self.seconds_an_image


def num_measured(dim: int) -> int:
    """Classes of a head to measure with."""
    return min(max(WEIGHT_BYTES // (4 * dim) // 1024 * 1024, 2048), 16384)


def quickest(run: Callable[[], object], device: torch.device, *, repeats: int | None = None) -> float:
    """Seconds of the quickest of some runs, after one to warm up."""
    return min([seconds(run, device) for _ in range((REPEATS if repeats is None else repeats) + 1)][1:])


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one run; of one thread its processor time, which others on the machine change least."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin


# ---- the head


def product_rate(num_samples: int, weight: Tensor, *, block: int) -> float:
    """Floating-point operations a second of the head's three products, block by block, into buffers that are there."""
    dim = weight.shape[1]
    x = torch.randn(num_samples, dim, device=weight.device)
    cos, output = x.new_empty(num_samples, block), torch.zeros_like(x)
    grad = x.new_empty(block, dim)

    def run() -> None:
        for start in range(0, len(weight), block):
            rows = weight[start : start + block]
            part = cos.flatten()[: num_samples * len(rows)].view(num_samples, len(rows))
            torch.mm(x, rows.T, out=part)
            output.addmm_(part, rows, beta=0.0)
            torch.mm(part.T, x, out=grad[: len(rows)])

    return 6 * num_samples * len(weight) * dim / quickest(run, weight.device)


def pass_seconds(head: ClassParallelHead, *, block: int) -> float:
    """Seconds a number of the head's weight takes to be read once, with 1 / length of its rows."""
    weight, like = head.weight.detach(), torch.empty(0, device=head.weight.device)
    shape, centers = weight.shape[1:], head.sub_centers
    copied = head.sample_rate < 1.0 or weight.dtype != like.dtype
    out = like.new_empty(block, *shape) if copied else None
    inverse = like.new_empty(block * centers)

    def run() -> None:
        for start in range(0, len(weight), block):
            stop = min(start + block, len(weight))
            chosen = torch.arange(start, stop, device=weight.device) if head.sample_rate < 1.0 else slice(start, stop)
            cut = None if out is None else out[: stop - start]
            native.read_rows(weight, chosen, out=cut, inverse=inverse[: (stop - start) * centers])

    return quickest(run, weight.device) / weight.numel()


def entry_seconds(head: ClassParallelHead, num_samples: int, *, block: int, flops: float, read: float) -> float:
    """Seconds a cosine takes beside its product in one pass: of one kernel, or of forward passes if there is more."""
    x = torch.randn(num_samples, head.embedding_size, device=head.weight.device)
    labels = torch.arange(num_samples, device=x.device) % head.num_classes
    cos, inverse, total = x.new_zeros(num_samples, block), x.new_ones(block), x.new_zeros(num_samples)

    def kernel() -> None:
        native.exponentials(cos, inverse, place=labels, start=0, shift=0.0, total=total)

    def forward() -> None:
        with torch.no_grad():
            head(x, labels)

    at_least = quickest(kernel, x.device) / cos.numel()
    if not head.margin.moves_others and head.filter_threshold is None and head.sub_centers == 1:
        return at_least
    cosines, numbers = num_samples * head.num_classes * head.sub_centers, head.weight.numel()
    beside = quickest(forward, x.device) - 2 * cosines * head.embedding_size / flops - numbers * read
    return max(beside / cosines, at_least)


def row_seconds(head: ClassParallelHead, config: Config, *, block: int) -> float:
    """Seconds a number of the weight takes to be stepped, gradient made orthogonal, by whatever steps it."""
    weight = head.weight.detach()
    grad = torch.randn(block, *weight.shape[1:], device=weight.device) * 1e-3
    sampled = head.sample_rate < 1.0

    def fused() -> None:
        for start in range(0, len(weight), block):
            stop = min(start + block, len(weight))
            rows = torch.arange(start, stop, device=weight.device) if sampled else slice(start, stop)
            assert head.head_optimizer is not None
            kept = head.head_optimizer, weight, head.row_state(), rows, grad[: stop - start]
            apply_rows(*kept, normalize=True, rounding=head._rounding())

    if head.head_optimizer is not None:
        return quickest(fused, weight.device) / weight.numel()
    ask = config.optim
    one = torch.nn.Parameter(weight)
    optimizer = build_optimizer(
        ask.name,
        [one],
        lr=1e-6,
        momentum=ask.momentum,
        nesterov=ask.nesterov,
        weight_decay=ask.weight_decay,
        betas=ask.betas,
    )

    def separate() -> None:
        one.grad = torch.zeros_like(weight)  # fresh pages, as in a step
        remove_radial(weight, slice(0, len(weight)), one.grad)
        optimizer.step()

    return quickest(separate, weight.device) / weight.numel()


def measure_head(config: Config, num_samples: int, device: torch.device, *, known: Device | None = None) -> Device:
    """Rates of the head that the config asks for; those of `known` that no format and no sampling changes are kept."""
    dim, centers = config.model.embedding_size, config.head.sub_centers
    num_samples = min(num_samples, ENOUGH)
    head = build.build_head(config, num_measured(dim), LocalCommunicator()).to(device)
    block = block_rows(num_samples * centers, dim * centers, device=device.type)
    if not isinstance(head, ClassParallelHead):  # plain softmax: the same sweep without lengths and margin
        plain = replace(config, head=replace(config.head, margin="cosine", margin_args={}))
        return measure_head(plain, num_samples, device, known=known)
    read = pass_seconds(head, block=block)
    if known is None:
        wide = torch.randn(num_measured(dim), dim, device=device)
        flops = product_rate(num_samples, wide, block=block)
        entry = entry_seconds(head, num_samples, block=block, flops=flops, read=read)
        known = Device(flops, entry, read, 0.0, overlaps=device.type == "cuda")
    return replace(known, read=read, step=row_seconds(head, config, block=block))


# ---- the backbone


def measure_backbone(config: Config, batch: int, *, repeats: int = 2) -> Backbone:
    """Takes steps with few images and with more, and draws a line through both. batch: of a rank, the largest asked."""
    strategy = replace(config.strategy, topology="flat", ps="none", servers=(), ps_args={}, accumulate=1, lanes=1)
    fleet = Fleet(strategy, LocalCommunicator())
    torch.manual_seed(config.seed)
    backbone = fleet.replicate(build.build_backbone(config))
    few = replace(config, head=replace(config.head, sample_rate=1.0, filter_threshold=None))
    head = build.build_head(few, 2, fleet.comm).to(fleet.device)
    optimizer = build.build_optim(few, backbone, head)
    data = config.data

    def steps(images: int) -> float:
        x = torch.randn(images, data.channels, data.image_size, data.image_size, device=fleet.device)
        labels = torch.zeros(images, dtype=torch.int64, device=fleet.device)

        def run() -> None:
            with fleet.autocast():
                loss = head(backbone(x), labels)
            fleet.step(loss, optimizer)

        return quickest(run, fleet.device, repeats=repeats)

    small = max(min(batch // 2, 8), 1)
    sizes, times, peaks = [small], [steps(small)], [peak_bytes(fleet.device)]
    large = min(batch, max(int(SECONDS / max(times[0] / small, 1e-9)), 2 * small))
    if large > small:
        sizes.append(large)
        times.append(steps(large))
        peaks.append(peak_bytes(fleet.device))
    slope = max(times[-1] - times[0], 0.0) / (sizes[-1] - sizes[0]) if large > small else times[0] / small
    growth = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0]) if large > small else 0.0
    return Backbone(
        seconds=max(times[-1] - sizes[-1] * slope, 0.0),
        seconds_an_image=slope,
        num_bytes=peaks[-1] - sizes[-1] * growth,
        bytes_an_image=growth,
        num_weights=sum(param.numel() for param in backbone.parameters()),
        flops=forward_flops(backbone, (1, data.channels, data.image_size, data.image_size), fleet.device),
    )


def forward_flops(backbone: torch.nn.Module, shape: Sequence[int], device: torch.device) -> float:
    """Of one image's forward pass, as torch counts them."""
    training = backbone.training
    backbone.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        backbone(torch.zeros(*shape, device=device))
    backbone.train(training)
    return float(counter.get_total_flops())


# ---- the machine


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held so far: resident, or on a GPU of the device by anybody."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return _status("VmHWM")


def available_bytes(device: torch.device) -> int:
    """What this process could still take besides what it holds."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
            if (folder / limit).is_file() and (text := (folder / limit).read_text().strip()).isdecimal():
                found = min(found, int(text) - int((folder / used).read_text()))
    return max(found, 0)


def loopback() -> Links:
    """This machine's way to itself."""
    with Responder("127.0.0.1") as responder:
        found = [visit(0, "127.0.0.1", responder.port) for _ in range(3)]
    delay, rate = min(link.delay for link in found), max(link.rate for link in found)
    return Links(delay / 2, rate)


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024
