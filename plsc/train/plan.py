"""plsc-train --plan: which classes fit on given devices, kept and sampled how, and what a step takes.

Measures the recipe's backbone and head on this machine (plsc.train.speeds), and puts both into the model of a step
(plsc.train.scaling). Devices that are not here are taken by their memory, or by name with the rates assumed for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from plsc.comm import LocalCommunicator
from plsc.data import Dataset, Loader
from plsc.nn.class_parallel import block_rows
from plsc.train import build, speeds
from plsc.train.config import Config, HeadConfig
from plsc.train.launch import num_cores
from plsc.train.preflight import OPTIMIZER_COPIES
from plsc.train.scaling import (
    GB,
    HARDWARE,
    Device,
    Kept,
    Links,
    Seconds,
    Work,
    cached_share,
    head_bytes,
    remade_share,
    step_seconds,
    workspace_bytes,
)
from plsc.train.speeds import Backbone

FORMATS = (
    (False, "fp32", "fp32"),
    (True, "fp32", "fp32"),
    (True, "split", "bf16"),
    (True, "split", "int8"),
    (True, "bf16", "bf16"),
    (True, "bf16", "int8"),
)
UNITS = {"GB": 10**9, "TB": 10**12, "GIB": 2**30, "TIB": 2**40}
READER_BYTES = 0.3 * GB  # a process that reads images: Python, torch and a batch
MOST = 10**11  # classes; what would fit beyond is told as this
Say = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """The devices that are planned for, one a rank."""

    text: str
    num_ranks: int
    memory: float  # bytes of one that a step may take, the process or the CUDA context included
    reserve: float  # bytes of it that are taken before anything of ours
    links: Links
    device: Device | None = None  # None: as measured here
    here: bool = False  # memory is this process's, measured with what it holds already


@dataclass(frozen=True)
class Row:
    """One way to keep and sample the classes."""

    head: HeadConfig
    bytes_per_class: float
    num_bytes: float  # of a rank, with the recipe's classes
    fitting: int  # classes
    seconds: Seconds


def plan(config: Config, *, say: Say) -> bool:
    """Measures, and says the table line by line; False if what the recipe asks for does not fit."""
    if config.head.store:
        raise ValueError(
            f"--plan counts what a head takes in memory, but head.store {config.head.store!r} keeps classes elsewhere; "
            "leave one of them out"
        )
    target = read_target(config)
    batch = batch_of(config, target)
    if target.here and torch.get_num_threads() > 1 and target.device is None:
        torch.set_num_threads(max(1, num_cores() // target.num_ranks))
    classes, data = open_data(config)
    if data is not None and target.here and config.data.workers == 0:
        read_some(config, data, batch)  # what reading takes is this process's then
    backbone = speeds.measure_backbone(config, batch, repeats=2 if target.device is None else 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = target.device or speeds.measure_head(config, batch * target.num_ranks, device)
    rows = []
    for head in candidates(config):
        asked = replace(config, head=head)
        of_head = known
        if target.device is None:
            of_head = speeds.measure_head(asked, batch * target.num_ranks, device, known=known)
            if device.type == "cpu" and target.here:
                of_head = of_head.slowed(max(1.0, target.num_ranks * torch.get_num_threads() / num_cores()))
        rows.append(row_of(asked, classes, target, backbone, of_head))
    for line in lines(config, classes, target, backbone, known, rows):
        say(line)
    return rows[0].num_bytes <= target.memory


def read_target(config: Config) -> Target:
    """What --plan names: "here", or devices such as 8x32GB or 8xH200."""
    text = config.plan
    if text == "here":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ranks = config.nproc
        memory = float(speeds.available_bytes(device) + speeds.peak_bytes(device))  # this process is one of the ranks
        if device.type == "cuda":  # one a rank; links as between the GPUs of a host that one can buy
            return Target(text, ranks, memory, 0.0, HARDWARE["H200"].links, here=True)
        memory = memory / ranks - config.data.workers * READER_BYTES
        return Target(text, ranks, memory, 0.0, speeds.loopback(), here=True)
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+(?:\.\d+)?)([GT]i?B)|(\w+))", text, re.IGNORECASE)
    names = {name.lower(): name for name in HARDWARE}
    if match is None or (match[4] and match[4].lower() not in names) or int(match[1] or 1) < 1:
        raise ValueError(
            f"--plan is {text!r}, expected here, or devices as 8x32GB or 8x{next(iter(HARDWARE))}: a number, and "
            f"memory in GB, TB, GiB or TiB, or one of {', '.join(HARDWARE)}"
        )
    ranks = int(match[1] or 1)
    if match[4]:
        made = HARDWARE[names[match[4].lower()]]
        return Target(text, ranks, made.memory, made.reserve, made.links, made.device)
    usual = HARDWARE["V100"]
    return Target(text, ranks, float(match[2]) * UNITS[match[3].upper()], usual.reserve, usual.links)


def batch_of(config: Config, target: Target) -> int:
    """Samples of a rank in one pass."""
    parts = target.num_ranks * config.strategy.accumulate
    if config.batch_size % parts:
        near = -(-config.batch_size // parts) * parts
        raise ValueError(
            f"batch_size is {config.batch_size}, expected a multiple of ranks * accumulate = {target.num_ranks} * "
            f"{config.strategy.accumulate} = {parts}; --batch-size {near} is one"
        )
    return config.batch_size // parts


def open_data(config: Config) -> tuple[int, Dataset | None]:
    """The recipe's classes, and its data where it is there."""
    try:
        data = build.build_data(config.data, seed=config.seed)
    except ValueError as error:
        if config.data.num_classes:
            return config.data.num_classes, None
        raise ValueError(f"{error}; or say how many classes to plan for: --data.num-classes N") from error
    return build.num_classes(config, data), data


def read_some(config: Config, data: Dataset, batch: int) -> None:
    """One batch, as a rank without reading processes takes it."""
    with closing(Loader(data, min(batch, len(data)), transform=build.build_transform(config.data))) as loader:
        next(loader.epochs(1))


def candidates(config: Config) -> Iterator[HeadConfig]:
    """The recipe's own head first, then others: less memory a class, then a sample."""
    own = config.head
    yield own
    if own.margin == "linear":
        return
    seen = [(own.fused, own.weight_dtype, own.state_dtype, own.sample_rate)]
    for rate in dict.fromkeys([own.sample_rate, 1.0, 0.1]):
        for fused, weight, state in FORMATS:
            small_state = config.optim.name == "sgd" and config.optim.momentum > 0
            state = state if small_state else "fp32"
            found = (fused, weight, state, rate)
            if found in seen or (not fused and rate < 1.0):
                continue
            seen.append(found)
            yield replace(own, fused=fused, weight_dtype=weight, state_dtype=state, sample_rate=rate)


# ---- one row


def kept_of(config: Config) -> Kept:
    """How the head of a config keeps its classes, its bytes counted on one of a few."""
    head, ask = config.head, config.optim
    few = build.build_head(config, 4, LocalCommunicator())
    bytes_per_class = few.bytes_per_class()
    temporaries = 0
    if not head.fused:
        moves = ask.name == "adamw" or ask.momentum > 0
        width = 4.0 * config.model.embedding_size * head.sub_centers
        bytes_per_class += width * (OPTIMIZER_COPIES[ask.name] if moves else 0)
        # What torch's steps make of the whole weight: w * decay + g, Nesterov's sum; the two parts of Adam's divisor.
        temporaries = int(ask.weight_decay > 0) + int(ask.nesterov) if ask.name == "sgd" else 2
    strategy = config.strategy
    waits = strategy.amp == "fp16" or strategy.clip_norm > 0 or strategy.accumulate > 1 or strategy.compress != "none"
    return Kept(
        bytes_per_class,
        fused=head.fused,
        waits=head.fused and waits,
        clipped=head.fused and strategy.clip_norm > 0,
        passes=strategy.accumulate,
        converted=(head.weight_dtype != "fp32") != few.half_products or head.sample_rate < 1.0,
        half=few.half_products,
        temporaries=temporaries,
        sampled=head.sample_rate,
        centers=head.sub_centers,
    )


def rank_bytes(config: Config, classes: int, target: Target, backbone: Backbone, kept: Kept) -> float:
    """The most that the rank with the largest shard takes in a step."""
    batch, dim = batch_of(config, target), config.model.embedding_size
    num_samples, shard = batch * target.num_ranks, -(-classes // target.num_ranks)
    num_rows = min(shard, round(shard * kept.sampled) + min(num_samples, shard)) if kept.sampled < 1.0 else shard
    workspace = workspace_bytes(
        num_samples=num_samples,
        dim=dim,
        num_rows=num_rows,
        block=block_of(num_samples, dim, kept.centers, target),
        kept=kept,
        cache_bytes=int(config.head.cache_mb * 2**20),
        cache_half=config.head.cache_dtype == "bf16",
    )
    # Activations are freed before an optimizer makes its temporaries, but an allocator rarely gives them back.
    work = head_bytes(shard, dim, kept, workspace=workspace, num_samples=num_samples) + batch * backbone.bytes_an_image
    return work + (backbone.num_bytes if target.here else target.reserve + backbone_bytes(config, backbone))


def backbone_bytes(config: Config, backbone: Backbone) -> float:
    """Weights, gradients and optimizer state of a backbone on a device of its own."""
    return 4.0 * backbone.num_weights * (2 + OPTIMIZER_COPIES[config.optim.name])


def block_of(num_samples: int, dim: int, centers: int, target: Target) -> int:
    here = torch.cuda.is_available() if target.here else True
    return block_rows(num_samples * centers, dim * centers, device="cuda" if here else "cpu")


def row_of(config: Config, classes: int, target: Target, backbone: Backbone, device: Device) -> Row:
    """Memory and time of a config on the target, and the classes with which it would just fit."""
    kept = kept_of(config)
    return Row(
        config.head,
        kept.bytes_per_class,
        rank_bytes(config, classes, target, backbone, kept),
        fitting(config, target, backbone, kept),
        seconds_of(config, classes, target, backbone, device),
    )


def fitting(config: Config, target: Target, backbone: Backbone, kept: Kept) -> int:
    """The most classes whose memory is within the target's; 0 if not even one fits."""
    low, high = 0, MOST
    while low < high:
        middle = (low + high + 1) // 2
        if rank_bytes(config, middle, target, backbone, kept) <= target.memory:
            low = middle
        else:
            high = middle - 1
    return low


def seconds_of(config: Config, classes: int, target: Target, backbone: Backbone, device: Device) -> Seconds:
    """A step of a config on the target."""
    batch, dim, head = batch_of(config, target), config.model.embedding_size, config.head
    num_samples, shard = batch * target.num_ranks, -(-classes // target.num_ranks)
    num_rows = max(int(shard * head.sample_rate), 1)
    kept, cache_bytes = kept_of(config), int(head.cache_mb * 2**20)
    half = head.cache_dtype == "bf16" or kept.half
    cut = {
        "num_rows": num_rows,
        "block": block_of(num_samples, dim, head.sub_centers, target),
        "centers": head.sub_centers,
    }
    cached = cached_share(num_samples=num_samples, cache_bytes=cache_bytes, half=half, **cut)
    waits = kept.waits and head.sample_rate == 1.0
    left = cache_bytes - cached * num_samples * num_rows * head.sub_centers * (2 if half else 4)
    norm = remade_share(dim=dim, left=left, **cut) if waits and kept.clipped else 0.0
    work = Work(
        classes * head.sub_centers,
        dim,
        batch,
        target.num_ranks,
        backbone_bytes=backbone.num_weights * (4 if config.strategy.reduce_dtype == "fp32" else 2),
        bucket_bytes=int((config.strategy.bucket_mb or 25.0) * 2**20),
        sample_rate=head.sample_rate,
        cached=cached,
        wire=4 if config.strategy.amp == "fp32" else 2,
        accumulate=config.strategy.accumulate,
        waits=waits,
        norm=norm,
    )
    seconds = 3 * batch * backbone.flops / device.training if device.training else backbone.seconds_of(batch)
    if target.here and not torch.cuda.is_available():
        seconds *= max(1.0, target.num_ranks * torch.get_num_threads() / num_cores())
    return step_seconds(work, device, target.links, backbone=seconds)


# ---- what is said


def lines(
    config: Config, classes: int, target: Target, backbone: Backbone, device: Device, rows: Sequence[Row]
) -> Iterator[str]:
    """The whole answer."""
    batch = batch_of(config, target)
    what = "this machine" if target.here else target.text
    yield (
        f"{config.model.backbone}, embeddings of {config.model.embedding_size}; {target.num_ranks} rank(s) on {what}, "
        f"{batch} samples of each in a pass, {target.memory / GB:.2f} GB a rank"
    )
    if target.device is None:
        yield (
            f"measured here: products {device.flops / 1e9:.0f} GF/s, {device.entry * 1e9:.2f} ns a cosine, backbone "
            f"{backbone.seconds_an_image * 1e3:.1f} ms an image and {backbone.seconds * 1e3:.1f} ms a step"
        )
    else:
        yield (
            f"assumed, not measured: products {device.flops / 1e12:.0f} TF/s, backbone {device.training / 1e12:.0f} "
            f"TF/s of {3 * backbone.flops / 1e9:.1f} GF an image, links as docs/scaling.md says"
        )
    before = backbone.num_bytes if target.here else target.reserve + backbone_bytes(config, backbone)
    yield f"before the head {before / GB:.2f} GB, and {backbone.bytes_an_image / 1e6:.2f} MB an image in work\n"
    columns = ["head", "sample", "bytes a class", f"GB a rank with {classes:,}", "classes that fit", "ms a step"]
    yield f"| {' | '.join([*columns, 'backbone, head, links'])} |"
    yield "|---|---|---|---|---|---|---|"
    for number, row in enumerate(rows):
        name = words_of(row.head) + (" (the recipe's)" if number == 0 else "")
        parts = ", ".join(f"{1e3 * part:.0f}" for part in (row.seconds.backbone, row.seconds.head, row.seconds.links))
        fit = f"over {MOST:,}" if row.fitting == MOST else f"{row.fitting:,}"
        yield (
            f"| {name} | {row.head.sample_rate:g} | {row.bytes_per_class:,.0f} | {row.num_bytes / GB:.2f} | {fit} | "
            f"{1e3 * row.seconds.total:.0f} | {parts} |"
        )
    yield ""
    yield verdict(classes, target, rows)


def words_of(head: HeadConfig) -> str:
    return f"fused {head.weight_dtype}, {head.state_dtype}" if head.fused else "torch optimizer, fp32"


def verdict(classes: int, target: Target, rows: Sequence[Row]) -> str:
    """Whether the recipe fits, and the least that makes it fit if not."""
    own = rows[0]
    need = f"{own.num_bytes / GB:.2f} of {target.memory / GB:.2f} GB a rank"
    if own.num_bytes <= target.memory:
        return f"fits: the recipe's {classes:,} classes take {need}"
    for row in rows[1:]:
        if row.num_bytes <= target.memory:
            return f"does not fit: {need}; the least that makes it fit: {flags_of(own.head, row.head)}"
    best = max(row.fitting for row in rows)
    hint = "fewer samples a pass (--batch-size, --strategy.accumulate) or --strategy.recompute full"
    if best:
        hint = f"about {-(-classes * target.num_ranks // best)} such devices, or {hint}"
    return f"does not fit: {need}, nor does any other row; take {hint}"


def flags_of(old: HeadConfig, new: HeadConfig) -> str:
    """The flags that lead from one head to another."""
    flags = ["--head.fused"] if new.fused and not old.fused else []
    for name in ("weight_dtype", "state_dtype", "sample_rate"):
        if getattr(old, name) != getattr(new, name):
            flags.append(f"--head.{name.replace('_', '-')} {getattr(new, name)}")
    return " ".join(flags)
