"""The class-parallel head against plain autograd on one rank: losses, gradients, updates, for every world size."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import plsc.nn as nn
from plsc.comm import Communicator, Counting, Shard, run_ranks
from plsc.ops import LARS, SGD, AdamW, deferred_updates, merge_updates, sample_classes

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


def optimizers() -> dict:
    return {
        "sgd": (SGD(0.1, weight_decay=1e-2), lambda p: torch.optim.SGD(p, 0.1, weight_decay=1e-2)),
        "momentum": (
            SGD(0.1, momentum=0.9, weight_decay=1e-2),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
        ),
        "nesterov": (
            SGD(0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        ),
        "adamw": (AdamW(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    }


@pytest.mark.parametrize("name", list(optimizers()))
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("deferred", [False, True])
def test_head_optimizer_equals_torch(name: str, world: int, deferred: bool) -> None:
    """Five fused steps over all classes are five steps of the torch optimizer."""
    weight = full_weight()

    def run(comm: Communicator) -> Tensor:
        fused, _ = optimizers()[name]
        head = build(comm, nn.CosFace(), weight, head_optimizer=fused, block=3)
        for i in range(5):
            x, y = batch(i)
            own = Shard.of(BATCH, comm)
            loss = head(x[own.start : own.stop].clone().requires_grad_(), y[own.start : own.stop])
            if deferred:
                before = head.weight.detach().clone()
                with deferred_updates() as updates:
                    (loss * 4.0).backward()
                assert torch.equal(head.weight, before)
                for update in merge_updates(updates):
                    update.apply(0.25)
            else:
                loss.backward()
            assert head.weight.grad is None
        return head.weight.detach()

    got = torch.cat(run_ranks(world, run))
    plain = weight.clone().requires_grad_()
    optimizer = optimizers()[name][1]([plain])
    for i in range(5):
        x, y = batch(i)
        optimizer.zero_grad()
        (reference_losses(nn.CosFace(), x, y, plain).sum() / (y >= 0).sum()).backward()
        optimizer.step()
    torch.testing.assert_close(got, plain.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1, momentum=0.9, weight_decay=0.1), AdamW(0.1, weight_decay=0.1), LARS(0.1)]
)
def test_unsampled_rows_and_state_stay_untouched(optimizer: object) -> None:
    head = nn.ClassParallelHead(DIM, 300, sample_rate=0.1, head_optimizer=optimizer, seed=2)
    g = torch.Generator().manual_seed(1)
    for i in range(4):
        y = torch.randint(0, 300, (BATCH,), generator=g)
        rows, _ = sample_classes(y, head.shard, rate=0.1, seed=2, step=i)
        still = torch.ones(300, dtype=torch.bool)
        still[rows] = False
        before = head.weight.detach().clone()
        state = {k: v.clone() for k, v in head.row_state().items()}
        head(torch.randn(BATCH, DIM, generator=g, requires_grad=True), y).backward()
        assert torch.equal(head.weight[still], before[still]) and (head.weight[rows] != before[rows]).any(1).all()
        for name, value in head.row_state().items():
            assert torch.equal(value[still], state[name][still])
    assert still.any() and int(head.num_steps) == 4


def test_accumulated_updates_of_different_samples_merge() -> None:
    head = nn.ClassParallelHead(DIM, 50, sample_rate=0.2, head_optimizer=SGD(1.0), cache_mb=0).double()
    plain = nn.ClassParallelHead(DIM, 50, sample_rate=0.2, cache_mb=0).double()
    x, y = batch(classes=50)
    before = head.weight.detach().clone()
    with deferred_updates() as updates:
        for half in (slice(0, 6), slice(6, 12)):
            head(x[half].clone().requires_grad_(), y[half]).backward()
    for half in (slice(0, 6), slice(6, 12)):
        plain(x[half].clone().requires_grad_(), y[half]).backward()
    (update,) = merge_updates(updates)
    update.apply(0.5)
    torch.testing.assert_close(head.weight.detach(), before - 0.5 * plain.weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world", WORLDS)
def test_linear_equals_torch(world: int) -> None:
    x, y = batch()
    x *= 30  # logits far beyond exp's range
    weight, bias = full_weight(), torch.linspace(-3, 3, CLASSES, dtype=torch.float64)

    def run(comm: Communicator) -> tuple:
        layer = nn.ClassParallelLinear(DIM, CLASSES, comm=comm, block=2, cache_mb=0.0004).double()
        layer.weight.data.copy_(weight[layer.shard.start : layer.shard.stop])
        layer.bias.data.copy_(bias[layer.shard.start : layer.shard.stop])
        own = Shard.of(BATCH, comm)
        local = x[own.start : own.stop].clone().requires_grad_()
        loss = layer(local, y[own.start : own.stop])
        loss.backward()
        return loss.detach(), local.grad, layer.weight.grad, layer.bias.grad, layer.topk(local, 5)

    results = run_ranks(world, run)
    rx, rw, rb = x.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
    mean = F.cross_entropy(F.linear(rx, rw, rb), y, ignore_index=-1)
    mean.backward()
    assert torch.stack([r[0] for r in results]).mean() == pytest.approx(mean.item(), rel=1e-10)
    torch.testing.assert_close(torch.cat([r[1] for r in results]) / world, rx.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), rw.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[3] for r in results]), rb.grad, rtol=1e-10, atol=1e-12)
    best = F.linear(x, weight, bias).topk(5)
    torch.testing.assert_close(torch.cat([r[4][0] for r in results]), best.values)
    assert torch.equal(torch.cat([r[4][1] for r in results]), best.indices)


@pytest.mark.parametrize("world", [1, 3, 6])
def test_topk_is_the_nearest_classes(world: int) -> None:
    x, _ = batch()
    weight = full_weight(2)

    def run(comm: Communicator) -> tuple:
        own = Shard.of(BATCH, comm)
        return build(comm, nn.ArcFace(), weight).topk(x[own.start : own.stop], 13)

    results = run_ranks(world, run)
    cos = torch.einsum("bd,ckd->bck", F.normalize(x), F.normalize(weight, dim=-1)).amax(2)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), cos.sort(1, descending=True).values)
    assert torch.equal(torch.cat([r[1] for r in results]), cos.argsort(1, descending=True))


@pytest.mark.parametrize("world", WORLDS)
def test_initial_weight_is_the_same_for_every_world(world: int) -> None:
    whole = nn.ClassParallelHead(5, 2500, seed=9).weight
    parts = run_ranks(world, lambda comm: nn.ClassParallelHead(5, 2500, seed=9, comm=comm).weight.detach())
    assert torch.equal(torch.cat(parts), whole)
    assert whole.std().item() == pytest.approx(0.01, rel=0.05)
    assert not torch.equal(whole[:1024], whole[1024:2048])


@pytest.mark.parametrize("world", [2, 4])
def test_all_ignored_gives_zero_and_one_rank_ignored_counts_right(world: int) -> None:
    x, _ = batch()
    y = torch.full((BATCH,), -1)

    def run(comm: Communicator, labels: Tensor) -> tuple:
        head = build(comm, nn.ArcFace(), full_weight())
        own = Shard.of(BATCH, comm)
        local = x[own.start : own.stop].clone().requires_grad_()
        loss = head(local, labels[own.start : own.stop])
        loss.backward()
        return loss.item(), local.grad.abs().max().item(), head.weight.grad.abs().sum().item()

    for result in run_ranks(world, run, y):
        assert result == (0.0, 0.0, 0.0)
    y[0] = 3
    losses = [r[0] for r in run_ranks(world, run, y)]
    alone = reference_losses(nn.ArcFace(), x[:1], y[:1], full_weight())
    assert losses[0] == pytest.approx(world * alone.item()) and losses[1:] == [0.0] * (world - 1)


@pytest.mark.parametrize(("margin", "extra"), [("arc", 0), ("mag", 0), ("curricular", 2)])
def test_three_collectives_a_step_whose_bytes_do_not_depend_on_the_classes(margin: str, extra: int) -> None:
    """Embeddings with labels, sums with own logits, gradients.

    CurricularFace needs the own cosines before; its logits reach 2 * scale, beyond exp's range: the largest one too.
    """

    def run(comm: Communicator, classes: int) -> tuple:
        counting = Counting(comm)
        head = nn.ClassParallelHead(DIM, classes, margin=make_margin(margin), comm=counting, head_optimizer=SGD(0.1))
        for _ in range(2):  # the first compares the ranks' batch sizes as well
            counting.reset()
            head(torch.randn(6, DIM, requires_grad=True), torch.arange(6)).backward()
        return dict(counting.calls), dict(counting.bytes)

    few, many = run_ranks(3, run, 20)[0], run_ranks(3, run, 5000)[0]
    assert few[0] == {"all_gather": 1, "all_reduce": 1 + extra, "reduce_scatter": 1}
    assert few == many


def test_mean_losses_scaled_differently_are_refused_on_every_rank_and_losses_are_not() -> None:
    def run(comm: Communicator, by_sample: bool) -> str:
        head = nn.ClassParallelHead(DIM, CLASSES, comm=comm)
        x, y = torch.randn(4, DIM, requires_grad=True), torch.arange(4)
        loss = head.losses(x, y).mean() if by_sample else head(x, y)
        try:
            (loss * (1.0 + 0.2 * comm.rank)).backward()
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("scaled the head's mean loss differently" in text for text in run_ranks(3, run, False))
    assert run_ranks(3, run, True) == ["", "", ""]


def bad_calls() -> list:
    x, y = torch.randn(4, DIM), torch.tensor([0, 1, 2, 3])
    return [
        (x, torch.tensor([0, 1, CLASSES, 3]), "label 13 of sample 2 on rank 0"),
        (x, torch.tensor([0, -2, 1, 3]), "label -2 of sample 1 on rank 0"),
        (x, y.float(), "labels are torch.float32"),
        (x, y.int(), "labels are torch.int32"),
        (x, y[:3], "labels have shape"),
        (x[:, :5], y, "embeddings have shape"),
        (x.long(), y, "embeddings are torch.int64"),
    ]


@pytest.mark.parametrize(("x", "y", "message"), bad_calls())
def test_bad_input_says_what_is_wrong(x: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.ClassParallelHead(DIM, CLASSES)(x, y)


def test_a_half_precision_weight_is_refused() -> None:
    head = nn.ClassParallelHead(DIM, CLASSES).bfloat16()
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16, expected float32"):
        head(torch.randn(2, DIM).bfloat16(), torch.tensor([0, 1]))


def test_bad_label_on_one_rank_is_an_error_on_all() -> None:
    def run(comm: Communicator) -> str:
        y = torch.tensor([0, 99 if comm.rank == 1 else 1])
        with pytest.raises(ValueError) as error:
            nn.ClassParallelHead(DIM, CLASSES, comm=comm)(torch.randn(2, DIM), y)
        return str(error.value)

    messages = run_ranks(3, run)
    assert len(set(messages)) == 1 and "label 99 of sample 1 on rank 1" in messages[0]


def test_unequal_batches_name_both_ranks() -> None:
    def run(comm: Communicator) -> str:
        size = 5 if comm.rank == 2 else 6
        with pytest.raises(ValueError) as error:
            nn.ClassParallelHead(DIM, CLASSES, comm=comm)(torch.randn(size, DIM), torch.zeros(size, dtype=torch.int64))
        return str(error.value)

    assert set(run_ranks(3, run)) == {
        "batch sizes differ between ranks: rank 0 has 6, rank 2 has 5; use drop_last or Fleet.loader"
    }


def test_a_batch_that_changes_on_one_rank_only_is_an_error_on_all_and_no_end() -> None:
    """Messages keep their size, so that the transport is not left with one that it did not expect."""

    def run(comm: Communicator) -> list:
        counting = Counting(comm)
        head = nn.ClassParallelHead(DIM, CLASSES, comm=counting)
        seen: list = []
        for sizes in ([4, 4, 4], [4, 4, 3], [5, 5, 5], [5, 0, 5], [5, 5, 5]):
            size = sizes[comm.rank]
            counting.reset()
            try:
                head(torch.randn(size, DIM), torch.zeros(size, dtype=torch.int64))
                seen.append(counting.calls["all_gather"])
            except ValueError as error:
                seen.append(str(error).split(";")[0].split(": ")[1])
        return seen

    expected = [2, "rank 0 has 4, rank 2 has 3", 2, "rank 0 has 5, rank 1 has 0", 1]
    assert run_ranks(3, run) == [expected] * 3


@pytest.mark.parametrize(
    "options",
    [{"sample_rate": 1.5}, {"sub_centers": 0}, {"filter_threshold": 2.0}, {"block": 0}, {"cache_mb": -1.0}],
)
def test_bad_arguments(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        nn.ClassParallelHead(DIM, CLASSES, **options)


def test_two_forwards_before_one_backward_no_grad_and_frozen_weight() -> None:
    x, y = batch()
    head = build(run_ranks(1, lambda comm: comm)[0], nn.ArcFace(), full_weight())
    first = head(x.clone().requires_grad_(), y)
    second = head(x.clone().requires_grad_() * 2.0, y)
    with torch.no_grad():
        quiet = head(x, y)
    assert quiet.item() == pytest.approx(first.item(), rel=1e-12) and not quiet.requires_grad
    first.backward()
    grad = head.weight.grad.clone()
    head.weight.grad = None
    second.backward()
    torch.testing.assert_close(head.weight.grad, grad, rtol=1e-9, atol=1e-12)  # the embedding's length does not matter
    head.weight.requires_grad_(False)
    head.weight.grad = None
    frozen = x.clone().requires_grad_()
    head(frozen, y).backward()
    assert head.weight.grad is None and frozen.grad.abs().sum() > 0


def test_backward_after_the_weight_changed_is_refused() -> None:
    x, y = batch()
    head = build(run_ranks(1, lambda comm: comm)[0], nn.ArcFace(), full_weight(), head_optimizer=SGD(0.1))
    first, second = head(x.clone().requires_grad_(), y), head(x.clone().requires_grad_(), y)
    second.backward()
    with pytest.raises(RuntimeError, match="weight changed between"):
        first.backward()


def test_loss_weights_by_sample() -> None:
    x, y = batch(ignore=False)
    sample_weights = torch.linspace(0, 2, BATCH, dtype=torch.float64)

    def run(comm: Communicator) -> tuple:
        head = build(comm, nn.ArcFace(), full_weight())
        own = Shard.of(BATCH, comm)
        part = slice(own.start, own.stop)
        local = x[part].clone().requires_grad_()
        (head.losses(local, y[part]) * sample_weights[part]).mean().backward()
        return local.grad, head.weight.grad

    results = run_ranks(3, run)
    rx, rw = x.clone().requires_grad_(), full_weight().requires_grad_()
    (reference_losses(nn.ArcFace(), rx, y, rw) * sample_weights).mean().backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]) / 3, rx.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), rw.grad, rtol=1e-10, atol=1e-12)


def test_deepcopy_keeps_marks_and_pickle_returns_to_the_same_rank() -> None:
    import pickle

    from plsc.comm import shard_of

    head = nn.ClassParallelHead(DIM, CLASSES, head_optimizer=SGD(0.1, momentum=0.9))
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert shard_of(twin.weight) == head.shard and shard_of(twin.row_momentum) == head.shard
        assert torch.equal(twin.weight, head.weight) and twin.weight is not head.weight
        x, y = batch()
        twin(x.float().requires_grad_(), y).backward()
    assert shard_of(head.double().weight) == head.shard


@pytest.mark.parametrize("margin", ["arc", "curricular"])
def test_under_autocast_nothing_is_rounded_and_a_rank_without_labels_works(margin: str) -> None:
    """The head leaves autocast: same loss and gradients inside it as outside, also where a rank holds no own class."""
    x, y = batch()
    y = y.clamp_max(3)  # rank 1 of 2 holds classes 7 to 12: none of these

    def run(comm: Communicator, amp: bool) -> tuple:
        head = build(comm, make_margin(margin), full_weight()).float()
        own = Shard.of(BATCH, comm)
        local = x[own.start : own.stop].float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            loss = head(local, y[own.start : own.stop])
        loss.backward()
        return loss.detach(), local.grad, head.weight.grad

    for inside, outside in zip(run_ranks(2, run, True), run_ranks(2, run, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("dim", [5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_batch_of_one(dim: int, dtype: torch.dtype) -> None:
    head = nn.ClassParallelHead(dim, 50)
    x = torch.randn(1, dim).to(dtype).requires_grad_()
    head(x, torch.zeros(1, dtype=torch.int64)).backward()
    assert x.grad.isfinite().all()
    nn.ClassParallelLinear(dim, 50)(x, torch.zeros(1, dtype=torch.int64)).backward()
    with pytest.raises(ValueError, match="empty batch"):
        head(torch.randn(0, dim), torch.zeros(0, dtype=torch.int64))


def test_second_derivatives_are_refused() -> None:
    head = nn.ClassParallelHead(DIM, CLASSES)
    x = torch.randn(4, DIM, requires_grad=True)
    for loss in (head(x, torch.arange(4)), head.losses(x, torch.arange(4)).sum()):
        with pytest.raises(RuntimeError, match="gradients of gradients"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_a_forward_pass_repeated_by_a_backward_pass_is_refused() -> None:
    """Under activation checkpointing the second pass would sample other classes and count a step more."""
    head, x = nn.ClassParallelHead(8, 30, sample_rate=0.5), torch.randn(4, 8, requires_grad=True)
    labels = torch.arange(4)
    for reentrant in (True, False):
        with pytest.raises(RuntimeError, match="leave it outside"):
            checkpoint(head, x, labels, use_reentrant=reentrant).backward()
    loss = head(checkpoint(torch.nn.functional.relu, x, use_reentrant=False), labels)
    loss.backward()
    assert x.grad is not None


def test_what_is_no_head_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_classes is 2.5, expected a whole number"):
        nn.ClassParallelHead(16, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="margin is 'arcface', expected"):
        nn.ClassParallelHead(16, 4, margin="arcface")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"head_optimizer is a .*type.*, expected plsc.SGD"):
        nn.ClassParallelHead(16, 4, head_optimizer=torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="labels is a list"):
        nn.ClassParallelHead(16, 4)(torch.randn(2, 16), [0, 1])


def test_initial_rows_are_not_what_a_user_draws_with_the_same_seed() -> None:
    torch.manual_seed(0)
    head, x = nn.ClassParallelHead(16, 50), torch.randn(50, 16)
    assert F.cosine_similarity(x, head.weight.detach()).abs().max() < 0.95
