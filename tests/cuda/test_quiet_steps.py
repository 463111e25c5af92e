"""A training step that never reads the device: run on torch's "meta" tensors, which have no numbers to be read.

They take every way that a GPU's tensors take, and whoever asks for a number, or for a shape that depends on numbers,
gets an error. Copies between host and device are watched besides. Where a step has to read once, that is counted.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plsc
from plsc.comm import LocalCommunicator
from plsc.comm.communicator import Work
from plsc.ops import deferred_updates, host, merge_updates, sampling

DIM, CLASSES, BATCH = 16, 5000, 12
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten._unique2.default)


class TwoRanks(LocalCommunicator):
    """One of two ranks, the other of which sends the same."""

    def __init__(self, rank: int) -> None:
        super().__init__("meta")
        self.rank, self.world_size = rank, 2

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return Work.done(torch.cat([x, x]))

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return Work.done(x[: sizes[self.rank]].clone())


class Crossings(TorchDispatchMode):
    """Refuses what moves numbers between host and device; a number alone that a kernel gets as an argument is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        assert len({t.device for t in tensors if t.dim() or func in COPIES}) < 2, f"{func} copies from or to the host"
        return out


class Literals(TorchFunctionMode):
    """Refuses device tensors made of Python's numbers, which lie in pageable memory first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor):
            assert torch.device((kwargs or {}).get("device") or "cpu").type == "cpu", f"{func} copies from the host"
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Counts what would make the host wait, were these tensors on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [func] if func in READS else []
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    with Crossings(), Literals():
        yield


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, and no autocast, which "meta" does not have."""
    monkeypatch.setenv("PLSC_KERNELS", "0")
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())


def make(comm: LocalCommunicator, **options: Any) -> plsc.ClassParallelHead:
    return plsc.ClassParallelHead(DIM, CLASSES, comm=comm, block=1024, **options).to("meta")


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.zeros(BATCH, DIM, device="meta", dtype=dtype, requires_grad=True)
    return x, torch.zeros(BATCH, dtype=torch.int64, device="meta")


COMMS: dict[str, Callable[[], LocalCommunicator]] = {
    "alone": lambda: LocalCommunicator("meta"),
    "of two": lambda: TwoRanks(1),
}
FUSED = {"head_optimizer": plsc.SGD(0.1, momentum=0.9, weight_decay=1e-4)}
HEADS: dict[str, dict[str, Any]] = {
    "separate": {},
    "fused": FUSED,
    "nothing kept": {**FUSED, "cache_mb": 0.0},
    "adamw": {"head_optimizer": plsc.AdamW(0.01)},
    "lars, sub-centres, filter": {"head_optimizer": plsc.LARS(0.1), "sub_centers": 3, "filter_threshold": 0.4},
    "split": {**FUSED, "weight_dtype": "split", "cache_dtype": "bf16"},
    "bf16, int8": {"head_optimizer": plsc.SGD(0.1, momentum=0.9, state_dtype="int8"), "weight_dtype": "bf16"},
    "halves": {**FUSED, "product_dtype": "bf16", "weight_dtype": "split"},
    "halves made for a block, AdaFace": {"product_dtype": "bf16", "margin": plsc.AdaFace(), "cache_mb": 0.0},
    "halves, sub-centres": {**FUSED, "product_dtype": "bf16", "sub_centers": 2, "weight_dtype": "bf16"},
    "halves, curricularface": {"product_dtype": "bf16", "margin": plsc.CurricularFace()},
    "adaface": {"margin": plsc.AdaFace(), **FUSED},
    "curricularface": {"margin": plsc.CurricularFace()},
    "magface": {"margin": plsc.MagFace(), **FUSED},
}


HALVES = [torch.float16, torch.bfloat16]  # of embeddings, in turn


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("comm", COMMS.values(), ids=COMMS)
def test_head(comm: Callable[[], LocalCommunicator], options: dict[str, Any]) -> None:
    head = make(comm(), **options)
    for dtype in (torch.float32, HALVES[len(options) % 2]):
        x, labels = batch(dtype)
        with watched():
            head(x, labels).backward()
        assert x.grad is not None and x.grad.shape == x.shape
    assert head.num_steps.item() == 2 and (head.weight.grad is None) == ("head_optimizer" in options)


@pytest.mark.parametrize("unsampled", ["still", "decayed"])
@pytest.mark.parametrize("comm", COMMS.values(), ids=COMMS)
def test_sampled_head(comm: Callable[[], LocalCommunicator], unsampled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside how many classes were sampled nothing is asked; here 300 are."""

    def sample(labels: Tensor, shard: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return torch.arange(300, device="meta"), labels.clone()

    monkeypatch.setattr("plsc.nn.head.sample_classes", sample)
    head = make(comm(), sample_rate=0.1, head_optimizer=plsc.SGD(0.1, momentum=0.9, unsampled=unsampled))
    for _ in range(3):
        x, labels = batch()
        with watched():
            head(x, labels).backward()


def test_losses_and_linear() -> None:
    head = make(TwoRanks(1), **FUSED)
    linear = plsc.ClassParallelLinear(DIM, CLASSES, comm=TwoRanks(0)).to("meta")
    for loss in (head.losses, lambda *inputs: linear(*inputs)[None]):
        x, labels = batch()
        with watched():
            loss(x, labels).sum().backward()


def test_deferred_steps() -> None:
    head, (x, labels) = make(TwoRanks(1), **FUSED), batch()
    with watched():
        with deferred_updates() as updates:
            for _ in range(2):
                head(x, labels).backward()
        for update in merge_updates(updates):
            update.apply(0.5)


STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {  # how often a step reads
    "plain": (0, {}),
    "bf16": (0, {"amp": "bf16", "reduce_dtype": "bf16"}),
    "halves": (0, {"reduce_dtype": "fp16", "reduce_accumulate": "fp32", "lanes": 2}),
    "accumulate": (0, {"accumulate": 2}),
    "sync_bn": (0, {"sync_bn": True}),
    "recompute": (0, {"recompute": "full"}),
    "local_sgd": (0, {"local_sgd": 8, "local_sgd_args": {"begin": 0}}),
    "fp16": (1, {"amp": "fp16"}),
    "clip": (1, {"clip_norm": 1.0}),
    "fp16, clip": (1, {"amp": "fp16", "clip_norm": 1.0, "accumulate": 2}),
    "local_sgd, fp16, clip": (1, {"local_sgd": 8, "local_sgd_args": {"begin": 0}, "amp": "fp16", "clip_norm": 1.0}),
}


@pytest.mark.parametrize(("reads", "options"), STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_fleet_step(fused: bool, options: dict[str, Any], reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step of a strategy: forward, backward, averages, clipping, optimizer."""
    asked: list[int] = []

    def tolist(x: Tensor) -> list[float]:
        asked.append(x.numel())
        return [0.0] * x.numel()

    monkeypatch.setattr(Tensor, "tolist", tolist)
    fleet = plsc.Fleet(plsc.Strategy(**options), comm=TwoRanks(1))
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Flatten(), nn.Linear(8 * 36, DIM))
    net = fleet.replicate(net)
    head = make(fleet.comm, **(FUSED if fused else {}))
    cut = [] if fused else [*head.parameters()]
    optimizer = torch.optim.SGD([*net.parameters(), *cut], lr=0.1, momentum=0.9)
    for step in range(2):
        asked.clear()
        for _ in range(fleet.strategy.accumulate):
            images = torch.zeros(BATCH, 3, 8, 8, device="meta")
            with contextlib.ExitStack() as stack:
                if step:  # the first one makes what is kept
                    stack.enter_context(watched())
                taken = fleet.step(head(net(images), batch()[1]), optimizer)
        assert taken.updated and len(asked) == reads


@pytest.mark.parametrize("rate", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_sampling_reads_once(rate: float, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, in plain torch, gives what that of a CPU does; it reads how many classes there are."""
    shard = plsc.comm.Shard(4100, rank, 4)
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(-1, 4100, (40,), generator=generator)
    options: dict[str, Any] = {"rate": rate, "seed": 5, "step": 9}
    expected = sampling.sample_classes(labels, shard, **options)
    monkeypatch.setattr(host, "reads_freely", lambda x: False)
    counted = torch.ops.aten.nonzero.default  # keys of a step are made on the host and read there
    with Reads() as reads:
        rows, place = sampling.sample_classes(labels, shard, **options)
    assert torch.equal(rows, expected[0]) and torch.equal(place, expected[1])
    assert reads.seen.count(counted) == 1 and not set(reads.seen) - {counted, READS[0]}


def test_what_waits_is_seen() -> None:
    """The net has no holes: each way of reading a device is an error here."""
    x = torch.zeros(3, device="meta")
    ways: list[Callable[[], object]] = [
        x.sum().item,
        x.tolist,
        x.cpu,
        x.numpy,
        x.nonzero,
        lambda: bool(x.any()),
        lambda: x[x > 0],
        lambda: torch.unique(x),
        lambda: x.masked_select(x > 0),
        lambda: x.repeat_interleave(x.long()),
        lambda: torch.tensor([1.0], device=x.device),
        lambda: torch.ones(3).to(x.device),
        lambda: torch.tensor(1.0).to(x.device),
        lambda: x.copy_(torch.ones(3)),
        lambda: x.__setitem__(torch.tensor([1]), 0.0),
    ]
    for number, way in enumerate(ways):
        with pytest.raises((RuntimeError, NotImplementedError, AssertionError, TypeError)), watched():
            way()
            pytest.fail(f"way {number} went through")
