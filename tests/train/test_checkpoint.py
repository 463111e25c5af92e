"""Checkpoints: any world size, bit for bit, no pickle; what does not fit is refused before anything changes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from plsc.comm import Communicator, Shard, mark, run_ranks, shard_of, world
from plsc.train.checkpoint import Checkpoints, describe, load, save


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Backbone(nn.Module):
    def __init__(self, width: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, width, 1)
        self.norm = nn.BatchNorm2d(width)
        for i, param in enumerate(self.parameters()):
            param.data.copy_(numbers(*param.shape, seed=seed + i))


class Head(nn.Module):
    """A weight [C, D] or [C, K, D] and a bias [C], cut by class."""

    def __init__(self, comm: Communicator, classes: int, *, centers: int = 1, dim: int = 4, seed: int = 50) -> None:
        super().__init__()
        shard = Shard.of(classes, comm)
        shape = (classes, dim) if centers == 1 else (classes, centers, dim)
        self.weight = mark(nn.Parameter(numbers(*shape, seed=seed)[shard.start : shard.stop].clone()), shard)
        self.bias = mark(nn.Parameter(numbers(classes, seed=seed + 1)[shard.start : shard.stop].clone()), shard)


SGD_M: Callable[[Any], Optimizer] = lambda params: SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
ADAMW: Callable[[Any], Optimizer] = lambda params: AdamW(params, lr=0.01, betas=(0.8, 0.95))  # noqa: E731


class Run:
    """What a training run has; `train` makes steps with gradients that depend on the class, not on the rank."""

    def __init__(
        self, comm: Communicator, *, classes: int = 10, make: Callable[[Any], Optimizer] = SGD_M, **head: Any
    ) -> None:
        self.comm = comm
        self.backbone = Backbone()
        self.head = Head(comm, classes, **head)
        self.optimizer = make([{"params": self.backbone.parameters()}, {"params": self.head.parameters(), "lr": 0.3}])

    @property
    def parts(self) -> dict[str, Any]:
        return {"backbone": self.backbone, "head": self.head, "optimizer": self.optimizer}

    def train(self, steps: int = 2) -> Run:
        for step in range(steps):
            for i, param in enumerate([*self.backbone.parameters(), *self.head.parameters()]):
                shard = shard_of(param)
                total = param.shape[0] if shard is None else shard.total
                grad = numbers(total, *param.shape[1:], seed=100 * step + i)
                param.grad = grad if shard is None else grad[shard.start : shard.stop]
            self.optimizer.step()
        return self

    def whole(self) -> dict[str, Tensor]:
        """Every tensor, joined over ranks."""
        found = {}
        for part, module in (("backbone", self.backbone), ("head", self.head)):
            for name, tensor in module.state_dict(keep_vars=True).items():
                found[f"{part}/{name}"] = self._join(tensor, shard_of(tensor))
            for name, param in module.named_parameters():
                for key, value in self.optimizer.state.get(param, {}).items():
                    cut = shard_of(param) if value.dim() else None
                    found[f"optimizer/{part}/{name}/{key}"] = self._join(value, cut)
        return found

    def _join(self, tensor: Tensor, shard: Shard | None) -> Tensor:
        rows = self.comm.gather_objects(tensor.detach().clone())
        return rows[0] if shard is None else torch.cat(rows)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[k].dtype and torch.equal(x, b[k]) for k, x in a.items())


def saved_run(path: Path, world_size: int = 4, **options: Any) -> dict[str, Tensor]:
    """Trains and saves on some ranks; what was saved, joined."""

    def body(comm: Communicator) -> dict[str, Tensor]:
        run = Run(comm, **options).train()
        save(path, comm=comm, step=7, extra={"epoch": 3}, **run.parts)
        return run.whole()

    return run_ranks(world_size, body)[0]


# ---- any world size, bit for bit


@pytest.mark.parametrize("make", [SGD_M, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize(("classes", "centers"), [(10, 1), (5, 1), (9, 3)])
def test_loads_on_any_number_of_ranks(
    tmp_path: Path, make: Callable[[Any], Optimizer], classes: int, centers: int
) -> None:
    options: dict[str, Any] = {"classes": classes, "centers": centers, "make": make}
    truth = saved_run(tmp_path / "a", **options)
    assert len(truth) == 7 + 2 + 6 * (3 if make is ADAMW else 1)

    def body(comm: Communicator) -> dict[str, Tensor]:
        run = Run(comm, seed=900, **options)  # other weights, and an optimizer before its first step
        run.optimizer.param_groups[1]["lr"] = 5.0
        assert load(tmp_path / "a", comm=comm, **run.parts) == {"epoch": 3}
        assert run.optimizer.param_groups[1]["lr"] == 0.3
        assert run.optimizer.param_groups[0].get("betas") in (None, (0.8, 0.95))
        return run.whole()

    for world_size in (1, 2, 3, 4, 6):
        for loaded in run_ranks(world_size, body):
            assert same(loaded, truth), world_size


def test_training_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    saved_run(tmp_path / "a", make=ADAMW)

    def resumed(comm: Communicator) -> dict[str, Tensor]:
        run = Run(comm, make=ADAMW).train(1)  # its own state is replaced
        load(tmp_path / "a", comm=comm, **run.parts)
        return run.train().whole()

    def straight(comm: Communicator) -> dict[str, Tensor]:
        return Run(comm, make=ADAMW).train().train().whole()

    assert same(run_ranks(3, resumed)[0], run_ranks(3, straight)[0])


def test_a_checkpoint_of_one_rank_grows(tmp_path: Path) -> None:
    truth = saved_run(tmp_path / "a", world_size=1)

    def body(comm: Communicator) -> dict[str, Tensor]:
        run = Run(comm, seed=900)
        load(tmp_path / "a", comm=comm, **run.parts)
        return run.whole()

    assert same(run_ranks(4, body)[0], truth)


def test_a_rank_without_rows_may_lack_optimizer_state(tmp_path: Path) -> None:
    def write(comm: Communicator) -> dict[str, Tensor]:
        run = Run(comm, classes=5, make=ADAMW).train()
        if comm.rank == 3:
            for param in run.head.parameters():
                del run.optimizer.state[param]
        save(tmp_path / "a", comm=comm, **run.parts)
        return {}

    run_ranks(4, write)

    def body(comm: Communicator) -> dict[str, Tensor]:
        run = Run(comm, classes=5, make=ADAMW)
        load(tmp_path / "a", comm=comm, **run.parts)
        return run.whole()

    want = run_ranks(2, lambda comm: Run(comm, classes=5, make=ADAMW).train().whole())[0]
    assert same(run_ranks(4, body)[0], want)


class Mixed(nn.Module):
    """Buffers of every kind, a non-contiguous one, an empty one, and JSON state of its own."""

    def __init__(self, fill: int = 0) -> None:
        super().__init__()
        values = numbers(6, 4, seed=3) * 5
        dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]
        for i, dtype in enumerate([*dtypes, torch.float8_e4m3fn, torch.int32]):
            self.register_buffer(f"b{i}", values.to(dtype) if fill else torch.zeros(6, 4, dtype=dtype))
        self.register_buffer("turned", values.t() if fill else torch.zeros(4, 6))
        self.register_buffer("strange", torch.tensor([float("nan"), float("inf"), -0.0]) if fill else torch.zeros(3))
        self.register_buffer("count", torch.tensor(fill))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.fill = fill

    def get_extra_state(self) -> dict[str, Any]:
        return {"fill": self.fill}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.fill = state["fill"]


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    source, target = Mixed(fill=7), Mixed()
    save(tmp_path / "a", mixed=source)
    load(tmp_path / "a", mixed=target)
    assert target.fill == 7 and int(target.get_buffer("count")) == 7
    for (name, a), (_, b) in zip(source.named_buffers(), target.named_buffers(), strict=True):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        assert a.dtype == b.dtype and torch.equal(*bits), name
    assert "hidden" not in "".join(json.loads((tmp_path / "a/metadata.json").read_text())["tensors"])


def test_state_of_another_type_than_its_parameter_keeps_its_bits(tmp_path: Path) -> None:
    def make() -> tuple[nn.Linear, Optimizer]:
        module: nn.Linear = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
        return module, SGD(module.parameters(), lr=torch.tensor(0.1), momentum=0.9)

    module, optimizer = make()
    master = numbers(2, 3)
    optimizer.state[module.weight] = {"momentum_buffer": None, "master": master, "count": 3, "history": [(1, 2.5)]}
    save(tmp_path / "a", module=module, optimizer=optimizer)
    other, resumed = make()
    resumed.param_groups[0]["lr"].fill_(9.0)
    resumed.param_groups[0]["foreach"] = False
    lr = resumed.param_groups[0]["lr"]
    load(tmp_path / "a", module=other, optimizer=resumed)
    state = resumed.state[other.weight]
    assert torch.equal(state.pop("master"), master)
    assert state == {"momentum_buffer": None, "count": 3, "history": [(1, 2.5)]}
    assert resumed.param_groups[0]["lr"] is lr and float(lr) == float(torch.tensor(0.1))
    assert resumed.param_groups[0]["foreach"] is False  # how, not what: the running program's choice


def test_optimizer_without_state_clears_the_live_one(tmp_path: Path) -> None:
    run = Run(world())
    save(tmp_path / "a", **run.parts)
    run.train()
    load(tmp_path / "a", **run.parts)
    assert not run.optimizer.state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_between_a_gpu_and_the_host(tmp_path: Path) -> None:
    def make(device: str) -> tuple[nn.Linear, Optimizer]:
        module = nn.Linear(3, 2).to(device)
        return module, AdamW(module.parameters(), fused=device == "cuda")

    first, optimizer = make("cuda")
    first(torch.ones(1, 3, device="cuda")).sum().backward()
    optimizer.step()
    save(tmp_path / "a", module=first, optimizer=optimizer)
    for device in ("cuda", "cpu"):
        module, resumed = make(device)
        load(tmp_path / "a", module=module, optimizer=resumed)
        state, truth = resumed.state[module.weight], optimizer.state[first.weight]
        assert torch.equal(module.weight.cpu(), first.weight.cpu())
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key].cpu(), truth[key].cpu()) and state[key].device.type == device
        module(torch.ones(1, 3, device=device)).sum().backward()
        resumed.step()


# ---- what is written


def test_whole_tensors_are_written_once_and_are_rank_0s(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        run = Run(comm, classes=5)
        for name in ("running_mean", "running_var"):  # statistics that were not synchronised
            run.backbone.norm.get_buffer(name).fill_(comm.rank + 1.0)
        save(tmp_path / "a", comm=comm, **run.parts)

    run_ranks(4, body)
    files = {path.name: load_file(path) for path in sorted((tmp_path / "a").glob("*.safetensors"))}
    assert list(files) == [f"rank_0000{rank}.safetensors" for rank in range(3)]  # rank 3 has no rows
    keys = [key for tensors in files.values() for key in tensors]
    assert len(keys) == len(set(keys)) and sum(key.startswith("head/weight@") for key in keys) == 3
    assert files["rank_00001.safetensors"]["head/weight@2,0"].shape == (2, 4)
    for name in ("running_mean", "running_var"):
        assert torch.equal(files["rank_00000.safetensors"][f"backbone/norm.{name}@0"], torch.ones(3))


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was used")

    for module, name in [(pickle, "dump"), (pickle, "dumps"), (pickle, "Pickler"), (torch, "save")]:
        monkeypatch.setattr(module, name, refuse)
    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)

    def body(comm: Communicator) -> None:
        run = Run(comm).train()
        checkpoints = Checkpoints(tmp_path, comm=comm)
        checkpoints.save(1, {"epoch": 1}, **run.parts)
        assert checkpoints.load(**run.parts) is not None

    run_ranks(2, body)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted({path.suffix for path in files}) == ["", ".json", ".safetensors"] and len(files) == 4
    for path in files:
        head = path.read_bytes()[:2]
        assert head not in (b"PK", *(b"\x80" + bytes([protocol]) for protocol in range(1, 6))), path


def test_json_says_what_is_in_it(tmp_path: Path) -> None:
    saved_run(tmp_path / "a", world_size=2)
    about = describe(tmp_path / "a")
    assert (about["step"], about["world_size"], about["extra"]) == (7, 2, {"epoch": 3})
    assert about["torch_version"] == torch.__version__ and "plsc_version" in about
    kinds = {name: (part["kind"], part["type"]) for name, part in about["parts"].items()}
    assert kinds == {
        "backbone": ("module", "Backbone"), "head": ("module", "Head"), "optimizer": ("optimizer", "SGD"),
    }  # fmt: skip
    assert about["cut"] == [
        "head/bias", "head/weight", "optimizer/head/bias/momentum_buffer", "optimizer/head/weight/momentum_buffer",
    ]  # fmt: skip


# ---- parts with a state of their own


class Stateful:
    """Takes any state, keeps it; refuses what `check` refuses."""

    def __init__(self, state: dict[Any, Any], check: Callable[[dict[Any, Any]], None] | None = None) -> None:
        self.state, self.check = state, check

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        if self.check is not None:
            self.check(state)
        self.state = state


def test_any_json_and_tensors_inside_it(tmp_path: Path) -> None:
    state = {
        "a": [1, 2.5, None, True, "x", (1, (2,))], "b": {3: "int key", "$odd": -1.5, (1, 2): []}, "inf": float("inf"),
        "nested": {"t": numbers(3), "list": [numbers(2, seed=1), torch.tensor(4)]},
    }  # fmt: skip
    save(tmp_path / "a", part=Stateful(state))
    for target in (
        Stateful({}),
        Stateful({"nested": {"t": torch.zeros(3), "list": [torch.zeros(2), torch.tensor(0)]}}),
    ):
        load(tmp_path / "a", part=target)
        nested = target.state.pop("nested")
        assert target.state == {key: state[key] for key in ("a", "b", "inf")}
        assert torch.equal(nested["t"], numbers(3)) and torch.equal(nested["list"][0], numbers(2, seed=1))
        assert nested["list"][1].dtype == torch.int64 and int(nested["list"][1]) == 4
    with pytest.raises(ValueError, match=r"part/x: got set, expected a tensor, None"):
        save(tmp_path / "b", part=Stateful({"x": {1}}))
    with pytest.raises(ValueError, match="extra/x: got a tensor"):
        save(tmp_path / "b", extra={"x": torch.zeros(1)}, part=Stateful({}))
    assert not (tmp_path / "b").exists()


def test_torch_schedules_and_scalers(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        module = nn.Linear(2, 2)
        optimizer = SGD(module.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3], gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return {"module": module, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

    first, second = make(), make()
    first["scaler"].load_state_dict({**first["scaler"].state_dict(), "scale": 2.0})
    for _ in range(2):
        first["optimizer"].step()
        first["schedule"].step()
    save(tmp_path / "a", **first)
    load(tmp_path / "a", **second)
    assert second["scaler"].get_scale() == 2.0
    for parts in (first, second):
        parts["optimizer"].step()
        parts["schedule"].step()
        assert parts["schedule"].get_last_lr() == [0.125]


class RowState:
    """Offers tensors cut by class beside a state_dict, as a row-wise optimizer does."""

    def __init__(self, comm: Communicator, classes: int, scale: float) -> None:
        self.shard = Shard.of(classes, comm)
        self.steps = torch.arange(classes)[self.shard.start : self.shard.stop] * int(scale)
        self.value = (numbers(classes, 3) * scale)[self.shard.start : self.shard.stop].clone()
        self.count = int(scale)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def sharded_state(self) -> dict[str, tuple[Tensor, Shard]]:
        return {"steps": (self.steps, self.shard), "value": (self.value, self.shard)}


class Inside(nn.Module):
    """A module that offers cut tensors which are in no state_dict."""

    def __init__(self, state: RowState) -> None:
        super().__init__()
        self.state = state

    def sharded_state(self) -> dict[str, tuple[Tensor, Shard]]:
        return self.state.sharded_state()


def test_sharded_state_is_cut_anew(tmp_path: Path) -> None:
    def write(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(1, 1), Inside(RowState(comm, 7, 3.0)))
        save(tmp_path / "a", comm=comm, rows=RowState(comm, 7, 2.0), model=model)

    def read(comm: Communicator) -> None:
        rows, inner = RowState(comm, 9, 0.0), RowState(comm, 9, 50.0)
        model = nn.Sequential(nn.Linear(1, 1), Inside(inner))
        load(tmp_path / "a", comm=comm, extend_classes=True, rows=rows, model=model)
        assert rows.count == 2
        for state, scale in ((rows, 2.0), (inner, 3.0)):
            steps = torch.cat(comm.gather_objects(state.steps))
            value = torch.cat(comm.gather_objects(state.value))
            assert torch.equal(steps, torch.cat([torch.arange(7) * int(scale), torch.zeros(2, dtype=torch.int64)]))
            assert torch.equal(value, torch.cat([numbers(7, 3) * scale, torch.zeros(2, 3)]))

    run_ranks(3, write)
    run_ranks(2, read)
    run_ranks(5, read)


def test_a_part_that_refuses_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    def refuse(state: dict[Any, Any]) -> None:
        raise ValueError(f"the loader has other data than {state['data']}")

    def body(comm: Communicator) -> None:
        run = Run(comm).train()
        save(tmp_path / "a", comm=comm, one=Stateful({"n": 1}), loader=Stateful({"data": "old"}), **run.parts)
        one, loader = Stateful({"n": 2}), Stateful({"data": "new"}, refuse if comm.rank == 1 else None)
        run.train()
        before = run.whole()
        with pytest.raises(ValueError, match="rank 1: the loader has other data than old"):
            load(tmp_path / "a", comm=comm, one=one, loader=loader, **run.parts)
        assert one.state == {"n": 2} and loader.state == {"data": "new"} and same(run.whole(), before)

    run_ranks(2, body)


# ---- what does not fit is refused, and nothing changes


def other_dtype(run: Run) -> dict[str, Any]:
    run.backbone.half()
    return {"backbone": run.backbone}


def other_names(run: Run) -> dict[str, Any]:
    return {"backbone": nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))}


def renamed_optimizer(run: Run) -> dict[str, Any]:
    return {"trunk": run.backbone, "head": run.head, "optimizer": run.optimizer}


def one_group(run: Run) -> dict[str, Any]:
    return {**run.parts, "optimizer": SGD([*run.backbone.parameters(), *run.head.parameters()], lr=1.0)}


def other_optimizer(run: Run) -> dict[str, Any]:
    return {**run.parts, "optimizer": ADAMW([*run.backbone.parameters(), *run.head.parameters()])}


def other_state_dtype(run: Run) -> dict[str, Any]:
    run.train()
    for state in run.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    return run.parts


MISFITS: dict[str, tuple[Callable[[Run], dict[str, Any]], str]] = {
    "dtype": (other_dtype, r"backbone/conv.bias: the checkpoint has torch.float32, the live tensor torch.float16"),
    "shape": (
        lambda run: {"backbone": Backbone(width=5)},
        r"backbone/conv.weight: the checkpoint has shape \[3, 2, 1, 1\], the live tensor \[5, 2, 1, 1\]",
    ),
    "names": (
        other_names,
        r"backbone is not what was saved \(not in the checkpoint: backbone/0.bias, .* and 3 more; only in the check",
    ),
    "dimensions": (
        lambda run: {"head": Head(run.comm, 10, dim=6)},
        r"head/weight: the checkpoint has shape \[10, 4\], the live tensor \[10, 6\]",
    ),
    "centers": (
        lambda run: {"head": Head(run.comm, 10, centers=2)},
        r"head/weight: the checkpoint has shape \[10, 4\], the live tensor \[10, 2, 4\]",
    ),
    "more classes": (
        lambda run: {"head": Head(run.comm, 12)},
        r"the checkpoint has 10 classes, the head has 12; pass extend_classes / --head.extend-classes to keep the "
        r"first 10 and initialise the rest$",
    ),
    "fewer classes": (
        lambda run: {"head": Head(run.comm, 8)},
        r"the checkpoint has 10 classes, the head has 8; classes are never dropped: build it with 10 or more$",
    ),
    "missing part": (lambda run: {"loader": Stateful({})}, r"no part 'loader'; it has backbone, head, optimizer"),
    "kind": (lambda run: {"head": Stateful({})}, r"head: the checkpoint has a part of kind module, got stateful"),
    "no state": (lambda run: {"head": 3}, r"head: got int, expected a module, an optimizer, or an object with "),
    "optimizer": (other_optimizer, r"optimizer: the checkpoint has the state of SGD, got AdamW; use the same"),
    "groups": (one_group, r"optimizer: the checkpoint has 2 parameter groups, got 1"),
    "parameters": (renamed_optimizer, r"optimizer is not what was saved \(not in the checkpoint: trunk/conv.bias"),
    "stranger": (
        lambda run: {"head": run.head, "optimizer": run.optimizer},
        r"optimizer: parameter 0 of group 0, shape \[3, 2, 1, 1\], is of no module given here; pass its module",
    ),
    "state dtype": (
        other_state_dtype,
        r"optimizer/backbone/conv.weight/momentum_buffer: the checkpoint has torch.float32, the live .* torch.float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_named_and_change_nothing(tmp_path: Path, name: str) -> None:
    change, message = MISFITS[name]
    saved_run(tmp_path / "a", world_size=2)

    def body(comm: Communicator) -> None:
        run = Run(comm, seed=900)
        parts = change(run)
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        before, state = run.whole(), [{k: v.clone() for k, v in m.state_dict().items()} for m in modules]
        options = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "a", comm=comm, **parts)
        assert same(run.whole(), before)
        assert all(same(dict(m.state_dict()), old) for m, old in zip(modules, state, strict=True))
        assert options == [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]

    run_ranks(3, body)


def test_a_misfit_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    saved_run(tmp_path / "a", world_size=2)

    def body(comm: Communicator) -> None:
        backbone = Backbone(width=5 if comm.rank == 1 else 3, seed=70)
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        with pytest.raises(ValueError, match=r"could not load .*: rank 1: .*shape"):
            load(tmp_path / "a", comm=comm, backbone=backbone)
        assert same(dict(backbone.state_dict()), before)

    run_ranks(3, body)


def test_extend_classes_keeps_the_old_and_the_fresh(tmp_path: Path) -> None:
    truth = saved_run(tmp_path / "a", world_size=3, classes=10, make=ADAMW)

    def body(comm: Communicator) -> None:
        for trained in (False, True):
            run = Run(comm, classes=17, seed=900, make=ADAMW)
            if trained:
                run.train()
            fresh = run.whole()
            load(tmp_path / "a", comm=comm, extend_classes=True, **run.parts)
            for name, tensor in run.whole().items():
                if tensor.dim() and name.startswith(("head/", "optimizer/head/")):
                    assert torch.equal(tensor[:10], truth[name]), name
                    new = tensor[10:]
                    assert torch.equal(new, fresh[name][10:] if name.startswith("head/") else torch.zeros_like(new))
                else:
                    assert torch.equal(tensor, truth[name]), name
            run.train()

    for world_size in (1, 2, 6):
        run_ranks(world_size, body)


def test_ranks_must_save_the_same_thing(tmp_path: Path) -> None:
    def differing_state(comm: Communicator) -> None:
        save(tmp_path / "a", comm=comm, loader=Stateful({"position": comm.rank // 2}))

    def differing_step(comm: Communicator) -> None:
        save(tmp_path / "a", comm=comm, step=comm.rank, loader=Stateful({}))

    def differing_parts(comm: Communicator) -> None:
        parts: dict[str, Any] = {"odd" if comm.rank == 2 else "even": Stateful({})}
        save(tmp_path / "a", comm=comm, **parts)

    def differing_shape(comm: Communicator) -> None:
        save(tmp_path / "a", comm=comm, backbone=Backbone(width=3 + comm.rank % 2))

    def lost_state(comm: Communicator) -> None:
        run = Run(comm).train()
        if comm.rank == 2:
            run.optimizer.state.pop(run.backbone.conv.weight)
        save(tmp_path / "a", comm=comm, **run.parts)

    for body, message in (
        (differing_state, "state of loader differs between rank 0 and rank 2"),
        (differing_step, "different steps: rank 0 has 0, rank 1 has 1"),
        (differing_parts, "different parts"),
        (differing_shape, "backbone/conv.weight differs between ranks: whole.* on 0, whole.* on 1"),
        (lost_state, "conv.weight/momentum_buffer exists on rank 0 but not on rank 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run_ranks(4, body)
        assert list(tmp_path.iterdir()) == []
