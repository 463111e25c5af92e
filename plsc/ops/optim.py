"""Row optimizers: update only the rows of a class weight that took part, with state and step count kept by row."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

State = dict[str, Tensor]
_PIECE_BYTES = 512 << 10  # of a weight's rows a thread works on; their gradient and state come on top


@dataclass
class RowOptimizer:
    """What every row optimizer has; `lr` may be changed between steps (a schedule does), the rest is fixed."""

    lr: float
    weight_decay: float = 0.0
    initial_lr: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.lr >= 0.0 or not self.weight_decay >= 0.0:
            raise ValueError(f"lr and weight_decay must be >= 0, got lr={self.lr}, weight_decay={self.weight_decay}")
        self.initial_lr = self.lr

    def state(self, weight: Tensor) -> State:
        """Fresh state for a weight: tensors whose dim 0 is the weight's rows."""
        raise NotImplementedError

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        """Applies one step in place. rows, grad: [R, ...]; state: [R, ...] of the same rows; grad may be destroyed."""
        raise NotImplementedError


@dataclass
class SGD(RowOptimizer):
    """SGD with momentum by row; equal to torch.optim.SGD when every row takes part in every step."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}, expected [0, 1)")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov needs a momentum above 0")

    def state(self, weight: Tensor) -> State:
        return {"momentum": torch.zeros_like(weight)} if self.momentum else {}

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        if self.weight_decay:
            grad.add_(rows, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["momentum"]
            torch.add(grad, velocity, alpha=self.momentum, out=velocity)
            grad = grad.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        rows.sub_(grad, alpha=self.lr)


@dataclass
class AdamW(RowOptimizer):
    """AdamW by row with a step count for each row, so that a rarely sampled class is corrected for its own steps.

    Equal to torch.optim.AdamW when every row takes part in every step. Source: Loshchilov and Hutter 2019.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def state(self, weight: Tensor) -> State:
        steps = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight), "steps": steps}

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        beta1, beta2 = self.betas
        step = state["steps"].add_(1).to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if self.weight_decay:
            rows.mul_(1 - self.lr * self.weight_decay)
        size = self.lr / (1 - beta1**step)
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**step).sqrt()).add_(self.eps)
        rows.sub_(size * state["exp_avg"] / denominator)


@dataclass
class LARS(RowOptimizer):
    """LARS with one trust ratio a class row, hence the same for every world size.

    ratio = trust * |w| / (|g| + weight_decay * |w|), 1 where either norm is 0. Source: You et al. 2017.
    """

    momentum: float = 0.9
    trust: float = 1e-3

    def state(self, weight: Tensor) -> State:
        return {"momentum": torch.zeros_like(weight)}

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        dims = tuple(range(1, rows.dim()))
        w_norm = torch.linalg.vector_norm(rows, dim=dims, keepdim=True)
        g_norm = torch.linalg.vector_norm(grad, dim=dims, keepdim=True)
        ratio = self.trust * w_norm / (g_norm + self.weight_decay * w_norm)
        ratio = torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
        grad.add_(rows, alpha=self.weight_decay).mul_(ratio)
        velocity = state["momentum"]
        torch.add(grad, velocity, alpha=self.momentum, out=velocity)
        rows.sub_(velocity, alpha=self.lr)


@dataclass
class RowUpdate:
    """A gradient for some rows of a weight, not applied yet."""

    optimizer: RowOptimizer
    weight: Tensor  # [C, ...], updated in place
    state: State
    rows: Tensor | None  # [R] row numbers; None: all rows
    grad: Tensor  # [R, ...]

    def apply(self, scale: float = 1.0) -> None:
        """Steps the rows with `scale * grad`."""
        if scale != 1.0:
            self.grad.mul_(scale)
        apply_rows(self.optimizer, self.weight, self.state, self.rows, self.grad)


def apply_rows(
    optimizer: RowOptimizer, weight: Tensor, state: State, rows: Tensor | slice | None, grad: Tensor
) -> None:
    """One optimizer step on the chosen rows of `weight` and of its state, everything else untouched."""
    with torch.no_grad():
        for first, last in pieces(weight, 0, len(grad)):
            part = grad[first:last]
            if isinstance(rows, Tensor):
                _apply_chosen(optimizer, weight, state, rows[first:last], part)
                continue
            offset = 0 if rows is None else rows.start
            cut = slice(offset + first, offset + last)
            optimizer.update(weight[cut], part, {name: value[cut] for name, value in state.items()})


def _apply_chosen(optimizer: RowOptimizer, weight: Tensor, state: State, rows: Tensor, grad: Tensor) -> None:
    part = weight.index_select(0, rows)
    part_state = {name: value.index_select(0, rows) for name, value in state.items()}
    optimizer.update(part, grad, part_state)
    weight.index_copy_(0, rows, part)
    for name, value in part_state.items():
        state[name].index_copy_(0, rows, value)


def pieces(weight: Tensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cuts rows [start, stop) so that several passes over one piece stay in a CPU's cache; on a GPU it is one piece."""
    step = max(stop - start, 1)
    if weight.device.type == "cpu":
        row_bytes = max(math.prod(weight.shape[1:]), 1) * weight.element_size()
        step = max(_PIECE_BYTES * torch.get_num_threads() // row_bytes, 1)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


_collecting: dict[int, list[RowUpdate]] = {}


@contextmanager
def deferred_updates() -> Iterator[list[RowUpdate]]:
    """Inside, backward passes of fused heads put their row updates into the list instead of applying them.

    Needed where ranks must agree first: fp16 overflow, clipping, gradient accumulation. Heads look it up by the thread
    of their forward pass, because autograd runs CUDA backwards in a thread of its own.
    """
    thread = threading.get_ident()
    outer = _collecting.get(thread)
    updates: list[RowUpdate] = []
    _collecting[thread] = updates
    try:
        yield updates
    finally:
        if outer is None:
            del _collecting[thread]
        else:
            _collecting[thread] = outer


def collector(thread: int) -> list[RowUpdate] | None:
    """The list that collects updates for the forward thread `thread`, or None when updates apply at once."""
    return _collecting.get(thread)


def merge_updates(updates: Sequence[RowUpdate]) -> list[RowUpdate]:
    """One update a weight: gradients of the same rows (several micro-steps) are added."""
    by_weight: dict[int, list[RowUpdate]] = {}
    for update in updates:
        by_weight.setdefault(id(update.weight), []).append(update)
    return [group[0] if len(group) == 1 else _merge(group) for group in by_weight.values()]


def _merge(group: Sequence[RowUpdate]) -> RowUpdate:
    first = group[0]
    if all(update.rows is None for update in group):
        grad = torch.stack([update.grad for update in group]).sum(0)
        return RowUpdate(first.optimizer, first.weight, first.state, None, grad)
    everything = torch.arange(first.weight.shape[0], device=first.weight.device)
    rows = [everything if update.rows is None else update.rows for update in group]
    union, place = torch.unique(torch.cat(rows), return_inverse=True)
    grad = first.grad.new_zeros(len(union), *first.grad.shape[1:])
    grad.index_add_(0, place, torch.cat([update.grad for update in group]))
    return RowUpdate(first.optimizer, first.weight, first.state, union, grad)
