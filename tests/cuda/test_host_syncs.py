"""Calls in a training step that make the host wait for the device: each is listed here with its reason.

A static look at whatever a step goes through; and what is done around the kernels' launches, on tensors that cannot be
read. test_quiet_steps.py beside it runs whole steps on such tensors, which also shows what cannot be seen here (an
index by a mask); on a GPU tools/gpu_check.py runs one under torch's own sync debugging.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plsc.comm import LocalCommunicator, Shard
from plsc.ops import kernels

ROOT = Path(__file__).resolve().parents[2]
PLSC = ROOT / "plsc"
FILES = sorted(path for room in ("ops", "nn", "strategies", "comm", "models") for path in (PLSC / room).glob("*.py"))
FILES += [PLSC / "fleet.py", PLSC / "data/pipeline.py", PLSC / "train/trainer.py", PLSC / "train/meter.py"]
# Methods, and torch.unique.
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "unique", "masked_select", "synchronize", "query"}
CASTS = {"int", "float", "bool"}
LITERALS = {"tensor", "as_tensor"}  # of torch, with a device: copied there from pageable memory
BUFFERS = {"num_steps", "num_batches_tracked"}
# Called when something is made, loaded or refused: never in a step.
SETUP = {"__post_init__", "load_state_dict", "_parse", "init_blocks", "bytes_per_class", "measure", "_checked"}

ONCE = "once a step: its result has a length, or steers the host"
CPU = "on a CPU only, where it does not wait"
HOST = "of a number that lies on the host"
SETUP_OF_RANKS = "where ranks are connected, measured or parted, in no step"
LOG = "at log lines, evaluations and checkpoints"
STORE = "rows of a store lie on the host or on servers"
ALLOWED = {
    # (file, function): why
    ("ops/kernels.py", "sample_classes"): ONCE + ": how many classes were sampled, for they are their own number",
    ("ops/packing.py", "gather_batch"): CPU + ": on a GPU it is gather_packed",
    ("ops/sampling.py", "sample_classes"): ONCE + ": how many classes were sampled, for they are their own number",
    ("ops/native.py", "step"): HOST + ": options of an optimizer",
    ("ops/updates.py", "GradientUpdate.joined"): "accumulation with sampling only: how many rows the union has",
    ("ops/sweep.py", "Sweep._find_own"): CPU + ": on a GPU all samples are listed, and masks tell whose count",
    ("ops/sweep.py", "Sweep._bound_own"): CPU + ": on a GPU blocks have no bounds, masks again",
    ("ops/topk.py", "_improve"): "evaluation, no training step",
    ("ops/topk.py", "_first_best"): "evaluation, no training step",
    ("ops/twins.py", "_own"): "the twin's: kernels compare each column with the own class",
    ("nn/class_parallel.py", "ClassParallelModule._rounding"): HOST + ": the step's, in a buffer that does not move",
    ("nn/class_parallel.py", "check_labels"): CPU + ": on a GPU an assertion that runs there takes its place",
    ("nn/head.py", "ClassParallelHead._loss"): HOST + ": the step's, in a buffer that does not move",
    ("nn/head.py", "ClassParallelHead._observe"): "margins whose update does not take `valid`; none of plsc's own",
    ("nn/stored.py", "StoredHead.pull"): STORE,
    ("nn/stored.py", "StoredHead.push"): STORE,
    ("nn/stored.py", "StoredHead.save_classes"): "where a checkpoint is written or read",
    ("nn/stored.py", "StoredHead.load_classes"): "where a checkpoint is written or read",
    ("nn/stored.py", "StoredHead.set_extra_state"): "where a checkpoint is written or read",
    ("strategies/dgc.py", "DGC.step"): ONCE + ": whether all gradients are finite is agreed before they are sent",
    ("strategies/dgc.py", "DGC._apply_sparse"): "where clip_norm is set: whether to clip what this rank sends",
    ("strategies/dgc.py", "largest_entries"): "the twin's: the kernels of select.cu do not wait",
    ("strategies/local_sgd.py", "LocalSGD._agree_on_period"): "not a quiet step: weights are averaged there",
    ("strategies/local_sgd.py", "_describe"): "not a quiet step: optimizers' states are averaged where the ranks meet",
    ("strategies/precision.py", "any_nonfinite"): CPU + ": on a GPU the norm says it, there",
    ("strategies/precision.py", "_is_finite"): "where somebody asks whether a loss is finite, not in a quiet step",
    ("strategies/sync_bn.py", "SyncBatchNorm._track"): "where momentum is None only: a mean over all batches",
    ("plsc/fleet.py", "Fleet.any"): LOG + "; and whether a loss is finite, on a CPU only",
    ("plsc/fleet.py", "Fleet._check_loss"): CPU + ": on a GPU the log lines look",
    ("plsc/fleet.py", "Fleet._agree"): ONCE + ", with fp16, DGC or clip_norm: overflow and norm, in one read",
    ("train/trainer.py", "Trainer._prepare_step"): HOST + ": a seed",
    ("train/trainer.py", "Trainer.evaluate"): LOG,
    ("train/meter.py", "Meter.report"): LOG,
    ("comm/nccl_session.py", "Session._find_fault"): "the watchdog's thread asks events, which does not wait",
    ("comm/nccl_session.py", "Streams.synchronize"): SETUP_OF_RANKS,
    ("comm/cupy_nccl.py", "CupyNcclCommunicator._drain"): SETUP_OF_RANKS,
    ("comm/launch.py", "_of_slurm_step"): SETUP_OF_RANKS,
    ("comm/topologies.py", "Topology._agree"): SETUP_OF_RANKS,
    ("comm/topologies.py", "Auto._time"): SETUP_OF_RANKS,
    ("comm/topologies.py", "_first_wrong"): SETUP_OF_RANKS,
    ("comm/torch_distributed.py", "TorchCommunicator._gather_objects"): "objects, which no step exchanges",
}


def waits(path: Path) -> Iterator[tuple[str, str, int]]:
    """(function, call, line) of what may make the host wait."""
    yield from _inside(ast.parse(path.read_text(encoding="utf-8")), "")


def _inside(node: ast.AST, name: str) -> Iterator[tuple[str, str, int]]:
    for child in ast.iter_child_nodes(node):
        here = name
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            here = f"{name}.{child.name}" if name else child.name
        if isinstance(child, ast.Call):
            called = child.func
            by_method = isinstance(called, ast.Attribute) and (called.attr in WAITS or _is_literal(child, called))
            if isinstance(called, ast.Attribute) and (by_method or _goes_to_the_host(child, called)):
                yield here, called.attr, child.lineno
            if isinstance(called, ast.Name) and called.id in CASTS and child.args and _may_be_a_tensor(child.args[0]):
                yield here, called.id, child.lineno
        yield from _inside(child, here)


def _is_literal(call: ast.Call, called: ast.Attribute) -> bool:
    """torch.tensor(..., device=...), unless it is made on the host."""
    places = [word.value for word in call.keywords if word.arg == "device"]
    on_host = any(isinstance(place, ast.Constant) and place.value == "cpu" for place in places)
    return called.attr in LITERALS and bool(places) and not on_host


def _goes_to_the_host(call: ast.Call, called: ast.Attribute) -> bool:
    """x.to("cpu"), also by name or as torch.device("cpu")."""
    given = [*call.args, *(word.value for word in call.keywords)]
    texts = [node.value for each in given for node in ast.walk(each) if isinstance(node, ast.Constant)]
    return called.attr == "to" and "cpu" in texts


def _may_be_a_tensor(argument: ast.expr) -> bool:
    """What a method or torch gives, an entry by number, a buffer; a plain name could be anything."""
    if isinstance(argument, ast.Attribute):
        return argument.attr in BUFFERS
    if isinstance(argument, ast.Subscript):
        index = argument.slice
        return not (isinstance(index, ast.Constant) and isinstance(index.value, str))
    calls = [node.func for node in ast.walk(argument) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Attribute) for call in calls)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_wait_has_a_reason(path: Path) -> None:
    file = f"{path.parent.name}/{path.name}"
    strangers = [
        f"{file}:{line} {call}() in {function}"
        for function, call, line in waits(path)
        if function.rpartition(".")[2] not in SETUP and (file, function) not in ALLOWED
    ]
    assert not strangers, f"{strangers}: may stop the host on a GPU; do without, or say why in ALLOWED"


def test_reasons_say_something() -> None:
    assert all(len(reason) > 20 for reason in ALLOWED.values())


def test_every_reason_is_needed() -> None:
    found = {(f"{path.parent.name}/{path.name}", function) for path in FILES for function, _, _ in waits(path)}
    assert not set(ALLOWED) - found, f"{set(ALLOWED) - found} do not wait any more; take them out of ALLOWED"


def test_waits_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        "class A:\n"
        "    def f(self, x, state):\n"
        "        n = int(state['n']) + int(3) + int('4')\n"
        "        return x.sum().item(), x.cpu(), float(x[0]), torch.unique(x), bool((x > 0).any())\n"
        "    def g(self, x):\n"
        "        a, b = torch.tensor(1), torch.tensor(1, device='cpu')\n"
        "        return torch.tensor(1, device=x.device), x.masked_select(x > 0)\n"
        "    def h(self, x, stream):\n"
        "        while not stream.query():\n"
        "            pass\n"
        "        a = x.to(torch.float32), x.to(x.device)\n"
        "        return x.to('cpu'), x.to(device='cpu', copy=True), x.to(torch.device('cpu'))\n"
    )
    assert [(f, call) for f, call, _ in waits(path)] == [
        *(("A.f", call) for call in ("item", "cpu", "float", "unique", "bool")),
        ("A.g", "tensor"),
        ("A.g", "masked_select"),
        ("A.h", "query"),
        *[("A.h", "to")] * 3,
    ]


class Nobody:
    """A launcher that does nothing: what a kernel would write is never there."""

    threads = 256

    def __init__(self) -> None:
        self.launched: list[str] = []

    def launch(self, file: str, kernel: str, **how: Any) -> None:
        self.launched.append(f"{file}.{kernel.rpartition('_')[0] or kernel}")


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def block() -> dict[str, Tensor]:
    """What exp_rows and its like take, of 6 samples and 40 classes."""
    place = on_meta(6, dtype=torch.int64)
    return {"product": on_meta(6, 40), "place": place, "inverse": on_meta(40)}


ROWS: dict[str, Any] = {"lr": 0.1, "normalize": True, "weighed": True, "rows": on_meta(3, dtype=torch.int64)}
CALLS: dict[str, Callable[[], object]] = {
    "exp_rows": lambda: kernels.exp_rows(**block(), shift=on_meta(6), out=on_meta(6, 40)),
    "grad_rows": lambda: kernels.grad_rows(
        **block(), shift=on_meta(6), coefficient=on_meta(6), own_value=on_meta(6), out=on_meta(6, 40)
    ),
    "online_rows": lambda: kernels.online_rows(**block()),
    "sgd_rows": lambda: kernels.sgd_rows(
        on_meta(9, 8),
        on_meta(3, 8),
        on_meta(9, 8, dtype=torch.int8),
        momentum=0.9,
        scales=on_meta(9),
        inverse=on_meta(3),
        **ROWS,
    ),
    "adam_rows": lambda: kernels.adam_rows(
        on_meta(9, 8), on_meta(3, 8), on_meta(9, 8), on_meta(9, 8), on_meta(9), **ROWS
    ),
    "merge_topk": lambda: kernels.merge_topk(on_meta(6, 4), on_meta(6, 4, dtype=torch.int64), on_meta(6, 40), k=4),
    "largest_entries": lambda: kernels.largest_entries(on_meta(900), 9),
    "largest_magnitude": lambda: kernels.largest_magnitude(on_meta(900)),
    "cast_scaled": lambda: kernels.cast_scaled(on_meta(900), torch.float16, largest=on_meta()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_launch_reads_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever plsc.ops.kernels does around its launches, on tensors that have no numbers to be read."""
    launcher = Nobody()
    monkeypatch.setattr(kernels, "launcher_for", lambda device: launcher)
    CALLS[name]()
    assert launcher.launched, "the twin ran"


def test_every_kernel_is_launched_here() -> None:
    public = {
        name
        for name, value in vars(kernels).items()
        if inspect.isfunction(value) and value.__module__ == kernels.__name__ and not name.startswith("_")
    }
    assert public - set(CALLS) == {"sample_classes"}


def test_sampling_reads_how_many_and_no_more(launch: Any) -> None:
    launch(order=3)
    labels = torch.arange(0, 3000, 100)
    with Reads() as reads:
        kernels.sample_classes(labels, Shard.of(3000, LocalCommunicator()), rate=0.1, seed=1, step=2)
    assert reads.seen == [torch.ops.aten._local_scalar_dense.default]


class Reads(TorchDispatchMode):
    """Lists what takes a number, or a length that depends on numbers, from a tensor."""

    WAITS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten._unique2.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [func] if func in self.WAITS else []
        return func(*args, **(kwargs or {}))
