"""What becomes of a class weight's gradient: a step of its rows at once, one that waits, or a gradient as torch has it.

A step waits for what the ranks agree on: overflow, a norm to clip by, more micro-steps.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plsc.ops.formats import Rounding, is_wide
from plsc.ops.optim import RowOptimizer, State, apply_rows
from plsc.ops.sweep import Sweep


def weight_gradient(
    sweep: Sweep, g_total: Tensor, g_own: Tensor, need_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias by those with respect to S and own logits; None of rows that an optimizer steps."""
    problem = sweep.problem
    sweep.begin_weight(g_total, g_own)
    pending = None if problem.optimizer is None else collector(problem.thread)
    if pending is not None and problem.rows is None:  # steps all rows later, from a second sweep of its own
        sweep.waits = True
        pending.append(SweepUpdate([sweep]))
        return None, None
    if problem.optimizer is not None and pending is None:
        for index, start, stop in sweep.blocks():
            sweep.step_rows(sweep.block_gradient(index, start, stop), start, stop)
        if problem.applied is not None:
            problem.applied(problem.rows)
        return None, None
    whole = problem.x.new_empty(sweep.num_rows, *sweep.weight.shape[1:])
    grad_bias = torch.zeros_like(sweep.bias) if need_bias and sweep.bias is not None else None
    for index, start, stop in sweep.blocks():
        sweep.block_gradient(index, start, stop, whole[start:stop], grad_bias)
        sweep.lead_to_weight(whole[start:stop], start, stop)
    if pending is not None:
        assert problem.optimizer is not None and problem.rows is not None
        kept = problem.optimizer, sweep.parameter, problem.state
        pending.append(GradientUpdate(*kept, problem.rows, whole, problem.rounding, problem.applied))
        return None, None
    assert is_wide(sweep.weight), "a weight that is kept in fewer bits has a row optimizer"
    if problem.rows is not None:
        whole = torch.zeros_like(sweep.weight).index_copy_(0, problem.rows, whole)
    return whole, grad_bias


class RowUpdate(ABC):
    """A step of some rows of a weight, not taken yet."""

    weight: Tensor  # that the rows belong to: updates of one weight are merged

    @abstractmethod
    def numbers(self) -> list[Tensor]:
        """What must be finite for the gradient to be."""

    @abstractmethod
    def square(self, scale: float = 1.0) -> Tensor:
        """Square of the norm of `scale * gradient`, 0-d float64."""

    @abstractmethod
    def apply(self, scale: float = 1.0) -> None:
        """Steps the rows with `scale * gradient`; once."""

    @abstractmethod
    def joined(self, others: Sequence[RowUpdate]) -> RowUpdate:
        """One step with the sum of their gradients; all are of one weight."""

    @abstractmethod
    def steps_with(self) -> tuple[RowOptimizer | None, State]:
        """The row optimizer and its state."""


@dataclass
class GradientUpdate(RowUpdate):
    """The step of sampled rows, whose gradient is there."""

    optimizer: RowOptimizer
    weight: Tensor  # [C, ...], updated in place
    state: State
    rows: Tensor  # [R] row numbers
    grad: Tensor  # [R, ...]
    rounding: Rounding | None = None
    applied: Callable[[Tensor | None], None] | None = None  # is told the rows afterwards

    def __post_init__(self) -> None:
        self._place, self._taken = self.weight.data_ptr(), False

    def numbers(self) -> list[Tensor]:
        return [self.grad]

    def square(self, scale: float = 1.0) -> Tensor:
        return (torch.linalg.vector_norm(self.grad) * scale).double() ** 2

    def steps_with(self) -> tuple[RowOptimizer | None, State]:
        return self.optimizer, self.state

    def apply(self, scale: float = 1.0) -> None:
        if self._taken or self.weight.data_ptr() != self._place:
            raise RuntimeError(
                "the step of these rows was taken already, or the head was moved (.to, .double) after its backward; "
                "apply an update once, and move the head between steps"
            )
        self._taken = True
        if scale != 1.0:
            self.grad.mul_(scale)
        apply_rows(self.optimizer, self.weight, self.state, self.rows, self.grad, rounding=self.rounding)
        if self.applied is not None:
            self.applied(self.rows)

    def joined(self, others: Sequence[RowUpdate]) -> GradientUpdate:
        group = [self, *(other for other in others if isinstance(other, GradientUpdate))]
        union = torch.unique(torch.cat([update.rows for update in group]))
        grad = self.grad.new_zeros(len(union), *self.grad.shape[1:])
        for update in group:
            grad.index_add_(0, torch.searchsorted(union, update.rows), update.grad)
        return replace(self, rows=union, grad=grad)


@dataclass
class SweepUpdate(RowUpdate):
    """The step of all rows, whose gradient is made when it is asked for, a block at a time: it never exists whole.

    Of several sweeps (micro-steps) the gradients are added block by block. `square` is one more pass over the blocks;
    the gradients it makes of the last ones stay for `apply`, as far as the bytes go that exponentials have left.
    """

    sweeps: list[Sweep]

    def __post_init__(self) -> None:
        self.weight = self.sweeps[0].parameter
        self._kept: dict[int, Tensor] = {}  # gradients of blocks, led to the weight already

    def steps_with(self) -> tuple[RowOptimizer | None, State]:
        return self.sweeps[0].problem.optimizer, self.sweeps[0].problem.state

    def numbers(self) -> list[Tensor]:
        return [number for sweep in self.sweeps for number in (sweep.coefficient, sweep.own_pull)]

    @torch.no_grad()
    def square(self, scale: float = 1.0) -> Tensor:
        first, squares = self._checked(), []
        blocks = first.blocks()
        kept_from = len(blocks) - self._num_kept()
        for index, start, stop in blocks:
            grad = self._gradient(index, start, stop, f"gradient{index}" if index >= kept_from else "gradient")
            first.lead_to_weight(grad, start, stop)
            squares.append(torch.linalg.vector_norm(grad).double() ** 2)
            if index >= kept_from:
                self._kept[index] = grad
        total = torch.stack(squares).sum() if squares else self.weight.new_zeros((), dtype=torch.float64)
        return total * scale**2

    def _num_kept(self) -> int:
        """Blocks whose gradients fit into what the kept exponentials leave of their bytes."""
        sweep = self.sweeps[0]
        row_bytes = math.prod(sweep.weight.shape[1:]) * sweep.x.element_size()
        left = max(sweep.problem.cache_bytes - max(each.cached_bytes() for each in self.sweeps), 0)
        return left // (min(sweep.problem.block, max(sweep.num_rows, 1)) * row_bytes)

    @torch.no_grad()
    def apply(self, scale: float = 1.0) -> None:
        first = self._checked()
        if scale != 1.0:
            for sweep in self.sweeps:
                sweep.multiply(scale)
            for grad in self._kept.values():
                grad.mul_(scale)
        for index, start, stop in first.blocks():
            made = self._kept.pop(index, None)
            grad = self._gradient(index, start, stop, "gradient") if made is None else made
            first.step_rows(grad, start, stop, led=made is not None)
        if first.problem.applied is not None:
            first.problem.applied(None)
        for sweep in self.sweeps:
            sweep.free()

    def joined(self, others: Sequence[RowUpdate]) -> SweepUpdate:
        sweeps = [sweep for update in (self, *others) for sweep in update.sweeps]  # type: ignore[attr-defined]
        for sweep in sweeps[1:]:
            sweep.cut_as(sweeps[0])
        return SweepUpdate(sweeps)

    def _checked(self) -> Sweep:
        if not all(sweep.is_current() for sweep in self.sweeps):
            raise RuntimeError(
                "the head's weight changed between a forward and the step of its rows, whose gradient is made from "
                "the weight then; apply the updates of one step together (plsc.ops.merge_updates), before anything "
                "else changes or moves the weight"
            )
        return self.sweeps[0]

    def _gradient(self, index: int, start: int, stop: int, name: str) -> Tensor:
        """That of w / |w| divided by |w| (cosines), [n, (K,) D], summed over the sweeps."""
        first, *others = self.sweeps
        shape = stop - start, *self.weight.shape[1:]
        grad = first.problem.workspace.get(name, first.x, *shape)
        first.block_gradient(index, start, stop, grad)
        for sweep in others:
            more = sweep.problem.workspace.get("more", sweep.x, *shape)
            grad += sweep.block_gradient(index, start, stop, more)
        return grad


_collecting: dict[int, list[RowUpdate]] = {}


@contextmanager
def deferred_updates() -> Iterator[list[RowUpdate]]:
    """Inside, backward passes of fused heads put their row updates into the list instead of applying them.

    Needed where ranks must agree first: fp16 overflow, clipping, gradient accumulation. Heads look it up by the thread
    of their backward pass, and where that is autograd's own (CUDA) by the one of their forward.
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
    """What collects updates of a backward in this thread, whose forward ran in `thread`; None: they apply at once."""
    return _collecting.get(threading.get_ident(), _collecting.get(thread))


def merge_updates(updates: Sequence[RowUpdate]) -> list[RowUpdate]:
    """One update a weight: gradients of the same rows (several micro-steps) are added."""
    by_weight: dict[int, list[RowUpdate]] = {}
    for update in updates:
        by_weight.setdefault(id(update.weight), []).append(update)
    return [_joined(group[0], group[1:]) for group in by_weight.values()]


def _joined(first: RowUpdate, others: Sequence[RowUpdate]) -> RowUpdate:
    """One step with the sum of their gradients, where all mean the same step."""
    optimizer, state = first.steps_with()
    for other in others:
        if type(other) is not type(first):
            raise RuntimeError(
                "a head that samples classes was called in training and in eval() within one step, and would step "
                "sampled rows and all rows together; call it in one mode, under torch.no_grad() where it is not trained"
            )
        its_optimizer, its_state = other.steps_with()
        if its_optimizer != optimizer or any(its_state.get(name) is not kept for name, kept in state.items()):
            raise RuntimeError(
                "two heads share a weight and each has a row optimizer or state of its own, or a head_optimizer was "
                "replaced between the passes of a step; call one head twice, and change a rate by head_optimizer.lr"
            )
    return first.joined(others) if others else first
