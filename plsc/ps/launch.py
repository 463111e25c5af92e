"""Servers and workers of one machine as processes: started together, servers started again where they die."""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

POLL = 0.1
GRACE = {"worker": 30.0, "server": 600.0}  # seconds to end in; a server saves

Say = Callable[[str], None]


def serve_command(settings: str | PathLike[str], *flags: str) -> list[str]:
    """The command line of one server process of this installation."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from plsc.cli import ps; sys.exit(ps())"
    return [sys.executable, "-P", "-c", start, "serve", os.fspath(settings), *flags]


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def launch(
    settings: str | PathLike[str],
    command: Sequence[str],
    *,
    servers: int,
    workers: int,
    folder: str | PathLike[str] | None = None,
    restarts: int = 3,
    say: Say = lambda text: None,
) -> int:
    """Runs `command` as workers beside servers of their own; returns the first bad exit status of a worker, else 0.

    A process that dies is started again, up to `restarts` times each; the others go on meanwhile. Workers find
    PLSC_PS_SERVERS, PLSC_PS_RUN, RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment.
    """
    *ports, master = free_ports(servers + 1)
    run = secrets.token_hex(8)
    kept: list[_Kept] = []
    for index, port in enumerate(ports):
        flags = ["--port", str(port), "--index", str(index), "--count", str(servers), "--run", run]
        if folder is not None:
            flags += ["--folder", str(Path(folder) / f"server-{index}")]
        kept.append(_Kept(f"server {index}", serve_command(settings, *flags), {}, restarts))
    common = {
        "PLSC_PS_SERVERS": ",".join(f"127.0.0.1:{port}" for port in ports),
        "PLSC_PS_RUN": run,
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master),
    }
    crew = [
        _Kept(f"worker {rank}", list(command), {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, restarts)
        for rank in range(workers)
    ]
    try:
        for each in (*kept, *crew):
            each.start()
        while not all(each.ended for each in crew):
            time.sleep(POLL)
            for each in (*kept, *crew):
                each.look(say)
            if all(each.ended for each in kept):
                raise RuntimeError("every server has ended for good; see what they said above")
        return next((each.code for each in crew if each.code), 0)
    finally:
        for group in (crew, kept):  # workers first: what they have pushed is in what servers save
            for each in group:
                each.terminate()
            for each in group:
                each.stop()


def _tie() -> Callable[[], None] | None:
    """What a child does before it becomes the command: when this process ends, however it does, it gets SIGTERM."""
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def tie() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before that
            os._exit(1)

    return tie


class _Kept:
    """A process that is started again when it dies."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], restarts: int) -> None:
        self.name = name
        self.command = command
        self.environment = environment
        self.left = restarts
        self.ended = False
        self.code = 0
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, **self.environment}
        self._child = subprocess.Popen(self.command, env=environment, start_new_session=True, preexec_fn=_tie())

    def look(self, say: Say) -> None:
        """Starts it again if it has died; a worker that ended well is done."""
        if self.ended or self._child is None or (code := self._child.poll()) is None:
            return
        self.code = code
        if code == 0 and self.name.startswith("worker"):
            self.ended = True
        elif self.left > 0:
            self.left -= 1
            say(f"{self.name} ended with status {code}; starting it again")
            self.start()
        else:
            say(f"{self.name} ended with status {code} too often; going on without it")
            self.ended = True

    def terminate(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        try:
            self._child.wait(GRACE[self.name.split()[0]])
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
