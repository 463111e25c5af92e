"""What is no longer used is freed: many trainings one after the other, as in a notebook, take the memory of one."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plsc
from plsc.comm import Communicator, run_ranks
from plsc.strategies import Reducer


def weakly(objects: list[Any]) -> list[Callable[[], Any]]:
    return [weakref.ref(each) for each in objects]


def left(seen: list[Callable[[], Any]]) -> int:
    """How many of the objects are still there."""
    gc.collect()
    return sum(each() is not None for each in seen)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bf16"}, {"reduce_dtype": "fp16"}, {"lanes": 2}], ids=str)
def test_reducer(options: dict[str, Any], steps: int) -> None:
    def body(comm: Communicator) -> list[Callable[[], Any]]:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        reducer = Reducer(net.parameters(), comm, **options)
        for _ in range(steps):
            net(torch.ones(2, 4)).sum().backward()
            reducer.finish()
            reducer.zero_grad()
        return weakly([*net.parameters(), reducer, *reducer.flats])

    assert left([each for rank in run_ranks(2, body) for each in rank]) == 0


def test_model_outlives_a_reducer_that_is_dropped() -> None:
    net = nn.Linear(3, 1, bias=False)

    seen = weakly([Reducer(net.parameters(), plsc.comm.world())])
    assert left(seen) == 0
    net.weight.grad = None
    net(torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(net.weight.grad, torch.full((1, 3), 2.0))


@pytest.mark.parametrize(
    "options",
    [{}, {"amp": "bf16"}, {"amp": "fp16"}, {"local_sgd": 2}, {"compress": "dgc"}, {"recompute": "full"}],
    ids=str,
)
def test_fleet(options: dict[str, Any]) -> None:
    def train() -> list[Callable[[], Any]]:
        fleet = plsc.Fleet(plsc.Strategy(**options))
        net = fleet.replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
        head = plsc.ClassParallelHead(4, 10, head_optimizer=plsc.SGD(lr=0.1), comm=fleet.comm)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            with fleet.autocast():
                loss = head(net(torch.randn(2, 4)), torch.tensor([1, 2]))
            fleet.step(loss, optimizer)
        return weakly([*net.parameters(), *head.parameters(), fleet, optimizer])

    assert left(train()) == 0
