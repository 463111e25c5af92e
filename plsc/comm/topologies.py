"""Ways for a sum to travel between ranks: a ring, by hosts, a grid, the fastest of them, or one of your own."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import os
import re
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plsc.comm.background import Background
from plsc.comm.communicator import Communicator, Work
from plsc.comm.shard import Shard

log = logging.getLogger(__name__)

# Ranks that share a host: None asks each for its name, a number is ranks a host, a list their numbers host by host.
Hosts = int | Sequence[int] | None

TOPOLOGIES = ("flat", "ring", "hierarchical", "grid", "auto")
CHECK_SIZES = (1, 3, 35, 1000, 20_011)  # elements of the sums that a topology is checked on at its first use
MEASURE_SIZES = (2**14, 2**18)  # float32 elements; the second one decides, the first one rules out what is hopeless
HOPELESS = 4.0  # times as slow as the flat way on the first size
MARGIN = 0.9  # another way than the flat one must take less than this share of its time


class Topology(Communicator):
    """A communicator around communicators: sums over all ranks go the way of `reduce`, all else passes through.

    A way of your own is a subclass with that one method. It runs in the background while the caller computes, on three
    communicators that nobody else uses: `everyone` (all ranks, those of a host side by side), `inside` (the ranks of
    this host), `between` (one rank of each host: those at the same place in theirs). Before the first sum it is
    compared with the flat one on whole numbers, and between ranks on others; where they differ, all ranks raise
    ValueError.
    """

    def __init__(self, inner: Communicator, *, hosts: Hosts = None) -> None:
        """Collective. hosts: see Hosts; absent, ranks whose machines have the same name share a host."""
        super().__init__(
            inner.name, inner.rank, world_size=inner.world_size, device=inner.device, members=inner.members
        )
        self.any_device = inner.any_device
        self.hosts = find_hosts(inner, hosts)
        self._bind(inner)

    @abstractmethod
    def reduce(self, flat: Tensor) -> None:
        """Leaves in flat [n] the sum over all ranks, the same bits on each; n may be less than the number of ranks."""

    @property
    def is_even(self) -> bool:
        """Whether every host has as many ranks."""
        return len({len(host) for host in self.hosts}) == 1

    def check(self) -> None:
        """Compares `reduce` with the flat sum, and what the ranks get; collective, waits."""
        self._background.submit(self._check_reduce).wait()

    def _bind(self, inner: Communicator) -> None:
        self.inner = inner
        places = [
            [host[place] for host in self.hosts if place < len(host)] for place in range(max(map(len, self.hosts)))
        ]
        self.everyone = inner.split([[rank for host in self.hosts for rank in host]])
        self.inside = inner.split(self.hosts)
        self.between = inner.split(places)
        self._background = Background(inner.device)
        self._checked = False

    def _check_reduce(self) -> None:
        for size in CHECK_SIZES:
            for dtype in (torch.float32, torch.int64):
                mine = ((torch.arange(size, device=self.device) * (self.rank + 1) + self.rank) % 7).to(dtype)
                got, expected = mine.clone(), self.everyone.all_reduce(mine).wait()
                self.reduce(got)
                self._agree(got, expected, f"{size} elements of {dtype}", "the flat sum on every rank")
            real = torch.randn(size, generator=torch.Generator().manual_seed(self.rank)).to(self.device)
            flat = self.everyone.all_reduce(real.clone()).wait()
            self.reduce(real)
            near = torch.where((real - flat).abs() < 1e-3, flat, real)
            self._agree(near, flat, f"{size} real numbers", "the flat sum but for its rounding")
            first = self.everyone.broadcast(real.clone()).wait()
            self._agree(real, first, f"{size} real numbers", "the same bits on every rank: add up in one order")
        self._checked = True

    def _agree(self, got: Tensor, expected: Tensor, what: str, wanted: str) -> None:
        """Raises ValueError on all ranks where the two differ on any."""
        wrong = (got != expected).any().int()
        if int(self.everyone.all_reduce(wrong, "max").wait()):
            raise ValueError(
                f"{type(self).__name__}.reduce: got {_first_wrong(got, expected)} on rank {self.rank} for {what} on "
                f"{self.world_size} ranks; expected {wanted}"
            )

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        if op != "sum" or self.world_size == 1 or not x.numel():
            return self.inner.all_reduce(x, op)

        def job() -> Tensor:
            if not self._checked:
                self._check_reduce()
            self.reduce(x.view(-1))
            return x

        return self._background.submit(job)

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return self.inner.all_gather(x, sizes=sizes)

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return self.inner.reduce_scatter(x, sizes=sizes)

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        return self.inner.all_to_all(x, send_sizes=send_sizes, recv_sizes=recv_sizes)

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        return self.inner.broadcast(x, root=root)

    def _barrier(self) -> None:
        self.inner.barrier()

    def _gather_objects(self, obj: object) -> list[Any]:
        return self.inner.gather_objects(obj)

    def _split(self, groups: list[list[int]]) -> Communicator:
        """All ranks in their order keep the topology, on connections of their own; other groups are plain."""
        part = self.inner.split(groups)
        if groups != [list(range(self.world_size))]:
            return part
        twin = copy.copy(self)
        twin._bind(part)
        return twin

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._background.close()
        for group in (self.everyone, self.inside, self.between, self.inner):
            group.close()


class Ring(Topology):
    """Every rank hands pieces to its neighbour only, ranks of a host side by side: one link a host in each direction.

    2 (W - 1) steps, 2 (W - 1) / W of the bytes through a host's link. Half types round at each of the W - 1 additions.
    """

    def reduce(self, flat: Tensor) -> None:
        _ring(self.everyone, flat)


class Hierarchical(Topology):
    """Reduce-scatter inside each host, all-reduce between the hosts on every rank's part, all-gather inside.

    Of N hosts 2 (N - 1) / N of the bytes go through a host's link, whatever the number of its ranks. Where hosts have
    unlike numbers of ranks, the first of each host speaks for it. Source: Cho et al. 2019 (BlueConnect).
    """

    def reduce(self, flat: Tensor) -> None:
        if self.is_even:
            _by_level(self.inside, self.between, flat)
        else:
            _by_leader(self.inside, self.between, flat)


class Grid2D(Topology):
    """Ranks laid out in rows: reduce-scatter along the row, then the column, all-gather along the column, then the row.

    2 (rows + cols - 2) steps; half types round once a direction. Source: Mikami et al. 2018 (2D-torus).
    """

    def __init__(self, inner: Communicator, *, rows: int, cols: int) -> None:
        if rows < 1 or cols < 1 or rows * cols != inner.world_size:
            raise ValueError(
                f"Grid2D: got {rows} rows and {cols} columns for {inner.world_size} ranks; expected rows * cols ranks"
            )
        super().__init__(inner, hosts=cols)

    def reduce(self, flat: Tensor) -> None:
        _by_grid(self.inside, self.between, flat)


class Auto(Topology):
    """The fastest of flat, ring, hierarchical and grid, measured when it is made; rank 0 decides for all.

    `choice` is its name. state_dict keeps it, so that a run that resumes adds up in the same order.
    """

    def __init__(self, inner: Communicator, *, hosts: Hosts = None) -> None:
        super().__init__(inner, hosts=hosts)
        self.measured: dict[str, float] = {}  # seconds of a sum of 1 MiB, by the slowest rank
        self._shared = {"choice": "flat"}  # with the twins that split makes
        if self.world_size > 1:
            self._measure()

    @property
    def choice(self) -> str:
        return self._shared["choice"]

    def reduce(self, flat: Tensor) -> None:
        self._ways()[self.choice](flat)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"choice": self.choice, "world_size": self.world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the saved choice, unless it was made for another number of ranks: then its own measurement stands."""
        if state["world_size"] == self.world_size and state["choice"] in self._ways():
            self._shared["choice"] = str(state["choice"])

    def _ways(self) -> dict[str, Callable[[Tensor], object]]:
        ways: dict[str, Callable[[Tensor], object]] = {
            "flat": lambda flat: self.everyone.all_reduce(flat).wait(),
            "ring": lambda flat: _ring(self.everyone, flat),
        }
        if self.is_even:
            ways["hierarchical"] = lambda flat: _by_level(self.inside, self.between, flat)
            ways["grid"] = lambda flat: _by_grid(self.inside, self.between, flat)
        else:
            ways["hierarchical"] = lambda flat: _by_leader(self.inside, self.between, flat)
        return ways

    def _measure(self) -> None:
        """A few sums each way; the hopeless are not tried on the larger size."""
        ways, (small, large) = self._ways(), MEASURE_SIZES
        quick = self._time(ways, small, turns=3)
        left = {name: way for name, way in ways.items() if quick[name] <= HOPELESS * quick["flat"]}
        self.measured = self._time(left, large, turns=2)
        best = min(self.measured, key=lambda name: self.measured[name])
        choice = best if self.measured[best] < MARGIN * self.measured["flat"] else "flat"
        self._shared["choice"] = str(self.everyone.gather_objects(choice)[0])
        if self.rank == 0:
            shown = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.measured.items())
            log.info("topology: %s for sums over %d ranks (1 MiB: %s)", self.choice, self.world_size, shown)

    def _time(self, ways: dict[str, Callable[[Tensor], object]], size: int, *, turns: int) -> dict[str, float]:
        """The quickest of some turns after one to warm up, by the slowest rank."""
        flat = torch.zeros(size, device=self.device)
        seconds = torch.full((len(ways),), math.inf, dtype=torch.float64)
        for index, way in enumerate(ways.values()):
            for turn in range(turns + 1):
                self.everyone.barrier()
                start = time.perf_counter()
                way(flat)
                if flat.is_cuda:
                    torch.cuda.synchronize(flat.device)
                if turn:
                    seconds[index] = min(float(seconds[index]), time.perf_counter() - start)
        slowest = self.everyone.all_reduce(seconds.to(self.device), "max").wait()
        return dict(zip(ways, slowest.tolist(), strict=True))


def _first_wrong(got: Tensor, expected: Tensor) -> str:
    places = (got != expected).nonzero().flatten().tolist()
    return (
        f"{float(got[places[0]])} instead of {float(expected[places[0]])} at place {places[0]}"
        if places
        else "it right"
    )


# ---- the ways


def _ring(comm: Communicator, flat: Tensor) -> None:
    """Pieces go round twice: adding up, then as they are. After one round rank r has the whole sum of piece r + 1."""
    world, rank = comm.world_size, comm.rank
    parts = flat.split(Shard(len(flat), rank, world).sizes())
    for step in range(world - 1):
        received = parts[(rank - step - 1) % world]
        received.add_(_hand_on(comm, parts[(rank - step) % world], len(received)))
    for step in range(world - 1):
        received = parts[(rank - step) % world]
        received.copy_(_hand_on(comm, parts[(rank - step + 1) % world], len(received)))


def _hand_on(comm: Communicator, part: Tensor, rows: int) -> Tensor:
    """Sends a piece to the next rank and gives the `rows` that come from the one before."""
    send, receive = [0] * comm.world_size, [0] * comm.world_size
    send[(comm.rank + 1) % comm.world_size] = len(part)
    receive[(comm.rank - 1) % comm.world_size] = rows
    return comm.all_to_all(part, send_sizes=send, recv_sizes=receive).wait()


def _by_level(inside: Communicator, between: Communicator, flat: Tensor) -> None:
    sizes = Shard.of(len(flat), inside).sizes()
    mine = inside.reduce_scatter(flat, sizes=sizes).wait()
    if between.world_size > 1:
        between.all_reduce(mine).wait()
    flat.copy_(inside.all_gather(mine, sizes=sizes).wait())


def _by_grid(row: Communicator, column: Communicator, flat: Tensor) -> None:
    sizes = Shard.of(len(flat), row).sizes()
    mine = row.reduce_scatter(flat, sizes=sizes).wait()
    if column.world_size > 1:
        inner_sizes = Shard.of(len(mine), column).sizes()
        mine = column.all_gather(column.reduce_scatter(mine, sizes=inner_sizes).wait(), sizes=inner_sizes).wait()
    flat.copy_(row.all_gather(mine, sizes=sizes).wait())


def _by_leader(inside: Communicator, between: Communicator, flat: Tensor) -> None:
    inside.all_reduce(flat).wait()
    if inside.rank == 0:
        between.all_reduce(flat).wait()
    inside.broadcast(flat).wait()


# ---- hosts, and topologies by name


def find_hosts(comm: Communicator, hosts: Hosts = None) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank; collective where hosts is None.

    A machine's name tells hosts apart, and the node number of torchrun or Slurm where several nodes are one machine.
    """
    world = comm.world_size
    if hosts is None:
        node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or ""
        found: dict[object, list[int]] = {}
        for rank, name in enumerate(comm.gather_objects((socket.gethostname(), node))):
            found.setdefault(tuple(name), []).append(rank)
        return list(found.values())
    if isinstance(hosts, int):
        if hosts < 1 or world % hosts:
            raise ValueError(f"hosts: got {hosts} ranks a host for {world} ranks; expected a divisor of their number")
        hosts = [hosts] * (world // hosts)
    sizes = [int(size) for size in hosts]
    if sum(sizes) != world or min(sizes, default=0) < 1:
        raise ValueError(f"hosts: got sizes {sizes} (sum {sum(sizes)}), expected a sum of {world} ranks, none below 1")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def check_topology(name: str) -> None:
    """Raises ValueError unless `route` knows the name; says nothing about the ranks it is for."""
    kind, _, detail = name.partition(":")
    pattern = {"hierarchical": r"[1-9]\d*", "grid": r"[1-9]\d*x[1-9]\d*"}.get(kind, r"[A-Za-z_]\w*")
    own = kind not in TOPOLOGIES and re.fullmatch(r"[\w.]+", kind)
    if name not in TOPOLOGIES and not ((own or kind in ("hierarchical", "grid")) and re.fullmatch(pattern, detail)):
        raise ValueError(
            f"topology: got {name!r}, expected one of {', '.join(TOPOLOGIES)}, hierarchical:RANKS_A_HOST, "
            "grid:ROWSxCOLUMNS, or module:Class for one of your own"
        )


def route(comm: Communicator, name: str) -> Communicator:
    """The communicator whose sums travel as `name` says; collective. "flat", and a world of one, is comm itself.

    "ring", "hierarchical" (hosts by name) or "hierarchical:4" (ranks a host), "grid" (as square as it gets) or
    "grid:2x3" (rows x columns), "auto" (measured), or "module:Class": a Topology, called with the communicator.
    """
    check_topology(name)
    kind, _, detail = name.partition(":")
    if comm.world_size == 1 or kind == "flat":
        return comm
    if kind == "ring":
        return Ring(comm)
    if kind == "hierarchical":
        return Hierarchical(comm, hosts=int(detail) if detail else None)
    if kind == "grid":
        if detail:
            rows, cols = map(int, detail.split("x"))
        else:
            rows = next(n for n in range(math.isqrt(comm.world_size), 0, -1) if comm.world_size % n == 0)
            cols = comm.world_size // rows
        return Grid2D(comm, rows=rows, cols=cols)
    if kind == "auto":
        return Auto(comm)
    try:
        own = getattr(importlib.import_module(kind), detail)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"topology is {name!r}: {error}; expected an importable module:Class") from error
    try:
        made = own(comm)
    except TypeError as error:
        raise ValueError(
            f"topology is {name!r}: {error}; expected a class with the method reduce(flat), which takes a communicator"
        ) from error
    if not isinstance(made, Topology):
        raise ValueError(f"topology {name!r} made a {type(made).__name__}, expected a plsc.comm.Topology")
    made.check()
    return made
