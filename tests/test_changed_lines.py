"""A script for one process becomes one for many with at most twelve changed lines, those of docs/strategies.md."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def scripts() -> tuple[str, str]:
    page = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    section = page.split("## From one process to many")[1].split("\n## ")[0]
    before, after = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return before, after


def test_at_most_twelve_lines_change() -> None:
    before, after = (script.splitlines() for script in scripts())
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    replaced = max(sum(line[0] == sign for line in changed) for sign in "+-")
    assert 0 < replaced <= 12 and len(changed) <= 20, changed
    assert not any("plsc" in line for line in before)


@pytest.mark.slow
def test_the_losses_are_those_of_one_process(tmp_path: Path) -> None:
    losses = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    before, after = scripts()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for name, script, launcher in (("a", before, []), ("b", after, []), ("c", after, torchrun)):
        path = tmp_path / f"{name}.py"
        path.write_text(script)
        command = [sys.executable, *launcher, str(path)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append([float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")])
    alone, same, two = losses
    assert len(alone) == 2 and same == pytest.approx(alone, rel=1e-6)
    assert two[::2] == pytest.approx(alone, rel=1e-5) and two[1::2] == pytest.approx(alone, rel=1e-5)
