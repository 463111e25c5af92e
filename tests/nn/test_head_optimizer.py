"""A head's own optimizer steps as torch's do, and only the rows that took part."""

import pytest
import torch
from torch import Tensor

import plsc.nn as nn
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import LARS, SGD, AdamW, deferred_updates, merge_updates, sample_classes

from .heads import BATCH, DIM, batch, build, full_weight
from .textbook import reference_losses


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
