"""Jobs of several verbs, one after the other, that go on while their caller computes."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from plsc.comm.communicator import Work

T = TypeVar("T")

PATIENCE = 5.0  # seconds that the end of the process waits for a job

_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[_Job | None]] = weakref.WeakKeyDictionary()


class Background:
    """Runs jobs in the order they are given: in one thread of its own or, on a GPU, at once in a stream of its own.

    For verbs that need the result of another verb first. The communicators that jobs use belong to this object alone:
    their verbs then come in the same order on every rank, wherever the ranks wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def submit(self, job: Callable[[], T]) -> Work[T]:
        """Starts the job; wait() gives its result, or raises what it raised. Jobs run without gradients."""
        if self.device.type == "cuda":
            return self._in_stream(job)
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            thread = threading.Thread(target=_run, args=(self._jobs,), name="plsc background", daemon=True)
            thread.start()
            _threads[thread] = self._jobs
            weakref.finalize(self, self._jobs.put, None)  # the thread ends with its owner
        entry = _Job(job)
        self._jobs.put(entry)
        return Work(entry.finish)

    def close(self) -> None:
        """Ends the thread after the jobs it has; closing twice is harmless."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _in_stream(self, job: Callable[[], T]) -> Work[T]:
        """Verbs of a GPU do not block the host: all of the job is queued now, behind what its caller has queued."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            result = job()
            done = torch.cuda.Event()
            done.record(self._stream)

        def finish() -> T:
            torch.cuda.current_stream(self.device).wait_event(done)
            return result

        return Work(finish)


class _Job:
    """A job on its way to the thread, and what came of it."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self._job: Callable[[], Any] | None = job
        self._done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        assert self._job is not None
        try:
            with torch.no_grad():
                self._result = self._job()
        except Exception as error:
            self._error = error
        self._job = None  # lets go of the buffers it held
        self._done.set()

    def finish(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def _run(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # its result is the caller's


@atexit.register
def _finish() -> None:
    """Waits for the threads: Python ends those that are left, and one that frees a tensor then aborts the process."""
    threads = list(_threads.items())
    for _, jobs in threads:
        jobs.put(None)
    for thread, _ in threads:
        thread.join(PATIENCE)
