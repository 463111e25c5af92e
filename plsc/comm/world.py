"""Which ranks there are: connecting to the others, and the world that this code runs in."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from plsc.comm.communicator import Communicator
from plsc.comm.cupy_nccl import CupyNcclCommunicator
from plsc.comm.local import LocalCommunicator, thread_rank
from plsc.comm.topology import Checked
from plsc.comm.torch_distributed import GlooCommunicator, Launch, NcclCommunicator, adopt

log = logging.getLogger(__name__)

BACKENDS: dict[str, type[Communicator]] = {
    "local": LocalCommunicator,
    "gloo": GlooCommunicator,
    "nccl": NcclCommunicator,
    "cupy_nccl": CupyNcclCommunicator,
}

_current: Communicator | None = None  # the world of this process; ranks that are threads have their own
# The torch.distributed world it was made over, to notice that it has ended. Weak: held, its threads would not end.
_of_torch: Callable[[], object] | None = None


def connect(name: str = "auto", *, timeout: float = 600.0, init_timeout: float = 300.0) -> Communicator:
    """Joins the world that the launcher described in the environment; world() gives it from then on.

    "auto" is NCCL where there is a GPU, gloo where there is none, and a world of one where the environment names no
    rank; a torch.distributed that is initialised already is adopted. timeout bounds one verb, init_timeout the start,
    in seconds. PLSC_DEBUG=1 wraps the world in Checked. Called again, gives the world there is.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"connect: got backend {name!r}, expected 'auto' or one of {', '.join(sorted(BACKENDS))}")
    there = thread_rank() or _open_world()
    alone = there is not None and there.name == "local"
    if there is not None and (name == there.name or (name == "auto" and not (alone and _ranks_elsewhere()))):
        return there
    if there is not None and not alone:
        raise ValueError(f"connect: got backend {name!r}, but this process is in a world of {there.name!r} already")
    if name == "auto" and dist.is_initialized():
        return _enter(adopt())
    if name == "auto":
        name = "local" if Launch.read() is None else "nccl" if torch.cuda.is_available() else "gloo"
    return _enter(BACKENDS[name].connect(timeout=timeout, init_timeout=init_timeout))


def world() -> Communicator:
    """The communicator of all ranks: this thread's in run_ranks, else the connected world, else a world of one.

    The same object each call. A torch.distributed that is initialised is adopted without any communication.
    """
    there = thread_rank() or _open_world()
    if there is not None and not (there.name == "local" and dist.is_initialized()):
        return there  # a world of one gives way to a torch.distributed that was initialised after it
    if dist.is_initialized():
        return _enter(adopt())
    if os.environ.get("WORLD_SIZE", "1") != "1":
        log.warning(
            "WORLD_SIZE is %s but this process has not connected, so its world is itself alone; "
            "call plsc.comm.connect() or torch.distributed.init_process_group() first",
            os.environ["WORLD_SIZE"],
        )
    return _enter(LocalCommunicator())


def connected() -> Communicator | None:
    """The world of several ranks that this thread is in or has connected to, without making one; else None."""
    there = thread_rank() or _open_world()
    if there is not None and there.name != "local":
        return there
    return world() if dist.is_initialized() else None


def _ranks_elsewhere() -> bool:
    """Whether a world of one is not all there is: world() was asked before anybody connected."""
    return dist.is_initialized() or Launch.read() is not None


def _open_world() -> Communicator | None:
    """The world entered last, unless it was closed or the torch.distributed under it has ended."""
    if _current is None or _current.closed:
        return None
    if _of_torch is not None and (not dist.is_initialized() or dist.group.WORLD is not _of_torch()):
        return None
    return _current


def _enter(comm: Communicator) -> Communicator:
    global _current, _of_torch
    _current = Checked(comm) if os.environ.get("PLSC_DEBUG") == "1" else comm
    under = dist.group.WORLD if comm.name in ("gloo", "nccl", "cupy_nccl") else None
    _of_torch = None if under is None else weakref.ref(under)
    return _current
