"""plsc-serve as a process of its own, for the tests that need a real one."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class Running:
    """A server on a free port; as a context, ended with SIGTERM. Its output is in `log`."""

    def __init__(self, bundle: Path, *flags: str, token: str = "") -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLSC_TOKEN": token, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "plsc.cli", "serve", str(bundle), "--port", "0", "--threads", "1", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.log: list[str] = []
        self.url = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if found := re.search(r"serving at (\S+)", line):
                self.url = found[1].rstrip("/")
                return
        self.process.wait()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        self.log += rest.splitlines(keepends=True)
        return self.process.returncode

    def __enter__(self) -> Self:
        assert self.url, "".join(self.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def words(running: Running) -> str:
    return "".join(running.log)


__all__: Sequence[str] = ["Running", "words"]
