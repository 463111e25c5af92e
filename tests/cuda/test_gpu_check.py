"""The script for GPUs: its lines survive a failure, and on a CPU every path of it runs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check(shim: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location("plsc_gpu_check", ROOT / "tools" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_are_there_before_the_end(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section that fails is a line, what came before it is written, and the next one runs."""
    seen = []

    def breaks(run: Any) -> None:
        run.add("first", "1")
        seen.append(json.loads((tmp_path / "gpu_check.json").read_text()))
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setattr(check, "SECTIONS", {"one": breaks, "two": lambda run: run.add("after", "2", ok=True)})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        check.main()
    assert left.value.code == 1 and [line["what"] for line in seen[0]] == ["first"]
    lines = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [(line["section"], line["ok"]) for line in lines] == [("one", None), ("one", False), ("two", True)]
    table = (tmp_path / "gpu_check.md").read_text().splitlines()
    assert table[3] == "| one | section | RuntimeError: no such thing |  | **no** |" and len(table) == 5


def test_no_section_begins_after_the_time(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SECTIONS", {"one": lambda run: run.add("ran", "1", ok=False)})
    command = ["gpu_check.py", "--device", "cpu", "--out", str(tmp_path), "--seconds", "-1"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as left:
        check.main()
    assert left.value.code == 0 and "time is up" in (tmp_path / "gpu_check.md").read_text()


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
    lines = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {line["section"] for line in lines} == set(check.SECTIONS)
    assert sum(line["ok"] is True for line in lines) >= 15
