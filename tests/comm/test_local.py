"""Ranks as threads: failures reach the caller and free the others, mismatches are named, nothing is left behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from plsc.comm import CommError, Communicator, ThreadCommunicator, run_ranks, world


def test_results_in_rank_order_and_arguments() -> None:
    assert run_ranks(3, lambda comm, a, b: (comm.rank, a + b), 1, 2) == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(ValueError, match="expected at least 1"):
        run_ranks(0, lambda comm: None)


def test_a_failing_rank_ends_the_others() -> None:
    seen: dict[int, str] = {}
    posted = threading.Barrier(3)

    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            posted.wait()
            raise KeyError("mine")
        work = comm.all_reduce(torch.ones(2))
        posted.wait()
        try:
            work.wait()
        except CommError as error:
            seen[comm.rank] = str(error)
            with pytest.raises(CommError, match="rank 2 failed"):  # waiting again gives the same answer
                work.wait()
            raise

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, body)
    assert seen == dict.fromkeys((0, 1), "rank 2 failed: KeyError: 'mine'")


def test_a_failure_reaches_the_groups_of_a_split() -> None:
    def body(comm: Communicator) -> None:
        part = comm.split([[0, 1], [2, 3]])
        if comm.rank == 3:
            raise ZeroDivisionError
        part.barrier()
        part.barrier()
        comm.barrier()

    with pytest.raises(ZeroDivisionError):
        run_ranks(4, body)


def test_missing_ranks_are_named() -> None:
    posted, reported = threading.Barrier(2), threading.Barrier(4)

    def sleeper(comm: Communicator) -> str:
        text = ""
        if comm.rank in (0, 2):
            work = comm.all_gather(torch.ones(2))
            posted.wait()
            with pytest.raises(CommError) as caught:
                work.wait()
            text = str(caught.value)
        reported.wait()
        return text

    texts = run_ranks(4, sleeper, timeout=0.3)
    assert texts[0] == "all_gather (verb 0 of rank 0): ranks 1, 3 did not come within 0.3 s"
    assert texts[2] == "all_gather (verb 0 of rank 2): ranks 1, 3 did not come within 0.3 s"

    def leaver(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(CommError, match=r"barrier \(verb 0 of rank \d\): rank 1 finished without coming to it"):
        run_ranks(3, leaver)


def test_a_timeout_starts_with_the_wait() -> None:
    posted = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        work = comm.all_reduce(torch.ones(1))
        posted.wait()
        time.sleep(0.5 if comm.rank else 0.0)
        assert work.wait().item() == 2.0

    run_ranks(2, body, timeout=0.4)


def test_mismatches_are_named_on_every_rank() -> None:
    def body(comm: Communicator) -> list[str]:
        texts, odd, x = [], comm.rank == 1, torch.ones(2, 3)
        for attempt in (
            lambda: comm.broadcast(x).wait() if odd else comm.all_reduce(x).wait(),
            lambda: comm.all_reduce(x.half() if odd else x).wait(),
            lambda: comm.all_reduce(x[:1] if odd else x).wait(),
            lambda: comm.all_reduce(x, "min" if odd else "max").wait(),
            lambda: comm.all_gather(x[:1] if odd else x).wait(),
            lambda: comm.barrier() if odd else comm.gather_objects(1),
            lambda: comm.split([[0], [1], [2]] if odd else [[0, 1, 2]]),
        ):
            with pytest.raises(CommError) as caught:
                attempt()
            texts.append(str(caught.value))
        assert comm.all_reduce(x).wait()[0, 0] == 3.0  # still in step
        return texts

    texts = run_ranks(3, body)
    assert texts[0] == texts[2]
    for text, words in zip(
        texts[0],
        (
            "verb differs: ranks 0, 2 have all_reduce, rank 1 has broadcast",
            "dtype differs: ranks 0, 2 have float32, rank 1 has float16",
            "shape differs: ranks 0, 2 have (2, 3), rank 1 has (1, 3)",
            "op differs: ranks 0, 2 have max, rank 1 has min",
            "sizes differs: ranks 0, 2 have (2, 2, 2), rank 1 has (1, 1, 1)",
            "verb differs: ranks 0, 2 have gather_objects, rank 1 has barrier",
            "groups differs: ranks 0, 2 have ((0, 1, 2),), rank 1 has ((0,), (1,), (2,))",
        ),
        strict=True,
    ):
        assert words in text


def test_nothing_is_left_behind() -> None:
    def body(comm: Communicator) -> int:
        assert isinstance(comm, ThreadCommunicator)
        works = [comm.all_reduce(torch.ones(3)) for _ in range(5)]
        for work in works[::-1]:
            work.wait()
        comm.barrier()
        return len(comm._group.slots)

    sizes = run_ranks(3, body)
    assert min(sizes) == 0 and max(sizes) <= 1  # the barrier's own, until the last rank has left it


def test_a_posted_tensor_is_a_copy() -> None:
    def body(comm: Communicator) -> None:
        x = torch.full((2,), float(comm.rank))
        work = comm.all_gather(x)
        x.fill_(9.0)
        assert work.wait().tolist() == [0.0, 0.0, 1.0, 1.0]

    run_ranks(2, body)


def test_world_is_the_threads_own_also_in_backward() -> None:
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * (world().rank + 1)

    def body(comm: Communicator) -> float:
        assert world() is comm
        x = torch.ones(1, requires_grad=True)
        Look.apply(x).backward()
        assert run_ranks(2, lambda inner: world() is inner) == [True, True]
        assert world() is comm and x.grad is not None
        return x.grad.item()

    outside = world()
    assert run_ranks(3, body) == [1.0, 2.0, 3.0]
    assert world() is outside
