"""The way that a GPU's tensors take through a head, where the host reads no number of them: taken here on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

import plsc.nn as nn
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import SGD, host, sample_classes

from .heads import CLASSES, DIM, MARGIN_NAMES, batch, build, check, full_weight, make_margin


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "reads_freely", lambda x: False)


@pytest.mark.parametrize("world", [1, 3, 6])
@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_equals_plain_autograd(world: int, margin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples are listed on every rank, and those whose class is elsewhere count nothing."""
    read_nothing(monkeypatch)
    check(world, margin, block=3)


def test_cuts_centers_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_of(y: Tensor) -> Tensor:
        return sample_classes(y, Shard(CLASSES, 0, 1), rate=0.2, seed=3, step=0)[0]

    read_nothing(monkeypatch)
    check(4, "arc", classes=5)  # the last rank holds no class
    check(3, "arc", centers=3, threshold=0.3, block=2)
    check(2, "curricular", centers=2, cache_mb=0.0)
    check(6, "ada", rows_of=rows_of, sample_rate=0.2, seed=3, block=4)


class Far(nn.CosFace):
    """Moves other cosines by a bound that it does not tell: the shift of the exponentials follows the logits."""

    def others(self, cos: Tensor, own: Tensor) -> Tensor:
        return cos * (1.1 + 0.1 * own)


def trained(comm: Communicator, kind: str, options: dict[str, Any]) -> list[Tensor]:
    """Losses of this rank, then what four steps have made of its rows and their state."""
    x, y = batch()
    own = Shard.of(len(x), comm)
    if kind == "linear":
        linear = nn.ClassParallelLinear(DIM, CLASSES, comm=comm, **options).double()
        local = x[own.start : own.stop].clone().requires_grad_()
        linear(local, y[own.start : own.stop]).backward()
        assert local.grad is not None and linear.weight.grad is not None and linear.bias is not None
        assert linear.bias.grad is not None
        return [local.grad, linear.weight.grad, linear.bias.grad]
    head = build(comm, Far(8.0) if kind == "far" else make_margin(kind), full_weight(), **options)
    losses = []
    for turn in range(4):
        local = x.roll(turn, 0)[own.start : own.stop].clone().requires_grad_()
        loss = head(local, y.roll(turn)[own.start : own.stop])
        loss.backward()
        losses.append(loss.detach())
    return [torch.stack(losses), head.rows(0, head.shard.size), *head.row_state().values()]


MOMENTUM = {"momentum": 0.9, "weight_decay": 1e-2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("arc", {"head_optimizer": SGD(0.1, **MOMENTUM), "block": 3}),
    "sampled": ("mag", {"head_optimizer": SGD(0.1, **MOMENTUM), "sample_rate": 0.3}),
    "decayed": ("cos", {"head_optimizer": SGD(0.1, **MOMENTUM, unsampled="decayed"), "sample_rate": 0.3}),
    "far": ("far", {"head_optimizer": SGD(0.1), "block": 2}),
    "halves": ("ada", {"head_optimizer": SGD(0.1, **MOMENTUM), "block": 3, "product_dtype": "bf16"}),
    "linear": ("linear", {"block": 4}),
}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
def test_equals_the_way_of_a_cpu(world: int, kind: str, options: dict[str, Any], monkeypatch: Any) -> None:
    expected = run_ranks(world, trained, kind, options)
    read_nothing(monkeypatch)
    for got, wanted in zip(run_ranks(world, trained, kind, options), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_ranks_that_scale_differently_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an assertion that runs where the tensors are."""

    def run(comm: Communicator) -> str:
        x, y = batch()
        own = Shard.of(len(x), comm)
        loss = build(comm, nn.ArcFace(), full_weight())(x[own.start : own.stop].requires_grad_(), y[: own.size])
        with pytest.raises(RuntimeError) as caught:
            (loss * (1.0 + comm.rank)).backward()
        return str(caught.value)

    read_nothing(monkeypatch)
    assert all("scaled the head's mean loss differently" in words for words in run_ranks(2, run))


def test_steps_are_counted_on_the_host() -> None:
    """Wherever the module goes; and the count is saved and read as any buffer."""
    head = nn.ClassParallelHead(DIM, CLASSES, sample_rate=0.5, seed=1)
    x, y = batch()
    head(x.float().requires_grad_(), y)
    assert head.state_dict()["num_steps"] == 1
    other = nn.ClassParallelHead(DIM, CLASSES, sample_rate=0.5, seed=1)
    other.load_state_dict(head.state_dict())
    assert other.double().num_steps == 1
    moved = other.to("meta")
    assert moved.weight.is_meta and moved.num_steps.device.type == "cpu" and moved.num_steps == 1


def test_made_without_memory_and_filled_later() -> None:
    """Torch's way to make what fits the device only: on "meta", to_empty, then a state_dict."""
    made = nn.ClassParallelHead(DIM, CLASSES, head_optimizer=SGD(0.1, momentum=0.9), seed=7)
    with torch.device("meta"):
        head = nn.ClassParallelHead(DIM, CLASSES, head_optimizer=SGD(0.1, momentum=0.9))
    assert head.weight.is_meta
    head.to_empty(device="cpu").load_state_dict(made.state_dict())
    assert torch.equal(head.weight, made.weight) and not head.row_state()["momentum"].any()
    assert nn.ClassParallelHead(DIM, CLASSES, seed=7).weight.equal(made.weight)
