"""The class-parallel head against plain autograd on one rank: losses and gradients, for every world size."""

import pytest
import torch
from torch import Tensor

import plsc.nn as nn
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import SGD, sample_classes

from .heads import (
    BATCH,
    CLASSES,
    DIM,
    MARGIN_NAMES,
    WORLDS,
    batch,
    build,
    check,
    close_to_float64,
    full_weight,
    make_margin,
)
from .textbook import reference_losses


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_equals_plain_autograd(world: int, margin: str) -> None:
    check(world, margin)


@pytest.mark.parametrize("block", [1, 3, 5, 64])
@pytest.mark.parametrize("cache_mb", [0.0, 0.0006, 64.0])
@pytest.mark.parametrize("margin", ["arc", "curricular"])
def test_any_block_and_cache(block: int, cache_mb: float, margin: str) -> None:
    check(2, margin, block=block, cache_mb=cache_mb)


@pytest.mark.parametrize("centers", [1, 2])
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_pieces_smaller_than_a_block(monkeypatch: pytest.MonkeyPatch, centers: int, rate: float) -> None:
    """A CPU passes over a few rows at a time, here over two; gradients and fused updates stay what they are."""

    def rows_of(y: Tensor) -> Tensor:
        return sample_classes(y, Shard(CLASSES, 0, 1), rate=rate, seed=3, step=0)[0]

    def fused() -> Tensor:
        head = build(run_ranks(1, lambda comm: comm)[0], nn.ArcFace(), full_weight(centers), block=5, **options)
        x, y = batch()
        head(x.requires_grad_(), y).backward()
        return head.weight.detach().clone()

    options = {"sample_rate": rate, "seed": 3, "head_optimizer": SGD(0.1, momentum=0.9, weight_decay=1e-2)}
    whole = fused()
    monkeypatch.setattr("plsc.ops.optim._PIECE_BYTES", 2 * centers * DIM * 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    check(2, "arc", centers=centers, rows_of=rows_of, sample_rate=rate, seed=3, block=5)
    torch.testing.assert_close(fused(), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("margin", ["arc", "curricular", "mag"])
def test_sub_centers(world: int, margin: str) -> None:
    check(world, margin, centers=3, block=2)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_inter_class_filter(world: int) -> None:
    check(world, "cos", threshold=0.2, block=4)


@pytest.mark.parametrize("world", [1, 3, 6])
@pytest.mark.parametrize("margin", MARGIN_NAMES)
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_float32_is_close_to_float64(world: int, margin: str, rate: float) -> None:
    """The kernels', where they are built, which float64 never meets."""
    close_to_float64(world, margin, rate, torch.float32, 2e-5)


@pytest.mark.parametrize("margin", ["arc", "curricular"])
@pytest.mark.parametrize("options", [{"block": 3, "cache_mb": 0.0}, {"block": 5}, {"sub_centers": 1, "block": 1}])
def test_float32_blocks(margin: str, options: dict) -> None:
    close_to_float64(2, margin, 1.0, torch.float32, 2e-5, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_half_embeddings_are_close_to_float64(margin: str, dtype: torch.dtype) -> None:
    """Unit rows travel in the embeddings' dtype: that rounding, times the scale, is what remains."""
    close_to_float64(2, margin, 1.0, dtype, 0.08 if dtype == torch.bfloat16 else 0.012)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("more", [0, 1])
def test_hardly_more_classes_than_ranks(world: int, more: int) -> None:
    check(world, "arc", classes=world + more)


@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_one_sample_and_a_row_of_zeros(margin: str) -> None:
    """A class whose row is zero has cosine 0 with everything, gets no pull along it, and is no reason for a NaN."""
    x, _ = batch()
    x, y, weight = x[3:4], torch.tensor([4]), full_weight()
    weight[7] = 0
    for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        head = build(run_ranks(1, lambda comm: comm)[0], make_margin(margin), weight).to(dtype)
        local = x.to(dtype, copy=True).requires_grad_()
        head(local, y).backward()
        ref_x, ref_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        reference_losses(make_margin(margin).double(), ref_x, y, ref_w).sum().backward()
        others = [c for c in range(CLASSES) if c != 7]
        torch.testing.assert_close(local.grad.double(), ref_x.grad, rtol=rtol, atol=rtol * 1e-2)
        torch.testing.assert_close(head.weight.grad[others].double(), ref_w.grad[others], rtol=rtol, atol=rtol * 1e-2)
        assert head.weight.grad.isfinite().all() and (head.weight.grad[7] == 0).all()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_sampled_equals_plain_autograd_over_the_sample(world: int, margin: str) -> None:
    def rows_of(y: Tensor) -> Tensor:
        return sample_classes(y, Shard(CLASSES, 0, 1), rate=0.4, seed=3, step=0)[0]

    check(world, margin, rows_of=rows_of, sample_rate=0.4, seed=3, block=4)


@pytest.mark.parametrize("scale", [1.0, 64.0, 128.0, 700.0])
@pytest.mark.parametrize("cache_mb", [0.0, 64.0])
def test_scales_beyond_the_constant_shift(scale: float, cache_mb: float) -> None:
    """Above exp's range the running maximum takes over; in float64 from 600."""
    x, y = batch()
    weight = full_weight()

    def run(comm: Communicator) -> tuple:
        head = build(comm, nn.CosFace(scale=scale, margin=0.3), weight, block=3, cache_mb=cache_mb)
        own = Shard.of(BATCH, comm)
        local = x[own.start : own.stop].clone().requires_grad_()
        loss = head(local, y[own.start : own.stop])
        loss.backward()
        return loss.detach(), local.grad, head.weight.grad

    results = run_ranks(2, run)
    ref_x, ref_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    mean = reference_losses(nn.CosFace(scale=scale, margin=0.3), ref_x, y, ref_w).sum() / (y >= 0).sum()
    mean.backward()
    assert torch.stack([r[0] for r in results]).mean() == pytest.approx(mean.item(), rel=1e-10)
    torch.testing.assert_close(torch.cat([r[1] for r in results]) / 2, ref_x.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), ref_w.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("margin", ["cos", "arc"])
def test_float32_matches_float64_with_extreme_rows(margin: str) -> None:
    """Rows of norm 1e-6 and 1e6, an embedding equal and opposite to its class, repeated labels."""
    x, y = batch(ignore=False)
    weight = full_weight()
    weight[0] *= 1e-6
    weight[1] *= 1e6
    x[0], x[1] = weight[y[0]] * 3, -weight[y[1]]
    x64, w64 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    reference = reference_losses(make_margin(margin), x64, y, w64).mean()
    reference.backward()
    head = build(run_ranks(1, lambda comm: comm)[0], make_margin(margin), weight).float()
    x32 = x.float().requires_grad_()
    loss = head(x32, y)
    loss.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=2e-5)
    if margin == "arc":  # at cos = +-1 the direction of its gradient is only rounding
        assert x32.grad.isfinite().all() and head.weight.grad.isfinite().all()
        return
    scale_x = x64.grad.norm(dim=1, keepdim=True).clamp_min(1e-8)
    assert ((x32.grad - x64.grad) / scale_x).abs().max() < 1e-3
    scale_w = w64.grad.norm(dim=1, keepdim=True).clamp_min(1e-8)
    assert ((head.weight.grad - w64.grad) / scale_w).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_half_embeddings_stay_finite_at_unit_cosines(margin: str, dtype: torch.dtype) -> None:
    head = nn.ClassParallelHead(4, 3, margin=make_margin(margin))
    head.weight.data.copy_(torch.eye(4)[:3])
    x = torch.tensor([[5.0, 0, 0, 0], [-5.0, 0, 0, 0], [0, 0, 0, 0]], dtype=dtype).requires_grad_()
    loss = head(x, torch.tensor([0, 0, 1]))
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and head.weight.grad.isfinite().all()
    assert x.grad.dtype == dtype and (x.grad[2] == 0).all()  # a zero embedding gets no gradient
