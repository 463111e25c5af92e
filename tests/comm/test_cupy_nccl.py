"""NCCL through CuPy, without either: nccl_stand_in.py takes the place of CuPy's interface and of CUDA's streams.

On a GPU the contract runs on the real thing, with one rank.
"""

from __future__ import annotations

import importlib.util
import itertools
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
from plsc.comm.communicator import REDUCIBLE
from plsc.comm.cupy_nccl import CupyNcclCommunicator, Session, check_version, in_time, open_handle
from plsc.comm.torch_distributed import GlooCommunicator, NcclCommunicator
from plsc.strategies.reduction import Lanes, Plain
from tests.comm import nccl_stand_in
from tests.comm.nccl_stand_in import CURRENT, STREAM, Handle, StandIn, Standing, stand

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
def test_contract_over_the_stand_in(world_size: int, stand_in: Stand) -> None:
    contract = contract_module().contract
    assert run_ranks(world_size, lambda comm: contract(stand_in(comm))) == ["kept"] * world_size


def of(nccl: StandIn, *names: str) -> list[tuple[Any, ...]]:
    return [call for call in nccl.calls if call[0] in names]


def test_calls_of_each_verb(stand_in: Stand) -> None:
    """All that the host asks of NCCL and CUDA, in order, on both of 2 ranks: so it never waits for the device.

    The stream of verbs waits for the caller's; tensors are kept for it; NCCL gets that stream; an event is recorded on
    it behind NCCL's calls; wait() makes the caller's stream wait for that event.
    """

    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        nccl: StandIn = ours._session.nccl
        events = itertools.count()

        def expect(work: Work[Any], calls: list[tuple[Any, ...]], *kept: tuple[int, ...]) -> None:
            event = next(events)
            issued = [("wait_stream", STREAM, CURRENT), *(("record_stream", shape, STREAM) for shape in kept), *calls]
            issued.append(("record", event, STREAM))
            assert nccl.calls == issued
            work.wait()
            assert nccl.calls == [*issued, ("wait_event", CURRENT, event)]
            nccl.calls = []

        def group(*calls: tuple[Any, ...]) -> list[tuple[Any, ...]]:
            return [("groupStart",), *calls, ("groupEnd",)]

        me, other = comm.rank, 1 - comm.rank
        expect(ours.all_reduce(torch.ones(3, 5)), [("allReduce", 15, 7, 0, STREAM)], (3, 5))
        halves = ours.all_reduce(torch.ones(4).bfloat16(), "max")  # values, and where NaN is
        expect(halves, [("allReduce", 8, 9, 2, STREAM)], (2, 4))
        whole = ours.all_reduce(torch.ones(4, dtype=torch.int64), "min")
        expect(whole, [("allReduce", 4, 4, 3, STREAM)], (4,))
        expect(ours.all_gather(torch.ones(2, 3).half()), [("allGather", 12, 1, STREAM)], (2, 3), (4, 3))
        pieces = [("broadcast", 8, 1, 0, STREAM), ("broadcast", 16, 1, 1, STREAM)]
        expect(ours.all_gather(torch.ones(1 + me, 2), sizes=[1, 2]), group(*pieces), (1 + me, 2), (3, 2))
        expect(ours.reduce_scatter(torch.ones(4, 3)), [("reduceScatter", 6, 7, 0, STREAM)], (4, 3), (2, 3))
        apart = [(name, 4, 1, peer, STREAM) for peer in range(2) for name in ("send", "recv")]  # not added on the way
        expect(ours.reduce_scatter(torch.ones(4).half()), group(*apart), (4,), (2, 2))
        sizes = [3 * other, 3 * me]
        swapped = ours.all_to_all(torch.ones(3), send_sizes=sizes, recv_sizes=sizes)
        expect(swapped, group(("send", 12, 1, me, STREAM), ("recv", 12, 1, me, STREAM)), (3,), (3,))
        flags = ours.broadcast(torch.ones(7, dtype=torch.bool), root=1)
        expect(flags, [("broadcast", 7, 1, 1, STREAM)], (7,))
        expect(ours.all_reduce(torch.ones(0)), [], (0,))
        both = [("synchronize", CURRENT), ("synchronize", STREAM)]
        comm.barrier = lambda: nccl.note("barrier of the hosts")  # type: ignore[method-assign]
        ours.barrier()
        assert nccl.calls == [*both, ("barrier of the hosts",)]
        nccl.calls = []
        part = ours.split([[1, 0]])
        assert nccl.calls == [*both, ("commSplit", 0, other)] and part.rank == other
        part.close()
        ours.close()
        assert ours.handle.ended == "destroyed" and part.handle.ended == "destroyed"  # type: ignore[attr-defined]

    run_ranks(2, ranks)


TYPES = {  # ncclDataType_t of nccl.h
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
OPS = {"sum": 0, "max": 2, "min": 3}  # ncclRedOp_t


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_numbers_of_types_and_operations(dtype: torch.dtype, op: str, stand_in: Stand) -> None:
    def ranks(comm: Communicator) -> None:
        ours = stand_in(comm)
        ours.all_reduce(torch.ones(2).to(dtype), op).wait()
        ours.reduce_scatter(torch.ones(2).to(dtype)).wait()
        numbers = [call[2:4] for call in of(ours._session.nccl, "allReduce", "reduceScatter")]
        direct = dtype not in (torch.float16, torch.bfloat16)
        assert numbers == [(TYPES[dtype], OPS[op])] + [(TYPES[dtype], 0)] * direct

    run_ranks(1, ranks)


# ---- the watchdog


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
        monkeypatch.setattr(cupy_nccl.time, "monotonic", lambda: now[0])

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
        for handle in every:
            handle.abort = lambda handle=handle: (asked.append(handle), fail())
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


def test_lanes_have_streams_of_their_own(stand_in: Stand) -> None:
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


# ---- the start


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


def test_nccl_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libnccl, before CuPy 14, and with another library than torch's."""
    nccl = types.SimpleNamespace(available=True, NCCL_BFLOAT16=9, NcclCommunicator=Handle, get_version=lambda: 23203)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 32, 3))
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nccl=nccl))  # type: ignore[arg-type]
    assert cupy_nccl.load_nccl() is nccl
    for name, value, words in (
        ("get_version", lambda: 22809, "CuPy has loaded NCCL 2.28.9 but torch uses 2.32.3"),
        ("NcclCommunicator", object, "expected 14 or newer"),
        ("available", False, "finds no libnccl"),
    ):
        monkeypatch.setattr(nccl, name, value)
        with pytest.raises(ValueError, match=words):
            cupy_nccl.load_nccl()


class Control(GlooCommunicator):
    """gloo between hosts, without any."""

    def __init__(self) -> None:
        Communicator.__init__(self, "gloo", 0, world_size=1, device=torch.device("cpu"))
        self._session = types.SimpleNamespace(store=dist.HashStore(), heartbeat=None)  # type: ignore[assignment]

    def _split(self, groups: list[list[int]]) -> Communicator:
        return Control()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("given", "order"), [(None, "1"), ("0", "0")])
def test_start_on_a_gpu(given: str | None, order: str, stand_in: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL binds to the thread's current device and reads its environment when it opens the first communicator."""
    device, here, seen = torch.device("cuda", 3), threading.local(), []

    def opens(*_: Any) -> Any:
        seen.append((getattr(here, "device", None), os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")))
        return types.SimpleNamespace(commSplit=opens, destroy=lambda: None)

    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", given or "")  # put back at the end
    if given is None:
        del os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]
    nccl = types.SimpleNamespace(
        **{name: value for name, value in vars(StandIn).items() if name.startswith("NCCL_")},
        NcclCommunicator=opens,
        get_unique_id=lambda: bytes(128),
    )
    monkeypatch.setattr(cupy_nccl, "load_nccl", lambda: nccl)
    monkeypatch.setattr(NcclCommunicator, "_find_device", lambda: device)
    monkeypatch.setattr(GlooCommunicator, "connect", lambda **_: Control())
    monkeypatch.setattr(torch.cuda, "set_device", lambda chosen: setattr(here, "device", chosen))
    ours = CupyNcclCommunicator.connect(timeout=60.0, init_timeout=60.0)
    part = ours.split([[0]])
    assert seen == [(device, order)] * 2 and ours.device == part.device == device
    part.close()
    ours.close()


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
