"""Checkpoints: any world size, bit for bit, no pickle."""

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

from plsc.comm import Communicator, run_ranks, world
from plsc.train.checkpoint import Checkpoints, describe, load, save

from .checkpoint_runs import ADAMW, SGD_M, Run, numbers, same, saved_run

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
