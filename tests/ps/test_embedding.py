"""The embedding layer over a table: equal to nn.EmbeddingBag with a sparse optimizer, shapes, modes, states."""

import copy
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from plsc.ps import SGD, Adagrad, Served, SparseEmbedding, Table, export, hash_strings, slot_keys


def bags(random: np.random.Generator, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = random.integers(0, 5, 16)  # empty bags among them
    lengths[-1] = 2
    ids = torch.from_numpy(random.integers(0, num_keys, lengths.sum()))
    return ids, torch.from_numpy(np.r_[0, np.cumsum(lengths)[:-1]])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_equals_embedding_bag(rule: str, pooling: str, weighted: bool) -> None:
    if weighted and pooling == "mean":
        return  # torch has no weighted mean either
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(30, 6, mode=pooling, sparse=True)
    layer = SparseEmbedding.from_bag(bag, rule=rule, lr=0.1)
    optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[rule](bag.parameters(), lr=0.1)
    random = np.random.default_rng(0)
    assert list(layer.parameters()) == []
    for _ in range(20):
        ids, offsets = bags(random, 30)
        weights = torch.rand(len(ids)) if weighted else None
        target = torch.randn(16, 6)
        expected = bag(ids, offsets, per_sample_weights=weights)
        got = layer(ids, offsets, weights)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        ((expected - target) ** 2).sum().backward()
        ((got - target) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(layer.table.pull(torch.arange(30)), bag.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_padding_counts_for_nothing(pooling: str) -> None:
    bag = nn.EmbeddingBag(10, 4, mode=pooling, padding_idx=3)
    layer = SparseEmbedding.from_bag(bag, rule="sgd", lr=1.0)
    ids = torch.tensor([[3, 3, 3], [1, 3, 2], [1, 1, 1]])
    torch.testing.assert_close(layer(ids), bag(ids))
    before = layer.table.pull(torch.arange(10))
    layer(ids).sum().backward()
    changed = (layer.table.pull(torch.arange(10)) != before).any(1)
    assert changed.tolist() == [False, True, True] + [False] * 7
    rows = SparseEmbedding(layer.table, pooling="none", padding_key=3)(ids)
    assert (rows[0] == 0).all() and (rows[2] != 0).any()


def test_shapes() -> None:
    table = Table(5)
    for ids, pooling, shape in [
        (torch.zeros(2, 3, dtype=torch.long), "none", (2, 3, 5)),
        (torch.zeros((), dtype=torch.long), "none", (5,)),
        (torch.zeros(2, 3, dtype=torch.long), "sum", (2, 5)),
        (torch.zeros(2, 3, 4, dtype=torch.long), "mean", (2, 3, 5)),
        (torch.zeros(2, 0, dtype=torch.long), "sum", (2, 5)),
        (torch.zeros(0, 4, dtype=torch.long), "sum", (0, 5)),
        (torch.zeros(0, 4, dtype=torch.long), "none", (0, 4, 5)),
    ]:
        out = SparseEmbedding(table, pooling=pooling)(ids)
        assert out.shape == shape
        out.sum().backward() if out.requires_grad else None
    assert len(table) == 1


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_the_padding_key_has_no_row(pooling: str) -> None:
    table = Table(4, rule=SGD(weight_decay=0.5), lr=1.0)
    table.assign(torch.tensor([3, 7]), torch.ones(2, 4))
    layer = SparseEmbedding(table, pooling=pooling, padding_key=3)
    for ids in ([[3, 7, 3], [5, 3, 3]], [[3, 3, 3]]):
        out = layer(torch.tensor(ids))
        assert out.isfinite().all()
        out.sum().backward()
    assert len(table) == 3 and table.pull(torch.tensor([3])).tolist() == [[1.0] * 4]
    new = Table(4)
    SparseEmbedding(new, pooling=pooling, padding_key=3)(torch.full((2, 2), 3)).sum().backward()
    assert len(new) == 0


def test_an_embedding_bags_call_is_taken_as_it_is() -> None:
    bag = nn.EmbeddingBag(10, 4, mode="sum")
    layer = SparseEmbedding.from_bag(bag, rule="sgd", lr=0.1)
    for kind in (torch.int32, torch.int64):
        call = {
            "input": torch.tensor([1, 2, 2, 9], dtype=kind),
            "offsets": torch.tensor([0, 3], dtype=kind),
            "per_sample_weights": torch.rand(4),
        }
        torch.testing.assert_close(layer(**call), bag(**call))
    empty, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for module in (bag, layer):
        out = module(empty, offsets)
        assert out.shape == (3, 4) and out.requires_grad
        out.sum().backward()
    assert len(layer.table) == 10


def test_frozen_rows_stay() -> None:
    table = Table(4, lr=1.0)
    layer = SparseEmbedding(table).requires_grad_(False)
    assert not layer(torch.tensor([[1]])).requires_grad and len(table) == 0
    layer.requires_grad_(True)(torch.tensor([[1]])).sum().backward()
    assert len(table) == 1


def test_compiled_nets_learn_as_plain_ones() -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(SparseEmbedding(Table(4, lr=0.5), pooling="mean"), nn.Linear(4, 1))
        run = torch.compile(net, backend="eager") if compiled else net
        for _ in range(3):
            loss = (run(torch.tensor([[1, 2], [2, 3]])) - 1).square().mean()
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_served_rows_have_a_state_and_no_layer_is_pickled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = Table(4)
    table.pull(torch.arange(3))
    export(table, tmp_path / "e.safetensors")
    served = SparseEmbedding(Served(tmp_path / "e.safetensors")).eval()
    trained = SparseEmbedding(table)
    served.load_state_dict(trained.state_dict())
    assert not caplog.records
    trained.load_state_dict(served.state_dict())
    with pytest.raises(TypeError, match=r"save its state_dict\(\) and table\.save"):
        torch.save(trained, tmp_path / "layer.pt")
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(trained)


def test_arrays_that_numpy_cannot_show_are_refused() -> None:
    table, keys = Table(2), torch.tensor([1])
    for grads, word in (
        (torch.ones(1, 2).bfloat16(), "bfloat16, expected float32"),
        (torch.ones(1, 2).to_sparse(), "to_dense"),
        (np.ma.masked_array(np.ones((1, 2), np.float32), [[True, False]]), "MaskedArray"),
    ):
        with pytest.raises(ValueError, match=word):
            table.push(keys, grads)
    assert len(table) == 0


def test_eval_creates_and_trains_nothing() -> None:
    layer = SparseEmbedding(Table(3))
    ids = torch.arange(6).reshape(2, 3)
    out = layer.eval()(ids)
    assert not out.requires_grad and len(layer.table) == 0
    with torch.no_grad():
        layer.train()(ids)
    assert len(layer.table) == 0
    torch.testing.assert_close(layer(ids), out)
    assert len(layer.table) == 6


def test_autocast_and_a_scaled_loss() -> None:
    plain, scaled = (SparseEmbedding(Table(4, rule="sgd", lr=0.5)) for _ in range(2))
    ids = torch.tensor([[1, 2, 2]])
    plain(ids).square().sum().backward()
    scaled.grad_scale = 1024.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = scaled(ids)
        assert out.dtype == torch.float32
    (out.square().sum() * 1024).backward()
    assert torch.equal(plain.table.pull(ids[0]), scaled.table.pull(ids[0]))
    rows = scaled.table.pull(ids[0])
    (scaled(ids).sum() * float("inf")).backward()
    assert torch.equal(scaled.table.pull(ids[0]), rows) and scaled.table.stats()["refused"] == 2


def test_a_dense_net_learns_beside_it() -> None:
    torch.manual_seed(0)
    layer = SparseEmbedding(Table(8, rule=Adagrad(), lr=0.1))
    model = nn.Sequential(layer, nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = torch.randint(0, 50, (256, 3))
    target = (ids % 2).float().sum(1, keepdim=True)
    losses = []
    for _ in range(60):
        loss = ((model(ids) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_state_dict_tells_the_save(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    layer = SparseEmbedding(Table(4))
    layer(torch.tensor([[1]]))
    layer.table.save(tmp_path / "t")
    state = copy.deepcopy(layer.state_dict())
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    with caplog.at_level(logging.WARNING):
        SparseEmbedding(Table.load(tmp_path / "t")).load_state_dict(state)
        assert not caplog.records
        SparseEmbedding(Table(4)).load_state_dict(state)
        assert len(caplog.records) == 1
    with pytest.raises(ValueError, match="dim 4"):
        SparseEmbedding(Table(5)).load_state_dict(state)


def test_bad_calls() -> None:
    layer = SparseEmbedding(Table(4))
    line, square = torch.zeros(3, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)
    for call, word in [
        (lambda: layer(line.float()), "int64"),
        (lambda: layer(line), "offsets"),
        (lambda: layer(square, torch.zeros(2, dtype=torch.long)), "offsets"),
        (lambda: layer(square, per_sample_weights=torch.ones(2)), "weights"),
        (lambda: layer(square, per_sample_weights=torch.ones(2, 2).double()), "float32"),
        (lambda: layer(square.numpy()), "got a ndarray"),
        (lambda: layer([[1, 2]]), "got a list"),
        (lambda: layer(line, [0]), "offsets: got a list"),
        (lambda: layer(square, per_sample_weights=[[1.0]]), "per_sample_weights: got a list"),
        (lambda: layer(square.to_sparse()), "ids: got a torch.sparse_coo"),
        (lambda: layer.table.pull(line, create="no"), "create: got 'no'"),
        (lambda: SparseEmbedding(Table(4), pooling="max"), "pooling"),
        (lambda: SparseEmbedding(Table(4), pooling="mean")(square, per_sample_weights=torch.ones(2, 2)), "weights"),
    ]:
        with pytest.raises(ValueError, match=word):
            call()


def test_lists_of_bags_and_unsigned_keys() -> None:
    layer = SparseEmbedding(Table(3, init_scale=1.0), pooling="mean")
    bags = [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([-1])]
    expected = layer(torch.tensor([1, 2, -1]), torch.tensor([0, 2, 2]))
    assert torch.equal(layer(bags), expected) and (expected[1] == 0).all()
    unsigned = torch.tensor([1, 2, 2**64 - 1], dtype=torch.uint64)
    assert torch.equal(layer(unsigned, torch.tensor([0, 2, 2])), expected)
    for ids, offsets in ((bags, torch.tensor([0])), ([], None), ([torch.zeros(1, 1, dtype=torch.int64)], None)):
        with pytest.raises(ValueError, match="got a list"):
            layer(ids, offsets)


def test_what_a_bag_has_and_a_table_has_not_is_refused() -> None:
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"include_last_offset": True}, {"mode": "max"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            SparseEmbedding.from_bag(nn.EmbeddingBag(4, 2, **options), rule="sgd", lr=0.1)
    with pytest.raises(ValueError, match="got Embedding"):
        SparseEmbedding.from_bag(nn.Embedding(4, 2), rule="sgd", lr=0.1)
    with pytest.raises(ValueError, match="got NoneType"):
        SparseEmbedding(None)


@pytest.mark.parametrize(
    "offsets", [[0, 3, 1], [0, 9], [1, 2], [0, -2], [], [0.0, 2.0], [[0, 2]]], ids=lambda offsets: str(offsets)
)
def test_bad_offsets(offsets: list) -> None:
    layer = SparseEmbedding(Table(3))
    with pytest.raises(ValueError, match="offsets: got"):
        layer(torch.arange(4), torch.tensor(offsets))
    with pytest.raises(ValueError, match="offsets: got"):
        layer(torch.arange(0), torch.tensor([0, 1]))
    assert len(layer.table) == 0  # refused before any row was made


def test_padding_keys_are_taken_bit_for_bit() -> None:
    signed, unsigned = (SparseEmbedding(Table(3), padding_key=key) for key in (-1, 2**64 - 1))
    ids = torch.tensor([[-1, 2], [-1, -1]])
    assert torch.equal(signed(ids), unsigned(ids)) and (signed(ids)[1] == 0).all()
    for key in ("0", 2**64, 1.0):
        with pytest.raises(ValueError, match="padding_key"):
            SparseEmbedding(Table(3), padding_key=key)


def test_an_embedding_bag_is_swapped_in_one_line() -> None:
    """A model that was written for nn.EmbeddingBag, its layer replaced, trains on as before."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
            self.top = nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.top(self.bag(ids, offsets)).squeeze(1)

    torch.manual_seed(0)
    plain = Model()
    ours = copy.deepcopy(plain)
    ours.bag = SparseEmbedding.from_bag(ours.bag, rule="adagrad", lr=0.1)
    rows = torch.optim.Adagrad(plain.bag.parameters(), lr=0.1)
    tops = [torch.optim.SGD(model.top.parameters(), lr=0.1) for model in (plain, ours)]
    random = np.random.default_rng(0)
    for _ in range(10):
        ids, offsets = bags(random, 50)
        losses = [model(ids, offsets).square().mean() for model in (plain, ours)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-7)
        for optimizer in (rows, *tops):
            optimizer.zero_grad()
        sum(losses).backward()
        for optimizer in (rows, *tops):
            optimizer.step()


def test_slot_keys_keep_slots_apart() -> None:
    keys = slot_keys(torch.arange(-2, 998).reshape(-1, 1).expand(-1, 5).contiguous())
    assert keys.unique().numel() == 5000
    assert torch.equal(keys, slot_keys(torch.arange(-2, 998).reshape(-1, 1).expand(-1, 5).contiguous()))
    with pytest.raises(ValueError, match="int64"):
        slot_keys(torch.zeros(3))


def test_hashed_strings() -> None:
    keys = hash_strings(["", "a", "käse", "a"])
    assert keys.dtype == np.uint64 and keys[1] == keys[3] and len(set(keys.tolist())) == 3
    assert hash_strings(["plsc"])[0] == int.from_bytes(
        __import__("hashlib").blake2b(b"plsc", digest_size=8).digest(), "little"
    )
    assert len(hash_strings([])) == 0
    for wrong in ("plsc", b"plsc", [b"plsc"], [None]):
        with pytest.raises(ValueError, match="strings: got"):
            hash_strings(wrong)
