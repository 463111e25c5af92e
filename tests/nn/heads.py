"""Heads, batches and comparisons with plain autograd that the tests of heads share."""

import pytest
import torch
from torch import Tensor

import plsc.nn as nn
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import SGD, sample_classes

from .textbook import reference_losses

WORLDS = [1, 2, 3, 4, 6]
DIM, CLASSES, BATCH = 8, 13, 12  # 13 classes on 6 ranks: the last rank holds 1, on 4 ranks 4, 4, 4, 1


def make_margin(name: str) -> nn.Margin:
    return {
        "norm": lambda: nn.NormFace(scale=16.0),
        "arc": lambda: nn.ArcFace(),
        "cos": lambda: nn.CosFace(margin=0.4),
        "sphere": lambda: nn.SphereFace(),
        "combined": lambda: nn.CombinedMargin(m1=1.1, m2=0.3, m3=0.1),
        "ada": lambda: nn.AdaFace(),
        "curricular": lambda: nn.CurricularFace(),
        "mag": lambda: nn.MagFace(),
    }[name]()


MARGIN_NAMES = ["norm", "arc", "cos", "sphere", "combined", "ada", "curricular", "mag"]


def batch(seed: int = 0, classes: int = CLASSES, ignore: bool = True) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, DIM, generator=g, dtype=torch.float64) * torch.rand(BATCH, 1, generator=g).double() * 20
    y = torch.randint(0, classes, (BATCH,), generator=g)
    y[0], y[1], y[5] = 0, classes - 1, y[4]
    if ignore:
        y[2] = -1
    return x, y


def full_weight(centers: int = 1, classes: int = CLASSES) -> Tensor:
    g = torch.Generator().manual_seed(5)
    shape = (classes, DIM) if centers == 1 else (classes, centers, DIM)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def build(comm: Communicator, margin: nn.Margin, weight: Tensor, **options: object) -> nn.ClassParallelHead:
    centers = weight.shape[1] if weight.dim() == 3 else 1
    head = nn.ClassParallelHead(DIM, len(weight), margin=margin, comm=comm, sub_centers=centers, **options).double()
    head.weight.data.copy_(weight[head.shard.start : head.shard.stop])
    return head


def step(comm: Communicator, margin: str, weight: Tensor, x: Tensor, y: Tensor, options: dict) -> tuple:
    """One forward and backward on this rank's slice; gradients in the law's units made plain."""
    head = build(comm, make_margin(margin), weight, **options)
    own = Shard.of(len(x), comm)
    local = x[own.start : own.stop].clone().requires_grad_()
    loss = head(local, y[own.start : own.stop])
    loss.backward()
    return loss.detach(), local.grad, head.weight.grad, head


def check(
    world: int,
    margin: str,
    *,
    centers: int = 1,
    classes: int = CLASSES,
    rows_of=None,
    threshold=None,
    **options: object,
) -> None:
    x, y = (value[: BATCH // world * world] for value in batch(classes=classes))
    weight = full_weight(centers, classes)
    results = run_ranks(world, step, margin, weight, x, y, {"filter_threshold": threshold, **options})
    ref_x, ref_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    rows = None if rows_of is None else rows_of(y)
    losses = reference_losses(make_margin(margin).double(), ref_x, y, ref_w, rows=rows, threshold=threshold)
    mean = losses.sum() / (y >= 0).sum()
    mean.backward()
    assert torch.stack([r[0] for r in results]).mean() == pytest.approx(mean.item(), rel=1e-10)
    grad_x = torch.cat([r[1] for r in results]) / world  # the Reducer's mean over ranks
    torch.testing.assert_close(grad_x, ref_x.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), ref_w.grad, rtol=1e-10, atol=1e-12)


def close_to_float64(world: int, margin: str, rate: float, dtype: torch.dtype, rtol: float, **options: object) -> None:
    """Loss, dx and the weight after a fused step, computed with float32 from embeddings of `dtype`, against float64."""
    x, y = batch()
    x, weight = x.to(dtype), full_weight().float()
    rows = sample_classes(y, Shard(CLASSES, 0, 1), rate=rate, seed=3, step=0)[0] if rate < 1 else None

    def run(comm: Communicator) -> tuple:
        kept = {"sample_rate": rate, "seed": 3, "head_optimizer": SGD(0.5, 1e-3, momentum=0.9), **options}
        head = nn.ClassParallelHead(DIM, CLASSES, margin=make_margin(margin), comm=comm, **kept)
        head.weight.data.copy_(weight[head.shard.start : head.shard.stop])
        own = Shard.of(BATCH, comm)
        local = x[own.start : own.stop].clone().requires_grad_()
        loss = head(local, y[own.start : own.stop])
        loss.backward()
        return loss.detach(), local.grad, head.weight.detach()

    results = run_ranks(world, run)
    ref_x, ref_w = x.double().requires_grad_(), weight.double().requires_grad_()
    mean = reference_losses(make_margin(margin).double(), ref_x, y, ref_w, rows=rows).sum() / (y >= 0).sum()
    mean.backward()
    moved = torch.arange(CLASSES) if rows is None else rows
    stepped = weight.double()
    stepped[moved] -= 0.5 * (ref_w.grad + 1e-3 * ref_w.detach())[moved]
    assert torch.stack([r[0] for r in results]).mean().item() == pytest.approx(mean.item(), rel=rtol)
    grad_x = torch.cat([r[1] for r in results]).double() / world
    assert (grad_x - ref_x.grad).norm() < rtol * ref_x.grad.norm()
    change = torch.cat([r[2] for r in results]).double() - weight.double()
    assert (change - (stepped - weight.double())).norm() < rtol * (stepped - weight.double()).norm()
