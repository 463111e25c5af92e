"""Topologies: each gives the flat sum, on every number of ranks, size and type, and all ranks get the same bits."""

import importlib.util
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plsc.comm import (
    Auto,
    CommError,
    Communicator,
    Counting,
    Grid2D,
    Hierarchical,
    LocalCommunicator,
    Ring,
    Topology,
    run_ranks,
)
from plsc.comm.communicator import REDUCIBLE
from plsc.comm.topologies import check_topology, find_hosts, route

Build = Callable[[Communicator], Communicator]
BUILDS: dict[str, tuple[tuple[int, ...], Build]] = {
    "ring": ((2, 3, 4, 6), lambda comm: Ring(comm, hosts=1)),
    "hierarchical": ((2, 4, 6), lambda comm: Hierarchical(comm, hosts=2)),
    "hierarchical of 3": ((6,), lambda comm: Hierarchical(comm, hosts=3)),
    "one host": ((2, 3), lambda comm: Hierarchical(comm)),
    "uneven hosts": ((4,), lambda comm: Hierarchical(comm, hosts=[1, 3])),
    "grid": ((2, 4, 6), lambda comm: Grid2D(comm, rows=2, cols=comm.world_size // 2)),
    "auto": ((2, 4, 6), Auto),
    "own": ((3,), lambda comm: Gathering(comm)),
}
CASES = [(name, world) for name, (worlds, _) in BUILDS.items() for world in worlds]


class Gathering(Topology):
    """Everybody gets everything and adds it up: a way of one's own."""

    def reduce(self, flat: Tensor) -> None:
        everything = self.everyone.all_gather(flat).wait().view(self.world_size, -1)
        flat.copy_(everything.sum(0, dtype=flat.dtype))


class Losing(Topology):
    """Forgets the last rank where there are more than three elements."""

    def reduce(self, flat: Tensor) -> None:
        if len(flat) > 3 and self.rank == self.world_size - 1:
            flat.zero_()
        self.everyone.all_reduce(flat).wait()


@pytest.mark.parametrize(("name", "world"), CASES)
def test_equals_the_flat_sum(name: str, world: int) -> None:
    def body(comm: Communicator) -> None:
        way = BUILDS[name][1](comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for size in (0, 1, 3, 35, 1000):
            for dtype in REDUCIBLE:
                mine = torch.randint(0, 9, (size,), generator=generator).to(dtype)
                flat = comm.all_reduce(mine.clone()).wait()
                assert way.all_reduce(mine).wait() is mine
                assert torch.equal(mine, flat)
            real = torch.randn(size, generator=generator, dtype=torch.float64)
            flat = comm.all_reduce(real.clone()).wait()
            way.all_reduce(real).wait()
            torch.testing.assert_close(real, flat, rtol=1e-13, atol=1e-13)
            for narrow in (torch.float32, torch.bfloat16):
                mine = torch.randn(7, size, generator=generator).to(narrow)
                bits = way.all_reduce(mine).wait().view(torch.uint8).tolist()
                assert all(other == bits for other in comm.gather_objects(bits))
        biggest = torch.tensor([float(comm.rank)])
        assert way.all_reduce(biggest, "max").wait() == comm.world_size - 1

    run_ranks(world, body)


def test_sums_in_flight_may_be_waited_for_in_any_order_on_each_rank() -> None:
    def body(comm: Communicator) -> None:
        way = Hierarchical(comm, hosts=2)
        works = [way.all_reduce(torch.full((5,), float(turn))) for turn in range(6)]
        if comm.rank % 2:
            comm.barrier()  # a verb that others come to only after they have waited
        turns = range(6) if comm.rank % 3 else reversed(range(6))
        for turn in turns:
            assert (works[turn].wait() == turn * comm.world_size).all()
        if not comm.rank % 2:
            comm.barrier()

    run_ranks(4, body)


def test_hierarchical_sends_a_share_between_hosts() -> None:
    """Of 4 ranks on 2 hosts each sends a half of the bytes to the other host; every byte is counted inside as well."""

    def body(comm: Communicator) -> None:
        way = Hierarchical(comm, hosts=2)
        way.all_reduce(torch.ones(1)).wait()  # the check at first use is over
        way.inside, way.between = Counting(way.inside), Counting(way.between)
        way.all_reduce(torch.ones(100)).wait()
        assert way.between.bytes == {"all_reduce": 200}
        assert way.inside.bytes == {"reduce_scatter": 400, "all_gather": 200}

    run_ranks(4, body)


def test_a_group_of_all_ranks_keeps_the_topology_and_others_do_not() -> None:
    def body(comm: Communicator) -> None:
        way = Ring(comm)
        twin, pair = way.split([list(range(4))]), way.split([[0, 1], [3, 2]])
        assert type(twin) is Ring and twin.everyone is not way.everyone
        assert not isinstance(pair, Topology) and pair.world_size == 2
        works = [some.all_reduce(torch.ones(9)) for some in (twin, way, pair)]
        assert [int(work.wait()[0]) for work in works] == [4, 4, 2]
        twin.close()
        assert int(way.all_reduce(torch.ones(1)).wait()) == 4
        with pytest.raises(CommError, match="closed"):
            twin.all_reduce(torch.ones(1))

    run_ranks(4, body)


def test_a_wrong_topology_is_refused_on_all_ranks_at_its_first_sum() -> None:
    def body(comm: Communicator) -> str:
        way = Losing(comm)
        work = way.all_reduce(torch.ones(2))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Losing.reduce: got .* for 35 elements") as caught:
                work.wait()
        return str(caught.value)

    assert len({message.split(" on rank")[0] for message in run_ranks(3, body)}) == 1


class Sorted(Topology):
    """Each rank adds its own number first: the same sum, in an order of its own."""

    def reduce(self, flat: Tensor) -> None:
        rows = self.everyone.all_gather(flat).wait().view(self.world_size, -1)
        flat.copy_(flat + sum(row for rank, row in enumerate(rows) if rank != self.rank))


class Whole(Topology):
    """Sums whole numbers."""

    def reduce(self, flat: Tensor) -> None:
        flat.copy_(self.everyone.all_reduce(flat.round()).wait())


class Short(Topology):
    """Has room for so many numbers."""

    def reduce(self, flat: Tensor) -> None:
        self.everyone.all_reduce(flat[:4096]).wait()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Sorted, "for 3 real numbers|for 35 real numbers"),
        (Whole, "for 1 real numbers .*but for its rounding"),
        (Short, "at place 4096 .* for 20011 elements"),
    ],
)
def test_what_a_small_sum_of_whole_numbers_does_not_show(kind: type[Topology], words: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=f"{kind.__name__}.reduce: got .*({words})|it right"):
            kind(comm).check()

    def told(comm: Communicator) -> str:
        try:
            kind(comm).check()
        except ValueError as error:
            return str(error)
        return "nothing"

    run_ranks(3, body)
    assert any(re.search(words, message) for message in run_ranks(3, told))


def test_the_thread_ends_with_its_topology() -> None:
    def body(comm: Communicator) -> None:
        way = Ring(comm)
        way.all_reduce(torch.ones(1)).wait()
        del way

    before = set(threading.enumerate())
    run_ranks(2, body)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_auto_takes_rank_0s_choice_and_its_state_brings_the_choice_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(self: Auto, ways: Any, size: int, *, turns: int) -> dict[str, float]:
        times = {"flat": 1.0, "ring": 0.95, "hierarchical": 0.5 if self.rank == 0 else 2.0, "grid": 9.0}
        return {name: times[name] for name in ways}

    monkeypatch.setattr(Auto, "_time", measured)

    def body(comm: Communicator) -> dict[str, Any]:
        way = Auto(comm, hosts=2)
        assert way.choice == "hierarchical" and "grid" not in way.measured
        twin = way.split([list(range(comm.world_size))])
        way.load_state_dict({"choice": "ring", "world_size": 4})
        assert isinstance(twin, Auto) and (way.choice, twin.choice) == ("ring", "ring")
        way.load_state_dict({"choice": "grid", "world_size": 2})  # of another world: what was measured here stays
        assert int(way.all_reduce(torch.ones(3)).wait()[2]) == 4
        return way.state_dict()

    assert run_ranks(4, body) == [{"choice": "ring", "world_size": 4}] * 4


def test_hosts_from_names_from_numbers_and_from_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(3, find_hosts) == [[[0, 1, 2]]] * 3
    assert run_ranks(4, lambda comm: find_hosts(comm, 2))[0] == [[0, 1], [2, 3]]
    assert run_ranks(4, lambda comm: find_hosts(comm, [1, 3]))[0] == [[0], [1, 2, 3]]
    comm = LocalCommunicator("cpu")
    monkeypatch.setattr(comm, "world_size", 4)
    monkeypatch.setattr(comm, "gather_objects", lambda _: [("a", "0"), ("b", "1"), ("a", "0"), ("b", "2")])
    assert find_hosts(comm) == [[0, 2], [1], [3]]
    for hosts, words in ((3, "divisor"), (0, "divisor"), ([2, 3], r"sizes \[2, 3\] \(sum 5\)"), ([4, 0], "none below")):
        with pytest.raises(ValueError, match=words):
            find_hosts(comm, hosts)


def test_ranks_of_a_host_stand_side_by_side_in_the_ring() -> None:
    def body(comm: Communicator) -> None:
        way = Ring(comm, hosts=1)
        way.hosts = [[0, 2], [1, 3]]
        way._bind(comm)
        assert way.everyone.members == (0, 2, 1, 3)
        assert way.inside.members == ((0, 2) if comm.rank in (0, 2) else (1, 3))
        assert way.between.members == ((0, 1) if comm.rank in (0, 1) else (2, 3))
        mine = torch.arange(10.0) * (comm.rank + 1)
        assert torch.equal(way.all_reduce(mine).wait(), torch.arange(10.0) * 10)

    run_ranks(4, body)


def test_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_ways.py").write_text(
        "from plsc.comm import Topology\n"
        "class Plain(Topology):\n"
        "    def reduce(self, flat):\n"
        "        self.everyone.all_reduce(flat).wait()\n"
        "class Broken(Topology):\n"
        "    def reduce(self, flat):\n"
        "        flat.zero_()\n"
        "class Needy(Plain):\n"
        "    def __init__(self, comm, rows):\n"
        "        super().__init__(comm)\n"
        "class Empty(Topology):\n"
        "    pass\n"
        "def other(comm):\n"
        "    return comm\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def kinds(comm: Communicator) -> list[str]:
        made = [route(comm, name) for name in ("ring", "hierarchical", "hierarchical:3", "grid", "grid:1x6")]
        assert [len(way.hosts) for way in made] == [1, 1, 2, 2, 1]  # type: ignore[attr-defined]
        assert route(comm, "flat") is comm
        return [type(way).__name__ for way in (*made, route(comm, "my_ways:Plain"))]

    assert run_ranks(6, kinds)[0] == ["Ring", "Hierarchical", "Hierarchical", "Grid2D", "Grid2D", "Plain"]
    alone = LocalCommunicator("cpu")
    assert route(alone, "auto") is alone
    for name, words in (
        ("my_ways:Broken", "Broken.reduce: got 0.0"),
        ("my_ways:Nothing", "expected an importable module:Class"),
        ("no_such_module:Way", "No module named"),
        ("my_ways:other", "made a ThreadCommunicator"),
        ("my_ways:Needy", "missing 1 required positional argument: 'rows'; expected a class with the method reduce"),
        ("my_ways:Empty", "abstract .*reduce.*; expected a class with the method reduce"),
        ("grid:2x2", "got 2 rows and 2 columns for 3 ranks"),
        ("hierarchical:2", "got 2 ranks a host for 3 ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            run_ranks(3, route, name)
    for name in ("rings", "grid:2", "hierarchical:x y", ""):
        with pytest.raises(ValueError, match="expected one of flat, ring"):
            check_topology(name)
    assert importlib.util.find_spec("my_ways") and sys.modules["my_ways"]
