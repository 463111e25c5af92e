"""The commands with ranks that are processes: stopped, killed, hanging, failing, under a launcher of the user's own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plsc.train.config import load_recipe
from tests.cli_runs import ROOT, STEPS, Started, alive, kept, losses, tree, wait_until


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run of two ranks from start to end, undisturbed: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("whole")
    code, printed, errors = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(out)).end()
    assert code == 0, errors
    return out, printed, errors


@pytest.mark.slow
def test_two_ranks_print_once_and_the_accuracy_last(whole: tuple[Path, str, str]) -> None:
    out, printed, errors = whole
    assert errors == "" and re.fullmatch(r"verification accuracy: \d+\.\d\d %", printed.splitlines()[-1])
    assert printed.count("step 7/40 ") == 1 and printed.count("TRAINING images") == 1 and "rank 1" not in printed
    assert "96 images, 8 classes, 2 ranks" in printed and list(losses(out)) == list(range(1, STEPS + 1))
    assert (out / "export/model.onnx").exists() and (out / "roc.png").exists()
    assert kept(out) == [20, 30, 40] and load_recipe(str(out / "config.toml")).nproc == 2


@pytest.mark.slow
def test_a_run_that_is_stopped_interrupted_and_killed_ends_as_if_it_had_not_been(
    whole: tuple[Path, str, str], recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ["train", str(recipe), "--nproc", "2", "--out", str(out)]

    run = Started(recipe, *command, DELAY="0.1")
    run.wait_for_step(out, 3)
    run.process.terminate()
    code, printed, errors = run.end()
    assert code == 0 and errors == "" and "SIGTERM: stopping after this step" in printed and "accuracy" not in printed
    (stopped,) = kept(out)
    assert 3 <= stopped == max(losses(out)) < 10

    run = Started(recipe, *command, DELAY="0.1")
    run.wait_for_step(out, stopped + 2)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    code, printed, errors = run.end()
    assert code == 130 and f"resumed at step {stopped} of 40" in printed
    assert len(errors.splitlines()) == 1 and errors.startswith("newest checkpoint: ")
    interrupted = kept(out)[-1]
    assert stopped < interrupted == max(losses(out))

    run = Started(recipe, *command, DELAY="0.1")
    run.wait_for_step(out, 11 if interrupted < 10 else 21)
    started = time.monotonic()
    os.kill(run.rank(1), signal.SIGKILL)
    code, printed, errors = run.end()
    assert code == 137 and time.monotonic() - started < 60
    first, hint = errors.splitlines()
    assert first.startswith("error: rank 1 was ended by SIGKILL")
    assert hint.startswith("newest checkpoint: ") and hint.endswith("the same command continues from it")
    before = kept(out)
    assert before[-1] in (10, 20) and max(losses(out)) > before[-1]

    # With one rank instead of two it goes on from there too. Dropout draws by rank: the losses are others.
    alone = tmp_path / "alone"
    shutil.copytree(out, alone)
    flags = ["--nproc", "1", "--max-steps", str(before[-1] + 2), "--eval.task", "none", "--no-export"]
    code, printed, errors = Started(recipe, "train", str(recipe), "--out", str(alone), *flags).end()
    assert code == 0 and f"resumed at step {before[-1]}" in printed and max(losses(alone)) == before[-1] + 2

    code, printed, errors = Started(recipe, *command, "--no-export").end()
    assert code == 0 and errors == "" and kept(out)[-1] == STEPS
    assert losses(out) == losses(whole[0])


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended(recipe: Path, tmp_path: Path) -> None:
    run = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(tmp_path), "--timeout", "15", DELAY="0.1")
    run.wait_for_step(tmp_path, 12)
    os.kill(run.rank(1), signal.SIGSTOP)
    code, _, errors = run.end()
    assert code == 1
    first, hint = errors.splitlines()
    assert first.startswith("error: ") and "rank 1 stopped responding" in first and "step_00000010" in hint


@pytest.mark.slow
def test_ranks_save_and_end_when_the_launcher_is_killed(recipe: Path, tmp_path: Path) -> None:
    run = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(tmp_path), DELAY="0.1")
    run.wait_for_step(tmp_path, 3)
    family = run.family()
    assert {"0", "1"} == set(family.values())
    run.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in family))
    run.process.communicate(timeout=60)
    assert kept(tmp_path) == [max(losses(tmp_path))]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_rank_is_told_once(rank: int, recipe: Path, tmp_path: Path) -> None:
    kind, wanted = [("user", 2), ("bug", 1)][rank]
    run = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(tmp_path), FAIL=kind, FAIL_RANK=str(rank))
    code, _, errors = run.end()
    assert code == wanted
    if kind == "user":
        assert errors == "error: the images are upside down\n"
    else:
        assert errors.count("Traceback") == 1 and "KeyError: 'the images are upside down'\n" in errors
        assert "parts.py" in errors and "trainer.py" not in errors and errors.endswith(")\nno checkpoint yet\n")


@pytest.mark.slow
def test_a_run_of_two_ranks_is_measured_on_one_and_exported_on_three(
    whole: tuple[Path, str, str], recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    accuracy = whole[1].splitlines()[-1]
    code, printed, errors = Started(recipe, "evaluate", str(out), "--nproc", "1").end()
    assert code == 0 and errors == "" and printed.splitlines()[-1] == accuracy
    before = tree(out / "export")
    shutil.rmtree(out / "export")
    code, printed, errors = Started(recipe, "export", str(out), "--nproc", "3").end()
    assert code == 0 and errors == "" and "accuracy" not in printed
    assert tree(out / "export").keys() == before.keys()

    # A disk that fails on rank 0 keeps no other rank waiting.
    shutil.rmtree(out / "export")
    (out / "export").touch()
    started = time.monotonic()
    code, _, errors = Started(recipe, "export", str(out), "--nproc", "2").end()
    assert code == 1 and errors.startswith("error: could not export") and errors.count("\n") == 1
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_a_full_file_system_is_named(recipe: Path, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        flags = ["--nproc", "2", "--model.embedding-size", "1024", "--keep", "100", "--save-every", "1", "--no-export"]
        code, printed, errors = Started(recipe, "train", str(recipe), "--out", str(tmp_path / "run"), *flags).end()
        first, hint = errors.splitlines()
        assert code == 1 and "error: could not write" in first and "No space left on device" in first
        steps = kept(tmp_path / "run")
        assert steps and f"step_{steps[-1]:08d}" in hint and f"saved step {steps[-1]} " in printed
        assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_launcher_of_the_users_own_is_left_to_its_job(recipe: Path, tmp_path: Path) -> None:
    """Under torchrun nproc starts nothing; and half an environment is refused in one sentence."""
    program = tmp_path / "start.py"
    program.write_text("import sys; from plsc.cli import train; sys.exit(train())")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    mine = tmp_path / "mine.toml"  # in the file, for torchrun takes --nproc for an abbreviation of its own flag
    mine.write_text("nproc = 5\n" + recipe.read_text())
    args = [str(mine), "--max-steps", "2", "--eval.task", "none", "--no-export"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), *args]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 150, "cwd": recipe.parent}
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], env=env, **options)
    assert done.returncode == 0 and "96 images, 8 classes, 2 ranks" in done.stdout, done.stderr

    alone = [sys.executable, str(program), *args]
    done = subprocess.run(alone, env={**env, "RANK": "0", "WORLD_SIZE": "2"}, **options)
    assert done.returncode == 2 and "error: the environment sets RANK but not MASTER_ADDR, MASTER_PORT" in done.stderr
