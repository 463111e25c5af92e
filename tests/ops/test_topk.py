"""The k best of rows that come in blocks: equal to a stable sort of all scores, ties and too few rows included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import plsc.ops.topk as topk
from plsc.comm import Communicator, Shard, run_ranks
from plsc.ops import block_topk, split_topk


def twin(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Falling scores, the lower row first among equals, of the whole matrix."""
    order = scores.sort(dim=1, descending=True, stable=True)
    return order.values[:, :k], order.indices[:, :k]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 700),
    queries=st.integers(1, 5),
    k=st.integers(1, 9),
    cut=st.integers(1, 90),
    levels=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_as_a_stable_sort_whatever_the_blocks(
    rows: int, queries: int, k: int, cut: int, levels: int, seed: int
) -> None:
    """Whole numbers: products are exact, and few levels give many ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-levels, levels + 1, (queries, 2), generator=generator).float()
    weight = torch.randint(-levels, levels + 1, (rows, 2), generator=generator).float()
    k = min(k, rows)
    before = topk.SCORES, topk.GROUP
    topk.SCORES, topk.GROUP = 64, 4  # groups are used from 4 * 4 * k scores on
    try:
        scores, found = block_topk(x, weight.split(cut), k, first=10)
    finally:
        topk.SCORES, topk.GROUP = before
    wanted, at = twin(x @ weight.T, k)
    assert torch.equal(scores, wanted) and torch.equal(found, at + 10)


def test_real_numbers_at_full_size() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 16, generator=generator), torch.randn(40_000, 16, generator=generator)
    scores, found = block_topk(x, weight.split(1000), 10)
    wanted, at = twin((x.double() @ weight.double().T), 10)
    assert torch.equal(found, at)
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-5, atol=1e-6)


def test_fewer_rows_than_k_and_nan() -> None:
    scores, found = block_topk(torch.ones(1, 2), [torch.ones(2, 2)], 3)
    assert scores.tolist() == [[2, 2, -torch.inf]] and found.tolist() == [[0, 1, -1]]
    scores, _ = block_topk(torch.full((1, 2), torch.nan), [torch.ones(5, 2)], 2)
    assert scores.isnan().all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_over_ranks_each_for_its_own_queries(ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-3, 4, (11, 2, 4), generator=generator).float()  # two centres a class
    x = torch.randint(-3, 4, (ranks * 2, 4), generator=generator).float()
    bias = torch.randint(-3, 4, (11,), generator=generator).float()

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        shard = Shard.of(11, comm)
        mine = slice(shard.start, shard.stop)
        own = x[comm.rank * 2 : comm.rank * 2 + 2]
        return split_topk(own, weight[mine].split(2), 4, comm=comm, shard=shard, bias=bias[mine])

    found = run_ranks(ranks, body)
    wanted, at = twin(torch.einsum("nd,ckd->nck", x, weight).amax(2) + bias, 4)
    assert torch.equal(torch.cat([scores for scores, _ in found]), wanted)
    assert torch.equal(torch.cat([classes for _, classes in found]), at)
