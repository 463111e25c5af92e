"""The README's twelve-line script as a user runs it: one process, then torchrun with 2 and 4 ranks, equal losses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script() -> str:
    """The block of the README that builds a Fleet, with a line that prints each step's mean loss on rank 0."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "plsc.Fleet" in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 12
    show = (
        "    mean = fleet.comm.all_reduce(loss.detach().double()).wait() / fleet.world_size\n"
        "    if fleet.rank == 0: print('loss', float(mean))\n"
    )
    return "import torch; torch.manual_seed(0)\n" + block.replace("    fleet.step", show + "    fleet.step")


def losses(folder: Path, world: int) -> list[float]:
    path = folder / f"train{world}.py"
    path.write_text(script())
    run = [sys.executable, str(path)]
    if world > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        run = [sys.executable, *launcher, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (work := folder / str(world)).mkdir()
    done = subprocess.run(run, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (work / "runs/twelve/metadata.json").is_file()
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.slow
def test_equal_losses_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    alone = losses(tmp_path, 1)
    assert len(alone) == 20
    for world in (2, 4):
        assert losses(tmp_path, world) == pytest.approx(alone, rel=1e-4)
