"""Processes that read batches for a loader: tasks dealt in turn, answers in their order, a death named at once."""

import gc
import multiprocessing
import os
import random
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from plsc.data.reading import Item, Read, Reader

_WATCH_SECONDS = 5.0  # after which an idle process looks whether the one that started it still lives
_END_SECONDS = 2.0  # that a process gets to finish what it reads

_LIKELY: dict[int, tuple[str, str]] = {  # what a signal tells, and what to do
    signal.SIGKILL: ("out of memory?", "give the loader fewer workers or a smaller batch"),
    signal.SIGBUS: (
        "a mapped file was cut short, its disk failed, or shared memory is full",
        "look at the files of {path} with `plsc-data verify`, and at the free space of /dev/shm",
    ),
}

Task = tuple[int, Item]  # (slot, batch)


class ReadingProcessDied(RuntimeError):
    """A process that reads for the loader has ended before its time; the message says how."""


@dataclass(frozen=True)
class _Failure:
    """What a process could not do: the error in one line, and where it was raised."""

    text: str
    where: str


class ReadingProcesses:
    """Copies of a reader in processes of their own, which end with this object or with the process that made it.

    At most `ahead` tasks a process are asked for before their turn comes. start_method: of multiprocessing.
    whose: put before the number of a process in messages, such as "rank 3, ".
    """

    def __init__(
        self, reader: Reader, number: int, *, ahead: int, start_method: str | None, seed: int, whose: str = ""
    ) -> None:
        context = multiprocessing.get_context(start_method)
        inherit = context.get_start_method() == "fork"
        self._limit, self._whose = number * ahead, whose
        self._path = getattr(reader.dataset, "path", "the data set")
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._left: deque[int] = deque()  # who still owes answers to tasks whose asker has gone
        self._finish = weakref.finalize(self, _finish, os.getpid(), self._ends, self._processes)
        for k in range(number):
            mine, theirs = context.Pipe()
            self._ends.append(mine)
            others = list(self._ends) if inherit else []
            process = context.Process(  # type: ignore[attr-defined]
                target=_work, args=(reader, theirs, others, seed + k), name=f"plsc reader {k}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)

    def read(self, tasks: Iterable[Task]) -> Iterator[Read]:
        """The answers to tasks, in their order. RuntimeError for what failed in a process; ReadingProcessDied."""
        while self._left:  # the last asker left in the middle
            self._receive(self._left.popleft())
        todo, asked = iter(tasks), deque[Task]()
        sent = 0
        try:
            while True:
                while len(asked) < self._limit and (task := next(todo, None)) is not None:
                    k = sent % len(self._ends)
                    self._send(k, task)
                    self._left.append(k)
                    asked.append(task)
                    sent += 1
                if not asked:
                    return
                answer = self._receive(self._left.popleft())
                slot, (_, samples) = asked.popleft()
                if isinstance(answer, _Failure):
                    raise RuntimeError(f"{answer.text}\n{answer.where}")
                changed, replaced = answer
                yield slot, samples if changed is None else changed, replaced
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        self._finish()

    def _send(self, k: int, task: Task) -> None:
        try:
            self._ends[k].send(task)
        except OSError:  # nobody is there to take it
            self._blame(k)

    def _receive(self, k: int) -> Any:
        end = self._ends[k]
        if not end.poll():
            sentinels = {process.sentinel: k for k, process in enumerate(self._processes)}
            ready = wait([end, *sentinels])
            if end not in ready:
                self._blame(next(sentinels[each] for each in ready if isinstance(each, int)))
        try:
            return end.recv()
        except (EOFError, OSError):
            self._blame(k)

    def _blame(self, k: int) -> None:
        process = self._processes[k]
        process.join(_END_SECONDS)
        code, pid = process.exitcode, process.pid
        if code is not None and code < 0:
            why, remedy = _LIKELY.get(-code, ("", "look for the reason"))
            how = f"was killed (signal {-code}{'; ' + why if why else ''})"
            remedy = f"{remedy.format(path=self._path)}; the system's log tells who ended it"
        else:
            how = f"ended by itself (exit code {code})"
            remedy = (
                "a script that starts processes needs `if __name__ == '__main__':`, a data set must not call sys.exit; "
                "workers=0 reads in this process"
            )
        raise ReadingProcessDied(
            f"{self._whose}reading process {k} of {len(self._processes)} (pid {pid}) {how}; {remedy}"
        )


def _finish(owner: int, ends: list[Connection], processes: list[BaseProcess]) -> None:
    if os.getpid() != owner:  # a copy of the object in a forked process: not its children
        return
    for end in ends:
        with suppress(OSError):
            end.send(None)
        end.close()
    for process in processes:
        process.join(_END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _work(reader: Reader, end: Connection, others: list[Connection], seed: int) -> None:
    """What a process does: reads into shared memory what it is told to, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that decides, which ends this one
    for number in (signal.SIGTERM, signal.SIGHUP):  # a forked process has its parent's handlers
        signal.signal(number, signal.SIG_DFL)
    for other in others:
        other.close()
    gc.freeze()  # what a fork inherits is not its own: ending a transport would wait for threads that are not here
    torch.set_num_threads(1)
    random.seed(seed)  # for data sets that draw from a global generator: not the same numbers in each process
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    parent = multiprocessing.parent_process()
    assert parent is not None
    try:
        while True:
            while not end.poll(_WATCH_SECONDS):
                if not parent.is_alive():
                    return
            task = end.recv()
            if task is None:
                return
            end.send(_answer(reader, task))
    except (EOFError, OSError):
        return  # nobody is there to read for


def _answer(reader: Reader, task: Task) -> Any:
    """Samples only where they are others than asked for: answers stay small, so that sending one never waits."""
    try:
        _, samples, replaced = reader[task]
        return (None if samples is task[1][1] else samples), replaced
    except Exception as error:
        return _Failure(str(error) or repr(error), "".join(traceback.format_exception(error)).rstrip())
