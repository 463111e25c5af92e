"""The script for GPUs: its lines survive a failure, and on a CPU every path of it runs."""

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from plsc.ops import kernels, twins

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check(shim: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location("plsc_gpu_check", ROOT / "tools" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOY = """
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("plsc_gpu_check", {path!r})
sys.modules[spec.name] = check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)

def breaks(run):
    run.add("first", "1")
    raise RuntimeError("no such thing\\nsecond line")

def hangs(run):
    run.add("pid", str(os.getpid()))
    time.sleep(600)

def dies(run):
    run.add("before", "3")
    os.kill(os.getpid(), signal.SIGSEGV)

check.SECTIONS = {{"breaks": breaks, "dies": dies, "hangs": hangs, "last": lambda run: run.add("after", "4", ok=True)}}
check.LIMITS = {{"hangs": {limit}}}
check.main()
"""


def start(tmp_path: Path, limit: float, *options: str) -> subprocess.Popen[str]:
    """The script with sections that go wrong, in a process."""
    script = tmp_path / "toy.py"
    script.write_text(TOY.format(path=str(ROOT / "tools" / "gpu_check.py"), limit=limit))
    command = [sys.executable, str(script), "--device", "cpu", "--out", str(tmp_path / "out"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(tmp_path: Path) -> list[tuple[str, str, str, bool | None]]:
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    return [(line["section"], line["what"], line["value"], line["ok"]) for line in found["results"]]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
def test_a_section_ends_alone(tmp_path: Path) -> None:
    """One that fails, one that crashes, one that hangs: each is a line, what came before it stays, the next runs."""
    process = start(tmp_path, 8.0)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1, text
    found = lines_of(tmp_path)
    (pid,) = (value for _, what, value, _ in found if what == "pid")
    assert found == [
        ("breaks", "first", "1", None),
        ("breaks", "section", "RuntimeError: no such thing", False),
        ("dies", "before", "3", None),
        ("dies", "section", "its process ended with -11", False),
        ("hangs", "pid", pid, None),
        ("hangs", "section", "stopped after 8 s", False),
        ("last", "after", "4", True),
    ]
    assert not alive(int(pid))
    table = (tmp_path / "out" / "gpu_check.md").read_text().splitlines()
    assert len(table) == 2 + len(found) and table[3] == "| breaks | section | RuntimeError: no such thing |  | **no** |"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, "the time"])
def test_a_stop_leaves_what_was_found(tmp_path: Path, how: Any) -> None:
    process = start(tmp_path, 600.0, "--only", "breaks", "hangs", "last", *(["--seconds", "12"] * (how == "the time")))
    pid, deadline = 0, time.monotonic() + 120
    while not pid and time.monotonic() < deadline:
        time.sleep(0.05)
        if (tmp_path / "out" / "gpu_check.json").exists():
            pid = next((int(value) for _, what, value, _ in lines_of(tmp_path) if what == "pid"), 0)
    assert pid
    if how != "the time":
        process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}.get(how, 1)
    for _ in range(100):  # the kernel ends the section's process after its parent
        if not alive(pid):
            break
        time.sleep(0.05)
    assert not alive(pid)
    found = lines_of(tmp_path)
    assert [line[0] for line in found[:3]] == ["breaks", "breaks", "hangs"]
    table = (tmp_path / "out" / "gpu_check.md").read_text()
    if how == "the time":
        assert found[-1] == ("last", "section", "left out: time is up", None) and "stopped after" in found[-2][2]
    else:
        assert "| hangs | still running when this was written |" in table


def test_files_are_whole_at_every_moment(check: ModuleType, tmp_path: Path) -> None:
    """A reader that comes while they are written, as after a kill there."""
    run = check.Run(torch.device("cpu"), tmp_path, 60.0)
    run.section = "one"
    run.add("n", "0")
    writer = threading.Thread(target=lambda: [run.add("n", str(i) * 200) for i in range(200)])
    writer.start()
    while writer.is_alive():
        assert json.loads((tmp_path / "gpu_check.json").read_text())["running"] == "one"
        assert (tmp_path / "gpu_check.md").read_text().endswith("|\n")
    writer.join()
    run.read()
    assert len(run.results) == 201


def test_tensors_are_carried_to_a_launcher(check: ModuleType, shim: Any, library: Path, monkeypatch: Any) -> None:
    """What takes the tests of kernels to a GPU, here to another place on the CPU; a result may lie on its input."""
    monkeypatch.setenv("PLSC_TEST_LAUNCHER", "carried")
    launcher = shim.Carried(shim.ShimLauncher(library, order=3), torch.device("cpu"), threads=64)
    monkeypatch.setattr(kernels, "launcher_for", lambda device: launcher)
    x, place = torch.rand(5, 70), torch.tensor([-1, 3, 0, 69, 5])
    expected = torch.empty(5, 70)
    sums = twins.exp_rows(x, torch.zeros(5), place, out=expected)
    got = kernels.exp_rows(x, torch.zeros(5), place, out=x)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(got, sums)
    assert launcher.launched == ["softmax.exp_rows_float_float"]


@pytest.mark.parametrize("by", ["twins", "kernels"])
def test_head_of_kernels_is_right(check: ModuleType, launch: Any, by: str) -> None:
    """The step that is timed computes loss, gradient and weight step of plain autograd in float64."""
    module = check.load(ROOT / "benchmarks" / "gpu_head.py")
    launcher = launch(order=4) if by == "kernels" else None
    assert module.check(torch.device("cpu"), form="fp32") < 1e-5
    assert module.check(torch.device("cpu"), form="split") < 1e-2  # the products' operands are bfloat16
    assert launcher is None or "update.sgd_split_bf16" in launcher.launched


@pytest.mark.slow
def test_every_path_runs_on_a_cpu(check: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    lines = json.loads((tmp_path / "gpu_check.json").read_text())["results"]
    assert {line["section"] for line in lines} == set(check.SECTIONS)
    assert sum(line["ok"] is True for line in lines) >= 15
