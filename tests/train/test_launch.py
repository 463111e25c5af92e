"""Ranks as processes, with programs that import nothing: environment, failures, signals, a launcher that is killed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plsc.train import launch as module
from plsc.train.launch import REPORTS, launch, scratch_folder

# What a program below may use: `rank`, `say(code, text, about_others)`, and the folder `out` of the test.
PRELUDE = """
import json, os, pathlib, signal, sys, time
rank, out = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
def say(code, text, about_others=False):
    words = dict(rank=rank, time=time.monotonic(), code=code, text=text, about_others=about_others)
    pathlib.Path(os.environ["PLSC_REPORTS"], f"{rank}.json").write_text(json.dumps(words))
    sys.exit(code)
(out / f"pid{rank}").write_text(str(os.getpid()))
"""
SAVES = """
def stop(number, frame):
    (out / f"saved{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(out / f"ready{rank}").touch()
time.sleep(60)
"""


def run(program: str, tmp_path: Path, nproc: int = 2) -> module.Outcome:
    reports = tmp_path / "reports"
    reports.mkdir()
    return launch([sys.executable, "-c", PRELUDE + program, str(tmp_path)], nproc, folder=reports)


def alive(path: Path) -> bool:
    """Whether the process whose id a file holds still runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_get_torchruns_environment_and_none_of_an_outer_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "0")
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"]
    program = f"""
text = " ".join(os.environ.get(name, "none") for name in {names})
(out / f"{{rank}}").write_text(text + " " + str(int(os.environ["MASTER_PORT"]) > 0))
"""
    assert run(program, tmp_path, nproc=3) == module.Outcome(0)
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert found == [f"{rank} {rank} 3 3 127.0.0.1 none True" for rank in range(3)]


def test_the_first_own_failure_is_the_one_that_is_told(tmp_path: Path) -> None:
    program = """
if rank == 0: say(1, "rank 2 is gone", about_others=True)
time.sleep(0.3 * (3 - rank))
say(2, f"error: label of rank {rank}")
"""
    assert run(program, tmp_path, nproc=3) == module.Outcome(2, "error: label of rank 2")


def test_a_killed_rank_is_named_before_those_that_saw_it(tmp_path: Path) -> None:
    program = """
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
say(1, "rank 1 is gone", about_others=True)
"""
    outcome = run(program, tmp_path)
    assert outcome.code == 137 and "rank 1 was ended by SIGKILL" in outcome.message and "memory" in outcome.message


def test_a_rank_that_dies_of_anothers_failure_does_not_hide_it(tmp_path: Path) -> None:
    """Words, then an abort in the same rank's end or in a rank that lost its peer: the words are told."""
    program = """
if rank == 0:
    try: say(2, "error: label of rank 0")
    finally: os.kill(os.getpid(), signal.SIGABRT)
while not (pathlib.Path(os.environ["PLSC_REPORTS"]) / "0.json").exists(): time.sleep(0.01)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGABRT)
"""
    assert run(program, tmp_path) == module.Outcome(2, "error: label of rank 0")


def test_a_rank_that_dies_is_not_hidden_by_what_others_say_after(tmp_path: Path) -> None:
    program = """
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
say(2, "error: a consequence")
"""
    outcome = run(program, tmp_path)
    assert outcome.code == 137 and "rank 1 was ended by SIGKILL" in outcome.message


def test_a_rank_that_hangs_is_asked_where_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    program = """
def stuck_here():
    (out / "ready").touch()
    time.sleep(60)
def reading_here():
    time.sleep(60)
if rank == 1:
    from plsc.train.launch import answer_launcher
    answer_launcher()
    stuck_here() if os.fork() else reading_here()
while not (out / "ready").exists(): time.sleep(0.01)
time.sleep(0.3)
say(1, "error: all_reduce failed: rank 1 behind", about_others=True)
"""
    outcome = run(program, tmp_path)
    first, second, *stacks = outcome.message.splitlines()
    assert (first, second) == ("error: all_reduce failed: rank 1 behind", "rank 1 was killed here:")
    assert outcome.code == 1 and any("in stuck_here" in line for line in stacks)
    assert any("in reading_here" in line for line in stacks)


def test_a_rank_that_cannot_answer_is_not_answered_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that is stopped, what it has started says nothing."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    program = """
if rank == 1:
    from plsc.train.launch import answer_launcher
    answer_launcher()
    if os.fork() == 0: time.sleep(60)
    (out / "ready").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
while not (out / "ready").exists(): time.sleep(0.01)
time.sleep(0.3)
say(1, "rank 1 stopped responding", about_others=True)
"""
    assert run(program, tmp_path) == module.Outcome(1, "rank 1 stopped responding")


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("say(2, 'error: label of rank 0')", 2, "error: label of rank 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "error: rank 0 was ended by SIGSEGV"),
    ],
)
def test_a_rank_that_hangs_is_not_asked_where_the_cause_is_known(
    end: str, code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    program = f"""
where = pathlib.Path(os.environ["PLSC_REPORTS"]) / "1.where"
if rank == 1:
    where.write_text("in stuck_here")
    time.sleep(60)
while not where.exists(): time.sleep(0.01)
{end}
"""
    assert run(program, tmp_path) == module.Outcome(code, text)


def test_when_a_rank_fails_one_that_hangs_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    program = """
import subprocess
if rank == 1:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (out / "pid_child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGSTOP)
while not (out / "pid_child").exists(): time.sleep(0.01)
time.sleep(0.2)
say(1, "rank 1 stopped responding", about_others=True)
"""
    assert run(program, tmp_path) == module.Outcome(1, "rank 1 stopped responding")
    wait_until(lambda: not alive(tmp_path / "pid1") and not alive(tmp_path / "pid_child"))


def test_a_failure_without_a_word_is_told_with_the_exit_codes(tmp_path: Path) -> None:
    outcome = run("sys.exit(3 * rank)", tmp_path)
    assert outcome.code == 1 and "[1]" in outcome.message and "[0, 3]" in outcome.message


def test_a_command_that_does_not_exist_leaves_nothing_behind(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(FileNotFoundError):
        launch([str(tmp_path / "nothing")], 2, folder=tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


def start(tmp_path: Path, program: str) -> subprocess.Popen[str]:
    """A process that launches two ranks of the program, and exits as they say."""
    reports = tmp_path / "reports"
    reports.mkdir()
    launcher = (
        "import pathlib, sys; from plsc.train.launch import launch\n"
        "outcome = launch(sys.argv[2:], 2, folder=pathlib.Path(sys.argv[1])); print(outcome.message)\n"
        "sys.exit(outcome.code)"
    )
    ranks = [sys.executable, "-c", PRELUDE + program, str(tmp_path)]
    command = [sys.executable, "-c", launcher, str(reports), *ranks]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_signals_let_the_ranks_save(tmp_path: Path, number: int, code: int) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as under nohup, and so by the ranks")
    process = start(tmp_path, SAVES)
    os.killpg(process.pid, number)  # as a terminal does
    assert process.communicate(timeout=60)[0].strip() == "" and process.returncode == code
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    process = start(tmp_path, SAVES.replace("sys.exit(0)", "time.sleep(60)"))
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "saved1").exists())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert "interrupted twice" in process.communicate(timeout=60)[0] and process.returncode == 130
    wait_until(lambda: not alive(tmp_path / "pid0") and not alive(tmp_path / "pid1"))


@pytest.mark.slow
def test_a_signal_before_the_loop_ends_the_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, "(out / f'ready{rank}').touch(); time.sleep(60)")
    process.terminate()
    assert "nothing new to save" in process.communicate(timeout=60)[0] and process.returncode == 143


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death reaches its children on Linux only")
def test_when_the_launcher_is_killed_the_ranks_save_and_end(tmp_path: Path) -> None:
    process = start(tmp_path, SAVES)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists())
    wait_until(lambda: not alive(tmp_path / "pid0") and not alive(tmp_path / "pid1"))


def test_reports_are_for_ranks_of_a_launcher_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORTS, raising=False)
    assert not module.report(1, "nobody hears", about_others=False)
    monkeypatch.setenv(REPORTS, str(tmp_path))
    monkeypatch.setenv("RANK", "4")
    assert module.report(2, "error: heard", about_others=False)
    assert [words.text for words in module._read_reports(tmp_path)] == ["error: heard"]
    monkeypatch.setenv(REPORTS, str(tmp_path / "gone"))
    assert not module.report(1, "nowhere to write", about_others=False)


def test_a_scratch_folder_that_a_killed_launcher_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = [tmp_path / "plsc-launch-without-a-lock", tmp_path / "plsc-data"]
    old, link = tmp_path / "plsc-launch-old-without-a-lock", tmp_path / "plsc-launch-link"
    for folder in (*foreign, old):
        folder.mkdir()
    link.symlink_to(foreign[1])
    foreign.append(link)
    long_ago = time.time() - 2 * module.UNLOCKED_SECONDS
    for folder in (old, foreign[1]):
        os.utime(folder, (long_ago, long_ago))
    program = f"""
import tempfile, time
tempfile.tempdir = {str(tmp_path)!r}
from plsc.train.launch import scratch_folder
with scratch_folder() as folder:
    (folder / "config.toml").touch()
    print(folder, flush=True)
    time.sleep(600)
"""
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip())
    try:
        with scratch_folder() as mine:
            assert left.is_dir() and mine.is_dir() and mine != left  # that launcher lives
            with scratch_folder() as other:
                assert mine.is_dir() and other != mine
    finally:
        killed.kill()
        killed.communicate()
    assert (left / "config.toml").exists()
    with scratch_folder() as mine:
        assert sorted(tmp_path.iterdir()) == sorted([mine, *foreign])
    assert sorted(tmp_path.iterdir()) == sorted(foreign)
