"""The ranks of one machine as processes: started together, stopped together, ended together when one of them fails."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

SCRATCH = "plsc-launch-"  # temporary folders of launchers are called so
UNLOCKED_SECONDS = 86_400  # after which one that never got its lock is taken for left behind
SAVE_SECONDS = 600  # that ranks told to stop get to finish their step and save
ANSWER_SECONDS = 0.5  # that a process which has hung gets to say where
ANSWER_LINES = 60  # of it that are shown
GRACE_SECONDS = 5  # that the others get when a rank has failed: to say what they saw, not to go on
POLL_SECONDS = 0.05
EXIT_INTERRUPTED = 130
REPORTS = "PLSC_REPORTS"  # environment: the folder where a rank leaves its last words for whoever launched it


@dataclass(frozen=True)
class Report:
    """The last words of a rank that failed."""

    rank: int
    time: float  # monotonic, the same clock for all processes of a machine
    code: int  # to exit with
    text: str
    about_others: bool  # it failed because another rank did


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: the exit status, and what to tell the user ("" if nothing)."""

    code: int
    message: str = ""
    stopped: bool = False  # it was asked to


def launch(command: Sequence[str], nproc: int, *, folder: Path) -> Outcome:
    """Runs `command` as nproc ranks of a world of their own and waits for them; call it from the main thread.

    The environment is torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). SIGTERM, SIGHUP and Ctrl-C
    become a SIGTERM to every rank, which has SAVE_SECONDS from then on; a second Ctrl-C kills. When a rank fails the
    others are killed after GRACE_SECONDS; where that rank only tells of others, after they were asked what they were
    doing. Ranks get a SIGTERM when this process dies. folder: an empty one.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    where = ""
    with _Signals() as signals:
        try:
            environment = _environment(nproc, folder)
            for rank in range(nproc):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                # A session each: Ctrl-C reaches this process only, and whatever a rank has started dies with it.
                child = subprocess.Popen(
                    command, env=environment | place, start_new_session=True, preexec_fn=_tied_to_parent()
                )
                ranks.append(child)
            ends = _wait(ranks, signals)
            unexplained = all(words.about_others for words in _read_reports(folder)) and not signals.seen
            if unexplained and all((end.code or 0) >= 0 for end in ends):
                where = _ask_where(ranks, folder)
        finally:
            failed = any(rank.poll() != 0 for rank in ranks)
            for child in ranks if failed else ():
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            for child in ranks:
                child.wait()
        outcome = _outcome(ends, signals.seen, _read_reports(folder))
        return replace(outcome, message=outcome.message + where, stopped=bool(signals.seen))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for one launch. Those that killed launchers of the same user left behind are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        if _abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as name:
        folder = Path(name)
        with open(folder / "lock.new", "w") as lock:
            _lock(lock)
            os.rename(folder / "lock.new", folder / "lock")  # never seen without being held
            yield folder


def report(code: int, text: str, *, about_others: bool) -> bool:
    """Leaves this rank's last words where the launcher finds them; False where none has started this process."""
    if REPORTS not in os.environ:
        return False
    words = Report(int(os.environ["RANK"]), time.monotonic(), code, text, about_others)
    path = Path(os.environ[REPORTS]) / f"{words.rank}.json"
    try:
        path.with_suffix(".tmp").write_text(json.dumps(asdict(words)), encoding="utf-8")
        os.replace(path.with_suffix(".tmp"), path)
    except OSError:
        return False
    return True


def answer_launcher() -> None:
    """Lets the launcher ask this rank what it is doing: a signal writes the stacks of its threads beside its report."""
    if REPORTS in os.environ and hasattr(faulthandler, "register"):
        file = open(_answer(Path(os.environ[REPORTS]), int(os.environ["RANK"])), "w")  # noqa: SIM115  faulthandler's
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def die_with_parent() -> None:
    """SIGTERM to this process when the one that started it ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


# ---- inside


def _abandoned(folder: Path) -> bool:
    """Whether a launcher made this folder that has ended: nobody holds its lock any more."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        if not (folder / "lock").exists():  # it has just been made, or was left in the moment after that
            return time.time() - folder.stat().st_mtime > UNLOCKED_SECONDS
        with open(folder / "lock") as lock:
            return _lock(lock)
    except OSError:
        return False


def _lock(file: IO[str]) -> bool:
    """Locks a file for as long as it is open in this process; False where another one has it, or none can be had."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


class _Signals:
    """Notes the signals that ask a run to stop, in the order they come, while it is entered."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it: so it stays
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.seen.append(number)


def _environment(nproc: int, folder: Path) -> dict[str, str]:
    # What a launcher around this one has set would lead the ranks to its store.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // nproc)))
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code says where
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what the transports say of a dead rank, we say ourselves
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        REPORTS: str(folder),
    }
    return environment | world


def _tied_to_parent() -> Callable[[], None] | None:
    """What a child does before it becomes the command, so that it never outlives this process."""
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def tie() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before that
            os._exit(1)

    return tie


@dataclass(frozen=True)
class _End:
    """How and when a rank was seen to have ended."""

    code: int | None  # None: not by itself in time
    time: float


def _wait(ranks: Sequence[subprocess.Popen[bytes]], signals: _Signals) -> list[_End]:
    """The ends of the ranks."""
    deadline, told = float("inf"), False
    ended: dict[int, float] = {}
    while True:
        codes = [rank.poll() for rank in ranks]
        now = time.monotonic()
        for number, code in enumerate(codes):
            if code is not None:
                ended.setdefault(number, now)
        if None not in codes or now > deadline or signals.seen.count(signal.SIGINT) > 1:
            return [_End(code, ended.get(number, now)) for number, code in enumerate(codes)]
        if signals.seen and not told:
            told, deadline = True, min(deadline, now + SAVE_SECONDS)
            for rank in ranks:
                rank.terminate()
        if any(codes):
            deadline = min(deadline, now + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.where"


def _ask_where(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> str:
    """What the ranks that still run were doing, then the processes they have started, as far as they can say."""
    asked = {rank: child.pid for rank, child in enumerate(ranks) if child.poll() is None}
    answers = {rank: _answer(folder, rank) for rank in asked if _answer(folder, rank).exists()}
    _ask([asked[rank] for rank in answers])
    answers = {rank: answer for rank, answer in answers.items() if answer.stat().st_size}  # others cannot even do that
    _ask([child for rank in answers for child in _children(asked[rank])])
    text = ""
    for rank, answer in answers.items():
        lines = answer.read_text(encoding="utf-8", errors="replace").splitlines()
        text += "\n".join([f"\nrank {rank} was killed here:", *lines[:ANSWER_LINES]])
    return text


def _ask(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    if processes:
        time.sleep(ANSWER_SECONDS)


def _children(process: int) -> list[int]:
    """What a process has started and still runs (Linux; elsewhere nothing)."""
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def _read_reports(folder: Path) -> list[Report]:
    """All reports, the first to fail first; those that only saw others fail come last."""
    reports = [Report(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(reports, key=lambda words: (words.about_others, words.time))


def _outcome(ends: Sequence[_End], signals: Sequence[int], reports: Sequence[Report]) -> Outcome:
    """What to blame: a rank that was killed or that reports a failure of its own, whichever came first, else a report.

    Where a rank has failed others may be killed for that, by their own transport or while they end.
    """
    codes = [end.code for end in ends]
    stopped = EXIT_INTERRUPTED if signal.SIGINT in signals else 128 + signals[0] if signals else 0
    if signals.count(signal.SIGINT) > 1:
        return Outcome(stopped, "interrupted twice: ended without saving")
    if not any(codes) and None not in codes:
        return Outcome(EXIT_INTERRUPTED if signal.SIGINT in signals else 0)
    if signals and -signal.SIGTERM in codes and all(words.about_others for words in reports):
        return Outcome(stopped, "stopped outside of the training loop: there was nothing new to save")
    killed = sorted((end.time, rank) for rank, end in enumerate(ends) if end.code is not None and end.code < 0)
    own = [words.time for words in reports if not words.about_others]
    if killed and not (own and own[0] < killed[0][0]):
        rank, number = killed[0][1], -(codes[killed[0][1]] or 0)
        why = "; the system does that when memory runs out" if number == signal.SIGKILL else ""
        return Outcome(128 + number, f"error: rank {rank} was ended by {_signal_name(number)}{why}")
    if reports:
        return Outcome(reports[0].code, reports[0].text)
    silent = [rank for rank, code in enumerate(codes) if code != 0]
    if signals:
        return Outcome(stopped, f"error: ranks {silent} did not stop within {SAVE_SECONDS} s and were killed")
    return Outcome(1, f"error: ranks {silent} failed without a word; exit codes by rank: {list(codes)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
