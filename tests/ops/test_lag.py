"""Rows that are not sampled catch up to where the dense optimizer would have them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import plsc
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import LARS, SGD, AdamW, deferred_updates, merge_updates
from plsc.ops import lag as lag_module

DIM, CLASSES, BATCH = 6, 80, 4


def make(optimizer: object, comm: Communicator | None = None, **options: object) -> plsc.ClassParallelHead:
    options = {"sample_rate": 0.1, "seed": 4, "margin": plsc.CosFace(8.0, 0.1), **options}
    return plsc.ClassParallelHead(DIM, CLASSES, comm=comm, head_optimizer=optimizer, **options)


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(BATCH, DIM, generator=g, dtype=torch.float64), torch.randint(0, CLASSES, (BATCH,), generator=g)


def rate(step: int) -> float:
    return 0.5 / (1 + step)


def train(head: plsc.ClassParallelHead, steps: int, *, deferred: bool = False) -> list[float]:
    losses = []
    for i in range(steps):
        head.head_optimizer.lr = rate(i)
        own = Shard.of(BATCH, head.comm)
        x, y = (value[own.start : own.stop].clone() for value in batch(i))
        loss = head(x.requires_grad_(), y)
        if deferred:
            with deferred_updates() as updates:
                loss.backward()
            if i != 3:  # an overflow: nothing moves, nothing decays
                for update in merge_updates(updates):
                    update.apply()
        else:
            loss.backward()
        losses.append(loss.item())
    return losses


def dense(options: dict, steps: int, *, skip: int | None = None) -> tuple[list[float], Tensor]:
    """The same by torch.optim.SGD over the whole weight, whose gradient is 0 where a class was not sampled."""
    head = make(None).double()
    optimizer, losses = torch.optim.SGD([head.weight], 1.0, **options), []
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = rate(i)
        x, y = batch(i)
        loss = head(x.requires_grad_(), y)
        optimizer.zero_grad()
        loss.backward()
        if i != skip:
            optimizer.step()
        losses.append(loss.item())
    return losses, head.weight.detach()


OPTIONS = [
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "momentum": 0.9},
    {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    {"momentum": 0.9},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("limit", [3, 1024])
def test_equals_the_dense_optimizer(options: dict, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.nn.class_parallel.LAG_LIMIT", limit)
    head = make(SGD(1.0, unsampled="decayed", **options)).double()
    losses, weight = dense(options, 30)
    assert train(head, 30) == pytest.approx(losses, rel=1e-11)
    assert not torch.allclose(head.weight, weight)  # some rows are behind, and have not been touched
    head.eval()
    torch.testing.assert_close(head.weight.detach(), weight, rtol=1e-11, atol=1e-13)


def test_deferred_and_skipped_steps() -> None:
    head = make(SGD(1.0, unsampled="decayed", **OPTIONS[1])).double()
    losses, weight = dense(OPTIONS[1], 12, skip=3)
    assert train(head, 12, deferred=True) == pytest.approx(losses, rel=1e-11)
    torch.testing.assert_close(head.rows(0, CLASSES), weight, rtol=1e-11, atol=1e-13)


def test_adamw_decays_and_its_moments_wait() -> None:
    head, still = (make(AdamW(1.0, 0.1, unsampled=word)).double() for word in ("decayed", "still"))
    first = head.weight.detach().clone()
    train(head, 10)
    train(still, 10)
    never = still.row_steps == 0
    assert 3 < int(never.sum()) < CLASSES and torch.equal(still.weight[never], first[never])
    shrink = torch.tensor([1 - rate(i) * 0.1 for i in range(10)], dtype=torch.float64).prod()
    torch.testing.assert_close(head.eval().weight[never], first[never] * shrink, rtol=1e-12, atol=0)
    assert torch.equal(head.row_steps, still.row_steps)


@pytest.mark.parametrize("kept", [("fp32", "fp32"), ("split", "bf16"), ("bf16", "int8")])
def test_any_number_of_ranks_and_kind_of_state(kept: tuple) -> None:
    def run(comm: Communicator) -> tuple:
        sgd = SGD(1.0, unsampled="decayed", state_dtype=kept[1], **OPTIONS[1])
        head = make(sgd, comm, weight_dtype=kept[0])
        losses = train(head, 15)
        return losses, head.rows(0, head.shard.size)

    _, weight = dense(OPTIONS[1], 15)
    for world in (1, 2, 4):
        rows = torch.cat([r[1] for r in run_ranks(world, run)]).double()
        exact = 1e-5 if kept[0] == "fp32" else 2e-2
        assert (rows - weight).norm() < exact * weight.norm()


def test_a_checkpoint_is_up_to_date(tmp_path: Path) -> None:
    sgd = SGD(1.0, unsampled="decayed", **OPTIONS[1])
    head = make(sgd).double()
    train(head, 8)
    plsc.save(tmp_path / "run", head=head)
    _, weight = dense(OPTIONS[1], 8)
    torch.testing.assert_close(head.weight.detach(), weight, rtol=1e-11, atol=1e-13)
    resumed = make(sgd).double()
    plsc.load(tmp_path / "run", head=resumed)
    assert torch.equal(resumed.weight, head.weight) and resumed.lag.clock == head.lag.clock == 0


def test_evaluation_and_search_see_today() -> None:
    head = make(SGD(1.0, unsampled="decayed", **OPTIONS[1])).double()
    train(head, 8)
    head.topk(batch(0)[0], 3)
    assert head.lag.clock == 0
    train(head, 3)
    with torch.no_grad():
        head(*batch(0))
    assert head.lag.clock == 0


def test_what_cannot_decay_says_so() -> None:
    with pytest.raises(ValueError, match="unsampled is 'decay', expected still or decayed"):
        SGD(0.1, unsampled="decay")
    with pytest.raises(ValueError, match="LARS does not decay rows that are not sampled"):
        LARS(0.1).idle()
    assert make(SGD(0.1)).lag is None
    assert make(SGD(0.1, unsampled="decayed"), sample_rate=1.0).lag is None
    assert lag_module.LIMIT > 100
