"""Heads at the edges: lone classes, vectors of any length, inference mode, state that is loaded, wrong words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plsc
import plsc.nn as nn
from plsc.comm import Communicator, Counting, run_ranks, shard_of
from plsc.ops import SGD, deferred_updates, merge_updates

DIM, CLASSES, BATCH = 8, 60, 6
KINDS = [("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "int8"), ("split", "fp32"), ("split", "bf16"), ("bf16", "int8")]


def sgd(state: str = "fp32", **options: Any) -> SGD:
    return SGD(0.1, 1e-2, momentum=0.9, state_dtype=state, **options)


def make(weight: str = "fp32", state: str = "fp32", **options: Any) -> nn.ClassParallelHead:
    options = {"margin": nn.CosFace(16.0, 0.2), "head_optimizer": sgd(state), **options}
    return nn.ClassParallelHead(DIM, CLASSES, weight_dtype=weight, **options)


def decaying(**options: Any) -> nn.ClassParallelHead:
    return make(sample_rate=0.1, head_optimizer=sgd(unsampled="decayed"), **options)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, DIM, generator=g), torch.randint(0, CLASSES, (BATCH,), generator=g)


def train(head: nn.ClassParallelHead, steps: int, first: int = 0) -> list[float]:
    losses = []
    for i in range(first, first + steps):
        x, y = batch(i)
        loss = head(x.requires_grad_(), y)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


# ---- sums


@pytest.mark.parametrize("scale", [64.0, 78.0, 128.0])
@pytest.mark.parametrize("margin", [nn.ArcFace, nn.CosFace, nn.SphereFace])
def test_a_lone_class_has_no_loss(margin: type[nn.Margin], scale: float) -> None:
    """However far the margin pushes its own logit down: the softmax of one logit is 1."""
    head = nn.ClassParallelHead(DIM, 1, margin=margin(scale))
    x = head.weight.detach().repeat(3, 1).neg().requires_grad_()
    loss = head(x, torch.zeros(3, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0 and not x.grad.any() and not head.weight.grad.any()


def test_a_sample_of_the_positive_alone_has_no_loss() -> None:
    head = nn.ClassParallelHead(DIM, CLASSES, margin=nn.ArcFace(78.0), sample_rate=0.0)
    x = head.weight.detach()[:1].neg().requires_grad_()
    loss = head(x, torch.tensor([0]))
    loss.backward()
    assert loss.item() == 0.0 and not x.grad.any() and not head.weight.grad.any()


def test_a_lone_class_of_a_plain_softmax_has_no_loss() -> None:
    head = nn.ClassParallelLinear(DIM, 1)
    torch.nn.init.constant_(head.weight, -5.0)
    x = torch.full((3, DIM), 4.0, requires_grad=True)  # logit -160
    loss = head(x, torch.zeros(3, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0 and not x.grad.any() and not head.weight.grad.any() and not head.bias.grad.any()


@pytest.mark.parametrize("length", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("scale", [1.0, 63.9, 64.1, 70.0, 78.0, 128.0])
def test_rows_of_any_length_at_any_scale(scale: float, length: float) -> None:
    """A class that is wrong and lies in the sample's own direction has the largest exponential there is."""
    x, _ = batch()
    y = torch.arange(BATCH)
    weight = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))
    weight[1 : BATCH + 1] = x
    weight *= length / weight.norm(dim=1, keepdim=True)
    head = nn.ClassParallelHead(DIM, CLASSES, margin=nn.CosFace(scale))
    head.weight.data.copy_(weight)
    got = x.clone().requires_grad_()
    loss = head(got, y)
    loss.backward()
    w, u = weight.double().requires_grad_(), x.double().requires_grad_()
    cos = F.normalize(u) @ F.normalize(w, eps=1e-30).T
    expected = F.cross_entropy(scale * (cos - 0.35 * F.one_hot(y, CLASSES)), y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for grad, true in ((got.grad, u.grad), (head.weight.grad, w.grad)):
        assert ((grad.double() - true).norm() / true.norm()).item() < 1e-5


@pytest.mark.parametrize("scale", [64.0, 100.0, 700.0])
def test_exponentials_of_float64_fit_what_keeps_them(scale: float) -> None:
    """bfloat16 ends at e^88, where float64 goes to e^709."""
    x, _ = batch()
    y = torch.arange(BATCH)
    grads = []
    for cache in ("fp32", "bf16"):
        head = nn.ClassParallelHead(DIM, CLASSES, margin=nn.CosFace(scale), cache_dtype=cache).double()
        head.weight.data[1 : BATCH + 1] = x  # wrong, and in the sample's own direction
        head(x.double(), y).backward()
        grads.append(head.weight.grad)
    assert ((grads[1] - grads[0]).norm() / grads[0].norm()).item() < 4e-3


@pytest.mark.parametrize("length", [1e-30, 1e-21, 1e-12, 1e12, 1e19, 1e30])
def test_embeddings_of_any_length(length: float) -> None:
    """The loss knows their direction alone, and their gradient is that at length 1 over the length."""
    x, y = batch()
    seen = []
    for factor in (1.0, length):
        head = nn.ClassParallelHead(DIM, CLASSES, margin=nn.ArcFace(16.0))
        local = (F.normalize(x) * factor).requires_grad_()
        loss = head(local, y)
        loss.backward()
        seen.append((loss.detach(), local.grad * factor, head.weight.grad))
    for got, expected in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("margin", "reduces"),
    [(nn.CosFace(64.0), 1), (nn.CosFace(64.1), 2), (nn.CurricularFace(32.0), 2), (nn.CurricularFace(32.1), 3)],
)
def test_the_largest_logit_is_asked_for_where_it_may_exceed_64(margin: nn.Margin, reduces: int) -> None:
    def run(comm: Communicator) -> dict:
        counting = Counting(comm)
        head = nn.ClassParallelHead(DIM, CLASSES, margin=margin, comm=counting)
        head(batch()[0].requires_grad_(), batch()[1]).backward()
        return dict(counting.calls)

    assert run_ranks(2, run)[0]["all_reduce"] == reduces


# ---- between training and other uses


class _Flat(nn.CosFace):
    def others(self, cos: Tensor, own: Tensor) -> Tensor:
        return torch.zeros_like(cos)


def test_inference_mode_of_a_margin_that_moves_the_others() -> None:
    """There is no slope to be had, and none is needed; nor of negatives that do not depend on their cosine."""
    head = make(margin=nn.CurricularFace(16.0))
    with torch.inference_mode():
        loss = head(*batch())
    with torch.no_grad():
        assert float(loss) == float(head(*batch()))
    x, y = batch()
    make(margin=_Flat(16.0))(x.requires_grad_(), y).backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("decay", [False, True])
def test_inference_mode_leaves_nothing_behind(decay: bool) -> None:
    """torch refuses to write into what inference mode has made: buffers that live on must not be of it."""
    used, other = (decaying() if decay else make(cache_mb=0.001) for _ in range(2))
    train(used, 3)
    train(other, 3)
    with torch.inference_mode():
        used(*batch())
        used.topk(batch()[0], 3)
        used.rows(0, 5)
    other.catch_up()
    assert train(used, 3, first=3) == train(other, 3, first=3)
    assert torch.equal(used.rows(0, CLASSES), other.rows(0, CLASSES))
    fresh = make()
    with torch.inference_mode():
        fresh(*batch())
    assert train(fresh, 2) == train(make(), 2)


def test_what_is_loaded_has_missed_no_step() -> None:
    """A head goes back to an earlier state while some of its rows still wait for their decay."""
    head = decaying()
    train(head, 2)
    saved = {name: value.clone() for name, value in head.state_dict().items()}
    train(head, 3, first=2)
    assert head.lag.clock > 0
    head.load_state_dict(saved)
    fresh = decaying()
    fresh.load_state_dict(saved)
    assert torch.equal(head.rows(0, CLASSES), saved["weight"])
    assert train(head, 3, first=2) == train(fresh, 3, first=2)
    assert torch.equal(head.rows(0, CLASSES), fresh.rows(0, CLASSES))


def test_loading_nothing_forgets_no_decay() -> None:
    head, other = decaying(), decaying()
    train(head, 4)
    train(other, 4)
    head.load_state_dict({}, strict=False)
    assert torch.equal(head.rows(0, CLASSES), other.rows(0, CLASSES))


def test_an_assigned_state_stays_cut() -> None:
    head = make("split", "int8")
    head.load_state_dict(make("split", "int8").state_dict(), assign=True)
    assert shard_of(head.weight) == shard_of(head.row_low) == shard_of(head.row_momentum) == head.shard


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("live", KINDS)
def test_numbers_of_another_kind_are_not_loaded(saved: tuple, live: tuple) -> None:
    source, target = make(*saved), make(*live)
    train(source, 1)
    before = target.rows(0, CLASSES)
    if saved == live:
        target.load_state_dict(source.state_dict())
        assert torch.equal(target.rows(0, CLASSES), source.rows(0, CLASSES))
        return
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"the state_dict has torch\.\w+, the head torch\.\w+; make the head"):
            target.load_state_dict(source.state_dict(), strict=strict)
    assert torch.equal(target.rows(0, CLASSES), before)


def test_float32_and_float64_are_one_kind() -> None:
    source = make().double()
    train64 = source(*(batch()[0].double().requires_grad_(), batch()[1]))
    train64.backward()
    target = make()
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight.float())


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_small_weight_keeps_its_state_whole(state: str) -> None:
    """module.bfloat16() would leave the weight as it is and round its momentum, or the momentum's units."""
    head = make("split", state)
    kinds = {name: value.dtype for name, value in head.state_dict().items()}
    with pytest.raises(ValueError, match="cannot change its dtype"):
        head.bfloat16()
    assert {name: value.dtype for name, value in head.state_dict().items()} == kinds


def test_two_calls_in_one_loss_of_a_head_that_steps_itself() -> None:
    """Mixup: refused with the ways that work, and these do what a torch optimizer does."""
    x, y = batch()
    other = y.flip(0)
    options: dict[str, Any] = {"margin": nn.CosFace(16.0, 0.2)}
    plain = nn.ClassParallelHead(DIM, CLASSES, **options).double()
    (0.3 * plain(x.double(), y) + 0.7 * plain(x.double(), other)).backward()
    torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=1e-2).step()

    head = make().double()
    with pytest.raises(RuntimeError, match=r"give it all samples in one call of head\.losses, or collect the steps"):
        (0.3 * head(x.double(), y) + 0.7 * head(x.double(), other)).backward()

    head = make().double()
    losses = head.losses(torch.cat([x, x]).double(), torch.cat([y, other]))
    (0.3 * losses[:BATCH].mean() + 0.7 * losses[BATCH:].mean()).backward()
    torch.testing.assert_close(head.weight, plain.weight, rtol=1e-12, atol=1e-14)

    head = make().double()
    with deferred_updates() as updates:
        (0.3 * head(x.double(), y) + 0.7 * head(x.double(), other)).backward()
    for update in merge_updates(updates):
        update.apply()
    torch.testing.assert_close(head.weight, plain.weight, rtol=1e-12, atol=1e-14)


# ---- words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_rate": "0.1"}, r"sample_rate is '0\.1', expected a finite number in .*; 1 is the exact softmax"),
        ({"sample_rate": None}, "sample_rate is None, expected a finite number"),
        ({"block": 2.5}, r"block is 2\.5, expected a whole number, at least 1; None chooses it"),
        ({"block": True}, "block is True, expected a whole number"),
        ({"cache_mb": "1"}, r"cache_mb is '1', expected a finite number in \[0, inf\) MiB"),
        ({"cache_mb": float("inf")}, "cache_mb is inf, expected a finite number"),
        ({"filter_threshold": "a"}, r"filter_threshold is 'a', expected a finite number in \(-1, 1\]"),
        ({"filter_threshold": -1}, "filter_threshold is -1, expected"),
        ({"seed": None}, "seed is None, expected a whole number"),
        ({"seed": 2**70}, "seed is 1180591620717411303424, expected a whole number, -9223372036854775808 to"),
        ({"comm": "gloo"}, "comm is a str, expected a Communicator such as"),
    ],
)
def test_words_of_the_wrong_kind(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.ClassParallelHead(DIM, CLASSES, **options)


@pytest.mark.parametrize("count", [True, "8", 2.0, None, 0])
def test_counts_are_whole_numbers(count: Any) -> None:
    for make_one in (nn.ClassParallelHead, nn.ClassParallelLinear):
        with pytest.raises(ValueError, match=r"embedding_size is .*, expected a whole number, at least 1"):
            make_one(count, CLASSES)
        with pytest.raises(ValueError, match=r"num_classes is .*, expected a whole number, at least 1"):
            make_one(DIM, count)


def test_counts_of_other_libraries_and_a_std_that_is_none() -> None:
    head = nn.ClassParallelHead(DIM, np.int64(5))
    assert head.num_classes == 5 and type(head.num_classes) is int
    for std in (float("nan"), -1.0, "a"):
        with pytest.raises(ValueError, match=r"std is .*, expected a finite number"):
            nn.ClassParallelLinear(DIM, CLASSES, std=std)


@pytest.mark.parametrize("kind", ["fp32", "split", "linear"])
def test_a_search_says_what_is_wrong(kind: str) -> None:
    head = plsc.ClassParallelLinear(DIM, CLASSES) if kind == "linear" else make(kind)
    x = torch.randn(2, DIM)
    for given, k, message in (
        (torch.randn(2, 5), 3, r"embeddings have shape \(2, 5\), expected \[batch, 8\]"),
        (x[0], 3, r"embeddings have shape \(8,\), expected"),
        (x.long(), 3, r"embeddings are torch\.int64, expected floats"),
        ([[1.0] * DIM], 3, "embeddings is a list, expected a tensor"),
        (x, 0, "k is 0, expected a whole number, 1 to 60 = num_classes"),
        (x, 61, "k is 61, expected a whole number, 1 to 60 = num_classes"),
        (x, 2.0, r"k is 2\.0, expected a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            head.topk(given, k)
