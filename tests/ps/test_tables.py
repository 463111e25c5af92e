"""Several tables as one: saved together or not at all; slots of different dimensions against EmbeddingBags."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from plsc.ps import SGD, Momentum, SlotEmbedding, Table, Tables

DIMS = {"user": 5, "item": 3, "city": 1}


def make_tables(seed: int = 0) -> Tables:
    rules = {"user": "adagrad", "item": Momentum(), "city": "row_adagrad"}
    tables = Tables({name: Table(dim, rule=rules[name], lr=0.1, seed=seed) for name, dim in DIMS.items()})
    random = np.random.default_rng(seed)
    for name, dim in DIMS.items():
        keys = random.integers(0, 1000, 300, np.uint64)
        tables[name].push(keys, random.standard_normal((300, dim), np.float32))
    return tables


def contents(tables: Tables) -> dict[str, dict[int, list[float]]]:
    return {
        name: {int(k): row.tolist() for keys, rows in table.items() for k, row in zip(keys, rows, strict=True)}
        for name, table in tables.items()
    }


def test_saved_and_loaded_as_one(tmp_path: Path) -> None:
    tables = make_tables()
    assert tables.save(tmp_path / "a") == sum(map(len, tables.values()))
    again = Tables.load(tmp_path / "a", options={"user": {"stripes": 4, "arena": tmp_path}})
    assert contents(again) == contents(tables) and list(again) == list(DIMS)
    assert len({table.last_save for table in again.values()}) == 1
    keys, grads = np.arange(500, dtype=np.uint64), np.ones((500, 3), np.float32)
    for each in (tables, again):  # optimizer state came along
        each["item"].push(keys, grads)
    assert contents(again) == contents(tables)


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make_tables()
    tables.save(tmp_path)
    before = contents(tables)
    held = sorted(tmp_path.iterdir())
    for name, dim in DIMS.items():
        tables[name].push(np.arange(9, dtype=np.uint64), np.ones((9, dim), np.float32))

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tables["city"], "save", full)  # after the others have written theirs
        with pytest.raises(OSError, match="No space"):
            tables.save(tmp_path)
    assert contents(Tables.load(tmp_path)) == before and sorted(tmp_path.iterdir()) == held
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)  # all are written, the index that names them is not
        with pytest.raises(OSError, match="No space"):
            tables.save(tmp_path)
    assert contents(Tables.load(tmp_path)) == before and sorted(tmp_path.iterdir()) == held
    tables.save(tmp_path)
    assert contents(Tables.load(tmp_path)) == contents(tables) != before
    assert len(list(tmp_path.glob("*.table"))) == len(DIMS)  # the old ones are gone


def test_bad_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Tables({})
    with pytest.raises(ValueError, match="got name"):
        Tables({"../user": Table(2)})
    with pytest.raises(ValueError, match=r"expected a plsc\.ps\.Table"):
        Tables({"user": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"no tables\.json"):
        Tables.load(tmp_path)
    make_tables().save(tmp_path)
    with pytest.raises(ValueError, match=r"got person, .* has user, item, city"):
        Tables.load(tmp_path, options={"person": {}})
    index = json.loads((tmp_path / "tables.json").read_text())
    index["tables"]["user"] = "../../etc/passwd"
    (tmp_path / "tables.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"expected a file of Tables\.save in this folder"):
        Tables.load(tmp_path)
    for text in ("[]", "{", '{"tables": 3}', '{"format": 9, "tables": {}}'):
        (tmp_path / "tables.json").write_text(text)
        with pytest.raises(ValueError, match=r"tables\.json"):
            Tables.load(tmp_path)


def slot_batch(step: int) -> dict[str, Tensor | list[Tensor]]:
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (6,), generator=g).tolist()
    return {
        "user": torch.randint(0, 30, (6,), generator=g),
        "seen": [torch.randint(0, 20, (length,), generator=g) for length in lengths],
        "bought": torch.randint(0, 20, (6, 2), generator=g),
    }


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_slots_of_different_dimensions_equal_bags(pooling: str) -> None:
    """`seen` and `bought` share the items' rows; both tables are stepped in one backward."""
    users, items = Table(5, rule=SGD(), lr=0.1, init_scale=0.5), Table(3, rule=SGD(), lr=0.1, init_scale=0.5)
    layer = SlotEmbedding({"user": users, "seen": items, "bought": items}, pooling=pooling)
    assert layer.embedding_dim == 11 and len(layer.layers) == 2
    bags = [torch.nn.EmbeddingBag(n, table.dim, mode=pooling) for n, table in ((30, users), (20, items))]
    for bag, table in zip(bags, (users, items), strict=True):
        bag.weight.data = table.pull(torch.arange(bag.num_embeddings))
    optimizer = torch.optim.SGD([bag.weight for bag in bags], lr=0.1)
    for step in range(4):
        ids = slot_batch(step)
        seen = ids["seen"]
        offsets = torch.tensor([0, *(len(bag) for bag in seen[:-1])]).cumsum(0)
        parts = [bags[0](ids["user"][:, None]), bags[1](torch.cat(list(seen)), offsets), bags[1](ids["bought"])]
        expected, got = torch.cat(parts, 1), layer(ids)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        optimizer.zero_grad()
        for out in (expected, got):
            (out**2).sum().backward()
        optimizer.step()
    for bag, table in zip(bags, (users, items), strict=True):
        rows = table.pull(torch.arange(bag.num_embeddings))
        torch.testing.assert_close(rows, bag.weight.data, rtol=1e-6, atol=1e-6)


def test_slots_state_and_scale(tmp_path: Path) -> None:
    tables = make_tables()
    tables.save(tmp_path)
    state = SlotEmbedding(tables).state_dict()
    SlotEmbedding(Tables.load(tmp_path)).load_state_dict(state)
    scaled, plain = (SlotEmbedding(make_tables()) for _ in range(2))
    scaled.grad_scale = 1024.0
    ids = {name: torch.arange(7) for name in DIMS}
    (scaled(ids).sum() * 1024).backward()
    plain(ids).sum().backward()
    assert torch.equal(scaled(ids), plain(ids)) and scaled.grad_scale == 1024.0


def test_bad_slots() -> None:
    layer = SlotEmbedding(make_tables())
    with pytest.raises(ValueError, match="got slots user, expected user, item, city"):
        layer({"user": torch.zeros(3, dtype=torch.int64)})
    ids = {name: torch.zeros(3, dtype=torch.int64) for name in DIMS}
    with pytest.raises(ValueError, match=r"different numbers of samples \(user 3, item 2, city 3\)"):
        layer({**ids, "item": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"slot 'user': got ids \(3, 1, 1\)"):
        layer({**ids, "user": torch.zeros(3, 1, 1, dtype=torch.int64)})
    with pytest.raises(ValueError, match="slot 'user': got a list"):
        layer({**ids, "user": [torch.zeros(1, 1, dtype=torch.int64)] * 3})
    for wrong, told in [({}, "got none"), ({"pooling": "none"}, "got 'none'")]:
        with pytest.raises(ValueError, match=told):
            SlotEmbedding(make_tables() if wrong else {}, **wrong)


def test_savers_and_loaders_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    """Each saver would remove the other's files; a loader would look for files that a newer save took away."""
    tables = [Tables({name: Table(2) for name in ("a", "b", "c")}) for _ in range(2)]
    keys = np.arange(100, dtype=np.uint64)
    for number, each in enumerate(tables):
        for table in each.values():
            table.assign(keys, np.full((100, 2), number, np.float32))
    tables[0].save(tmp_path)

    def save(number: int) -> None:
        for _ in range(15):
            tables[number].save(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        saving = [pool.submit(save, number) for number in (0, 1)]
        while not all(done.done() for done in saving):
            values = {float(table.pull(keys).mean()) for table in Tables.load(tmp_path).values()}
            assert len(values) == 1  # of one save
        for done in saving:
            done.result()
    assert len(list(tmp_path.iterdir())) == 4
    next(tmp_path.glob("b.*")).unlink()
    with pytest.raises(FileNotFoundError):
        Tables.load(tmp_path)
