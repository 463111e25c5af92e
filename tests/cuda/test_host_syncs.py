"""Calls in a training step that make the host wait for the device: each is listed here with its reason.

A static look at ops, nn and strategies. On a GPU tools/gpu_check.py runs a step under torch's own sync debugging, which
also sees what cannot be seen here (an index by a mask, a copy from unpinned memory).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for room in ("ops", "nn", "strategies") for path in (ROOT / "plsc" / room).glob("*.py"))
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "synchronize"}  # methods, and torch.unique
CASTS = {"int", "float", "bool"}
BUFFERS = {"num_steps", "num_batches_tracked"}
# Called when something is made, loaded or refused: never in a step.
SETUP = {"__post_init__", "load_state_dict", "_parse", "init_blocks", "bytes_per_class", "measure", "_checked"}

ONCE = "once a step: its result has a length, or steers the host"
CPU = "on a CPU only, or where ranks already differ in what they raise"
HOST = "of a number that lies on the host"
STORE = "rows of a store lie on the host or on servers"
ALLOWED = {
    # (file, function): why
    ("ops/cross_entropy.py", "_check_upstream"): ONCE + "; agrees on upstream gradients before the second sweep",
    ("ops/kernels.py", "sample_classes"): ONCE + ": how many classes were sampled",
    ("ops/packing.py", "gather_batch"): CPU + ": on a GPU it is gather_packed",
    ("ops/sampling.py", "sample_classes"): ONCE + ": how many classes were sampled",
    ("ops/sampling.py", "_draw"): ONCE + "; the kernels of sample.cu wait once instead",
    ("ops/native.py", "leave_out"): "the twin's: plsc.ops.fused.exponentials leaves the own class out without a wait",
    ("ops/native.py", "step"): HOST + ": options of an optimizer",
    ("ops/optim.py", "_merge"): "under gradient accumulation with sampling only: the union of rows has a length",
    ("ops/sweep.py", "Sweep.__init__"): ONCE + ": which samples' classes this rank holds, by block",
    ("ops/topk.py", "_improve"): "evaluation, no training step",
    ("ops/topk.py", "_first_best"): "evaluation, no training step",
    ("ops/twins.py", "_own"): "the twin's: kernels compare each column with the own class",
    ("nn/class_parallel.py", "ClassParallelModule._rounding"): ONCE + "; the step's number lies in a buffer",
    ("nn/class_parallel.py", "check_batch"): CPU,
    ("nn/class_parallel.py", "check_labels"): CPU + ": on a GPU an assertion that runs there takes its place",
    ("nn/head.py", "ClassParallelHead._loss"): ONCE + "; the step's number lies in a buffer",
    ("nn/head.py", "ClassParallelHead._observe"): ONCE + "; margins that follow the batch's statistics",
    ("nn/stored.py", "StoredHead.pull"): STORE,
    ("nn/stored.py", "StoredHead.push"): STORE,
    ("nn/stored.py", "StoredHead.save_classes"): "where a checkpoint is written or read",
    ("nn/stored.py", "StoredHead.load_classes"): "where a checkpoint is written or read",
    ("nn/stored.py", "StoredHead.set_extra_state"): "where a checkpoint is written or read",
    ("strategies/dgc.py", "DGC.step"): ONCE + ": whether all gradients are finite is agreed before they are sent",
    ("strategies/dgc.py", "DGC._apply_sparse"): "where clip_norm is set: whether to clip",
    ("strategies/dgc.py", "largest_entries"): "the twin's: the kernels of select.cu do not wait",
    ("strategies/local_sgd.py", "LocalSGD._agree_on_period"): "not a quiet step: weights are averaged there",
    ("strategies/precision.py", "any_nonfinite"): CPU + ": on a GPU the norm says it, there",
    ("strategies/precision.py", "_is_finite"): "where somebody asks whether a loss is finite, not in a quiet step",
    ("strategies/sync_bn.py", "SyncBatchNorm._track"): "where momentum is None only: a mean over all batches",
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
            if isinstance(called, ast.Attribute) and called.attr in WAITS:
                yield here, called.attr, child.lineno
            if isinstance(called, ast.Name) and called.id in CASTS and child.args and _may_be_a_tensor(child.args[0]):
                yield here, called.id, child.lineno
        yield from _inside(child, here)


def _may_be_a_tensor(argument: ast.expr) -> bool:
    """What a method or torch gives, an entry by number, a buffer; a plain name could be anything and is not told."""
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
    assert all(len(reason) > 20 for reason in ALLOWED.values() if reason is not HOST)


def test_waits_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        "class A:\n"
        "    def f(self, x, state):\n"
        "        n = int(state['n']) + int(3) + int('4')\n"
        "        return x.sum().item(), x.cpu(), float(x[0]), torch.unique(x), bool((x > 0).any())\n"
    )
    assert [(f, call) for f, call, _ in waits(path)] == [
        ("A.f", call) for call in ("item", "cpu", "float", "unique", "bool")
    ]
