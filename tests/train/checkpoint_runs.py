"""What checkpoints are made of, for their tests: a backbone, a head cut by class, an optimizer, parts with a state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from plsc.comm import Communicator, Shard, mark, run_ranks, shard_of
from plsc.train.checkpoint import save


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Backbone(nn.Module):
    def __init__(self, width: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, width, 1)
        self.norm = nn.BatchNorm2d(width)
        for i, param in enumerate(self.parameters()):
            param.data.copy_(numbers(*param.shape, seed=seed + i))


class Head(nn.Module):
    """A weight [C, D] or [C, K, D] and a bias [C], cut by class."""

    def __init__(self, comm: Communicator, classes: int, *, centers: int = 1, dim: int = 4, seed: int = 50) -> None:
        super().__init__()
        shard = Shard.of(classes, comm)
        shape = (classes, dim) if centers == 1 else (classes, centers, dim)
        self.weight = mark(nn.Parameter(numbers(*shape, seed=seed)[shard.start : shard.stop].clone()), shard)
        self.bias = mark(nn.Parameter(numbers(classes, seed=seed + 1)[shard.start : shard.stop].clone()), shard)


SGD_M: Callable[[Any], Optimizer] = lambda params: SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
ADAMW: Callable[[Any], Optimizer] = lambda params: AdamW(params, lr=0.01, betas=(0.8, 0.95))  # noqa: E731


class Run:
    """What a training run has; `train` makes steps with gradients that depend on the class, not on the rank."""

    def __init__(
        self, comm: Communicator, *, classes: int = 10, make: Callable[[Any], Optimizer] = SGD_M, **head: Any
    ) -> None:
        self.comm = comm
        self.backbone = Backbone()
        self.head = Head(comm, classes, **head)
        self.optimizer = make([{"params": self.backbone.parameters()}, {"params": self.head.parameters(), "lr": 0.3}])

    @property
    def parts(self) -> dict[str, Any]:
        return {"backbone": self.backbone, "head": self.head, "optimizer": self.optimizer}

    def train(self, steps: int = 2) -> Run:
        for step in range(steps):
            for i, param in enumerate([*self.backbone.parameters(), *self.head.parameters()]):
                shard = shard_of(param)
                total = param.shape[0] if shard is None else shard.total
                grad = numbers(total, *param.shape[1:], seed=100 * step + i)
                param.grad = grad if shard is None else grad[shard.start : shard.stop]
            self.optimizer.step()
        return self

    def whole(self) -> dict[str, Tensor]:
        """Every tensor, joined over ranks."""
        found = {}
        for part, module in (("backbone", self.backbone), ("head", self.head)):
            for name, tensor in module.state_dict(keep_vars=True).items():
                found[f"{part}/{name}"] = self._join(tensor, shard_of(tensor))
            for name, param in module.named_parameters():
                for key, value in self.optimizer.state.get(param, {}).items():
                    cut = shard_of(param) if value.dim() else None
                    found[f"optimizer/{part}/{name}/{key}"] = self._join(value, cut)
        return found

    def _join(self, tensor: Tensor, shard: Shard | None) -> Tensor:
        rows = self.comm.gather_objects(tensor.detach().clone())
        return rows[0] if shard is None else torch.cat(rows)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[k].dtype and torch.equal(x, b[k]) for k, x in a.items())


def saved_run(path: Path, world_size: int = 4, **options: Any) -> dict[str, Tensor]:
    """Trains and saves on some ranks; what was saved, joined."""

    def body(comm: Communicator) -> dict[str, Tensor]:
        run = Run(comm, **options).train()
        save(path, comm=comm, step=7, extra={"epoch": 3}, **run.parts)
        return run.whole()

    return run_ranks(world_size, body)[0]


class Stateful:
    """Takes any state, keeps it; refuses what `check` refuses."""

    def __init__(self, state: dict[Any, Any], check: Callable[[dict[Any, Any]], None] | None = None) -> None:
        self.state, self.check = state, check

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        if self.check is not None:
            self.check(state)
        self.state = state
