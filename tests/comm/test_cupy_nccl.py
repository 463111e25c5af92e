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
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import plsc.comm.cupy_nccl as cupy_nccl
from plsc.comm import BACKENDS, CommError, Communicator, Work, connect, run_ranks
from plsc.comm.communicator import REDUCIBLE
from plsc.comm.cupy_nccl import CupyNcclCommunicator, check_version, in_time, open_handle
from plsc.comm.nccl_session import Streams
from plsc.comm.torch_distributed import GlooCommunicator, NcclCommunicator
from plsc.strategies.reduction import Lanes, Plain
from tests.comm.nccl_stand_in import CURRENT, STREAM, Handle, Stand, StandIn


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
    streams = Streams(device)
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
