"""The updated weight of a class-parallel head against float64 autograd and torch.optim.SGD, through whatever varies."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

import plsc.nn as nn
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import SGD, sample_classes

from .textbook import reference_losses

DIM, CLASSES, BATCH, STEPS = 8, 13, 12, 3
LR, MOMENTUM, DECAY = 0.05, 0.9, 1e-2
MARGINS = {
    "cosine": lambda: nn.NormFace(scale=16.0),
    "arc": nn.ArcFace,
    "cos": nn.CosFace,
    "sphere": nn.SphereFace,
    "combined": lambda: nn.CombinedMargin(m1=1.1, m2=0.3, m3=0.1),
    "ada": nn.AdaFace,
    "curricular": nn.CurricularFace,
    "mag": nn.MagFace,
}
VARIANTS = {
    "all": {},
    "block 1": {"block": 1},
    "odd block, part cached": {"block": 5, "cache_mb": 0.001},
    "sampled": {"sample_rate": 0.4, "block": 3},
    "filtered": {"filter_threshold": 0.3},
    "sub-centres": {"sub_centers": 2},
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, DIM, generator=g, dtype=torch.float64) * (1 + 9 * torch.rand(BATCH, 1, generator=g))
    y = torch.randint(0, CLASSES, (BATCH,), generator=g)
    y[0], y[1], y[2], y[5] = 0, CLASSES - 1, -1, y[4]
    return x, y


def full_weight(centers: int = 1) -> Tensor:
    shape = (CLASSES, DIM) if centers == 1 else (CLASSES, centers, DIM)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def textbook(margin: nn.Margin, options: dict) -> tuple[list[float], list[Tensor], Tensor]:
    """Losses, gradients of the embeddings, and the weight after STEPS steps of SGD over the rows that take part."""
    w, margin = full_weight(options.get("sub_centers", 1)), margin.double()
    momentum, losses, grads = torch.zeros_like(w), [], []
    for step in range(STEPS):
        x, y = batch(step)
        x.requires_grad_()
        leaf, rows = w.clone().requires_grad_(), None
        if options.get("sample_rate", 1.0) < 1.0:
            rows, _ = sample_classes(y, Shard(CLASSES, 0, 1), rate=options["sample_rate"], seed=0, step=step)
        each = reference_losses(margin, x, y, leaf, rows=rows, threshold=options.get("filter_threshold"))
        loss = each.sum() / (y >= 0).sum()
        loss.backward()
        assert leaf.grad is not None and x.grad is not None
        taken = torch.arange(CLASSES) if rows is None else rows
        momentum[taken] = MOMENTUM * momentum[taken] + leaf.grad[taken] + DECAY * w[taken]
        w[taken] -= LR * momentum[taken]
        losses.append(float(loss))
        grads.append(x.grad)
    return losses, grads, w


def make(comm: Communicator, margin: nn.Margin, options: dict, weight: Tensor) -> nn.ClassParallelHead:
    sgd = SGD(LR, DECAY, momentum=MOMENTUM)
    head = nn.ClassParallelHead(DIM, CLASSES, margin=margin, comm=comm, head_optimizer=sgd, **options).double()
    head.weight.data.copy_(weight[head.shard.start : head.shard.stop])
    return head


def trained(comm: Communicator, margin: str, options: dict) -> tuple[list[Tensor], list[Tensor], Tensor]:
    head = make(comm, MARGINS[margin](), options, full_weight(options.get("sub_centers", 1)))
    own, losses, grads = Shard.of(BATCH, comm), [], []
    for step in range(STEPS):
        x, y = (value[own.start : own.stop] for value in batch(step))
        loss = head(x.requires_grad_(), y)
        loss.backward()
        losses.append(loss.detach())
        grads.append(x.grad)
    return losses, grads, head.weight.detach()


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("margin", list(MARGINS))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_three_fused_steps_are_those_of_the_textbook(variant: str, margin: str, world: int) -> None:
    options = VARIANTS[variant]
    found = run_ranks(world, trained, margin, options)
    losses, grads, weight = textbook(MARGINS[margin](), options)
    for step in range(STEPS):
        mean = torch.stack([each[0][step] for each in found]).mean()
        assert float(mean) == pytest.approx(losses[step], rel=1e-10)
        grad = torch.cat([each[1][step] for each in found]) / world
        torch.testing.assert_close(grad, grads[step], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([each[2] for each in found]), weight, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 16.0, 64.0, 64.1, 78.0, 128.0])
@pytest.mark.parametrize("near", [False, True])
def test_float32_is_exact_to_rounding_at_every_scale(scale: float, near: bool) -> None:
    """On both sides of exp's range, with cosines all over and with all of them near -1, where a shift by s/2 fails."""
    x, y = batch(0)
    y = y.clamp_min(0)
    weight = full_weight()
    if near:
        weight = -x[:1] + 0.02 * weight
        x = x[:1] + 0.02 * x
    margin = nn.CosFace(scale=scale, margin=0.2)
    x64, w64 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    truth = reference_losses(margin, x64, y, w64).mean()
    truth.backward()
    head = nn.ClassParallelHead(DIM, CLASSES, margin=margin, block=3)
    head.weight.data.copy_(weight)
    x32 = x.float().requires_grad_()
    loss = head(x32, y)
    loss.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-6)
    for got, want in ((x32.grad, x64.grad), (head.weight.grad, w64.grad)):
        assert got is not None and want is not None
        assert (got - want).norm() <= 2e-4 * want.norm()


@pytest.mark.parametrize("margin", list(MARGINS))
def test_rows_of_any_length_step_as_in_the_textbook(margin: str) -> None:
    """Lengths of 1e-6 and 1e6 beside ordinary ones; the tiny row's step is huge, as the formula has it."""
    weight = full_weight()
    weight[3] *= 1e-6 / weight[3].norm()
    weight[4] *= 1e6 / weight[4].norm()
    x, y = batch(0)
    head = make(run_ranks(1, lambda comm: comm)[0], MARGINS[margin](), {"block": 4}, weight)
    head(x.requires_grad_(), y).backward()
    leaf = weight.clone().requires_grad_()
    losses = reference_losses(MARGINS[margin]().double(), x.detach(), y, leaf)
    (losses.sum() / (y >= 0).sum()).backward()
    assert leaf.grad is not None
    stepped = weight - LR * (leaf.grad + DECAY * weight)
    torch.testing.assert_close(head.weight.detach(), stepped, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("margin", list(MARGINS))
def test_cosines_of_one_and_minus_one(margin: str) -> None:
    """An embedding that is its class, and one that is its opposite: finite, and the loss of the textbook."""
    weight = torch.eye(CLASSES, DIM, dtype=torch.float64) + torch.eye(CLASSES, DIM, dtype=torch.float64).roll(8, 0)
    x, y = torch.stack([3 * weight[1], -2 * weight[1], weight[2]]), torch.tensor([1, 1, 5])
    head = make(run_ranks(1, lambda comm: comm)[0], MARGINS[margin](), {}, weight)
    loss = head(x.clone().requires_grad_(), y)
    loss.backward()
    truth = reference_losses(MARGINS[margin]().double(), x, y, weight).mean()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-10) and head.weight.isfinite().all()


@pytest.mark.parametrize("margin", list(MARGINS))
def test_one_sample_a_rank(margin: str) -> None:
    """B = 1 on three ranks, one of them with a label to ignore."""
    (x, y), weight = batch(0), full_weight()

    def run(comm: Communicator) -> tuple[Tensor, Tensor | None, Tensor]:
        head = make(comm, MARGINS[margin](), {}, weight)
        own = x[comm.rank : comm.rank + 1].clone().requires_grad_()
        loss = head(own, y[comm.rank : comm.rank + 1])
        loss.backward()
        return loss.detach(), own.grad, head.weight.detach()

    found = run_ranks(3, run)
    ref, leaf = x[:3].clone().requires_grad_(), weight.clone().requires_grad_()
    losses = reference_losses(MARGINS[margin]().double(), ref, y[:3], leaf)
    mean = losses.sum() / 2
    mean.backward()
    assert leaf.grad is not None
    assert float(torch.stack([each[0] for each in found]).mean()) == pytest.approx(mean.item(), rel=1e-10)
    torch.testing.assert_close(torch.cat([each[1] for each in found]) / 3, ref.grad, rtol=1e-9, atol=1e-11)
    stepped = weight - LR * (leaf.grad + DECAY * weight)
    torch.testing.assert_close(torch.cat([each[2] for each in found]), stepped, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("margin", list(MARGINS))
def test_the_gradient_goes_through_the_embeddings_length(margin: str) -> None:
    """It is orthogonal to the embedding and falls with its length, except for margins that look at lengths."""
    (x, y), comm = batch(0), run_ranks(1, lambda comm: comm)[0]
    grads = []
    for length in (1.0, 10.0):
        leaf = (x * length).requires_grad_()
        make(comm, MARGINS[margin](), {}, full_weight())(leaf, y).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
    along = (grads[0] * x).sum(1).abs() / (grads[0].norm(dim=1) * x.norm(dim=1)).clamp_min(1e-30)
    if margin == "mag":
        assert along.max() > 1e-3
    else:
        assert along.max() < 1e-9
    if margin not in ("mag", "ada"):
        torch.testing.assert_close(grads[1] * 10, grads[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_goes_on_where_the_original_stands(way: str) -> None:
    """Sampling step, momentum and margin statistics come along; what the copy learns leaves the original alone."""
    comm = run_ranks(1, lambda comm: comm)[0]
    head = make(comm, nn.CurricularFace(), {"sample_rate": 0.4}, full_weight())
    x, y = batch(0)
    head(x.clone().requires_grad_(), y).backward()
    twin = copy.deepcopy(head) if way == "deepcopy" else pickle.loads(pickle.dumps(head))
    before = head.weight.detach().clone()
    x, y = batch(1)
    loss = twin(x.clone().requires_grad_(), y)
    loss.backward()
    assert torch.equal(head.weight.detach(), before) and not torch.equal(twin.weight.detach(), before)
    again = head(x.clone().requires_grad_(), y)
    again.backward()
    assert torch.equal(loss, again) and torch.equal(twin.weight, head.weight)
    assert repr(twin) == repr(head) and vars(twin.head_optimizer) == vars(head.head_optimizer)


@pytest.mark.parametrize("world", [1, 3])
def test_weights_of_single_samples_reach_the_updated_weight(world: int) -> None:
    factors, weight = torch.linspace(0, 2, BATCH, dtype=torch.float64), full_weight()
    x, y = batch(0)

    def run(comm: Communicator) -> Tensor:
        head, own = make(comm, nn.ArcFace(), {}, weight), Shard.of(BATCH, comm)
        part = slice(own.start, own.stop)
        (head.losses(x[part].clone().requires_grad_(), y[part]) * factors[part]).mean().backward()
        return head.weight.detach()

    found = torch.cat(run_ranks(world, run))
    leaf = weight.clone().requires_grad_()
    (reference_losses(nn.ArcFace().double(), x, y, leaf) * factors).mean().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(found, weight - LR * (leaf.grad + DECAY * weight), rtol=1e-10, atol=1e-11)
