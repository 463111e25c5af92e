"""Heads whose weight and momentum are kept in fewer bits: what they are, and that they train alike on any ranks."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plsc
import plsc.nn as nn
from plsc.comm import Communicator, Shard, run_ranks, shard_of
from plsc.ops import LARS, SGD, AdamW, RowOptimizer, deferred_updates, merge_updates
from plsc.ops.formats import join

DIM, CLASSES, BATCH = 24, 40, 12
FORMATS = [
    ("fp32", "fp32"),
    ("split", "fp32"),
    ("split", "bf16"),
    ("split", "int8"),
    ("bf16", "bf16"),
    ("bf16", "int8"),
]


def sgd(state: str = "fp32", lr: float = 0.1) -> SGD:
    return SGD(lr, 1e-3, momentum=0.9, state_dtype=state)


def batch(seed: int, comm: Communicator | None = None) -> tuple[Tensor, Tensor]:
    """Samples near one of 40 fixed directions, this rank's part of them."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (BATCH,), generator=g)
    x = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))[y]
    x = x + 0.3 * torch.randn(BATCH, DIM, generator=g)
    part = slice(0, BATCH) if comm is None else slice(Shard.of(BATCH, comm).start, Shard.of(BATCH, comm).stop)
    return x[part], y[part]


def make(
    comm: Communicator | None = None, weight: str = "fp32", state: str = "fp32", **options: object
) -> nn.ClassParallelHead:
    options.setdefault("head_optimizer", sgd(state))
    return nn.ClassParallelHead(
        DIM, CLASSES, margin=nn.CosFace(16.0, 0.2), comm=comm, weight_dtype=weight, seed=3, **options
    )


def train(head: nn.ClassParallelHead, steps: int, first: int = 0) -> list[float]:
    losses = []
    for i in range(first, first + steps):
        x, y = batch(i, head.comm)
        loss = head(x.requires_grad_(), y)
        loss.backward()
        total = head.comm.all_reduce(loss.detach().clone()).wait()
        losses.append(float(total) / head.comm.world_size)
    return losses


@pytest.mark.parametrize(
    ("weight", "state", "expected"),
    [
        ("fp32", "fp32", 4096),
        ("split", "fp32", 4096),
        ("split", "bf16", 3072),
        ("split", "int8", 2564),
        ("bf16", "bf16", 2048),
        ("bf16", "int8", 1540),
    ],
)
def test_bytes_per_class(weight: str, state: str, expected: int) -> None:
    head = nn.ClassParallelHead(512, 3, weight_dtype=weight, head_optimizer=sgd(state))
    assert head.bytes_per_class() == expected
    held = [head.weight, *(value for name, value in head.named_buffers() if name.startswith("row_"))]
    assert sum(t.numel() * t.element_size() for t in held) == 3 * expected


@pytest.mark.parametrize(("weight", "state"), FORMATS)
@pytest.mark.parametrize("kernels", ["", "0"])
def test_trains_as_fp32_does(weight: str, state: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLSC_KERNELS", kernels)
    reference, losses = train(make(), 40), train(make(None, weight, state), 40)
    assert reference[-1] < 0.4 * reference[0]
    for a, b in zip(losses, reference, strict=True):
        assert a == pytest.approx(b, rel=0.08, abs=0.04)


def test_split_steps_the_exact_floats_by_gradients_of_their_upper_halves() -> None:
    head = make(None, "split", "fp32")
    assert torch.equal(head.rows(0, CLASSES), make().weight.detach())  # the same initial centres, to the bit
    velocity = torch.zeros(CLASSES, DIM)
    for i in range(5):
        before = head.rows(0, CLASSES)
        plain = nn.ClassParallelHead(DIM, CLASSES, margin=nn.CosFace(16.0, 0.2))
        plain.weight.data.copy_(head.weight.detach().float())
        x, y = batch(i)
        loss = plain(x.clone().requires_grad_(), y)
        loss.backward()
        ours = head(x.requires_grad_(), y)
        assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
        ours.backward()
        velocity = plain.weight.grad + 1e-3 * before + 0.9 * velocity
        torch.testing.assert_close(head.rows(0, CLASSES), before - 0.1 * velocity, rtol=1e-5, atol=1e-6)
        assert torch.equal(join(head.weight.detach(), head.row_low), head.rows(0, CLASSES))


@pytest.mark.parametrize(("weight", "state"), FORMATS[2:])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_any_number_of_ranks_trains_alike(weight: str, state: str, rate: float) -> None:
    """Random bits belong to the class: only sums in another order differ, and seldom tip a rounding."""

    def run(comm: Communicator) -> tuple:
        head = make(comm, weight, state, sample_rate=rate)
        losses = train(head, 12)
        return losses, head.rows(0, CLASSES)

    losses, rows = run_ranks(1, run)[0]
    for world in (2, 3):
        results = run_ranks(world, run)
        assert results[0][0] == pytest.approx(losses, rel=5e-3)
        apart = (torch.cat([r[1] for r in results]) - rows).abs()
        assert apart.mean() < 2e-3 * rows.abs().mean()


@pytest.mark.parametrize("optimizer", [AdamW(0.02), LARS(5.0, momentum=0.5), SGD(0.3)])
@pytest.mark.parametrize("weight", ["split", "bf16"])
def test_every_optimizer_steps_a_small_weight(optimizer: RowOptimizer, weight: str) -> None:
    reference = train(make(head_optimizer=copy.deepcopy(optimizer)), 40)
    losses = train(make(None, weight, head_optimizer=copy.deepcopy(optimizer)), 40)
    assert reference[-1] < 0.95 * reference[0]
    assert losses == pytest.approx(reference, rel=0.08, abs=0.05)


@pytest.mark.parametrize(("weight", "state"), [FORMATS[2], FORMATS[5]])
def test_deferred_updates_are_those_of_the_backward(weight: str, state: str) -> None:
    heads = make(None, weight, state), make(None, weight, state)
    for i in range(4):
        x, y = batch(i)
        heads[0](x.clone().requires_grad_(), y).backward()
        with deferred_updates() as updates:
            heads[1](x.clone().requires_grad_(), y).backward()
        for update in merge_updates(updates):
            update.apply()
    apart = (heads[0].rows(0, CLASSES) - heads[1].rows(0, CLASSES)).abs()
    assert apart.max() < 2e-2 * heads[0].rows(0, CLASSES).abs().max() and apart.mean() < 1e-4


@pytest.mark.parametrize(("weight", "state"), FORMATS[1:])
def test_a_checkpoint_resumes_on_another_number_of_ranks(weight: str, state: str, tmp_path: Path) -> None:
    def whole(head: nn.ClassParallelHead) -> dict[str, Tensor]:
        return {"weight": head.weight.detach().clone(), **{k: v.clone() for k, v in head.row_state().items()}}

    def save(comm: Communicator) -> dict[str, Tensor]:
        head = make(comm, weight, state)
        train(head, 3)
        plsc.save(tmp_path / "run", comm=comm, head=head)
        return whole(head)

    def resume(comm: Communicator) -> tuple:
        head = make(comm, weight, state)
        plsc.load(tmp_path / "run", comm=comm, head=head)
        return whole(head), train(head, 3, first=3)

    saved, resumed = run_ranks(2, save), run_ranks(3, resume)
    for name in saved[0]:
        parts = [torch.cat([r[name] for r in results]) for results in (saved, [r[0] for r in resumed])]
        assert torch.equal(*parts)
    straight = train(make(None, weight, state), 6)
    assert resumed[0][1] == pytest.approx(straight[3:], rel=5e-3)


def test_another_kind_of_weight_is_not_loaded(tmp_path: Path) -> None:
    plsc.save(tmp_path / "run", head=make(None, "bf16", "bf16"))
    with pytest.raises(
        ValueError, match=r"head/weight: the checkpoint has torch\.bfloat16, the live tensor torch\.float32"
    ):
        plsc.load(tmp_path / "run", head=make())


def test_topk_marks_copies_and_device_moves() -> None:
    head = make(None, "split", "int8")
    train(head, 5)
    x, _ = batch(0)
    scores, classes = head.topk(x, 4)
    best = (F.normalize(x) @ F.normalize(head.rows(0, CLASSES)).T).topk(4)
    torch.testing.assert_close(scores, best.values)
    assert torch.equal(classes, best.indices)
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert all(shard_of(t) == head.shard for t in (twin.weight, twin.row_low, twin.row_momentum_scale))
        assert train(twin, 2) == train(copy.deepcopy(head), 2)
    assert head.to("cpu").weight.dtype == torch.bfloat16
    for change in (head.double, head.float, head.half):
        with pytest.raises(ValueError, match="cannot change its dtype"):
            change()


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_a_head_in_eval_rounds_by_new_bits_in_each_step(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a whole model is tuned in eval(), for its batch statistics: steps far below the spacing still arrive."""
    monkeypatch.setenv("PLSC_KERNELS", kernels)
    head = nn.ClassParallelHead(8, 64, head_optimizer=SGD(1.0, weight_decay=1e-4), weight_dtype="bf16").eval()
    before = head.weight.detach().float()
    for _ in range(100):  # no gradient comes to an embedding of zeros, nor from it
        head(torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)).backward()
    shrunk = head.weight.detach().float().abs().sum() / before.abs().sum()
    assert float(shrunk) == pytest.approx(1 - 1e-2, abs=2e-3)


@pytest.mark.parametrize("weight", ["split", "bf16"])
def test_a_frozen_weight_and_a_second_backward(weight: str) -> None:
    head = make(None, weight, "bf16")
    x, y = batch(0)
    first, second = head(x.clone().requires_grad_(), y), head(x.clone().requires_grad_(), y)
    second.backward()
    with pytest.raises(RuntimeError, match="weight changed between"):
        first.backward()
    assert head.weight.grad is None and head.weight.requires_grad
    head.weight.requires_grad_(False)
    before, frozen = head.weight.detach().clone(), x.clone().requires_grad_()
    head(frozen, y).backward()
    assert torch.equal(head.weight, before) and frozen.grad is not None and frozen.grad.abs().sum() > 0


@pytest.mark.parametrize("cache_mb", [0.001, 64.0])
def test_exponentials_kept_in_half_precision(cache_mb: float) -> None:
    """Same loss and dx, a gradient of the weight to three digits."""
    heads = [
        nn.ClassParallelHead(DIM, CLASSES, block=7, cache_mb=cache_mb, cache_dtype=kept) for kept in ("fp32", "bf16")
    ]
    grads = []
    for head in heads:
        x, y = batch(1)
        loss = head(x.requires_grad_(), y)
        loss.backward()
        assert head.weight.grad is not None
        grads.append((loss.detach(), x.grad, head.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    apart = (grads[0][2] - grads[1][2]).norm() / grads[0][2].norm()
    assert 1e-5 < apart < 4e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_dtype": "fp16"}, "weight_dtype is 'fp16', expected one of fp32, split, bf16"),
        ({"weight_dtype": "split", "head_optimizer": None}, "'split' needs a head_optimizer"),
        ({"cache_dtype": "fp16"}, "cache_dtype is 'fp16'"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.ClassParallelHead(DIM, CLASSES, **{"head_optimizer": sgd(), **options})
    with pytest.raises(ValueError, match="state_dtype is 'fp8'"):
        SGD(0.1, momentum=0.9, state_dtype="fp8")


def test_a_recipe_can_ask_for_it() -> None:
    from plsc.train.build import build_head
    from plsc.train.config import Config, HeadConfig, OptimConfig

    kept = {"weight_dtype": "bf16", "state_dtype": "int8", "unsampled": "decayed", "sample_rate": 0.5}
    comm = run_ranks(1, lambda comm: comm)[0]
    head = build_head(Config(head=HeadConfig(fused=True, **kept)), 10, comm)
    assert head.bytes_per_class() == 1540 + 4 and head.lag is not None
    for options, optim, message in (
        (kept, "sgd", "needs fused = true"),
        ({"fused": True, "state_dtype": "int8"}, "adamw", "is for optim.name 'sgd'"),
        ({"fused": True, "unsampled": "decayed"}, "lars", "got 'lars'"),
    ):
        with pytest.raises(ValueError, match=message):
            build_head(Config(head=HeadConfig(**options), optim=OptimConfig(name=optim)), 10, comm)
    with pytest.raises(ValueError, match=r"head\.state_dtype"):
        HeadConfig(state_dtype="fp8") and Config(head=HeadConfig(state_dtype="fp8"))
