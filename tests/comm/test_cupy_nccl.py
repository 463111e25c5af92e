"""NCCL through CuPy, without either: nccl_stand_in.py takes the place of CuPy's interface and of CUDA's streams.

On a GPU the contract runs on the real thing, with one rank.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import plsc.comm.cupy_nccl as cupy_nccl
from plsc.comm import BACKENDS, CommError, Communicator, Work, connect, run_ranks
from plsc.comm.cupy_nccl import CupyNcclCommunicator, Session, check_version, in_time, open_handle
from plsc.comm.communicator import REDUCIBLE
from plsc.comm.torch_distributed import GlooCommunicator, NcclCommunicator
from plsc.strategies.reduction import Lanes, Plain
from tests.comm import nccl_stand_in
from tests.comm.nccl_stand_in import CURRENT, STREAM, Handle, Standing, StandIn, stand

Stand = Callable[..., Standing]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """stand_in(comm): what is tested, on the stand-in's NCCL, streams and events."""
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(nccl_stand_in, name))
    monkeypatch.setattr(Tensor, "record_stream", nccl_stand_in.record_stream)
    monkeypatch.setattr(cupy_nccl, "POLL", 0.01)
    return stand


def contract_module() -> types.ModuleType:
    path = Path(__file__).with_name("test_contract.py")
    spec = importlib.util.spec_from_file_location("plsc_contract", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_contract_over_the_stand_in(world_size: int) -> None:
    contract = contract_module().contract
    assert run_ranks(world_size, lambda comm: contract(stand_in(comm))) == ["kept"] * world_size


def of(nccl: StandIn, *names: str) -> list[tuple[Any, ...]]:
    return [call for call in nccl.calls if call[0] in names]


def test_calls_of_each_verb() -> None:
    """Sequence, counts, types and stream, as rank 0 of 2 issues them."""

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        nccl: StandIn = ours._session.nccl

        def after(work: Any) -> list[tuple[Any, ...]]:
            work.wait()
            calls, nccl.calls = nccl.calls, []
            return calls

        before, behind = ("wait for the current stream",), ("current stream waits",)
        me, other = comm.rank, 1 - comm.rank
        got = after(ours.all_reduce(torch.ones(3, 5)))
        assert got == [before, ("allReduce", 15, 7, 0, STREAM), ("keep", (3, 5)), behind]
        got = after(ours.all_reduce(torch.ones(4).bfloat16(), "max"))
        assert got == [before, ("allReduce", 8, 9, 2, STREAM), ("keep", (2, 4)), behind]  # values, and where NaN is
        got = after(ours.all_reduce(torch.ones(4, dtype=torch.int64), "min"))
        assert got == [before, ("allReduce", 4, 4, 3, STREAM), ("keep", (4,)), behind]
        got = after(ours.all_gather(torch.ones(2, 3).half()))
        assert got == [before, ("allGather", 12, 1, STREAM), ("keep", (2, 3), (4, 3)), behind]
        got = after(ours.all_gather(torch.ones(1 + me, 2), sizes=[1, 2]))
        grouped = [("groupStart",), ("broadcast", 8, 1, 0, STREAM), ("broadcast", 16, 1, 1, STREAM), ("groupEnd",)]
        assert got == [before, *grouped, ("keep", (1 + me, 2), (3, 2)), behind]
        got = after(ours.reduce_scatter(torch.ones(4, 3)))
        assert got == [before, ("reduceScatter", 6, 7, 0, STREAM), ("keep", (4, 3), (2, 3)), behind]
        got = after(ours.reduce_scatter(torch.ones(4).half()))  # no half sums on the way
        assert [call[0] for call in got] == [
            before[0],
            "groupStart",
            *["send", "recv"] * 2,
            "groupEnd",
            "keep",
            behind[0],
        ]
        got = after(ours.all_to_all(torch.ones(3), send_sizes=[3 * other, 3 * me], recv_sizes=[3 * other, 3 * me]))
        assert got[1:5] == [("groupStart",), ("send", 12, 1, me, STREAM), ("recv", 12, 1, me, STREAM), ("groupEnd",)]
        got = after(ours.broadcast(torch.ones(7, dtype=torch.bool), root=1))
        assert got == [before, ("broadcast", 7, 1, 1, STREAM), ("keep", (7,)), behind]
        got = after(ours.all_reduce(torch.ones(0)))
        assert got == [before, ("keep", (0,)), behind]
        part = ours.split([[1, 0]])
        assert nccl.calls == [("synchronize",), ("commSplit", 0, other)] and part.rank == other
        part.close()
        ours.close()
        assert ours.handle.ended == "destroyed" and part.handle.ended == "destroyed"

    run_ranks(2, ranks)


def test_overdue_verb_aborts_everything() -> None:
    """The watchdog's look, asked at times of our own."""

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        session = ours._session
        part = ours.split([[0, 1]])
        session._thread = object()  # type: ignore[assignment]  # no thread: this test looks
        ours._streams.happened = part._streams.happened = False  # type: ignore[attr-defined]
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
        assert ours.handle.ended == part.handle.ended == "aborted"
        verb_0 = r"all_gather of float32 \(2,\) \(verb 0 of rank . among ranks \[0, 1\]\)"
        words = verb_0 + r" failed\. Cause: not finished within 60 s"
        for verb in (work.wait, ours.barrier, lambda: ours.all_reduce(torch.ones(1)), lambda: ours.split([[0, 1]])):
            with pytest.raises(CommError, match=words):
                verb()
        session._thread = None
        ours.close()  # destroys nothing that is aborted

    run_ranks(2, ranks)


def test_error_of_nccl_aborts_everything() -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        session = ours._session
        session._thread = object()  # type: ignore[assignment]
        ours._streams.happened = False
        ours.all_reduce(torch.ones(2))
        ours.handle.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
        session.look(0.0)
        with pytest.raises(CommError, match=r"all_reduce sum of float32 \(2,\) .* NCCL_ERROR_REMOTE_ERROR"):
            ours.broadcast(torch.ones(1))

    run_ranks(2, ranks)


def test_refused_verb_is_a_comm_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE")

    monkeypatch.setattr(Handle, "allGather", refuse)

    def ranks(comm: Communicator) -> None:
        with pytest.raises(CommError, match=r"all_gather .* NCCL_ERROR_INVALID_USAGE"):
            stand_in(comm).all_gather(torch.ones(1))

    run_ranks(1, ranks)


def test_watchdog_runs_in_a_thread_and_ends() -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        ours.all_reduce(torch.ones(1)).wait()
        thread = ours._session._thread
        assert thread is not None and thread.daemon
        ours.close()
        assert not thread.is_alive()

    run_ranks(1, ranks)


def test_lanes_have_streams_of_their_own() -> None:
    """A split into one group of all ranks runs beside its origin; parts of the ranks share its stream."""

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        nccl: StandIn = ours._session.nccl
        lanes = Lanes(Plain(), ours, lanes=2)
        nccl.calls.clear()
        flats = [torch.full((3,), float(i + comm.rank)) for i in range(3)]
        works = [lanes.start(flat, turn=turn) for turn, flat in enumerate(flats)]
        assert [call[-1] for call in of(nccl, "allReduce")] == [STREAM + 1, STREAM + 2, STREAM + 1]
        assert [float(work.wait()[0]) for work in works] == [0.5, 1.5, 2.5]
        nccl.calls.clear()
        ours.split([[0], [1]]).all_reduce(torch.ones(1)).wait()
        assert of(nccl, "allReduce")[0][-1] == STREAM
        with pytest.raises(ValueError, match="at most 2 on NCCL"):
            Lanes(Plain(), ours, lanes=3)

    run_ranks(2, ranks)


def test_a_late_verb_of_one_lane_hides_no_error_of_another() -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        lane = ours.split([[0, 1]])
        session = ours._session
        session._thread = object()  # type: ignore[assignment]
        for one in (ours, lane):
            one._streams.happened = False  # type: ignore[attr-defined]
        ours.all_reduce(torch.ones(2))
        lane.broadcast(torch.ones(1))
        lane.handle.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")  # type: ignore[attr-defined]
        session.look(0.0)
        assert session.failure is not None and "broadcast" in str(session.failure)
        assert ours.handle.ended == "aborted"

    run_ranks(2, ranks)


def test_unique_id_travels_over_the_store() -> None:
    store, identity = dist.HashStore(), bytes(range(128))
    given: dict[int, bytes] = {}
    nccl = types.SimpleNamespace(
        get_unique_id=lambda: identity, NcclCommunicator=lambda size, unique, rank: given.setdefault(rank, unique)
    )
    for rank in range(3):
        open_handle(nccl, store, rank, 3)
    assert list(given.values()) == [identity] * 3


def test_the_stand_in_has_cupys_interface() -> None:
    """Constants, and what each call takes in which order, of the CuPy that is installed; no GPU is asked."""
    nccl = pytest.importorskip("cupy.cuda.nccl", reason="needs CuPy")
    if not nccl.available:
        pytest.skip("CuPy finds no libnccl.so.2")
    for name in vars(StandIn):
        if name.startswith("NCCL_"):
            assert getattr(nccl, name) == getattr(StandIn, name), name
    real = nccl.NcclCommunicator
    for name, method in vars(Handle).items():
        if name.startswith("_") or name in ("memory", "note"):
            continue
        declared = getattr(real, name).__doc__.splitlines()[0]  # allReduce(self, intptr_t sendbuf, ...)
        theirs = [part.split("=")[0].split()[-1] for part in declared[declared.index("(") + 1 : -1].split(",")]
        ours = method.__code__.co_varnames[: method.__code__.co_argcount]
        assert len(theirs) - declared.count("=") == len(ours), (name, declared)
        # where each number stands, whatever the address before it is called
        meaning = {"kind": "datatype", "count": "count", "op": "op", "root": "root", "peer": "peer", "stream": "stream"}
        for at, word in enumerate(ours):
            assert theirs[at] in (meaning.get(word, theirs[at]), "recvcount"), (name, declared)
    identity = nccl.get_unique_id()
    assert isinstance(identity, bytes) and len(identity) == 128
    assert issubclass(nccl.NcclError, RuntimeError) and callable(nccl.groupStart) and callable(nccl.groupEnd)


def test_ranks_that_never_come_are_not_waited_for() -> None:
    never = threading.Event()
    with pytest.raises(CommError, match=r"did not connect the ranks within 0\.01 s"):
        in_time(0.01, never.wait)
    never.set()
    with pytest.raises(CommError, match="could not connect the ranks: NCCL_ERROR_SYSTEM_ERROR"):
        in_time(60.0, _refuse)
    assert in_time(60.0, lambda: 7) == 7


def _refuse() -> None:
    raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")


def test_two_nccl_libraries_are_refused() -> None:
    check_version(22803, (2, 28, 3))
    with pytest.raises(ValueError, match=r"CuPy has loaded NCCL 2.32.3 but torch uses 2.28.9"):
        check_version(23203, (2, 28, 9))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BACKENDS["cupy_nccl"] is CupyNcclCommunicator
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"found no GPU; use connect\('gloo'\)"):
            connect("cupy_nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ValueError, match=r"needs CuPy .* pip install cupy-cuda13x"):
        cupy_nccl.load_nccl()


class Moved(Communicator):
    """Takes CPU tensors to another communicator's device and the results back: the contract on a GPU."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(
            inner.name, inner.rank, world_size=inner.world_size, device=torch.device("cpu"), members=inner.members
        )
        self.inner = inner

    def _there(self, x: Tensor) -> Tensor:
        return x.to(self.inner.device, copy=True)

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        return self.inner.all_reduce(self._there(x), op).then(x.copy_)

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return self.inner.all_gather(self._there(x), sizes=sizes).then(Tensor.cpu)

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return self.inner.reduce_scatter(self._there(x), sizes=sizes).then(Tensor.cpu)

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        work = self.inner.all_to_all(self._there(x), send_sizes=send_sizes, recv_sizes=recv_sizes)
        return work.then(Tensor.cpu)

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        return self.inner.broadcast(self._there(x), root=root).then(x.copy_)

    def _barrier(self) -> None:
        self.inner.barrier()

    def _gather_objects(self, obj: object) -> list[Any]:
        return self.inner.gather_objects(obj)

    def _split(self, groups: list[list[int]]) -> Communicator:
        return Moved(self.inner.split(groups))

    def close(self) -> None:
        super().close()
        self.inner.close()


def test_contract_reaches_another_device() -> None:
    """What the GPU runs use, here around threads."""
    contract = contract_module().contract
    assert run_ranks(2, lambda comm: contract(Moved(comm))) == ["kept"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["nccl", "cupy_nccl"])
def test_contract_on_a_gpu(backend: str, start_ranks: Any, finish_ranks: Any) -> None:
    if backend == "cupy_nccl":
        pytest.importorskip("cupy")
    (text,) = finish_ranks(start_ranks(Path(__file__), 1, backend), 240.0)
    assert text.strip().endswith("kept"), text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_of_a_gpu() -> None:
    """On a GPU the real streams order producer, verb and consumer."""
    pytest.importorskip("cupy")
    device = torch.device("cuda", torch.cuda.current_device())
    streams = cupy_nccl.Streams(device)
    x = torch.zeros(1 << 20, device=device)

    def issue(stream: int) -> None:
        assert stream == streams.side.cuda_stream
        with torch.cuda.stream(streams.side):
            x.add_(1)

    torch.cuda._sleep(10_000_000)
    x.fill_(1)
    streams.wait(streams.run(issue, [x]))
    assert float(x.mean()) == 2.0


if __name__ == "__main__":  # one rank of a backend on GPUs
    print(contract_module().contract(Moved(connect(sys.argv[1], timeout=60.0))))
