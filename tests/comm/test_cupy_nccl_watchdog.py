"""The watchdog of NCCL through CuPy: what is overdue, blocks the host or fails ends every communicator, by an abort.

Over the stand-in for NCCL and CUDA; a real thread looks where the test does not say that it looks itself.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import plsc.comm.nccl_session as nccl_session
from plsc.comm import CommError, Communicator, run_ranks
from plsc.comm.nccl_session import Session
from tests.comm import nccl_stand_in
from tests.comm.nccl_stand_in import Handle, Stand


def is_over(session: Session) -> bool:
    """Whether the watchdog's thread ends by itself; it does once there is a failure."""
    assert session._thread is not None
    session._thread.join(60.0)
    return not session._thread.is_alive()


def test_overdue_verb_aborts_everything(stand_in: Stand) -> None:
    """The watchdog's look, asked at times of our own."""

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm, watched=False)
        session, nccl = ours._session, ours._session.nccl
        part = ours.split([[0, 1]])
        nccl.happened = False
        work = ours.all_reduce(torch.ones(2))
        (pending,) = session._pending
        session.look(pending.deadline - 1)
        assert session.failure is None
        pending.event.happened = True
        session.look(pending.deadline + 1)
        assert session.failure is None and not session._pending  # late, but done
        work.wait()
        work = part.all_gather(torch.ones(2))
        session.look(session._pending[0].deadline + 1)
        assert ours.handle.ended == part.handle.ended == "aborted"  # type: ignore[attr-defined]
        verb_0 = r"all_gather of float32 \(2,\) \(verb 0 of rank . among ranks \[0, 1\]\)"
        words = verb_0 + r" failed\. Cause: not finished within 60 s"
        for verb in (work.wait, ours.barrier, lambda: ours.all_reduce(torch.ones(1)), lambda: ours.split([[0, 1]])):
            with pytest.raises(CommError, match=words):
                verb()
        ours.close()  # destroys nothing that is aborted

    run_ranks(2, ranks)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("name", ["allReduce", "groupEnd", "synchronize"])
def test_host_call_that_blocks_is_ended_by_an_abort(name: str, raises: bool, stand_in: Stand) -> None:
    """Deadlines run while the host is inside a call of NCCL's or CUDA's; an abort ends that, with an error or not."""

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm, timeout=0.05)
        session, aborted = ours._session, threading.Event()

        def block(*_: Any) -> None:
            assert aborted.wait(60.0), "nobody aborts"
            if raises:
                raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR")

        ours.handle.abort = aborted.set
        if name == "synchronize":
            session.nccl.happened = False
            ours._streams.synchronize = block
            ours.broadcast(torch.ones(1))
            verb: Callable[[], Any] = ours.barrier
        elif name == "groupEnd":
            session.nccl.groupEnd = block
            verb = lambda: ours.all_to_all(torch.ones(1))  # noqa: E731
        else:
            ours.handle.allReduce = block
            verb = lambda: ours.all_reduce(torch.ones(1))  # noqa: E731
        with pytest.raises(CommError, match=r"\(verb 0 of rank 0\) failed\. Cause: not finished within 0\.05 s"):
            verb()
        assert is_over(session)

    run_ranks(1, ranks)


def test_deadline_begins_before_the_host_issues(stand_in: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm, watched=False)
        now = [1000.0]
        monkeypatch.setattr(nccl_session.time, "monotonic", lambda: now[0])

        def slow(*_: Any) -> None:
            now[0] += 50.0

        ours.handle.allReduce = slow
        ours.all_reduce(torch.ones(1))
        assert ours._session._pending[0].deadline == 1000.0 + ours._session.timeout

    run_ranks(1, ranks)


def fail(*_: Any) -> Any:
    raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")


@pytest.mark.parametrize("source", ["query", "check_async_error", "explain"])
def test_any_error_of_a_look_aborts_everything(source: str, stand_in: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real thread looks. An abort that fails keeps no other communicator from its own."""
    if source == "query":
        monkeypatch.setattr(nccl_stand_in.Event, "query", fail)

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm, timeout=0.05)
        session = ours._session
        parts = [ours.split([[0]]) for _ in range(2)]
        every = [one.handle for one in (ours, *parts)]  # type: ignore[attr-defined]
        asked: list[Handle] = []

        def refuse(handle: Handle) -> None:
            asked.append(handle)
            fail()

        for handle in every:
            handle.abort = functools.partial(refuse, handle)
        if source == "check_async_error":
            ours.handle.check_async_error = fail
        if source == "explain":
            session.heartbeat = types.SimpleNamespace(explain=fail, note=lambda *_: None, forget=lambda *_: None)  # type: ignore[assignment]
        session.nccl.happened = False
        work = ours.all_reduce(torch.ones(2))
        assert is_over(session) and session.failure is not None
        assert sorted(map(id, asked)) == sorted(map(id, every))
        for verb in (work.wait, lambda: parts[0].broadcast(torch.ones(1))):
            with pytest.raises(CommError, match="NCCL_ERROR_REMOTE_ERROR"):
                verb()

    run_ranks(1, ranks)


def test_error_of_nccl_names_its_verb(stand_in: Stand) -> None:
    """Also where a verb of another lane is older, and not done yet."""

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm, watched=False)
        lane = ours.split([[0, 1]])
        ours._session.nccl.happened = False
        ours.all_reduce(torch.ones(2))
        lane.broadcast(torch.ones(1))
        lane.handle.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")  # type: ignore[attr-defined]
        ours._session.look(0.0)
        with pytest.raises(CommError, match=r"broadcast of float32 \(1,\) .* NCCL_ERROR_REMOTE_ERROR"):
            ours.all_reduce(torch.ones(2))
        assert ours.handle.ended == "aborted"

    run_ranks(2, ranks)


def test_refused_call_is_everybodys_failure(stand_in: Stand) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        part = ours.split([[0]])
        ours.handle.send = fail
        for verb in (lambda: ours.all_to_all(torch.ones(1)), lambda: part.all_gather(torch.ones(1))):
            with pytest.raises(CommError, match=r"all_to_all .*\(verb 0 of rank 0\) .* NCCL_ERROR_REMOTE_ERROR"):
                verb()
        assert ours._session.nccl.calls[-1] == ("groupEnd",)  # NCCL counts groups, by thread
        assert ours.handle.ended == part.handle.ended == "aborted"  # type: ignore[attr-defined]

    run_ranks(1, ranks)


def test_watchdog_lives_until_the_last_communicator_is_closed(stand_in: Stand) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        part = ours.split([[0]])
        session = ours._session
        assert session._thread is None  # nothing to watch yet
        ours.all_reduce(torch.ones(1)).wait()
        thread = session._thread
        assert thread is not None and thread.daemon
        ours.close()
        assert thread.is_alive()
        part.close()
        assert not thread.is_alive()

    run_ranks(1, ranks)


def test_parts_are_watched_after_the_world_is_closed(stand_in: Stand) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm, timeout=0.05)
        part = ours.split([[0]])
        ours.close()
        ours._session.nccl.happened = False
        work = part.all_reduce(torch.ones(1))
        assert is_over(ours._session)
        with pytest.raises(CommError, match=r"not finished within 0\.05 s"):
            work.wait()
        assert (ours.handle.ended, part.handle.ended) == ("destroyed", "aborted")  # type: ignore[attr-defined]

    run_ranks(1, ranks)


@pytest.mark.parametrize("place", ["destroy", "synchronize"])
def test_close_does_all_of_it_whatever_fails(place: str, stand_in: Stand) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        ours.all_reduce(torch.ones(1)).wait()
        setattr(ours.handle if place == "destroy" else ours._streams, place, fail)
        with pytest.raises(RuntimeError, match="NCCL_ERROR_REMOTE_ERROR"):
            ours.close()
        assert ours.handle.ended == ("" if place == "destroy" else "aborted")
        assert is_over(ours._session) and comm.closed

    run_ranks(1, ranks)


def test_closed_communicator_is_not_looked_at(stand_in: Stand) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm, watched=False)
        part = ours.split([[0]])
        ours._session.nccl.happened = False
        part.all_reduce(torch.ones(1))
        (pending,) = ours._session._pending
        part.close()
        part.handle.check_async_error = fail  # type: ignore[attr-defined]
        ours._session.look(pending.deadline + 1)
        assert ours._session.failure is None and part.handle.ended == "destroyed"  # type: ignore[attr-defined]

    run_ranks(1, ranks)


def test_refused_split_is_everybodys_failure(stand_in: Stand) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        ours.handle.commSplit = fail
        for verb in (lambda: ours.split([[0]]), lambda: ours.all_reduce(torch.ones(1))):
            with pytest.raises(CommError, match="could not connect the ranks: NCCL_ERROR_REMOTE_ERROR"):
                verb()
        assert ours.handle.ended == "aborted"

    run_ranks(1, ranks)
