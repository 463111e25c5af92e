"""Gradients of the collectives: exact adjoints in float64, and equal to what one process computes by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plsc.comm import Communicator, LocalCommunicator, run_ranks, world
from plsc.ops import collective

WORLDS = (1, 2, 3, 4, 6)


def draw(rank: int, *shape: int, salt: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(97 * salt + rank), dtype=torch.float64)


def uneven(world_size: int) -> list[int]:
    return [(3 * rank + 2) % 5 if rank != 1 else 0 for rank in range(world_size)]


def traffic(world_size: int) -> list[list[int]]:
    """[source][target]: rows of an all_to_all; some pairs exchange nothing."""
    return [[(source + 2 * target) % 3 for target in range(world_size)] for source in range(world_size)]


def exchange(x: Tensor, comm: Communicator) -> Tensor:
    rows = traffic(comm.world_size)
    receive = [rows[source][comm.rank] for source in range(comm.world_size)]
    return collective.all_to_all(x, comm, send_sizes=rows[comm.rank], recv_sizes=receive)


# name: (the rows each rank brings, given the number of ranks and the rank; the verb)
Verb = Callable[[Tensor, Communicator], Tensor]
VERBS: dict[str, tuple[Callable[[int, int], int], Verb]] = {
    "all_gather": (lambda n, r: 3, collective.all_gather),
    "all_gather uneven": (
        lambda n, r: uneven(n)[r],
        lambda x, comm: collective.all_gather(x, comm, sizes=uneven(comm.world_size)),
    ),
    "reduce_scatter": (lambda n, r: 2 * n, collective.reduce_scatter),
    "reduce_scatter uneven": (
        lambda n, r: sum(uneven(n)),
        lambda x, comm: collective.reduce_scatter(x, comm, sizes=uneven(comm.world_size)),
    ),
    "all_reduce": (lambda n, r: 3, collective.all_reduce),
    "broadcast": (lambda n, r: 3, collective.broadcast),
    "broadcast from last": (lambda n, r: 3, lambda x, comm: collective.broadcast(x, comm, root=comm.world_size - 1)),
    "all_to_all": (lambda n, r: 2 * n, collective.all_to_all),
    "all_to_all uneven": (lambda n, r: sum(traffic(n)[r]), exchange),
}


def reference(name: str, inputs: list[Tensor], rank: int) -> Tensor:
    """What a verb gives on `rank`, written with plain differentiable torch over all ranks' inputs."""
    n = len(inputs)
    if name.startswith("all_gather"):
        return torch.cat(inputs)
    if name.startswith("reduce_scatter"):
        return torch.stack(inputs).sum(0).split([2] * n if name == "reduce_scatter" else uneven(n))[rank]
    if name == "all_reduce":
        return torch.stack(inputs).sum(0)
    if name.startswith("broadcast"):
        return inputs[0 if name == "broadcast" else n - 1].clone()
    rows = [[2] * n] * n if name == "all_to_all" else traffic(n)
    return torch.cat([x.split(rows[source])[rank] for source, x in enumerate(inputs)])


def products(comm: Communicator, name: str) -> tuple[float, float]:
    """<A x, y> and <x, A' y> of this rank; x and y come strided."""
    rows, verb = VERBS[name]
    x = draw(comm.rank, 5, rows(comm.world_size, comm.rank), salt=1).t().requires_grad_()  # [rows, 5], columns first
    out = verb(x, comm)
    y = draw(comm.rank, *reversed(out.shape), salt=2).t()
    (back,) = torch.autograd.grad(out, x, y)
    assert back.shape == x.shape
    return float((out.detach() * y).sum()), float((x.detach() * back).sum())


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", VERBS)
def test_backward_is_the_adjoint(name: str, world_size: int) -> None:
    pairs = run_ranks(world_size, products, name)
    left, right = (sum(values) for values in zip(*pairs, strict=True))
    size = sum(abs(value) for pair in pairs for value in pair)
    assert abs(left - right) <= 1e-12 * max(size, 1e-300)


def values_and_gradients(comm: Communicator, name: str) -> tuple[Tensor, Tensor]:
    rows, verb = VERBS[name]
    x = draw(comm.rank, rows(comm.world_size, comm.rank), 2).requires_grad_()
    out = verb(x, comm)
    assert world() is comm
    # Unlike on each rank, nonlinear, and its gradient reaches the verb expanded in one term and dense in the other.
    ((comm.rank + 1.0) * (out**3).sum() + out.sum()).backward()
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", VERBS)
def test_equals_one_process(name: str, world_size: int) -> None:
    rows, _ = VERBS[name]
    inputs = [draw(rank, rows(world_size, rank), 2).requires_grad_() for rank in range(world_size)]
    outs = [reference(name, inputs, rank) for rank in range(world_size)]
    objective = sum((rank + 1.0) * (out**3).sum() + out.sum() for rank, out in enumerate(outs))
    gradients = torch.autograd.grad(objective, inputs, allow_unused=True)
    for rank, (out, gradient) in enumerate(run_ranks(world_size, values_and_gradients, name)):
        torch.testing.assert_close(out, outs[rank].detach(), rtol=1e-13, atol=1e-13)
        expected = gradients[rank] if gradients[rank] is not None else torch.zeros_like(inputs[rank])
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_scalars_and_plain_sums() -> None:
    """A 0-d input, and the gradient of .sum(), which arrives as one number expanded."""

    def body(comm: Communicator) -> tuple[list[float], Any]:
        x = torch.tensor(1.0 + comm.rank, dtype=torch.float64, requires_grad=True)
        gathered = collective.all_gather(x, comm)
        (gathered * torch.arange(1.0, 4.0)).sum().backward()
        weights = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        collective.all_reduce(weights, comm).sum().backward()
        return gathered.tolist(), (x.grad, weights.grad)

    for rank, (gathered, (of_x, of_weights)) in enumerate(run_ranks(3, body)):
        assert gathered == [1.0, 2.0, 3.0]
        assert of_x.shape == () and of_x == 3.0 * (rank + 1)
        assert torch.equal(of_weights, torch.full((2, 3), 3.0, dtype=torch.float64))


def test_inputs_stay_and_integers_pass() -> None:
    def body(comm: Communicator) -> None:
        x = torch.full((2,), float(comm.rank))
        collective.all_reduce(x, comm)
        collective.broadcast(x, comm)
        assert x.tolist() == [comm.rank] * 2
        labels = collective.all_gather(torch.tensor([comm.rank]), comm)
        assert labels.tolist() == [0, 1] and not labels.requires_grad

    run_ranks(2, body)


def test_scale_grad() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = collective.scale_grad(x, 0.25)
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 3), 0.25))


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    y = collective.all_reduce(x, LocalCommunicator("cpu")) ** 2
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
