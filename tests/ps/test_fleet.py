"""A local script becomes training on parameter servers by a few lines, and one word switches the mode."""

import difflib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import plsc
from plsc.comm import Communicator, run_ranks
from plsc.ps import Server, Table

LOCAL = """
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

def batches(rank, steps):
    random = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        ids = torch.randint(0, 40, (64, 3), generator=random)
        yield ids, ((ids % 7 < 3).sum(1) > 1).float()

class Model(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, ids):
        return self.net(self.embedding(ids)).squeeze(1)

torch.manual_seed(0)
model = Model(nn.EmbeddingBag(40, 8, mode="sum", sparse=False))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for ids, clicked in batches(0, 60):
    loss = binary_cross_entropy_with_logits(model(ids), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
SPREAD = (
    LOCAL.replace("import torch\n", "import torch, plsc\n", 1)
    .replace(
        'torch.manual_seed(0)\nmodel = Model(nn.EmbeddingBag(40, 8, mode="sum", sparse=False))',
        'fleet = plsc.Fleet(plsc.Strategy(ps="async", servers=servers), comm)\n'
        "torch.manual_seed(0)\n"
        'model = fleet.replicate(Model(fleet.embedding("clicks", dim=8)))',
    )
    .replace("batches(0, 60)", "batches(fleet.rank, 60)")
    .replace(
        "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n", "    fleet.step(loss, optimizer)\n"
    )
)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made = [Server({"clicks": Table(8, rule="adagrad", lr=0.1, locked=True)}, index=i, count=2) for i in range(2)]
    yield made
    for server in made:
        server.close()


def test_at_most_twelve_lines_change() -> None:
    changed = [line for line in difflib.ndiff(LOCAL.splitlines(), SPREAD.splitlines()) if line[0] in "+-"]
    assert 5 <= len(changed) <= 12, changed


@pytest.mark.parametrize("mode", ["direct", "async", "half_async", "sync", "geo"])
def test_one_word_switches_the_mode(servers: list[Server], mode: str) -> None:
    """Two ranks learn, their dense weights agree, and rows are on the servers."""
    script = SPREAD.replace('"async"', f'"{mode}"')
    if mode == "geo":
        script = script.replace("servers=servers", 'servers=servers, ps_args={"every": 5}')
    addresses = [server.address for server in servers]

    def rank(comm: Communicator) -> dict[str, Any]:
        names: dict[str, Any] = {"comm": comm, "servers": addresses}
        exec(script, names)
        names["fleet"].meet(names["optimizer"])
        return names

    done = run_ranks(2, rank)
    for names in done:
        assert np.mean(names["losses"][-10:]) < 0.8 * np.mean(names["losses"][:5])
    assert torch.equal(*(names["model"].net[0].weight for names in done))
    assert sum(len(server.hosts["clicks"].table) for server in servers) == 40
    for names in done:
        names["fleet"].stores[0].close()
        names["fleet"].stores[0].store.close()


def test_without_servers_the_table_is_here() -> None:
    fleet = plsc.Fleet(plsc.Strategy(amp="fp16"))
    layer = fleet.embedding("clicks", dim=4, rule="sgd", lr=1.0)
    net = fleet.replicate(torch.nn.Sequential(layer, torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    ids = torch.tensor([[3, 5]])
    before, weight = layer.table.pull(torch.tensor([3, 5])), net[1].weight.detach().clone()
    fleet.step(net(ids).sum(), optimizer)
    # the loss scale of fp16 is taken out of rows' gradients too
    torch.testing.assert_close(layer.table.pull(torch.tensor([3, 5])), before - weight, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ps": "often"}, "ps: got 'often', expected none or one of direct, async"),
        ({"servers": ["a:1"]}, "got servers or ps_args but ps is 'none'"),
        ({"ps": "geo", "ps_args": {"evry": 5}}, "geo knows no evry; expected every"),
    ],
)
def test_strategies_that_make_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plsc.Strategy(**options)


def test_what_script_and_servers_say_must_agree(servers: list[Server]) -> None:
    fleet = plsc.Fleet(plsc.Strategy(ps="direct", servers=[server.address for server in servers]))
    for options, why in (({"dim": 9}, "got dim 9, the servers have 8"), ({"dim": 8, "lr": 1.0}, "got lr 1.0")):
        with pytest.raises(ValueError, match=why):
            fleet.embedding("clicks", **options)
    with pytest.raises(ValueError, match="got rule SGD"):
        fleet.embedding("clicks", dim=8, rule="sgd")
    assert fleet.embedding("clicks", dim=8, rule="adagrad", lr=0.1).embedding_dim == 8


def test_two_ranks_without_servers_are_told() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="got 2 workers and no servers"):
            plsc.Fleet(plsc.Strategy(ps="async"), comm).embedding("clicks", dim=4)

    run_ranks(2, rank)
