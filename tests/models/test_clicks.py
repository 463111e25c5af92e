"""Models of clicks: against their formulas, over nn.Embedding and over a sparse table, and on real data."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plsc.models import DCN, DeepFM, LogisticRegression, WideDeep
from plsc.ps import SparseEmbedding, Table

MODELS = [LogisticRegression, WideDeep, DeepFM, DCN]
IDS = torch.randint(0, 40, (7, 4), generator=torch.Generator().manual_seed(0))
DENSE = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_dense", [0, 3])
def test_gradients_reach_everything(model: type[nn.Module], num_dense: int) -> None:
    torch.manual_seed(0)
    net = model(nn.Embedding(40, 5), num_slots=4, num_dense=num_dense)
    logits = net(DENSE if num_dense else None, IDS)
    assert logits.shape == (7,) and logits.dtype == torch.float32
    F.binary_cross_entropy_with_logits(logits, torch.ones(7)).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and (parameter.numel() == 0 or parameter.grad.abs().sum() > 0), name


def test_linear_part() -> None:
    sparse = nn.Embedding(40, 1)
    net = LogisticRegression(sparse, num_slots=4, num_dense=3)
    nn.init.normal_(net.dense_weight)
    nn.init.constant_(net.bias, 0.5)
    expected = 0.5 + (DENSE * net.dense_weight).sum(1) + sparse(IDS).sum((1, 2))
    torch.testing.assert_close(net(DENSE, IDS), expected)


def test_pairs_of_deepfm() -> None:
    torch.manual_seed(0)
    net = DeepFM(nn.Embedding(40, 5), num_slots=4, num_dense=3)
    rows = net.sparse(IDS)
    fields = [*rows[..., 1:].unbind(1), *(DENSE[:, i : i + 1] * net.dense_vectors[i] for i in range(3))]
    pairs = sum((fields[i] * fields[j]).sum(1) for i in range(7) for j in range(i))
    without = WideDeep.forward(net, DENSE, IDS)
    torch.testing.assert_close(net(DENSE, IDS) - without, pairs)


def test_cross_layers_of_dcn() -> None:
    torch.manual_seed(0)
    net = DCN(nn.Embedding(40, 3), num_slots=4, cross=1, hidden=())
    x = net.sparse(IDS)[..., 1:].flatten(1)
    crossed = x * (x @ net.cross[0].weight.T + net.cross[0].bias) + x
    torch.testing.assert_close(net(None, IDS), net.deep(crossed).squeeze(1) + net.sparse(IDS)[..., 0].sum(1))


def test_table_trains_as_an_embedding_does() -> None:
    """The same weights, ids and rule: the same losses, whether rows are a parameter or in a table."""
    torch.manual_seed(0)
    table = Table(5, rule="adagrad", lr=0.1)
    plain = DeepFM(nn.Embedding(40, 5), num_slots=4, num_dense=3, hidden=(8,))
    table.assign(torch.arange(40), plain.sparse.weight.detach())
    ours = DeepFM(SparseEmbedding(table, pooling="none"), num_slots=4, num_dense=3, hidden=(8,))
    ours.load_state_dict({**ours.state_dict(), **{k: v for k, v in plain.state_dict().items() if "sparse" not in k}})
    rows = torch.optim.Adagrad(plain.sparse.parameters(), lr=0.1)
    rest = [torch.optim.SGD([p for n, p in m.named_parameters() if "sparse" not in n], lr=0.1) for m in (plain, ours)]
    clicked = (IDS.sum(1) % 2).float()
    for _ in range(15):
        losses = [F.binary_cross_entropy_with_logits(model(DENSE, IDS), clicked) for model in (plain, ours)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for optimizer in (rows, *rest):
            optimizer.zero_grad()
        sum(losses).backward()
        for optimizer in (rows, *rest):
            optimizer.step()


def test_bad_calls() -> None:
    net = DeepFM(nn.Embedding(40, 5), num_slots=4, num_dense=3)
    pooled = DeepFM(SparseEmbedding(Table(5)), num_slots=4)
    for call, word in [
        (lambda: net(None, IDS), r"expected \(7, 3\)"),
        (lambda: net(DENSE, IDS[:, :3]), r"\[B, 4\]"),
        (lambda: pooled(None, IDS), "pooling='none'"),
        (lambda: DeepFM(nn.Embedding(40, 1), num_slots=4), "embedding_dim 1"),
        (lambda: DeepFM(nn.Linear(2, 2), num_slots=4), "embedding_dim None"),
    ]:
        with pytest.raises(ValueError, match=word):
            call()


def auc(scores: np.ndarray, clicked: np.ndarray) -> float:
    """Mann-Whitney: the share of (clicked, not clicked) pairs in right order, ties half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(clicked.sum())
    return float((ranks[clicked].sum() - positive * (positive + 1) / 2) / (positive * (len(clicked) - positive)))


def frappe(shared: Path) -> tuple[Tensor, Tensor]:
    with gzip.open(shared / "data" / "ctr" / "frappe_train.libfm.gz", "rt") as file:
        lines = [line.split() for line in file]
    ids = torch.tensor([[int(word.split(":")[0]) for word in words[1:]] for words in lines])
    return ids, torch.tensor([words[0] == "1" for words in lines])


@pytest.mark.slow
def test_deepfm_on_frappe(shared: Path) -> None:
    """Hashed logistic regression reaches an AUC of 0.931 on held-out rows; DeepFM must be 0.01 above."""
    torch.manual_seed(0)
    ids, clicked = frappe(shared)
    order = torch.randperm(len(ids))
    held_out, train = order[: len(ids) // 5], order[len(ids) // 5 :]
    table = Table(17, rule="adagrad", lr=0.05, seed=1)
    model = DeepFM(SparseEmbedding(table, pooling="none"), num_slots=10, dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(8):
        for batch in train[torch.randperm(len(train))].split(512):
            loss = F.binary_cross_entropy_with_logits(model(None, ids[batch]), clicked[batch].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        got = auc(model(None, ids[held_out]).numpy(), clicked[held_out].numpy())
    assert got > 0.941, got
