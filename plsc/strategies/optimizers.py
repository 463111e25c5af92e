"""Optimizers by name, parameter groups without decay where it does harm, and learning-rate schedules as functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from plsc.comm import shard_of

KINDS = ("polynomial", "cosine", "step", "constant")
OPTIMIZERS = ("sgd", "adamw", "lars")

Group = dict[str, Any]


def param_groups(*modules: nn.Module, weight_decay: float) -> list[Group]:
    """Two groups for an optimizer: weights with decay; biases, norms and other vectors or scalars without.

    Every trainable parameter once, in order of registration. Pulling a norm's scale or a bias to zero fits nothing.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in modules:
        for name, param in module.named_parameters():
            if not param.requires_grad or id(param) in seen:
                continue
            seen.add(id(param))
            is_bias = name.rpartition(".")[2] == "bias"
            (plain if param.ndim <= 1 or is_bias else decayed).append(param)
    if not seen:
        raise ValueError("param_groups: got no trainable parameter, expected modules with some")
    groups: list[Group] = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    name: str,
    groups: Iterable[Group] | Iterable[nn.Parameter],
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    trust: float = 1e-3,
) -> Optimizer:
    """An optimizer by name ("sgd", "adamw": torch's; "lars": ours), ready for set_lr.

    weight_decay is for groups that bring none of their own. momentum and nesterov are read by sgd and lars (which has
    no nesterov), betas and eps by adamw, trust by lars.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer: got {name!r}, expected one of {', '.join(OPTIMIZERS)}")
    optimizer: Optimizer
    if name == "sgd":
        optimizer = SGD(groups, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    elif name == "adamw":
        optimizer = AdamW(groups, lr, betas=betas, eps=eps, weight_decay=weight_decay)
    elif nesterov:
        raise ValueError("lars: got nesterov=True, expected False; use sgd for Nesterov momentum")
    else:
        optimizer = LARS(groups, lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


class LARS(Optimizer):
    """SGD with momentum whose step is scaled to each layer's weight, for very large batches.

    ratio = trust * |w| / (|g| + weight_decay * |w|), 1 where either norm is 0
    v = momentum * v + ratio * (g + weight_decay * w);  w = w - lr * v
    Norms are of the whole weight. A weight cut by rows (one row a class) gets one ratio a row instead, so that the
    answer does not depend on the number of ranks and needs no communication. Vectors and scalars (biases, norms) step
    with ratio 1. The learning rate stands outside the momentum, as in torch's SGD; at a constant rate that is the
    paper's rule. Source: You, Gitman and Ginsburg 2017, algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Group] | Iterable[nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        if not lr >= 0.0 or not weight_decay >= 0.0 or not trust > 0.0 or not 0.0 <= momentum < 1.0:
            raise ValueError(
                f"LARS: got lr={lr}, momentum={momentum}, weight_decay={weight_decay}, trust={trust}; "
                "expected lr and weight_decay >= 0, trust > 0 and momentum in [0, 1)"
            )
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.layout != torch.strided:
                    raise ValueError(f"LARS: got a gradient of layout {param.grad.layout}, expected a dense one")
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                direction = param.grad.add(param, alpha=group["weight_decay"])
                if param.ndim > 1:
                    direction.mul_(trust_ratio(param, param.grad, trust=group["trust"], decay=group["weight_decay"]))
                velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
                param.sub_(group["lr"] * velocity)
        return loss


def trust_ratio(param: Tensor, grad: Tensor, *, trust: float, decay: float) -> Tensor:
    """LARS's factor: one number for a whole weight, one a row for a cut one; 1 where a norm is 0.

    Returns: a tensor that broadcasts against param.
    """
    dims = tuple(range(param.ndim)) if shard_of(param) is None else tuple(range(1, param.ndim))
    w_norm = torch.linalg.vector_norm(param, dim=dims, keepdim=True)
    g_norm = torch.linalg.vector_norm(grad, dim=dims, keepdim=True)
    ratio = trust * w_norm / (g_norm + decay * w_norm)
    return torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a pure function of the step: factor(step) times the initial rate.

    kind: "polynomial" falls as (1 - t)^power, "cosine" as half a cosine, both from 1 to `final`, with t going from 0
    to 1 between warm-up and total_steps; "step" multiplies by gamma at each milestone (a step); "constant" stays at 1.
    A warm-up rises in a line to 1 at its last step. Beyond total_steps the last value holds.
    """

    kind: str
    total_steps: int
    warmup_steps: int = 0
    power: float = 1.0
    milestones: Sequence[int] = ()
    gamma: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule: got kind {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.total_steps < 1 or not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(
                f"schedule: got total_steps {self.total_steps}, warmup_steps {self.warmup_steps}; "
                "expected total_steps >= 1 and 0 <= warmup_steps <= total_steps"
            )
        if self.power < 0 or self.gamma < 0 or not 0 <= self.final <= 1:
            raise ValueError(
                f"schedule: got power {self.power}, gamma {self.gamma}, final {self.final}; "
                "expected power and gamma >= 0 and final in [0, 1]"
            )
        if bool(self.milestones) != (self.kind == "step") or list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(
                f"schedule: got kind {self.kind!r} with milestones {list(self.milestones)}; "
                'expected rising steps for kind "step" and none for the others'
            )

    def factor(self, step: int) -> float:
        """What the initial learning rate is multiplied by at `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"schedule: got step {step}, expected >= 0")
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        if self.kind == "step":
            return float(self.gamma ** sum(milestone <= step for milestone in self.milestones))
        t = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        fall = (1.0 - t) ** self.power if self.kind == "polynomial" else 0.5 * (1.0 + math.cos(math.pi * t))
        return self.final + (1.0 - self.final) * fall


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Sets every group's learning rate to factor times its initial one."""
    for group in optimizer.param_groups:
        if "initial_lr" not in group:
            raise ValueError('set_lr: a group has no "initial_lr"; use build_optimizer, or set group["initial_lr"]')
        lr = group["initial_lr"] * factor
        if isinstance(group["lr"], Tensor):  # torch's capturable optimizers keep it on the device
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
