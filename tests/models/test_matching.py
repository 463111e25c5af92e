"""Skip-gram and two towers: against their formulas, over tables, and learning what goes with what."""

import numpy as np
import pytest
import torch
from torch import nn

from plsc.models import SkipGram, TwoTower
from plsc.ps import SparseEmbedding, Table


def rows(dim: int, *, init: str = "uniform", pooling: str = "none", seed: int = 0) -> SparseEmbedding:
    return SparseEmbedding(Table(dim, rule="adagrad", lr=0.2, init=init, init_scale=0.5, seed=seed), pooling=pooling)


def test_skip_gram_formula() -> None:
    torch.manual_seed(0)
    words, contexts = nn.Embedding(9, 4).double(), nn.Embedding(9, 4).double()
    word, context, negatives = torch.tensor([1, 2]), torch.tensor([3, 1]), torch.tensor([[4, 4, 5], [0, 8, 2]])
    expected = 0.0
    for b in range(2):
        vector = words.weight[word[b]]
        expected -= torch.log(torch.sigmoid(vector @ contexts.weight[context[b]]))
        for k in range(3):
            expected -= torch.log(torch.sigmoid(-vector @ contexts.weight[negatives[b, k]]))
    torch.testing.assert_close(SkipGram(words, contexts)(word, context, negatives), expected / 2)


def test_skip_gram_puts_words_of_one_company_together() -> None:
    """Words 0-9 keep company with each other, and so do 10-19."""
    random = np.random.default_rng(0)
    model = SkipGram(rows(8), rows(8, init="zeros", seed=1))
    assert list(model.parameters()) == []
    for _ in range(150):
        word = random.integers(0, 20, 256)
        context = word // 10 * 10 + random.integers(0, 10, 256)
        model(*(torch.from_numpy(x) for x in (word, context, random.integers(0, 20, (256, 3))))).backward()
    vectors = nn.functional.normalize(model.words.table.pull(torch.arange(20)))
    cosines = vectors @ vectors.T
    same = torch.arange(20) // 10 == (torch.arange(20) // 10)[:, None]
    assert cosines[same].mean() > 0.8 > 0.2 > cosines[~same].mean()


def test_two_tower_formula() -> None:
    torch.manual_seed(0)
    model = TwoTower(nn.EmbeddingBag(9, 4), document_tokens=nn.EmbeddingBag(9, 5), hidden=(6,), width=3).double()
    queries, documents = torch.tensor([[1, 2], [3, 3], [0, 8]]), torch.tensor([[1], [5], [2]])
    q, d = model.embed_queries(queries), model.embed_documents(documents)
    torch.testing.assert_close(q.norm(dim=1), torch.ones(3, dtype=torch.float64))
    likely = torch.softmax(20 * q @ d.T, 1).diagonal()
    torch.testing.assert_close(model(queries, documents), -likely.log().mean())


def test_two_towers_over_one_table_learn_to_match() -> None:
    """A document fits a query that shares its topic: tokens t, t + 100 and t + 200 speak of topic t."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = TwoTower(rows(16, pooling="mean"), hidden=(32,), width=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        topics = random.permutation(40)[:count, None]
        return tuple(torch.from_numpy(topics + 100 * random.integers(low, 3, (count, 4))) for low in (0, 1))

    for _ in range(60):
        loss = model(*draw(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    queries, documents = draw(40)
    nearest = (model.embed_queries(queries) @ model.embed_documents(documents).T).argmax(1)
    assert (nearest == torch.arange(40)).float().mean() > 0.9


def test_bad_calls() -> None:
    skip = SkipGram(nn.Embedding(3, 2), nn.Embedding(3, 2))
    one = torch.zeros(1, dtype=torch.int64)
    for call, word in [
        (lambda: SkipGram(nn.Embedding(3, 2), nn.Embedding(3, 4)), "2 and 4"),
        (lambda: skip(one, one, one), r"\[B, K\]"),
        (lambda: TwoTower(nn.Linear(2, 2)), "EmbeddingBag"),
        (lambda: TwoTower(nn.EmbeddingBag(3, 2))(one[None], torch.zeros(2, 1, dtype=torch.int64)), "pairs"),
    ]:
        with pytest.raises(ValueError, match=word):
            call()
