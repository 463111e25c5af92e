"""A small model trained with DGC and its truth without, for tests."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from plsc.comm import Communicator
from plsc.strategies import DGC, DGCOptions

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))
MODEL = MODEL.double()
BATCH = torch.randn(12, 6, dtype=torch.float64)
SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
ALL = DGCOptions(density=1.0, min_numel=1, fallback=False, masking=False)


def sparse(density: float = 0.05, **options: Any) -> DGCOptions:
    return DGCOptions(density=density, min_numel=1, fallback=False, **options)


def loss_of(model: nn.Module, step: int, comm: Communicator | None = None) -> Tensor:
    x = BATCH.roll(step, 0)
    x = x if comm is None else x.chunk(comm.world_size)[comm.rank]
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def alone(steps: int = 6, **changes: Any) -> Tensor:
    """One process on the whole batch with torch's SGD."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), **{**SETTINGS, **changes})
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return weights(model)


def train(
    comm: Communicator,
    options: DGCOptions,
    *,
    steps: int = 6,
    **changes: Any,
) -> Tensor:
    model = copy.deepcopy(MODEL)
    dgc = DGC(model.parameters(), comm, options=options)
    optimizer = torch.optim.SGD(model.parameters(), **{**SETTINGS, **changes})
    for step in range(steps):
        loss_of(model, step, comm).backward()
        assert dgc.step(optimizer)
    return weights(model)


def same_bits(results: list[Tensor]) -> Tensor:
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


def fixed_gradients(rank: int, step: int) -> Tensor:
    return torch.randn(20, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def drift(comm: Communicator, options: DGCOptions, steps: int, **settings: Any) -> tuple[Tensor, DGC]:
    """Steps along gradients that do not depend on the weight; the weight's way and the DGC."""
    weight = nn.Parameter(torch.zeros(20, 10, dtype=torch.float64))
    dgc = DGC([weight], comm, options=options)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, **settings)
    for step in range(steps):
        (weight * fixed_gradients(comm.rank, step)).sum().backward()
        dgc.step(optimizer)
    return weight.detach(), dgc
