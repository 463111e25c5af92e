"""What ranks share: linear layers, nearest classes, initial rows, ignored samples, collectives and their bytes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plsc.nn as nn
from plsc.comm import Communicator, Counting, Shard, run_ranks
from plsc.ops import SGD

from .heads import BATCH, CLASSES, DIM, WORLDS, batch, build, full_weight, make_margin
from .textbook import reference_losses


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
