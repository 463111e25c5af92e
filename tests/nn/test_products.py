"""Heads whose products have operands in bfloat16, against float64 on the same rounded operands and against fp32 heads.

What is left of the error is the rounding of exponentials, 2^-9 of each at most, in the embeddings' gradient; of them
and of x times its share of the loss in the weight's, 2^-8. Losses know neither.
"""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plsc
import plsc.nn as nn
from plsc import ps
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import LARS, SGD, AdamW, RowOptimizer, native, sample_classes
from plsc.ops.formats import join, split
from plsc.ops.optim import apply_rows

from .heads import MARGIN_NAMES, make_margin
from .textbook import losses_of

DIM, CLASSES, BATCH = 32, 61, 18
LOSS, INPUT, WEIGHT = 5e-6, 2**-9, 2**-8  # relative; of a loss it is float32's, at a scale of 64
Make = Callable[[], nn.Margin]


def batch(seed: int = 0, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Samples halfway between their class and anywhere; one ignored, labels that repeat."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (BATCH,), generator=g)
    y[0], y[1], y[5] = 0, classes - 1, y[4]
    x = torch.randn(BATCH, DIM, generator=g) + full_weight(classes=classes)[y]
    y[2] = -1
    return x * (torch.rand(BATCH, 1, generator=g) * 20 + 0.1), y


def full_weight(centers: int = 1, classes: int = CLASSES) -> Tensor:
    shape = (classes, DIM) if centers == 1 else (classes, centers, DIM)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def rounded(values: Tensor) -> Tensor:
    """As products see them; the gradient goes through."""
    return values + (values.detach().bfloat16().to(values.dtype) - values).detach()


def truth(margin: nn.Margin, x: Tensor, y: Tensor, w: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dx and dw in float64 from the same operands."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    losses = losses_of(margin.double(), rounded(F.normalize(x)), x.norm(dim=1), y, rounded(w), **how)
    loss = losses.sum() / (y >= 0).sum()
    loss.backward()
    assert x.grad is not None and w.grad is not None
    return loss.detach(), x.grad, w.grad


def step(comm: Communicator, make: Make, weight: Tensor, x: Tensor, y: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Loss, dx and dw of this rank."""
    centers = weight.shape[1] if weight.dim() == 3 else 1
    options = {"product_dtype": "bf16", **options}
    dtype, factor = options.pop("dtype", torch.float32), options.pop("factor", 1.0)
    head = nn.ClassParallelHead(DIM, len(weight), margin=make(), comm=comm, sub_centers=centers, **options).to(dtype)
    head.weight.data.copy_(weight[head.shard.start : head.shard.stop])
    own = Shard.of(len(x), comm)
    local = x[own.start : own.stop].to(dtype).requires_grad_()
    loss = head(local, y[own.start : own.stop])
    (loss * factor).backward()
    assert local.grad is not None and head.weight.grad is not None
    return [loss.detach(), local.grad / factor, head.weight.grad / factor]


def joined(results: list[list[Tensor]]) -> list[Tensor]:
    """What the ranks have, as one rank would."""
    losses, inputs, weights = zip(*results, strict=True)
    return [torch.stack(losses).mean(), torch.cat(inputs) / len(results), torch.cat(weights)]


def apart(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check(world: int, make: Make, given: tuple[Tensor, Tensor, Tensor], how: dict[str, Any], **options: Any) -> None:
    x, y, weight = given
    got = joined(run_ranks(world, step, make, weight, x, y, options))
    expected = truth(make(), x, y, weight, **how)
    for value, wanted, allowed in zip(got, expected, (LOSS, INPUT, WEIGHT), strict=True):
        assert apart(value, wanted) < allowed


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_equals_float64_on_the_same_operands(world: int, margin: str) -> None:
    check(world, lambda: make_margin(margin), (*batch(), full_weight()), {}, block=7)


@pytest.mark.parametrize("cache_mb", [0.0, 0.0005, 8.0])
@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize("margin", ["arc", "curricular"])
def test_any_block_and_cache(margin: str, block: int, cache_mb: float) -> None:
    check(2, lambda: make_margin(margin), (*batch(), full_weight()), {}, block=block, cache_mb=cache_mb)


@pytest.mark.parametrize("world", [1, 2])
def test_sub_centers_filter_and_sampling(world: int) -> None:
    x, y = batch()
    check(world, nn.ArcFace, (x, y, full_weight(3)), {}, block=4)
    check(world, nn.CosFace, (x, y, full_weight()), {"threshold": 0.2}, filter_threshold=0.2)
    rows = sample_classes(y, Shard(CLASSES, 0, 1), rate=0.4, seed=3, step=0)[0]
    check(world, nn.ArcFace, (x, y, full_weight()), {"rows": rows}, sample_rate=0.4, seed=3, block=6)


@pytest.mark.parametrize("scale", [1.0, 16.0, 64.0, 70.0, 128.0])
@pytest.mark.parametrize("cache_mb", [0.0, 8.0])
def test_scales(scale: float, cache_mb: float) -> None:
    """Above 64 the shift of the exponentials follows the logits."""
    options = {"block": 9, "cache_mb": cache_mb}
    check(2, lambda: nn.CosFace(scale, 0.3), (*batch(), full_weight()), {}, **options)


@pytest.mark.parametrize("side", [1.0, -1.0])
@pytest.mark.parametrize("scale", [64.0, 77.0])
def test_range_of_bfloat16(side: float, scale: float) -> None:
    """All cosines near 1, or -1, of 4,000 classes whose rows are of length 1e-6 to 1e6, and a millionth of the loss.

    Nothing leaves its range. Of what is left without the part along x and w, nearly all, errors are those of the whole.
    """
    classes = 4000
    g = torch.Generator().manual_seed(1)
    way = F.normalize(torch.randn(1, DIM, generator=g))
    weight = F.normalize(way + 0.01 * torch.randn(classes, DIM, generator=g))
    weight *= 10 ** (12 * torch.rand(classes, 1, generator=g) - 6)
    x = side * way + 0.01 * torch.randn(BATCH, DIM, generator=g)
    y = torch.randint(0, classes, (BATCH,), generator=g)
    options = {"factor": 2.0**-20}
    loss, grad_x, grad_w = joined(run_ranks(1, step, lambda: nn.CosFace(scale, 0.3), weight, x, y, options))
    expected, wanted_x, wanted_w = truth(nn.CosFace(scale, 0.3), x, y, weight)
    assert apart(loss, expected) < LOSS
    assert ((grad_x - wanted_x).norm(dim=1) * x.norm(dim=1) < INPUT * scale / BATCH).all()
    cos = F.normalize(x.double()) @ F.normalize(weight.double()).T
    share = (scale * cos.scatter(1, y[:, None], -math.inf)).softmax(1).sum(0)  # of a class, over all samples
    own = torch.zeros(classes, dtype=torch.float64).index_add_(0, y, torch.ones(BATCH, dtype=torch.float64))
    error = (grad_w - wanted_w).norm(dim=1) * weight.norm(dim=1) / (scale / BATCH)
    assert (error < WEIGHT * share + 2**-9 * (share + own)).all()  # the part along w is that along the unrounded one
    assert (wanted_w.norm(dim=1) * weight.norm(dim=1) / (scale / BATCH)).median() > 10 * error.median()


def test_exponentials_that_stay_are_those_made_again() -> None:
    x, y = batch()
    for make in (nn.ArcFace, lambda: nn.CosFace(70.0, 0.2)):
        ways = [run_ranks(1, step, make, full_weight(), x, y, {"block": 8, "cache_mb": mb}) for mb in (0.0, 9.0)]
        for once, kept in zip(*(way[0] for way in ways), strict=True):
            assert apart(once, kept) < (1e-7 if make is nn.ArcFace else 3e-4)


@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_any_number_of_ranks(margin: str) -> None:
    """To float64's rounding in float64, where hardly an operand is rounded the other way; close in float32."""
    x, y = batch()
    for dtype, allowed in ((torch.float64, 1e-9), (torch.float32, 3e-4)):
        options = {"dtype": dtype, "block": 8}
        given = full_weight(), x, y, options
        alone, *more = [joined(run_ranks(n, step, lambda: make_margin(margin), *given)) for n in (1, 2, 3)]
        for together in more:
            assert max(map(apart, together, alone)) < allowed


def test_products_are_made_of_halves_and_summed_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three a block, four where exponentials are made again; and no copy of rows that are kept in bfloat16."""
    seen: list[tuple[torch.dtype, ...]] = []
    multiply = native.product

    def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        seen.append((a.dtype, b.dtype, out.dtype))
        return multiply(a, b, out=out)

    monkeypatch.setattr(native, "product", product)
    x, y = batch()
    for kind, cache_mb in (("fp32", 0.0), ("split", 9.0), ("bf16", 0.0)):
        seen.clear()
        options = {"head_optimizer": SGD(0.1), "weight_dtype": kind, "cache_mb": cache_mb, "block": 16}
        head = nn.ClassParallelHead(DIM, CLASSES, product_dtype="bf16", **options)
        head(x.clone().requires_grad_(), y).backward()
        assert seen == [(torch.bfloat16, torch.bfloat16, torch.float32)] * (4 * (3 if cache_mb else 4))
        buffers = head.workspace._buffers
        assert ("rows" in buffers) == (kind == "fp32")
        kept = [name for name in buffers if name.startswith("cache")]
        assert len(kept) == (4 if cache_mb else 0)
        assert all(buffers[name].dtype == torch.bfloat16 for name in [*kept, *({"rows", "halves"} & set(buffers))])


OPTIMIZERS: dict[str, Callable[[], RowOptimizer]] = {
    "sgd": lambda: SGD(0.5, 1e-2, momentum=0.9, nesterov=True),
    "int8": lambda: SGD(0.5, 1e-2, momentum=0.9, state_dtype="int8"),
    "adamw": lambda: AdamW(0.02, 0.1, eps=1e-2),
    "lars": lambda: LARS(1.0, momentum=0.5),
}


@pytest.mark.parametrize("kind", ["fp32", "split", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fused_steps(kind: str, optimizer: Callable[[], RowOptimizer]) -> None:
    """Three of them, each from the state before it, against the same step by float64's gradient."""
    head = nn.ClassParallelHead(
        DIM, CLASSES, product_dtype="bf16", weight_dtype=kind, head_optimizer=optimizer(), block=11
    )
    start = full_weight()
    if kind == "split":
        high, head.row_low = split(start)
        head.weight.data.copy_(high)
    else:
        head.weight.data.copy_(start)
    for turn in range(3):
        x, y = batch(turn)
        before, state = head.weight.detach().clone(), {name: t.clone() for name, t in head.row_state().items()}
        old, rounding = head.rows(0, CLASSES).clone(), head._rounding()
        gradient = truth(nn.ArcFace(), x, y, before)[2].float()
        head(x.clone().requires_grad_(), y).backward()
        apply_rows(optimizer(), before, state, None, gradient, rounding=rounding)
        expected = before.float() if kind != "split" else join(before, state["low"])
        if kind == "bf16":  # on its grid, and a step of it away where the gradient's error tipped the rounding
            assert head.weight.dtype == torch.bfloat16
            steps = (head.weight.detach().view(torch.int16).int() - before.view(torch.int16).int()).abs()
            assert (steps <= 1).float().mean() > 0.99 and (steps > 0).float().mean() < 0.05
        else:
            assert apart(head.rows(0, CLASSES) - old, expected - old) < 2 * WEIGHT


def test_auto_is_floats_but_for_halves_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(kind: str, asked: str) -> list[Tensor]:
        options = {"weight_dtype": kind, "product_dtype": asked, "head_optimizer": SGD(0.1, momentum=0.9), "seed": 1}
        head = nn.ClassParallelHead(DIM, CLASSES, **options)
        losses = []
        for turn in range(3):
            x, y = batch(turn)
            losses.append(head(x.requires_grad_(), y))
            losses[-1].backward()
        return [torch.stack(losses).detach(), head.rows(0, CLASSES)]

    def same(kind: str, asked: str) -> bool:
        return all(map(torch.equal, trained(kind, "auto"), trained(kind, asked)))

    assert all(same(kind, "fp32") and not same(kind, "bf16") for kind in ("fp32", "split", "bf16"))
    monkeypatch.setattr(native, "multiplies_halves", lambda device: True)
    assert same("fp32", "fp32") and same("split", "bf16") and same("bf16", "bf16")


def test_which_gpus_multiply_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not native.multiplies_halves(torch.device("cpu"))
    for capability, fast in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert native.multiplies_halves(torch.device("cuda", 0)) == fast


@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_finite_at_unit_cosines(margin: str) -> None:
    """Rounded embeddings of length 1.002 at most against rows that are as they enter: cosines just above 1."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(9, DIM, generator=g)
    head = nn.ClassParallelHead(DIM, 9, margin=make_margin(margin), product_dtype="bf16")
    head.weight.data.copy_(weight)
    x = torch.cat([weight * 3, -weight, torch.zeros(1, DIM)]).requires_grad_()
    loss = head(x, torch.arange(19) % 9)
    loss.backward()
    assert x.grad is not None and head.weight.grad is not None and loss.isfinite()
    assert x.grad.isfinite().all() and head.weight.grad.isfinite().all() and (x.grad[-1] == 0).all()


def test_over_a_store() -> None:
    table = ps.Table(DIM, rule=ps.SGD(), lr=0.3, init="normal", seed=3)
    stored = plsc.ClassParallelHead(DIM, CLASSES, weight=table, sample_rate=0.5, seed=5, product_dtype="bf16", block=9)
    options = {"sample_rate": 0.5, "seed": 5, "head_optimizer": SGD(0.3), "block": 9}
    memory = nn.ClassParallelHead(DIM, CLASSES, product_dtype="bf16", **options)
    memory.weight.data.copy_(stored.rows(0, CLASSES))
    for turn in range(3):
        x, y = batch(turn)
        losses = [head(x.clone().requires_grad_(), y) for head in (stored, memory)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for loss in losses:
            loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(*(head.eval()(x, y) for head in (stored, memory)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["fp32", "split", "bf16"])
def test_trains_as_floats_do(kind: str) -> None:
    def losses(asked: str) -> list[float]:
        optimizer = SGD(0.1, 1e-3, momentum=0.9, state_dtype="fp32" if kind == "fp32" else "bf16")
        head = nn.ClassParallelHead(
            DIM,
            CLASSES,
            margin=nn.CosFace(16.0, 0.2),
            weight_dtype=kind,
            head_optimizer=optimizer,
            product_dtype=asked,
        )
        found = []
        for turn in range(40):
            x, y = batch(turn)
            loss = head(x.requires_grad_(), y)
            loss.backward()
            found.append(loss.item())
        return found

    wide, half = losses("fp32"), losses("bf16")
    assert wide[-1] < 0.6 * wide[0]
    for got, wanted in zip(half, wide, strict=True):
        assert got == pytest.approx(wanted, rel=0.02 if kind != "bf16" else 0.05)


def test_the_word_is_checked_copied_and_told_by_a_recipe() -> None:
    from plsc.train.build import build_head
    from plsc.train.config import Config, HeadConfig

    with pytest.raises(ValueError, match="product_dtype is 'fp16', expected one of auto, fp32, bf16"):
        nn.ClassParallelHead(DIM, CLASSES, product_dtype="fp16")
    with pytest.raises(ValueError, match=r"head\.product_dtype"):
        Config(head=HeadConfig(product_dtype="tf32"))
    comm = run_ranks(1, lambda comm: comm)[0]
    head = build_head(Config(head=HeadConfig(product_dtype="bf16")), 10, comm)
    for twin in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert twin.product_dtype == "bf16" and twin.half_products
    with pytest.raises(ValueError, match=r"takes no .*product_dtype"):
        build_head(Config(head=HeadConfig(margin="linear", product_dtype="bf16")), 10, comm)
    assert math.isfinite(head.bytes_per_class())
