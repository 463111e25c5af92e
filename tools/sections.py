"""Sections of checks, each in a process of its own with a limit of seconds; what they find is kept as it comes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Result:
    """One line: `ok` is None where it is a measurement and no check."""

    section: str
    what: str
    value: str
    ok: bool | None = None
    wanted: str = ""


def one_line(text: str) -> str:
    return " ".join(text.split())


class Run:
    """The options of a run, and what it has found so far."""

    def __init__(self, device: torch.device, out: Path, seconds: float) -> None:
        self.device, self.out, self.seconds = device, out, seconds
        self.small = device.type == "cpu"
        self.begin = time.monotonic()
        self.results: list[Result] = []
        self.section = ""
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begin)

    def add(self, what: str, value: str, *, ok: bool | None = None, wanted: str = "") -> None:
        result = Result(self.section, what, value, ok, wanted)
        self.results.append(result)
        mark = {None: " ", True: "+", False: "!"}[ok]
        line = one_line(f"{self.section}: {what}: {value} {wanted}")
        print(f"{time.monotonic() - self.begin:6.1f} s {mark} {line}", flush=True)
        self.write()

    def write(self) -> None:
        """Both files anew, each whole at every moment."""
        found = {"running": self.section, "results": [asdict(result) for result in self.results]}
        rows = [["section", "what", "found", "wanted", ""], ["---"] * 5]
        for r in self.results:
            rows.append([r.section, r.what, r.value, r.wanted, {None: "", True: "ok", False: "**no**"}[r.ok]])
        if self.section:
            rows.append([self.section, "still running when this was written", "", "", ""])
        lines = ["| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
        for name, text in (("gpu_check.json", json.dumps(found, indent=1)), ("gpu_check.md", "\n".join(lines))):
            begun = self.out / f"{name}.part"
            begun.write_text(text + "\n")
            begun.replace(self.out / name)

    def read(self) -> None:
        """What a process of a section has found."""
        found = json.loads((self.out / "gpu_check.json").read_text())
        self.results = [Result(**result) for result in found["results"]]

    def apart(self, name: str, section: Callable[[Run], None], limit: float) -> None:
        """Runs a section in a process of its own; it and whatever it started end with it, at the limit, or with this.

        All of them are one process group. A shell waits for the end of this process, however that ends, to kill it.
        """
        self.section, limit = name, min(limit, self.left)
        if limit <= 0:
            self.add("section", "left out: time is up")
            return
        self.write()
        child = multiprocessing.get_context("fork").Process(target=self._inside, args=(section, os.getpid()))
        child.start()
        group = child.pid or 0
        with contextlib.suppress(OSError):  # both do it: neither may go on before it is done
            os.setpgid(group, group)
        words = ["sh", "-c", f"read _; kill -s KILL -- -{group}"]
        guard = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        deadline, stopped = time.monotonic() + limit, False
        try:
            while not (ended(group) or stopped):
                time.sleep(0.02)
                stopped = time.monotonic() > deadline
        finally:  # a signal may have ended the wait
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
            guard.kill()
            guard.communicate()
            child.join()
            self.read()
        if stopped:
            self.add("section", f"stopped after {limit:.0f} s", ok=False)
        elif child.exitcode:
            self.add("section", f"its process ended with {child.exitcode}", ok=False)

    def _inside(self, section: Callable[[Run], None], parent: int) -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent, guarded yet or not
        if os.getppid() != parent:
            return
        try:
            section(self)
        except Exception as error:
            traceback.print_exc()
            words = (str(error).splitlines() or [""])[0]
            self.add("section", f"{type(error).__name__}: {words[:300]}", ok=False)


def ended(pid: int) -> bool:
    """Whether a child has ended; it stays to be waited for, so that its number is nobody else's."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def say(command: list[str], *, line: str, seconds: float, **environment: str) -> tuple[int | None, str]:
    """Exit status of a command (None: it took too long), and its last line of stdout in which `line` is found.

    Without one, the last line it wrote anywhere. What libraries log to either stream is no verdict.
    """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # a pipe would wait for grandchildren
        try:
            status: int | None = subprocess.run(
                command, env=env, stdout=out, stderr=err, timeout=seconds, cwd=ROOT
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace").strip().splitlines())
    written = [*texts[0], *texts[1]] or [f"no output, status {status}"]
    if status != 0:
        print("\n".join(written[-40:]), flush=True)
    if status is None:
        return None, f"stopped after {seconds:g} s"
    return status, ([words for words in texts[0] if re.search(line, words)] or written)[-1][:200]


def run_tests(run: Run, path: Path, **environment: str) -> None:
    """A file of tests as a line, by pytest alone: no plugin and no setting of the machine changes it."""
    options = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider"]
    options += ["-m", "not slow"] if run.small else []
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", **environment}
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    status, words = say(
        command, line=r"^=*\s?\d+ (passed|failed|skipped|error)", seconds=360 if run.small else 90, **alone
    )
    run.add(path.name, words, ok=status == 0 and " passed" in words)


def difference(got: Tensor, expected: Tensor) -> float:
    """Relative error (of the 2-norm) of a result; infinite where type or shape differ, or one alone has a NaN or inf.

    Integers are right (0) or wrong (infinite).
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, expected) else math.inf
    a, b = got.double(), expected.double()
    alike = (a == b) | (a.isnan() & b.isnan())
    gap, size = torch.where(alike, 0.0, a - b).norm(), b.nan_to_num(0.0, 0.0, 0.0).norm()
    return worst([float(gap / size.clamp_min(1e-30))])


def worst(errors: Iterable[float]) -> float:
    """The largest error; what is no number is infinite, where max() would drop it."""
    return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)
