"""Bad input and unusual use of a head: what is refused, on every rank, and what still holds."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import plsc.nn as nn
from plsc.comm import Communicator, Counting, Shard, run_ranks
from plsc.ops import SGD

from .heads import BATCH, CLASSES, DIM, batch, build, full_weight, make_margin
from .textbook import reference_losses


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
