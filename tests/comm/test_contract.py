"""The contract of a communicator, checked over every backend; run as a script, this file is one rank of processes.

A new backend is one line in CASES. Values are small whole numbers, so that sums are exact in every dtype and all
results can be compared for equality with what plain torch makes of every rank's input.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plsc.comm import (
    Checked,
    CommError,
    Communicator,
    Counting,
    Hierarchical,
    LocalCommunicator,
    Ring,
    connect,
    run_ranks,
    world,
)
from plsc.comm.communicator import OPS, REDUCIBLE

MOVABLE = (*REDUCIBLE, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (5,), (3, 7), (0,), (2, 0, 3), (0, 4))


def data(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, salt: int = 0) -> Tensor:
    """Rank's input: whole numbers in [0, 7), the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 7, tuple(shape), generator=generator).to(dtype)


def all_data(comm: Communicator, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [data(rank, shape, dtype) for rank in range(comm.world_size)]


def same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert not got.requires_grad or got.is_leaf
    numbers = torch.complex64 if expected.dtype.is_complex else torch.float64
    assert torch.equal(got.detach().to(numbers), expected.detach().to(numbers)), f"got {got}, expected {expected}"


def strided(x: Tensor) -> Tensor:
    """The same values in memory with gaps, innermost dimension outermost."""
    wide = torch.empty(*reversed([2 * size for size in x.shape]), dtype=x.dtype)
    view = wide.permute(*reversed(range(x.dim())))[tuple(slice(None, None, 2) for _ in x.shape)]
    view.copy_(x)
    assert not view.is_contiguous()
    return view


def uneven(comm: Communicator) -> list[int]:
    """Rows by rank, some rank without any."""
    return [(2 * rank + 3) % 5 if rank != 1 else 0 for rank in range(comm.world_size)]


def raises(kind: type[Exception], words: str, fn: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        fn()


# ---- the checks: each is called on every rank of the backend under test


def check_all_reduce(comm: Communicator) -> None:
    fold = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    for dtype in REDUCIBLE:
        for op in OPS:
            for shape in SHAPES if dtype == torch.float32 else ((), (3, 5)):
                inputs = all_data(comm, shape, dtype)
                expected = inputs[0].clone()
                for other in inputs[1:]:
                    expected = fold[op](expected, other)
                x = data(comm.rank, shape, dtype)
                assert comm.all_reduce(x, op).wait() is x
                same(x, expected)


def check_all_reduce_any_memory(comm: Communicator) -> None:
    expected = torch.stack(all_data(comm, (3, 4, 5, 6))).sum(0)
    for view in (strided, lambda x: x.to(memory_format=torch.channels_last), lambda x: torch.nn.Parameter(x)):
        x = view(data(comm.rank, (3, 4, 5, 6)))
        assert comm.all_reduce(x).wait() is x
        same(x, expected)
    whole = torch.full((4, 6), -1.0)
    comm.all_reduce(whole[::2, 1:3].copy_(data(comm.rank, (2, 2)))).wait()
    assert (whole[1::2] == -1).all() and (whole[:, 3:] == -1).all()


def check_all_reduce_keeps_nan(comm: Communicator) -> None:
    last = comm.world_size - 1
    for dtype in (torch.float32, torch.float16):
        for op in ("sum", "max", "min"):
            x = torch.tensor([torch.nan if comm.rank == last else 1.0, torch.inf, 3.0 if op == "sum" else -torch.inf])
            x = comm.all_reduce(x.to(dtype), op).wait()
            assert x[0].isnan() and x[1] == torch.inf and x[2] == (3.0 * comm.world_size if op == "sum" else -torch.inf)


def check_all_reduce_same_bits(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
        bits = comm.all_reduce(x).wait().view(torch.uint8).tolist()
        assert all(other == bits for other in comm.gather_objects(bits))


def check_all_gather(comm: Communicator) -> None:
    for dtype in MOVABLE:
        for shape in SHAPES if dtype in (torch.float32, torch.float8_e4m3fn) else ((), (3, 5)):
            x = data(comm.rank, shape, dtype)
            got = comm.all_gather(x).wait()
            same(
                got,
                torch.cat(
                    [part.reshape(-1, *shape[1:]) if shape == () else part for part in all_data(comm, shape, dtype)]
                ),
            )
            got.zero_()
            same(x, data(comm.rank, shape, dtype))


def check_all_gather_uneven(comm: Communicator) -> None:
    sizes = uneven(comm)
    for dtype in (torch.float64, torch.int16):
        for rest in ((), (3,), (2, 3), (0,)):
            parts = [data(rank, (rows, *rest), dtype) for rank, rows in enumerate(sizes)]
            same(comm.all_gather(parts[comm.rank], sizes=sizes).wait(), torch.cat(parts))
    parts = [data(rank, (rows, 3, 2)) for rank, rows in enumerate(sizes)]
    if sizes[comm.rank]:
        parts[comm.rank] = strided(parts[comm.rank])
    same(comm.all_gather(parts[comm.rank].requires_grad_(), sizes=sizes).wait(), torch.cat(parts))
    nothing = [0] * comm.world_size
    same(comm.all_gather(torch.empty(0, 3), sizes=nothing).wait(), torch.empty(0, 3))
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    same(comm.all_gather(z).wait(), torch.cat([z] * comm.world_size))


def check_reduce_scatter(comm: Communicator) -> None:
    even, sizes = [2] * comm.world_size, uneven(comm)
    for dtype in REDUCIBLE:
        for rows, given in ((even, None), (even, even), (sizes, sizes)):
            for rest in ((), (3, 2), (0,)):
                inputs = all_data(comm, (sum(rows), *rest), dtype)
                for x in (inputs[comm.rank], strided(inputs[comm.rank]) if rest == (3, 2) else inputs[comm.rank]):
                    got = comm.reduce_scatter(x, sizes=given).wait()
                    same(got, torch.stack(inputs).sum(0, dtype=dtype).split(rows)[comm.rank])
                    got.zero_()
                    same(x, data(comm.rank, x.shape, dtype))
    nothing = [0] * comm.world_size
    same(comm.reduce_scatter(torch.empty(0, 3), sizes=nothing).wait(), torch.empty(0, 3))
    same(comm.reduce_scatter(torch.empty(0)).wait(), torch.empty(0))


def check_reduce_scatter_rounds_once(comm: Communicator) -> None:
    """2048 + 1 is 2048 in float16: adding ones one by one in it would never arrive."""
    x = torch.full((comm.world_size,), 2048.0 if comm.rank == 0 else 1.0, dtype=torch.float16)
    expected = torch.tensor([2048.0 + comm.world_size - 1]).half()
    same(comm.reduce_scatter(x).wait(), expected)


def check_all_to_all(comm: Communicator) -> None:
    ranks, me = range(comm.world_size), comm.rank
    rows = [[(source + 2 * target) % 4 for target in ranks] for source in ranks]  # sent by source to target
    for dtype in MOVABLE:
        for rest in ((), (2, 3), (0,)):
            sent = [data(r, (sum(rows[r]), *rest), dtype) for r in ranks]
            send, receive = rows[me], [rows[source][me] for source in ranks]
            expected = torch.cat([sent[source].split(rows[source])[me] for source in ranks])
            for x in (sent[me], strided(sent[me]) if rest == (2, 3) and len(sent[me]) else sent[me]):
                same(comm.all_to_all(x, send_sizes=send, recv_sizes=receive).wait(), expected)
    counts = comm.all_to_all(torch.tensor(rows[me])).wait()
    assert counts.tolist() == [rows[source][me] for source in ranks]
    nothing = [0] * comm.world_size
    same(comm.all_to_all(torch.empty(0, 3), send_sizes=nothing, recv_sizes=nothing).wait(), torch.empty(0, 3))


def check_broadcast(comm: Communicator) -> None:
    for root in range(comm.world_size):
        for dtype in MOVABLE:
            for shape in SHAPES if dtype == torch.float32 else ((), (3, 5)):
                x = data(comm.rank, shape, dtype)
                assert comm.broadcast(x, root=root).wait() is x
                same(x, data(root, shape, dtype))
        for view in (strided, torch.nn.Parameter):
            x = view(data(comm.rank, (3, 4)))
            same(comm.broadcast(x, root=root).wait(), data(root, (3, 4)))
            same(x, data(root, (3, 4)))


def check_several_in_flight(comm: Communicator) -> None:
    inputs = all_data(comm, (4 * comm.world_size, 3))
    mine, total = inputs[comm.rank], torch.stack(inputs).sum(0)
    works = [
        (comm.all_reduce(mine.clone()), total),
        (comm.all_gather(mine), torch.cat(inputs)),
        (comm.broadcast(mine.clone(), root=comm.world_size - 1), inputs[-1]),
        (comm.reduce_scatter(mine), total.chunk(comm.world_size)[comm.rank]),
        (comm.all_to_all(mine), torch.cat([x.chunk(comm.world_size)[comm.rank] for x in inputs])),
        (comm.all_reduce(mine.clone(), "max"), torch.stack(inputs).amax(0)),
    ]
    for work, expected in reversed(works):
        first = work.wait()
        same(first, expected)
        assert work.wait() is first
    doubled = comm.all_reduce(mine.clone()).then(lambda x: 2 * x)
    same(doubled.wait(), 2 * total)


def check_objects_and_barrier(comm: Communicator) -> None:
    comm.barrier()
    got = comm.gather_objects({"rank": comm.rank, "long": "x" * 100 * comm.rank})
    assert [(one["rank"], len(one["long"])) for one in got] == [(r, 100 * r) for r in range(comm.world_size)]
    assert comm.gather_objects(None) == [None] * comm.world_size


def check_split(comm: Communicator) -> None:
    n = comm.world_size
    groups = [list(range(n - 1, 0, -1)), [0]] if n > 1 else [[0]]  # ranks in reverse, and one on its own
    group = next(group for group in groups if comm.rank in group)
    part = comm.split(groups)
    assert (part.rank, part.world_size) == (group.index(comm.rank), len(group))
    assert part.members == tuple(comm.members[rank] for rank in group)
    assert part.gather_objects(comm.rank) == group
    x = comm.all_reduce(torch.ones(2))  # the groups and the whole do not disturb each other
    same(part.all_reduce(data(comm.rank, (3,))).wait(), torch.stack([data(r, (3,)) for r in group]).sum(0))
    same(part.broadcast(data(comm.rank, (3,)), root=len(group) - 1).wait(), data(group[-1], (3,)))
    same(part.all_gather(data(comm.rank, (2,))).wait(), torch.cat([data(r, (2,)) for r in group]))
    same(x.wait(), torch.full((2,), float(n)))
    alone = part.split([[rank] for rank in range(part.world_size)])  # unlike numbers of splits on unlike ranks
    assert alone.gather_objects(comm.rank) == [comm.rank]
    if part.world_size > 1:
        again = part.split([list(range(part.world_size))])
        assert again.members == part.members
        again.close()
    part.close()
    raises(CommError, "closed", part.barrier)
    twin = comm.split([list(range(n))])
    same(twin.all_reduce(torch.ones(1)).wait(), torch.full((1,), float(n)))
    raises(ValueError, "exactly one group", lambda: comm.split([[0]] * 2))
    raises(ValueError, "exactly one group", lambda: comm.split([list(range(n + 1))]))


def check_misuse(comm: Communicator) -> None:
    """Wrong arguments are refused before anything travels: the verbs after them still agree."""
    n, x = comm.world_size, torch.ones(6, 2)
    for bad_type in (x.to(torch.int16), x.bool(), x.to(torch.complex64), x.to(torch.float8_e4m3fn)):
        words = f"got dtype {bad_type.dtype}, expected one of float32"
        raises(ValueError, f"all_reduce: {words}", partial(comm.all_reduce, bad_type))
        raises(ValueError, f"reduce_scatter: {words}", partial(comm.reduce_scatter, bad_type))
    raises(ValueError, "got op 'mean'", lambda: comm.all_reduce(x, "mean"))
    raises(ValueError, r"x\.clone\(\)", lambda: comm.all_reduce(torch.ones(1).expand(3)))
    raises(ValueError, r"x\.clone\(\)", lambda: comm.broadcast(torch.ones(1).expand(3)))
    raises(ValueError, f"got root {n}", lambda: comm.broadcast(x, root=n))
    raises(ValueError, "got root -1", lambda: comm.broadcast(x, root=-1))
    raises(ValueError, "one a rank", lambda: comm.all_gather(x, sizes=[6] * (n + 1)))
    raises(ValueError, "got 6 rows on rank", lambda: comm.all_gather(x, sizes=[5] * n))
    raises(ValueError, "none negative", lambda: comm.reduce_scatter(x, sizes=[-6] * n))
    raises(ValueError, "expected a sum of 6", lambda: comm.reduce_scatter(x, sizes=[7] * n))
    if n > 1:
        raises(ValueError, "multiple of", lambda: comm.reduce_scatter(torch.ones(n + 1)))
        raises(ValueError, "multiple of", lambda: comm.all_to_all(torch.ones(n + 1)))
        bad = [2 if rank == comm.rank else 0 for rank in range(n)]
        raises(ValueError, "sends itself", lambda: comm.all_to_all(torch.ones(2), send_sizes=bad, recv_sizes=[1] * n))
    raises(ValueError, "both or none", lambda: comm.all_to_all(x, send_sizes=[6] + [0] * (n - 1)))
    raises(ValueError, "0-d", lambda: comm.reduce_scatter(torch.tensor(1.0)))
    raises(ValueError, "dense", lambda: comm.all_reduce(x.to_sparse()))
    raises(ValueError, "dense", lambda: comm.all_gather([1.0]))  # type: ignore[arg-type]
    if not comm.any_device:
        raises(ValueError, "got a tensor on meta", lambda: comm.all_reduce(x.to("meta")))
    same(comm.all_reduce(torch.ones(1)).wait(), torch.full((1,), float(n)))


def check_checked(comm: Communicator) -> None:
    """Every field that can differ is named with its ranks, on every rank, and the ranks stay in step."""
    checked, n, odd = Checked(comm), comm.world_size, comm.rank == comm.world_size - 1
    everyone = list(range(n))
    for good in (check_all_gather_uneven, check_all_to_all, check_split, check_several_in_flight):
        good(checked)
    if n == 1:
        return
    last, x = f"rank {comm.members[-1]} has ", torch.ones(2, 3)  # errors name ranks of the world
    wrong: list[tuple[str, Callable[[], Any]]] = [
        (f"verb differs: .*{last}barrier", lambda: checked.barrier() if odd else checked.all_reduce(x)),
        (f"dtype differs: .*{last}float64", lambda: checked.all_reduce(x.double() if odd else x)),
        (rf"shape differs: .*{last}\(3, 2\)", lambda: checked.all_reduce(x.t() if odd else x)),
        (f"op differs: .*{last}max", lambda: checked.all_reduce(x, "max" if odd else "sum")),
        (f"root differs: .*{last}0", lambda: checked.broadcast(x, root=0 if odd else 1)),
        (rf"after dim 0 differs: .*{last}\(1,\)", lambda: checked.all_gather(x[:, :1] if odd else x)),
        (f"sizes differs: .*{last}", lambda: checked.all_gather(x[:1] if odd else x)),
        (f"shape differs: .*{last}", lambda: checked.reduce_scatter(torch.ones(2 * n if odd else n))),
        (f"groups differs: .*{last}", lambda: checked.split([everyone[::-1] if odd else everyone])),
        (
            f"rank {comm.members[-1]} sends 2 rows to rank {comm.members[0]}, which expects 1",
            lambda: checked.all_to_all(torch.ones(n + odd), send_sizes=[1 + odd] + [1] * (n - 1), recv_sizes=[1] * n),
        ),
    ]
    for words, fn in wrong:
        raises(CommError, words, fn)
    same(checked.all_reduce(torch.ones(1)).wait(), torch.full((1,), float(n)))


def check_counting(comm: Communicator) -> None:
    counting, n = Counting(comm), comm.world_size
    counting.all_reduce(torch.ones(3, 5)).wait()
    counting.all_reduce(torch.ones(2).half(), "max").wait()
    counting.all_gather(torch.ones(4, dtype=torch.int64)).wait()
    counting.reduce_scatter(torch.ones(2 * n).double()).wait()
    counting.all_to_all(torch.ones(n, 0)).wait()
    counting.broadcast(torch.ones(7, dtype=torch.uint8)).wait()
    counting.barrier()
    counting.split([list(range(n))]).all_reduce(torch.ones(1)).wait()
    calls = {"all_reduce": 3, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1, "barrier": 1}
    assert counting.calls == {**calls, "split": 1}
    moved = {"all_reduce": 60 + 4 + 4, "all_gather": 32, "reduce_scatter": 16 * n, "all_to_all": 0, "broadcast": 7}
    assert counting.bytes == {**moved, "barrier": 0, "split": 0}
    counting.reset()
    assert not counting.calls and not counting.bytes
    same(Checked(counting).all_reduce(torch.ones(1)).wait(), torch.full((1,), float(n)))
    assert counting.calls == {"gather_objects": 1, "all_reduce": 1}


def check_face(comm: Communicator) -> None:
    assert 0 <= comm.rank < comm.world_size
    assert len(comm.members) == comm.world_size
    assert copy.deepcopy({"comm": comm})["comm"] is comm
    assert str(comm.world_size) in repr(comm)
    assert comm.gather_objects(comm.rank) == list(range(comm.world_size))


def check_closing(comm: Communicator) -> None:
    """The last check: nothing works after it."""
    comm.close()
    comm.close()
    for verb in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.broadcast):
        raises(CommError, "closed", partial(verb, torch.ones(2 * comm.world_size)))
    raises(CommError, "closed", comm.barrier)
    raises(CommError, "closed", lambda: comm.gather_objects(1))
    raises(CommError, "closed", lambda: comm.split([[0]]))


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    check_face,
    check_all_reduce,
    check_all_reduce_any_memory,
    check_all_reduce_keeps_nan,
    check_all_reduce_same_bits,
    check_all_gather,
    check_all_gather_uneven,
    check_reduce_scatter,
    check_reduce_scatter_rounds_once,
    check_all_to_all,
    check_broadcast,
    check_several_in_flight,
    check_objects_and_barrier,
    check_split,
    check_misuse,
    check_checked,
    check_counting,
    check_closing,
)


def contract(comm: Communicator) -> str:
    """All checks in order; the error of one says which it was."""
    for check in CHECKS:
        try:
            check(comm)
        except Exception as error:
            error.add_note(f"in {check.__name__}, rank {comm.rank} of {comm.world_size}, backend {comm.name}")
            raise
    return "kept"


# ---- the backends


def in_threads(world_size: int) -> None:
    assert run_ranks(world_size, contract) == ["kept"] * world_size


def in_hosts(world_size: int) -> None:
    """Topologies have the face of what they go around."""
    assert run_ranks(world_size, lambda comm: contract(Hierarchical(comm, hosts=2))) == ["kept"] * world_size


def in_a_ring(world_size: int) -> None:
    assert run_ranks(world_size, lambda comm: contract(Ring(comm))) == ["kept"] * world_size


def alone(world_size: int) -> None:
    assert contract(LocalCommunicator("cpu")) == "kept"


CASES = (
    pytest.param(alone, 1, id="local"),
    *(pytest.param(in_threads, size, id=f"threads-{size}") for size in (1, 2, 3, 4)),
    pytest.param(in_hosts, 4, id="hierarchical-4"),
    pytest.param(in_a_ring, 3, id="ring-3"),
    pytest.param("gloo", 3, id="gloo-3-and-2"),
    pytest.param("gloo", 4, id="gloo-4-and-2", marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("how", "world_size"), CASES)
def test_contract(how: Any, world_size: int, start_ranks: Any, finish_ranks: Any) -> None:
    """how: a function that runs the ranks, or the name of a backend between processes."""
    if callable(how):
        how(world_size)
        return
    texts = finish_ranks(start_ranks(Path(__file__), world_size, how), 240.0)
    assert all(text.strip().endswith("kept") for text in texts), "\n".join(texts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    this = connect(sys.argv[1], timeout=30.0)
    assert world() is this and os.environ["RANK"] == str(this.rank)
    assert this.members == tuple(range(this.world_size))
    contract(this.split([[1, 0], list(range(2, this.world_size))]))  # a world of two, without starting it anew
    if this.world_size == 4:
        contract(Hierarchical(this.split([list(range(4))]), hosts=2))
    print(contract(this))
