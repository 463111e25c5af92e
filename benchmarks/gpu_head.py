"""A training step of a large softmax head on one GPU: against its matrix products, and how many classes fit.

    python benchmarks/gpu_head.py                       # C = 1 M and 10 M, B = 1024 and 4096, D = 512
    python benchmarks/gpu_head.py --fit                 # the most classes of each format that train
    python benchmarks/gpu_head.py --device cpu --quick  # every path, small, on a CPU; its times say nothing

"products" are the three matrix products of a step that keeps its exponentials (four of one that does not), bf16 in,
float32 out, blocks of the same size, by cuBLAS. "kernels" is a step written with plsc.ops.kernels alone: products in
bf16, ArcFace, weight and momentum in few bits, everything else fused. "head" is plsc.ClassParallelHead as it is, with
the same products where its weight is kept in few bits; those of an fp32 weight are float32 (TF32 on a GPU), and its
note has the ratio to such products as well. Contenders alternate within a round; medians of CUDA events, or of
processor time on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import plsc
from plsc.comm import world
from plsc.ops import kernels, native

SCALE, MARGIN, LR, MOMENTUM = 64.0, 0.5, 0.1, 0.9
FORMATS = ("split", "bf16", "fp32")  # of the weight; the momentum is bf16, of an fp32 weight fp32
Step = Callable[[], object]


@dataclass
class Row:
    """One measured line."""

    what: str
    batch: int
    classes: int
    milliseconds: float
    ratio: float  # to the products of the same configuration
    gigabytes: float  # most that was allocated
    note: str = ""
    judged: bool = False  # whether this is what a GPU must be fast at, or hold many of
    falls: bool = True  # the loss, where it is known


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, from half types: on a GPU by the tensor cores, on a CPU by widening."""
    return native.product(a, b, out=torch.empty(len(a), b.shape[1], device=a.device))


class KernelHead:
    """The class-parallel head's step for one rank, on plsc.ops.kernels: what the kernels and cuBLAS make possible."""

    def __init__(
        self, classes: int, dim: int, *, form: str, block: int, cache: bool, device: torch.device, seed: int = 0
    ) -> None:
        self.classes, self.dim, self.block, self.cache, self.steps = classes, dim, block, cache, 0
        self.kind = torch.float32 if form == "fp32" else torch.bfloat16  # of products
        generator = torch.Generator(device).manual_seed(seed)
        self.weight = torch.empty(classes, dim, dtype=self.kind, device=device)
        for start, stop in self.blocks():  # in blocks: no float32 copy of the whole
            rows = torch.randn(stop - start, dim, generator=generator, device=device) * 0.05
            self.weight[start:stop] = rows.to(self.kind)
        self.low = torch.zeros(classes, dim, dtype=torch.int16, device=device) if form == "split" else None
        self.velocity = torch.zeros_like(self.weight)
        self.inverse = torch.empty(classes, device=device)
        for start, stop in self.blocks():
            self.inverse[start:stop] = 1 / self.weight[start:stop].float().norm(dim=1)
        self.kept: dict[int, Tensor] = {}
        self.margin = plsc.ArcFace(SCALE, MARGIN)

    def blocks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.classes, self.block):
            yield start, min(start + self.block, self.classes)

    def step(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Trains on unit rows x [B, D] of the type of products; returns the mean loss and its gradient to x [B, D]."""
        batch, shift = len(x), math.log(self.classes) / 2
        shifts = torch.full((batch,), shift, device=x.device)
        own_rows, own_inverse = self.weight[labels].float(), self.inverse[labels]
        cos = ((x.float() * own_rows).sum(1) * own_inverse).requires_grad_()
        with torch.enable_grad():
            target = self.margin.target(cos)
            (slope,) = torch.autograd.grad(target.sum(), cos)
        own = SCALE * target.detach()
        total, output = torch.zeros(batch, device=x.device), torch.zeros(batch, self.dim, device=x.device)
        for start, stop in self.blocks():
            e, sums = self._exponentials(x, labels, shifts, start, stop)
            total += sums
            output += product(e, self.weight[start:stop])
            if self.cache:
                self.kept[start] = e
        excess = total.log() + shift - own
        share = torch.sigmoid(excess) / batch  # d mean loss / d S * S, and - d / d own logit
        pull = SCALE * share / total
        own_pull = -SCALE * share * slope
        grad = output * pull[:, None] + own_rows * (own_pull * own_inverse)[:, None]
        half_pull = (x.float() * pull[:, None]).to(self.kind)
        own_part = x.float() * (own_pull * own_inverse)[:, None]
        for start, stop in self.blocks():
            e = self.kept.pop(start) if self.cache else self._exponentials(x, labels, shifts, start, stop)[0]
            rows_grad = product(e.T, half_pull)
            inside = (labels >= start) & (labels < stop)
            at = (labels - start).clamp(0, stop - start - 1)
            rows_grad.index_add_(0, at, own_part * inside[:, None])  # no wait for which samples are here
            kernels.sgd_rows(
                self.weight,
                rows_grad,
                self.velocity,
                lr=LR,
                momentum=MOMENTUM,
                low=self.low,
                normalize=True,
                weighed=True,
                inverse=self.inverse[start:stop],
                start=start,
                key=self.steps,
            )
        self.steps += 1
        return F.softplus(excess).mean(), grad

    def _exponentials(self, x: Tensor, labels: Tensor, shifts: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """exp(logit - shift) / |w| in the type of products, and its sums without the division."""
        dots = product(x, self.weight[start:stop].T)
        e = dots if self.kind == torch.float32 else torch.empty_like(dots, dtype=self.kind)
        options = {"start": start, "scale": SCALE, "inverse": self.inverse[start:stop], "weigh": True}
        return e, kernels.exp_rows(dots, shifts, labels, out=e, **options)


def products(x: Tensor, weight: Tensor, *, block: int, num: int) -> Step:
    """The matrix products of a step alone: `num` is 3, or 4 where exponentials are made twice."""
    e = torch.zeros(len(x), block, dtype=x.dtype, device=x.device)

    def step() -> None:
        for rows in weight.split(block):
            part = e[:, : len(rows)]
            for _ in range(num - 2):
                product(x, rows.T)
            product(part, rows)
            product(part.T, x)

    return step


def library_options(form: str, *, block: int, cache_bytes: float) -> dict[str, Any]:
    """Of a plsc.ClassParallelHead in a format of FORMATS, momentum as KernelHead's."""
    half = form != "fp32"
    optimizer = plsc.SGD(LR, momentum=MOMENTUM, state_dtype="bf16" if half else "fp32")
    options: dict[str, Any] = {"weight_dtype": form, "head_optimizer": optimizer, "block": block}
    return options | {"product_dtype": "bf16" if half else "fp32", "cache_mb": cache_bytes / 2**20}


def make_head(dim: int, classes: int, device: torch.device, **options: Any) -> plsc.ClassParallelHead:
    """A plsc.ClassParallelHead made where it trains: its rows are not those of its seed."""
    with torch.device("meta"):
        head = plsc.ClassParallelHead(dim, classes, margin=plsc.ArcFace(SCALE, MARGIN), comm=world(), **options)
    head.to_empty(device=device)
    for kept in head.row_state().values():
        kept.zero_()
    with torch.no_grad():
        head.weight.normal_(std=0.05)
    return head


def library_head(x: Tensor, labels: Tensor, classes: int, **options: Any) -> Callable[[], Tensor]:
    """A step of plsc.ClassParallelHead, gives its loss."""
    head = make_head(x.shape[1], classes, x.device, **options)
    leaf = x.float().requires_grad_()

    def step() -> Tensor:
        leaf.grad = None
        loss: Tensor = head(leaf, labels)
        loss.backward()
        return loss.detach()

    return step


def milliseconds(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, float]:
    """Median time of each contender; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            if device.type == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                step()
                end.record()
                end.synchronize()
                took = begin.elapsed_time(end)
            else:
                cpu = time.process_time()
                step()
                took = (time.process_time() - cpu) * 1e3
            if turn:
                times[name].append(took)
    return {name: statistics.median(each) for name, each in times.items()}


def make_batch(batch: int, dim: int, classes: int, kind: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    x = F.normalize(torch.randn(batch, dim, generator=generator, device=device)).to(kind)
    return x, torch.randint(0, classes, (batch,), generator=generator, device=device)


def check(
    device: torch.device, *, what: str = "kernels", form: str = "fp32", batch: int = 33, classes: int = 1003
) -> float:
    """Largest relative error of a step's loss, input gradient and weight step against float64 autograd.

    what: "kernels", or "head", with the same rows and embeddings.
    """
    dim = 64
    head = KernelHead(classes, dim, form=form, block=256, cache=True, device=device)
    x, labels = make_batch(batch, dim, classes, head.kind, device)
    leaf, weight = x.double().requires_grad_(), head.weight.double().requires_grad_()
    logits = (leaf if what == "kernels" else F.normalize(leaf)) @ F.normalize(weight).T
    at = torch.arange(batch, device=device)
    logits = logits.index_put((at, labels), head.margin.target(logits[at, labels]))
    loss = F.cross_entropy(SCALE * logits, labels)
    loss.backward()
    assert leaf.grad is not None and weight.grad is not None
    if what == "kernels":
        got, grad = head.step(x, labels)
        velocity = head.velocity  # the first one is the gradient
    else:
        made = make_head(dim, classes, device, **library_options(form, block=256, cache_bytes=1e6))
        made.weight.data.copy_(head.weight)
        wide = x.float().requires_grad_()
        got = made(wide, labels)
        got.backward()
        assert wide.grad is not None
        grad, velocity = wide.grad, made.row_state()["momentum"]
    pairs = [(got.detach(), loss), (grad, leaf.grad), (velocity, weight.grad)]
    errors = [float((a.double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf  # max() alone would drop a NaN


def compare(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """A step against its products, in every size."""
    for classes in args.classes:
        for batch in args.batches:
            free(device)
            cache = 2 * batch * classes <= args.cache_gb * 1e9
            head = KernelHead(classes, args.dim, form="split", block=args.block, cache=cache, device=device)
            x, labels = make_batch(batch, args.dim, classes, head.kind, device)
            steps: dict[str, Step] = {
                "products": products(x, head.weight, block=args.block, num=3 if cache else 4),
                "kernels": lambda head=head, x=x, labels=labels: head.step(x, labels),  # type: ignore[misc]
            }
            times = milliseconds(steps, args.rounds, device)
            for name, took in times.items():
                note = f"split weight, bf16 momentum, {'cached' if cache else 'recomputed'}"
                judged = name == "kernels"
                ratio = took / times["products"]
                yield Row(name, batch, classes, took, ratio, peak(device), note if judged else "", judged)
            del steps, head
            free(device)
            for form in () if classes > args.library_classes else FORMATS:
                yield compare_library(x, labels, classes, form, times["products"], args)
                free(device)


def compare_library(
    x: Tensor, labels: Tensor, classes: int, form: str, products_took: float, args: argparse.Namespace
) -> Row:
    """plsc.ClassParallelHead against the bf16 products, and in fp32 against those of that type (TF32)."""
    options = library_options(form, block=args.block, cache_bytes=args.cache_gb * 1e9)
    took = milliseconds({"head": library_head(x, labels, classes, **options)}, args.rounds, x.device)["head"]
    note = f"{form} weight"
    if form == "fp32":
        free(x.device)
        cache = 4 * len(x) * classes <= args.cache_gb * 1e9
        weight = torch.zeros(classes, x.shape[1], device=x.device)
        own = products(x.float(), weight, block=args.block, num=3 if cache else 4)
        own_took = milliseconds({"own": own}, args.rounds, x.device)["own"]
        note += f", {took / own_took:.2f} of the same products in float32"
    return Row("head", len(x), classes, took, took / products_took, peak(x.device), note, judged=form == "split")


def fit(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The most classes that train three steps in each format: memory is asked for, then taken."""
    for form in FORMATS:
        for what in ("kernels", "head"):
            free(device)
            available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 16e6
            each = {"split": 6, "bf16": 4, "fp32": 8}[form] * args.dim + 4
            width = 2 if form != "fp32" else 4
            room = args.block * (args.batch_fit * (4 + width) + args.dim * 8) + 2e9 * (device.type == "cuda")
            classes = int((available * 0.97 - room) / each)
            if classes < 1:
                continue
            try:
                took, first, last = fit_one(what, classes, form, args, device)
            except torch.cuda.OutOfMemoryError:
                note = f"{form}: out of memory with {classes:,}"
                yield Row(what, args.batch_fit, 0, math.nan, math.nan, peak(device), note, form == "bf16", falls=False)
                continue
            note = f"{form}: {each} bytes a class, loss {first:.2f} -> {last:.2f}"
            yield Row(what, args.batch_fit, classes, took, math.nan, peak(device), note, form == "bf16", last < first)


def fit_one(
    what: str, classes: int, form: str, args: argparse.Namespace, device: torch.device
) -> tuple[float, float, float]:
    """Milliseconds of a step, and the losses of the first and the last of three."""
    kind = torch.float32 if form == "fp32" else torch.bfloat16
    x, labels = make_batch(args.batch_fit, args.dim, classes, kind, device)
    if what == "kernels":
        head = KernelHead(classes, args.dim, form=form, block=args.block, cache=False, device=device)
        step: Callable[[], Tensor] = lambda: head.step(x, labels)[0]  # noqa: E731
    else:
        step = library_head(x, labels, classes, **library_options(form, block=args.block, cache_bytes=0))
    losses: list[Tensor] = []
    took = milliseconds({"fit": lambda: losses.append(step())}, 2, device)["fit"]
    return took, float(losses[0]), float(losses[-1])


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else math.nan


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a training step of a large softmax head on one GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--classes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--block", type=int, default=65536, help="classes of one pass")
    parser.add_argument("--cache-gb", type=float, default=24.0, help="exponentials are kept up to here")
    parser.add_argument("--library-classes", type=int, default=1_000_000, help="plsc.ClassParallelHead up to here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fit", action="store_true", help="the most classes that train")
    parser.add_argument("--batch-fit", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="2,000 classes, one round")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args(argv)
    if args.quick:
        args.classes, args.batches, args.dim, args.block, args.rounds = [2000], [16], 64, 512, 1
        args.batch_fit = 16
    return args


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    for what in ("kernels", "head"):
        wide, half = (check(device, what=what, form=form) for form in ("fp32", "split"))
        print(f"{what}: relative error against float64 {wide:.1e}, with bf16 products {half:.1e}")
    print()
    print("| what | B | C | ms | x products | GB | |\n|---|---|---|---|---|---|---|")
    rows = []
    for row in fit(args, device) if args.fit else compare(args, device):
        rows.append(row)
        cells = [row.what, row.batch, f"{row.classes:,}", f"{row.milliseconds:.2f}", f"{row.ratio:.2f}"]
        print("| " + " | ".join(map(str, [*cells, f"{row.gigabytes:.1f}", row.note])) + " |", flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
