"""Row updates that wait are the steps of the textbook, and the gradient of all rows is never held."""

import copy
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plsc
from plsc import nn
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import LARS, SGD, AdamW, RowOptimizer, deferred_updates, merge_updates, native
from plsc.ops.updates import GradientUpdate, RowUpdate, collector

DIM, CLASSES, BATCH = 8, 29, 12
BLOCK_BYTES = 8 * BATCH * 5  # exponentials of a block of 5 classes, float64
CACHES = {"none": 0.0, "some": 2 * BLOCK_BYTES / 2**20, "exponentials and gradients": 1.0}


def batches(micro: int, size: int = BATCH, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, DIM, generator=g, dtype=torch.float64), torch.randint(0, CLASSES, (size,), generator=g))
        for _ in range(micro)
    ]


def make(comm: Communicator | None = None, **options: Any) -> nn.ClassParallelHead:
    options = {"margin": nn.CosFace(16.0), "block": 5, **options}
    return nn.ClassParallelHead(DIM, CLASSES, comm=comm, seed=3, **options).double()


def collect(head: nn.ClassParallelHead, micro: list[tuple[Tensor, Tensor]]) -> RowUpdate:
    own = Shard.of(BATCH, head.comm)
    with deferred_updates() as updates:
        for x, y in micro:
            x, y = (value[own.start : own.stop] if len(x) == BATCH else value for value in (x, y))
            (head(x.clone().requires_grad_(), y) / len(micro)).backward()
    (update,) = merge_updates(updates)
    return update


def gradient(head: nn.ClassParallelHead, micro: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of a head of one rank without an optimizer, by autograd's own accumulation, each micro-step at once."""
    for x, y in micro:
        (head(x.clone().requires_grad_(), y) / len(micro)).backward()
    assert head.weight.grad is not None
    return head.weight.grad


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("margin", [nn.CosFace(16.0), nn.CurricularFace(16.0), nn.AdaFace(300.0)])
def test_micro_steps_clipped_equal_the_gradient_made_at_once(margin: nn.Margin, world: int, cache: str) -> None:
    """Norm and step of three micro-steps; CurricularFace and AdaFace move between them, 300 has a moving maximum."""
    steps = [batches(3, seed=i) for i in range(2)]

    def run(comm: Communicator) -> tuple[list[float], Tensor]:
        head = make(comm, margin=copy.deepcopy(margin), head_optimizer=SGD(0.5, momentum=0.9), cache_mb=CACHES[cache])
        squares = []
        for micro in steps:
            update = collect(head, micro)
            squares.append(float(comm.all_reduce(update.square(0.5)).wait()))
            update.apply(0.25)
        return squares, head.weight.detach()

    ranks = run_ranks(world, run)
    plain = make(margin=copy.deepcopy(margin))
    optimizer = torch.optim.SGD([plain.weight], 0.5, momentum=0.9)
    for i, micro in enumerate(steps):
        optimizer.zero_grad()
        grad = gradient(plain, micro)
        assert all(squares[i] == pytest.approx(0.25 * float(grad.norm()) ** 2, rel=1e-11) for squares, _ in ranks)
        grad.mul_(0.25)
        optimizer.step()
    torch.testing.assert_close(torch.cat([w for _, w in ranks]), plain.weight.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("optimizer", [AdamW(0.1, 0.1), LARS(0.5)])
@pytest.mark.parametrize("centers", [1, 3])
def test_micro_steps_of_other_sizes_are_cut_alike(optimizer: RowOptimizer, centers: int) -> None:
    options: dict[str, Any] = {"head_optimizer": optimizer, "sub_centers": centers}
    head, plain = make(**options), make(sub_centers=centers)
    micro = [*batches(1), *batches(1, size=7, seed=4)]
    with deferred_updates() as updates:
        for block, (x, y) in zip((5, 4), micro, strict=True):
            head.block = block
            (head(x.clone().requires_grad_(), y) / 2).backward()
    (update,) = merge_updates(updates)
    weight, state = plain.weight.detach().clone(), optimizer.state(plain.weight.detach())
    grad = gradient(plain, micro)
    assert float(update.square()) == pytest.approx(float(grad.norm()) ** 2, rel=1e-12)
    update.apply()
    optimizer.update(weight, grad.clone(), state)
    torch.testing.assert_close(head.weight.detach(), weight, rtol=1e-12, atol=1e-14)


class _Largest(TorchDispatchMode):
    """The most numbers of any tensor that comes out of an operation and is no view of those given."""

    def __init__(self, *but: Tensor) -> None:
        super().__init__()
        self.numel, self._but = 0, {tensor.untyped_storage().data_ptr() for tensor in but}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        sizes = [leaf.numel() for leaf in made if leaf.untyped_storage().data_ptr() not in self._but]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize(
    "strategy",
    [{"clip_norm": 1e-3}, {"amp": "fp16"}, {"accumulate": 2}, {"amp": "fp16", "clip_norm": 1e-3, "accumulate": 2}],
    ids=str,
)
@pytest.mark.parametrize("sample_rate", [1.0, 0.1])
def test_no_step_of_a_fleet_holds_a_gradient_of_all_rows(strategy: dict[str, Any], sample_rate: float) -> None:
    classes = 2000
    fleet = plsc.Fleet(plsc.Strategy(**strategy))
    body = fleet.replicate(torch.nn.Linear(DIM, DIM))
    options: dict[str, Any] = {"block": 64, "cache_mb": 0.0, "sample_rate": sample_rate}
    head = nn.ClassParallelHead(DIM, classes, head_optimizer=SGD(0.1), **options)
    optimizer = torch.optim.SGD(body.parameters(), 0.1)
    before, seen = head.weight.detach().clone(), _Largest(head.weight)
    for i in range(strategy.get("accumulate", 1)):
        x, y = torch.randn(BATCH, DIM), torch.randint(0, classes, (BATCH,))
        with seen:
            step = fleet.step(head(body(x), y), optimizer)
        assert step.updated == (i == strategy.get("accumulate", 1) - 1)
    assert not torch.equal(head.weight, before)
    assert BATCH * 64 <= seen.numel < classes * DIM / 2


def test_gradients_stay_as_far_as_the_bytes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exponentials a block takes 2 products for its norm and 2 for its step; a kept gradient saves those."""
    made, product = [], native.product
    monkeypatch.setattr(native, "product", lambda *a, **k: made.append(1) or product(*a, **k))
    blocks = math.ceil(CLASSES / 5)
    for gradients, cache_mb in ((0, 0.0), (blocks, 1.0)):
        head = make(head_optimizer=SGD(0.1), cache_mb=cache_mb)
        update = collect(head, batches(1))
        made.clear()
        update.square()
        update.apply()
        assert len(made) == (4 * blocks if gradients == 0 else blocks)
    head = make(head_optimizer=SGD(0.1), cache_mb=3 * BLOCK_BYTES / 2**20)  # 3 of exponentials, none of gradients left
    update = collect(head, batches(1))
    made.clear()
    update.apply()
    assert len(made) == 3 + 2 * (blocks - 3)


def test_what_is_kept_of_batches_of_other_sizes_stays_within_its_bytes() -> None:
    head = make(head_optimizer=SGD(0.1), cache_mb=6 * BLOCK_BYTES / 2**20)  # the exponentials of all blocks, no more
    with deferred_updates() as updates:
        for x, y in (*batches(1, size=1), *batches(1)):
            head(x.clone().requires_grad_(), y).backward()
    (update,) = merge_updates(updates)
    update.square()
    held = {name: buffer.numel() * 8 for name, buffer in head.workspace._buffers.items()}
    assert sum(size for name, size in held.items() if name.rstrip("0123456789") != name) <= 6 * BLOCK_BYTES


def test_a_weight_that_changed_before_its_step_is_an_error() -> None:
    head = make(head_optimizer=SGD(0.1))
    with deferred_updates() as updates:
        for x, y in batches(2):
            head(x.clone().requires_grad_(), y).backward()
    updates[0].apply()
    for act in (updates[1].apply, updates[1].square):
        with pytest.raises(RuntimeError, match=r"weight changed between a forward .*plsc.ops.merge_updates"):
            act()


@pytest.mark.parametrize("cache_mb", [0.0, 1.0])
def test_a_margin_that_moves_counts_as_it_was_in_the_forward(cache_mb: float) -> None:
    """Two forwards before one backward: what is made anew of the first uses its own moving average."""
    head, plain = (make(margin=nn.CurricularFace(16.0, alpha=0.5), cache_mb=cache_mb) for _ in range(2))
    (first, second) = batches(2)
    x = first[0].clone().requires_grad_()
    (head(x, first[1]) + head(second[0].clone().requires_grad_(), second[1])).backward()
    want = first[0].clone().requires_grad_()
    plain(want, first[1]).backward()
    plain(second[0].clone().requires_grad_(), second[1]).backward()
    torch.testing.assert_close(head.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(x.grad, want.grad, rtol=1e-12, atol=1e-14)


class _Moving(nn.Margin):
    """A margin whose `others` reads a number that it keeps somewhere; `update`, or the loop, moves it in place."""

    def __init__(self, home: str) -> None:
        super().__init__(16.0)
        self.home, self.number = home, 0.1
        self.tensor, self.numbers = torch.tensor(0.1), [0.1]
        self.part = torch.nn.BatchNorm1d(1)
        self.lock = threading.Lock()  # cannot be copied
        self.own = torch.nn.Parameter(torch.tensor(0.1))

    def target(self, cos: Tensor) -> Tensor:
        return cos - 0.2

    def others(self, cos: Tensor, own: Tensor) -> Tensor:
        kept = {"number": self.number, "list": self.numbers[0], "tensor": float(self.tensor)}
        kept |= {"part": float(self.part.running_mean), "parameter": float(self.own.detach())}
        return cos * (1 + kept[self.home] * cos)

    @torch.no_grad()
    def move(self) -> None:
        self.number, self.numbers[0] = self.number + 0.3, self.numbers[0] + 0.3
        for kept in (self.tensor, self.part.running_mean, self.own):
            kept += 0.3


class _MovedByItself(_Moving):
    def update(self, own: Tensor, norms: Tensor | None) -> None:
        self.move()


@pytest.mark.parametrize("home", ["number", "list", "tensor", "part", "parameter"])
@pytest.mark.parametrize("kind", [_Moving, _MovedByItself])
@pytest.mark.parametrize("training", [True, False])
def test_a_users_margin_counts_as_it_was_in_the_forward(kind: type[_Moving], home: str, training: bool) -> None:
    """Wherever its state is, and whoever moves it: the blocks are made anew after all forwards of the step."""
    head, plain = make(margin=kind(home), head_optimizer=SGD(1.0), cache_mb=0.0), make(margin=kind(home))
    before = head.train(training).weight.detach().clone()
    plain.train(training)
    micro, moves = batches(2), [each.margin.move if kind is _Moving or not training else int for each in (head, plain)]
    with deferred_updates() as updates:
        for x, y in micro:
            head(x.clone().requires_grad_(), y).backward()
            moves[0]()
            plain(x.clone().requires_grad_(), y).backward()
            moves[1]()
    (update,) = merge_updates(updates)
    update.apply()
    torch.testing.assert_close(head.weight.detach(), before - plain.weight.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("strategy", [{"clip_norm": 1e-3}, {"amp": "fp16", "clip_norm": 1e-3}], ids=str)
def test_only_a_heads_rows_are_trained(strategy: dict[str, Any]) -> None:
    """Nothing that the optimizer has gets a gradient, as with a frozen backbone."""
    fleet = plsc.Fleet(plsc.Strategy(**strategy))
    head = nn.ClassParallelHead(DIM, CLASSES, head_optimizer=SGD(1.0))
    before = head.weight.detach().clone()
    step = fleet.step(head(torch.randn(BATCH, DIM), torch.arange(BATCH)), torch.optim.SGD(head.parameters(), 0.1))
    assert step.updated and float((head.weight.detach() - before).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_a_forward_of_another_thread_is_collected_where_the_backward_runs() -> None:
    head = make(head_optimizer=SGD(1.0))
    before, losses = head.weight.detach().clone(), []
    helper = threading.Thread(target=lambda: losses.append(head(*batches(1)[0])))
    helper.start()
    helper.join()
    with deferred_updates() as updates:
        losses[0].backward()
    assert len(updates) == 1 and torch.equal(head.weight, before)


def test_samples_of_micro_steps_wait_as_one_gradient() -> None:
    fleet = plsc.Fleet(plsc.Strategy(accumulate=8))
    head = nn.ClassParallelHead(DIM, 4000, head_optimizer=SGD(0.1), sample_rate=0.3)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for _ in range(7):
        assert not fleet.step(head(torch.randn(BATCH, DIM), torch.arange(BATCH)), optimizer).updated
        (waiting,) = fleet._pending
        assert isinstance(waiting, GradientUpdate)
        assert len(waiting.rows.unique()) == len(waiting.rows) == len(waiting.grad)
    assert len(waiting.rows) == pytest.approx(4000 * (1 - 0.7**7), rel=0.05)


def test_a_step_that_is_not_defined_is_an_error() -> None:
    """Sampled rows and all rows; a weight of two heads with a state each; a step taken twice."""
    x, y = batches(1)[0]
    head = make(head_optimizer=SGD(0.1), sample_rate=0.5)
    with deferred_updates() as updates:
        for mode in (True, False):
            head.train(mode)(x.clone().requires_grad_(), y).backward()
    with pytest.raises(RuntimeError, match=r"in training and in eval\(\) within one step"):
        merge_updates(updates)
    updates[0].apply()
    with pytest.raises(RuntimeError, match="taken already"):
        updates[0].apply()
    for options in ({"momentum": 0.9}, {}):
        pair = [make(head_optimizer=SGD(lr, **options)) for lr in (0.1, 0.2)]
        pair[1].weight = pair[0].weight
        with deferred_updates() as updates:
            (pair[0](x, y) + pair[1](x, y)).backward()
        with pytest.raises(RuntimeError, match="two heads share a weight"):
            merge_updates(updates)


@pytest.mark.parametrize("sample_rate", [1.0, 0.5])
def test_a_head_that_was_moved_before_its_step_is_an_error(sample_rate: float) -> None:
    """Its update would be of numbers that nobody has any more."""
    head = nn.ClassParallelHead(DIM, CLASSES, head_optimizer=SGD(0.1), sample_rate=sample_rate)
    x, y = torch.randn(BATCH, DIM), torch.arange(BATCH)
    with deferred_updates() as updates:
        head(x, y).backward()
    loss = head(x, y)
    head.double()
    with pytest.raises(RuntimeError, match=r"move[ds] "):
        updates[0].apply()
    with pytest.raises(RuntimeError, match="or moved"):
        loss.backward()


def test_overflow_is_seen_before_any_gradient_is_made() -> None:
    head = make(head_optimizer=SGD(0.1))
    (x, y) = batches(1)[0]
    with deferred_updates() as updates:
        (head(x.clone().requires_grad_(), y) * torch.tensor(1e308, dtype=torch.float64) * 1e3).backward()
    assert not all(bool(number.isfinite().all()) for number in updates[0].numbers())


def test_merge_adds_gradients_by_row() -> None:
    weight = torch.zeros(4, 2)

    def update(rows: list[int], value: float) -> RowUpdate:
        return GradientUpdate(SGD(1.0), weight, {}, torch.tensor(rows), torch.full((len(rows), 2), value))

    (merged,) = merge_updates([update([0, 2], 1.0), update([2, 3], 10.0)])
    assert float(merged.square(2.0)) == pytest.approx(4 * 2 * (1 + 121 + 100))
    merged.apply(0.5)
    assert weight[:, 0].tolist() == [-0.5, 0.0, -5.5, -5.0]
    other = GradientUpdate(SGD(1.0), torch.zeros(1, 2), {}, torch.tensor([0]), torch.ones(1, 2))
    assert len(merge_updates([update([1], 1.0), other])) == 2


def test_deferred_updates_nest_and_end() -> None:
    me = threading.get_ident()
    assert collector(me) is None
    with deferred_updates() as outer:
        with deferred_updates() as inner:
            assert collector(me) is inner
        assert collector(me) is outer
    assert collector(me) is None
