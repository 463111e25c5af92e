"""Shards are cut as torch.chunk cuts, and a mark stays on its parameter."""

import pytest
import torch

from plsc.comm import Communicator, LocalCommunicator, Shard, mark, run_ranks, shard_of


def test_cut_as_torch_chunks() -> None:
    for total in (*range(40), 1000, 93_431):
        for world_size in (1, 2, 3, 4, 7, 8):
            shards = [Shard(total, rank, world_size) for rank in range(world_size)]
            chunks = [chunk.tolist() for chunk in torch.arange(total).chunk(world_size)] if total else []
            chunks += [[] for _ in range(world_size - len(chunks))]
            assert [list(range(total))[shard.start : shard.stop] for shard in shards] == chunks
            assert [shard.size for shard in shards] == shards[0].sizes() == list(map(len, chunks))
            assert all(rank == index // shards[0].step for rank, part in enumerate(chunks) for index in part)


def test_last_shards_may_be_empty() -> None:
    assert Shard(5, 0, 4).sizes() == [2, 2, 1, 0]
    assert (Shard(5, 3, 4).start, Shard(5, 3, 4).stop) == (5, 5)


def test_of_a_communicator() -> None:
    def body(comm: Communicator) -> Shard:
        return Shard.of(7, comm)

    assert run_ranks(3, body) == [Shard(7, rank, 3) for rank in range(3)]
    assert Shard.of(7, LocalCommunicator("cpu")).size == 7


@pytest.mark.parametrize(("total", "rank", "world_size"), [(-1, 0, 1), (3, 2, 2), (3, -1, 2), (3, 0, 0)])
def test_refuses_what_is_no_cut(total: int, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="expected total >= 0"):
        Shard(total, rank, world_size)


def test_mark() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 4))
    assert shard_of(param) is None
    assert mark(param, Shard(5, 1, 4)) is param
    module = torch.nn.Module()
    module.weight = param
    assert shard_of(module.double().weight) == Shard(5, 1, 4)
    with pytest.raises(ValueError, match="expected 1 rows"):
        mark(param, Shard(5, 2, 4))
    with pytest.raises(ValueError, match="mark: got shape"):
        mark(torch.tensor(1.0), Shard(5, 2, 4))
