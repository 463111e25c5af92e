"""What the commands share: progress, what they say and how they end."""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from plsc.comm import CommError, Communicator
from plsc.comm.torch_distributed import Launch
from plsc.train.failures import Stopped, exit_code, stopped_by_signals, told
from plsc.train.launch import EXIT_INTERRUPTED, report

EXIT_UNHEARD = 141  # as a shell has it for a program that SIGPIPE ended
ARTIFACTS = (  # of a run, as far as they are there
    "config.toml",
    "metrics.jsonl",
    "tensorboard",
    "data",
    "checkpoints",
    "result.json",
    "loss.png",
    "vocab.txt",
    "vectors.bin",
    "vectors.txt",
    "roc.png",
    "export/model.onnx",
    "export/table.safetensors",
    "export/dense.safetensors",
    "export/centres.safetensors",
    "export/embeddings.safetensors",
    "export/backbone.safetensors",
    "export/model.pt2",
    "bundle",
)
Command = Callable[[Sequence[str] | None], int]


def guarded(run: Callable[[], int]) -> int:
    """An error becomes one sentence, or a traceback where that is needed; a rank leaves it to its launcher to say."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # where a mapped file is cut short, the process ends: say at what line
    try:
        # A rank of several may wait inside of a collective, where no handler runs: a signal ends it at once.
        with stopped_by_signals() if Launch.read() is None else nullcontext():
            return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Stopped as stopped:
        print(f"stopped by {stopped.name}: what was not whole is removed", file=sys.stderr)
        return stopped.code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_unheard():
            raise
        code, text = exit_code(error), told(error)
        if not report(code, text, about_others=isinstance(error, CommError)):
            print(text, file=sys.stderr)
        return code


def until_unheard(command: Command) -> Command:
    """The command, ended without a word where nobody reads what it prints any more, as by `| head`."""

    @functools.wraps(command)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return command(argv)
        except BrokenPipeError:
            if not is_unheard():
                raise
            return EXIT_UNHEARD
        finally:
            try:
                sys.stdout.flush()
            except BrokenPipeError:  # what still waits to be printed would be a traceback at the very end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return run


def is_unheard() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    try:
        asked = select.poll()
        asked.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in asked.poll(0))
    except (AttributeError, OSError, ValueError):  # none, closed, or no file of the system
        return False


@contextmanager
def logging_to_stdout(comm: Communicator) -> Iterator[None]:
    """What the library logs, as plain lines: all of rank 0's, the warnings of the others.

    A record marked `once` says what every rank finds, of every data set alike: rank 0 says it, of the first.
    """
    said: set[str] = set()

    def is_news(record: logging.LogRecord) -> bool:
        if not getattr(record, "once", False):
            return True
        known = comm.rank > 0 or record.msg in said
        said.add(record.msg)
        return not known

    log, handler = logging.getLogger("plsc"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if comm.rank == 0 else f"rank {comm.rank}: %(message)s"))
    handler.addFilter(is_news)
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO if comm.rank == 0 else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def say_result(out: Path, result: dict[str, Any], names: Sequence[str] = ARTIFACTS) -> None:
    """Where everything is; the one figure people look for comes last."""
    say_written([out / name for name in names if (out / name).exists()])
    if (out / "bundle").exists():
        say_how_to_serve(out)
    for name in ("top1", "top5"):
        if name in result:
            print(f"{name} accuracy: {result[name] * 100:.2f} %")
    if "accuracy" in result:
        print(f"verification accuracy: {result['accuracy'] * 100:.2f} %")
    sys.stdout.flush()


def say_written(paths: Sequence[Path]) -> None:
    print("\nwritten:")
    for path in paths:
        print(f"  {path}")
    sys.stdout.flush()


def say_how_to_serve(out: Path) -> None:
    print(f"serve it, with a page to look at: plsc-serve {out}", flush=True)


class Bar:
    """A progress bar on a terminal, a line every tenth elsewhere."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if sys.stdout.isatty():
            print(f"\r{self.what} [{'#' * tenth}{'.' * (10 - tenth)}] {done}/{total}", end="", flush=True)
            if done >= total:
                print()
        elif tenth != self._shown:
            print(f"{self.what}: {done}/{total}", flush=True)
        self._shown = tenth
