"""What a user is told when a command fails: a sentence, or a traceback where only that says what is wrong."""

from __future__ import annotations

import os
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from plsc.comm import CommError, FailedTogether
from plsc.data import ReadingProcessDied
from plsc.fleet import NonFiniteLoss
from plsc.ps import ServerLost, WorkerMissing

EXIT_FAILURE, EXIT_USAGE = 1, 2
EXIT_DIVERGED = 3  # the loss is not finite: the same command would get no further
PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def exit_code(error: Exception) -> int:
    if isinstance(error, NonFiniteLoss):
        return EXIT_DIVERGED
    return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILURE


# Errors of ours whose message is all that their reader needs.
TOLD = FailedTogether | CommError | NonFiniteLoss | ReadingProcessDied | ServerLost | WorkerMissing


class Stopped(BaseException):
    """SIGTERM or SIGHUP, on its way up as Ctrl-C goes, so that what is half written is removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number
        self.name = signal.Signals(number).name


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """The first SIGTERM or SIGHUP raises Stopped inside; further ones do not disturb the clearing up.

    Outside of the main thread, where Python lets nobody handle signals, nothing changes.
    """
    before, seen = {}, []

    def stop(number: int, _: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise Stopped(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one of them: so it stays
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def opening(name: str, path: str) -> Iterator[None]:
    """ValueError that names the setting, for a path that is not there, of another kind or not to be read by us."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        which = "" if error.filename in (None, path) else f"{error.filename}: "
        why = (error.strerror or type(error).__name__).lower()
        raise ValueError(f"{name} is {path!r}, which cannot be opened ({which}{why}); check the path") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is {path!r}, expected a text file in UTF-8: {error.reason}") from error


def told(error: Exception) -> str:
    """The text for the user; PLSC_DEBUG=1 makes it the whole traceback, whatever the error is."""
    if os.environ.get("PLSC_DEBUG") == "1":
        return _traceback(error, first=0)
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {(error.strerror or type(error).__name__).lower()}"
    if isinstance(error, ValueError | TOLD):
        return f"error: {error}"
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [number for number, file in enumerate(files) if file.is_relative_to(PACKAGE)]
    # Where our last call led into the user's own code, that code is what has to be looked at.
    theirs = (number for number in range(ours[-1] + 1, len(files)) if _is_users(files[number])) if ours else iter(())
    return _traceback(error, first=next(theirs, 0))


def _is_users(file: Path) -> bool:
    return file.is_file() and not any(file.is_relative_to(folder) for folder in (PACKAGE, *LIBRARIES))


def _traceback(error: Exception, *, first: int) -> str:
    """From frame number `first` on."""
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list(shown.stack[first:])
    hint = f"\n(before that: {first} frames of plsc and torch; PLSC_DEBUG=1 shows them)" if first else ""
    return "".join(shown.format()).rstrip() + hint
