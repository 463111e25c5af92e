"""The passes of the sharded cross-entropy over the blocks of one rank's classes: sums forward, gradients backward.

The products are made with the rows as they are: a cosine is dot * inverse, with inverse = 1 / |w|, and what is kept
of a block is E_ij f'(cos_ij) inverse_j, with E_ij = exp(z_ij - m). Then O = E w, and E.T @ x is already the gradient
of w / |w| divided by |w|: no normalised copy of the weight, nor of its gradient, is ever made.

Products in halves (Problem.half) have bfloat16 operands: x, w, what is kept of a block, and x by its share of the loss,
each rounded once; logits, sums and own-class terms are wide. bfloat16 has the exponents of float32, so no number needs
a scale of its own; what is left of x after the division by S, where S is largest (scale 64, 1e8 classes, 1e5 samples:
64 / (1e5 * 1e4 * e^64) = 1e-35, times x), is still above 1.2e-38, below which bfloat16 loses digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plsc.ops import host, native
from plsc.ops.optim import apply_rows, remove_radial
from plsc.ops.problem import Problem

# exp(+-range) summed over 1e8 classes stays in the dtype's, and so does each over a length between 1e-6 and 1e6
_EXP_RANGE = {torch.float32: 64.0, torch.float64: 600.0}
_LN2 = math.log(2.0)


class Sweep:
    """Two passes over one rank's classes."""

    def __init__(self, problem: Problem, weight: Tensor, bias: Tensor | None) -> None:
        self.problem, self.parameter = problem, weight  # the parameter itself: updates of one weight are told by it
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.version = weight._version  # what is made of the weight later must be made of the same one
        self.centers = weight.shape[1] if weight.dim() == 3 else 1
        self.num_rows = len(weight) if problem.rows is None else len(problem.rows)
        self.num_samples = len(problem.x)
        self.released = self.waits = False  # after a backward; for the step of the rows after it
        self.cache: dict[int, Tensor] = {}
        self.maxima: dict[int, Tensor] = {}  # [N] the shift a cached block was made with, where it moves
        assert bias is None or not problem.half
        scoring = problem.scoring
        limit = _EXP_RANGE[torch.float32 if problem.half or problem.cache_half else problem.x.dtype]
        self.constant_shift = scoring.scale * scoring.bound <= limit
        self.constant = math.log(max(problem.num_classes, 1)) / 2
        self.shift = problem.x.new_full((self.num_samples,), self.constant if self.constant_shift else -math.inf)
        self.total = problem.x.new_zeros(self.num_samples)
        self.own = problem.x.new_zeros(self.num_samples)  # own logits
        self.own_cos: Tensor | None = None  # [N] of all ranks' classes, where `others` needs it
        self.output: Tensor | None = None
        # Where nothing stands between cosine and logit the product gives logits at once.
        self.plain = scoring.others is None and scoring.filter_threshold is None and self.bias is None
        self.direct = self.plain and self.constant_shift and scoring.normalize and self.centers == 1
        self.operand = torch.bfloat16 if problem.half else problem.x.dtype
        self.x = self._seen(problem.x)  # [N, D]
        self.scale = scoring.scale  # still to be multiplied by
        self.left = self.x.to(self.operand)
        if self.plain and not problem.half:
            self.left, self.scale = self.x * scoring.scale, 1.0
        self.place = problem.place.contiguous()
        self._find_own()

    def blocks(self) -> list[tuple[int, int, int]]:
        """(index, start, stop) of each block of the rows that take part."""
        step = self.problem.block
        return [(i, at, min(at + step, self.num_rows)) for i, at in enumerate(range(0, self.num_rows, step))]

    def is_current(self) -> bool:
        """Whether the weight is what it was in the forward, where it was."""
        return self.version == self.parameter._version and self.weight.data_ptr() == self.parameter.data_ptr()

    def release(self) -> None:
        """No backward comes any more; what the step of the rows needs stays until `free`, if it waits."""
        self.released, self.output = True, None
        if not self.waits:
            self.free()

    def free(self) -> None:
        self.cache, self.maxima = {}, {}

    def cached_bytes(self) -> int:
        return sum(kept.numel() * kept.element_size() for kept in self.cache.values())

    def _find_own(self) -> None:
        """The samples whose class this rank holds, sorted by class: `mine` [M].

        How many they are a GPU would have to be asked. There M is N: `held` says which count, and those of other ranks
        have row 0 and add nothing.
        """
        self.mine = self.place.argsort(stable=True)  # what is not held comes first
        if self.num_rows == 0:
            self.mine = self.mine[:0]
        if host.reads_freely(self.place):
            self.mine = self.mine[int((self.place < 0).sum()) :]
        self.own_at = self.place[self.mine]  # [M] the own row, -1 where it is not held; later the own vector of K a row
        self.held = self.own_at >= 0
        self.mine_rows = self.own_at.clamp_min(0)
        self.bounds: list[int] | None = None  # own classes of block b are those from bounds[b] to bounds[b + 1]
        self._bound_own()

    def _bound_own(self) -> None:
        if host.reads_freely(self.place):
            starts = torch.arange(0, self.num_rows + self.problem.block, self.problem.block)
            self.bounds = torch.searchsorted(self.mine_rows, starts).tolist()

    def cut_as(self, other: Sweep) -> None:
        """Cuts the rows into the blocks of another sweep over them."""
        if self.problem.block != other.problem.block:
            self.problem.block = other.problem.block
            self.free()
            self._bound_own()

    # ---- forward

    def forward(self, *, keep_output: bool, keep_cache: bool) -> None:
        problem = self.problem
        problem.workspace.owner = self
        self._own_classes()
        if keep_output:
            self.output = torch.zeros_like(problem.x)
        self._plan_cache(keep_cache)
        for index, start, stop in self.blocks():
            self._sum_block(index, start, stop)
        if not self.constant_shift:
            self._agree_on_shift()
        packed = torch.stack([self.total, self.own])
        self.total, self.own = problem.comm.all_reduce(packed).wait().unbind(0)

    def excess(self) -> Tensor:
        """How far log of the others' sum lies above the own logit, [N], -inf without any; the loss is its softplus."""
        return self.total.log() + self.shift - self.own

    def _own_classes(self) -> None:
        """Own-class cosines of the samples this rank holds, their margin and its slopes; zeros elsewhere."""
        problem, scoring = self.problem, self.problem.scoring
        w_own = self._seen(self.weight[self._rows_of(self.mine_rows)])  # [M, (K,) D]
        x_own = self.x[self.mine]
        self.own_inverse = _inverse_norm(w_own) if scoring.normalize else torch.ones_like(w_own[..., :1])
        self.own_unit = w_own * self.own_inverse
        dots = torch.einsum("md,m...d->m...", x_own, self.own_unit)  # [M, (K)]
        if dots.dim() == 2:
            cos, nearest = dots.max(1)
            each = torch.arange(len(cos), device=cos.device)
            self.own_unit, self.own_inverse = self.own_unit[each, nearest], self.own_inverse[each, nearest]
            self.own_at = self.own_at * self.centers + nearest
        else:
            cos = dots
        if self.bias is not None:
            cos = cos + self.bias[self._rows_of(self.mine_rows)]
        if scoring.others is not None:
            everyone = problem.x.new_zeros(self.num_samples)
            everyone[self.mine] = torch.where(self.held, cos, 0.0)
            self.own_cos = problem.comm.all_reduce(everyone).wait()
        if problem.observe is not None:
            problem.observe(self.own_cos)
        moved, slope, norm_slope = self._target(cos)
        self.own[self.mine] = torch.where(self.held, scoring.scale * moved, 0.0)
        self.cos_slope = torch.where(self.held, slope, 0.0)  # for the backward
        self.norm_slope = None if norm_slope is None else torch.where(self.held, norm_slope, 0.0)

    def _target(self, cos: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The margin's cosines [M], and their slopes against cosine and norm."""
        problem, target = self.problem, self.problem.scoring.target
        if target is None or len(cos) == 0:
            return cos, torch.ones_like(cos), None
        with torch.enable_grad():
            cos = cos.detach().requires_grad_()
            inputs = [cos]
            if problem.norms is not None:
                inputs.append(problem.norms[self.mine].detach().requires_grad_())
            moved = target(*inputs)
            if moved.shape != cos.shape:
                raise ValueError(f"margin target gave shape {tuple(moved.shape)}, expected {tuple(cos.shape)}")
            slopes = torch.autograd.grad(moved.sum(), inputs, allow_unused=True) if moved.requires_grad else [None] * 2
        slope = torch.zeros_like(cos) if slopes[0] is None else slopes[0]
        return moved.detach(), slope, slopes[1] if len(inputs) > 1 else None

    def _plan_cache(self, keep_cache: bool) -> None:
        """The first blocks keep their exponentials until the backward, as far as the byte budget goes."""
        problem = self.problem
        width = 2 if problem.cache_half or problem.half else problem.x.element_size()
        block_bytes = self.num_samples * min(problem.block, self.num_rows) * self.centers * width
        self.num_cached = problem.cache_bytes // max(block_bytes, 1) if keep_cache else 0

    def _sum_block(self, index: int, start: int, stop: int) -> None:
        problem, keep = self.problem, index < self.num_cached
        rows, inverse = self._rows_between(start, stop)
        spread = self._spread(start, rows, inverse, f"cache{index}" if keep else None, self.total)
        if self.output is not None:
            self._add_product(spread, rows.flatten(0, -2))
        if not keep:
            return
        if problem.cache_half and spread.dtype != torch.bfloat16:
            half = problem.workspace.get(f"cache{index}", spread.new_empty(0, dtype=torch.bfloat16), *spread.shape)
            spread = half.copy_(spread)
        self.cache[index] = spread
        if not self.constant_shift:
            self.maxima[index] = self.shift

    def _add_product(self, spread: Tensor, rows: Tensor) -> None:
        """output += spread @ rows."""
        assert self.output is not None
        if not self.problem.half:
            self.output.addmm_(spread, rows)
            return
        part = self.problem.workspace.get("part", self.output, *self.output.shape)
        self.output += native.product(spread, rows, out=part)

    def _raise_shift(self, largest: Tensor) -> None:
        """The largest logit so far becomes the shift; what was summed with a lower one shrinks.

        In halves by powers of two: blocks that differ in their shift, as those of other ranks, are rounded alike.
        """
        if self.problem.half:
            largest = (largest / _LN2).ceil_() * _LN2
        top = torch.maximum(self.shift, largest)
        shrink = torch.exp(self.shift - top).nan_to_num_(nan=0.0)  # -inf - -inf: nothing summed so far
        self.shift = top
        self._shrink(shrink)

    def _agree_on_shift(self) -> None:
        """The largest logit over all ranks becomes everybody's shift."""
        local = self.shift
        self.shift = self.problem.comm.all_reduce(local.clone(), "max").wait()
        self.shift = torch.where(self.shift.isinf(), 0.0, self.shift)  # a lone class: no other logit anywhere
        self._shrink(torch.exp(local - self.shift))

    def _shrink(self, factor: Tensor) -> None:
        self.total.mul_(factor)
        if self.output is not None:
            self.output.mul_(factor[:, None])

    # ---- one block

    def _rows_of(self, rows: Tensor) -> Tensor:
        return rows if self.problem.rows is None else self.problem.rows[rows]

    def _chosen(self, start: int, stop: int) -> Tensor | slice:
        """Rows [start, stop) of those that take part, as numbers of the weight's rows."""
        return slice(start, stop) if self.problem.rows is None else self.problem.rows[start:stop]

    def _seen(self, values: Tensor) -> Tensor:
        """As products see them, wide."""
        return values.to(self.operand).to(self.problem.x.dtype)

    def _rows_between(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Rows [start, stop) of those that take part, [n, (K,) D], and 1 / length of each vector [n * K] if cosines."""
        return self._operands(self.weight, self._chosen(start, stop), stop - start)

    def _operands(self, weight: Tensor, rows: Tensor | slice, count: int) -> tuple[Tensor, Tensor | None]:
        """`count` rows as operands: a view of the weight where that will do, else in a buffer of the block.

        Their lengths are those of what enters the products, so that no cosine leaves [-1, 1] by more than rounding.
        """
        problem, out, inverse = self.problem, None, None
        if isinstance(rows, Tensor) or weight.dtype != self.operand:
            out = problem.workspace.get("rows", self.left, count, *weight.shape[1:])
        if problem.scoring.normalize:
            inverse = problem.workspace.get("inverse", problem.x, count * self.centers)
        return native.read_rows(weight, rows, out=out, inverse=inverse), inverse

    def _spread(
        self, start: int, rows: Tensor, inverse: Tensor | None, kept: str | None, total: Tensor | None = None
    ) -> Tensor:
        """What the products of a block are made with: E f' / |w|, [N, n * K], its own entries left out.

        kept: the buffer where it stays until the backward, if it does. total: [N] gets the sums of E, forward.
        """
        problem, flat = self.problem, rows.flatten(0, -2)  # [n * K, D]
        shape = self.num_samples, len(flat)
        narrowed = problem.half or problem.cache_half  # what stays is not what logits are made in
        dots = problem.workspace.get("exponentials" if kept is None or narrowed else kept, problem.x, *shape)
        half = problem.workspace.get(kept or "halves", self.left, *shape) if problem.half else None
        native.product(self.left, flat.T, out=dots)
        if self.direct:
            assert inverse is not None
            sums = torch.zeros_like(self.total) if total is None else total
            where: dict[str, Any] = {"place": self.place, "start": start, "shift": self.constant, "total": sums}
            return native.exponentials(dots, inverse, scale=self.scale, out=half, **where)
        raw, slope, center = self._logits(dots, start, len(rows), inverse)
        if total is not None and not self.constant_shift and len(rows):
            self._raise_shift(raw.amax(1))
        exponentials = self._exponentials(raw, self.shift)
        if total is not None:
            total += exponentials.sum(1)
        spread = self._by_vector(exponentials, slope, center, inverse)
        return spread if half is None else half.copy_(spread)

    def _logits(
        self, cos: Tensor, start: int, count: int, inverse: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """From products [N, n * K] to logits [N, n] of `count` classes, -inf at own entries.

        With them d logit / d cosine over scale; the sub-centre that won.
        """
        scoring = self.problem.scoring
        if inverse is not None:
            cos.mul_(inverse)
        center = None
        if self.centers > 1:
            cos, center = cos.view(self.num_samples, count, -1).max(2)
        if self.bias is not None:
            cos += self.bias[self._chosen(start, start + count)]
        slope = None
        if scoring.filter_threshold is not None:
            kept = cos <= scoring.filter_threshold
            slope = kept.to(cos.dtype)
            cos.mul_(slope)
        if scoring.others is not None:
            assert self.own_cos is not None
            cos, inner = _elementwise(scoring.others, cos, self.own_cos[:, None])
            slope = inner if slope is None else slope.mul_(inner)
        if self.scale != 1.0:
            cos.mul_(self.scale)
        native.leave_out(cos, self.place, start)
        return cos, slope, center

    def _exponentials(self, raw: Tensor, shift: Tensor) -> Tensor:
        """exp(logit - shift) in place; a row that has met no finite logit yet stays 0."""
        if self.constant_shift:
            return raw.sub_(self.constant).exp_()
        return raw.sub_(shift.clamp_min(torch.finfo(shift.dtype).min)[:, None]).exp_()

    def _by_vector(
        self, exponentials: Tensor, slope: Tensor | None, center: Tensor | None, inverse: Tensor | None
    ) -> Tensor:
        """[N, n] over classes -> [N, n * K] over vectors: E f' / |w| at the sub-centre that won, 0 elsewhere."""
        if slope is not None:
            exponentials.mul_(slope)
        if center is not None:
            wide = exponentials.new_zeros(*exponentials.shape, self.centers)
            exponentials = wide.scatter_(2, center[:, :, None], exponentials[:, :, None]).flatten(1)
        return exponentials if inverse is None else exponentials.mul_(inverse)

    # ---- backward

    def loss_gradient(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """d sum(factors * loss) / d S and / d own logit, each [N]; with the sums of all ranks it takes no exchange."""
        share = factors * torch.sigmoid(self.excess())  # factor * (1 - probability of the own class)
        tiny = torch.finfo(self.total.dtype).tiny
        return torch.where(self.total < tiny, 0.0, share / self.total.clamp_min(tiny)), -share

    def input_gradient(self, g_total: Tensor, g_own: Tensor) -> Tensor:
        """This rank's part of the gradient of all embeddings [N, D]."""
        scale = self.problem.scoring.scale
        assert self.output is not None
        grad = self.output.mul_((scale * g_total)[:, None])
        pull = (scale * g_own[self.mine]) * self.cos_slope  # [M]
        return grad.index_add_(0, self.mine, self.own_unit * pull[:, None])

    def norm_gradient(self, g_own: Tensor) -> Tensor:
        """This rank's part of the gradient of all embeddings' norms [N]."""
        grad = torch.zeros_like(g_own)
        if self.norm_slope is not None:
            grad[self.mine] = self.problem.scoring.scale * g_own[self.mine] * self.norm_slope
        return grad

    def begin_weight(self, g_total: Tensor, g_own: Tensor) -> None:
        """What the weight's gradient is made from, by the loss's with respect to S and own logits, each [N]."""
        factor = self.problem.scoring.scale * self.problem.grad_scale
        self.coefficient = factor * g_total  # [N]
        self.own_pull = factor * g_own[self.mine] * self.cos_slope  # [M]

    def multiply(self, scale: float) -> None:
        """Multiplies the weight's gradient by `scale`, before it is made."""
        self.coefficient, self.own_pull = self.coefficient * scale, self.own_pull * scale
        self.__dict__.pop("_factors", None)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What blocks of exponentials are multiplied with: [N, D], the same as an operand; own-class rows [M, D]."""
        pull = self.x * self.coefficient[:, None]
        own_rows = self.x[self.mine] * (self.own_pull[:, None] * self.own_inverse)
        return pull, pull.to(self.operand), own_rows

    def block_gradient(
        self, index: int, start: int, stop: int, out: Tensor | None = None, grad_bias: Tensor | None = None
    ) -> Tensor:
        """Gradient of the block's w / |w|, divided by |w|, if cosines, else of w: [n, (K,) D]; in a buffer or in `out`.

        grad_bias: of all rows, gets those of the block.
        """
        problem, (pull, rounded, own_rows) = self.problem, self._factors
        spread, shrink = self._exponentials_again(index, start, stop)
        if out is None:
            out = problem.workspace.get("gradient", problem.x, stop - start, *self.weight.shape[1:])
        flat = out.view(-1, out.shape[-1])
        a = rounded if shrink is None else (pull * shrink[:, None]).to(self.operand)
        native.product(spread.T, a, out=flat)
        self._add_own(flat, own_rows, index, start)
        if grad_bias is not None:
            part = spread.T @ (self.coefficient if shrink is None else self.coefficient * shrink)
            self._add_own(part, self.own_pull, index, start)
            grad_bias[self._chosen(start, stop)] = part
        return out

    def lead_to_weight(self, grad: Tensor, start: int, stop: int) -> None:
        """From what `block_gradient` gives to the gradient of w, in place."""
        if self.problem.scoring.normalize:
            remove_radial(self.weight, self._chosen(start, stop), grad)

    def step_rows(self, grad: Tensor, start: int, stop: int, *, led: bool = False) -> None:
        """Steps the block's rows with what `block_gradient` gives; led: it is that of w already."""
        problem, normalize = self.problem, self.problem.scoring.normalize and not led
        assert problem.optimizer is not None
        kept = problem.optimizer, self.weight, problem.state
        apply_rows(*kept, self._chosen(start, stop), grad, normalize=normalize, rounding=problem.rounding)

    def _exponentials_again(self, index: int, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """What was kept of a block [N, n * K], cached or computed anew; and a row factor if any."""
        problem = self.problem
        if index not in self.cache or problem.workspace.owner is not self:
            return self._spread(start, *self._rows_between(start, stop), None), None
        spread = self.cache[index]
        if spread.dtype != self.operand:
            spread = problem.workspace.get("exponentials", problem.x, *spread.shape).copy_(spread)
        return spread, None if self.constant_shift else torch.exp(self.maxima[index] - self.shift)

    def _add_own(self, grad: Tensor, terms: Tensor, index: int, start: int) -> None:
        """Adds the own-class terms [M, ...], one a sample, to the gradient [n * K, ...] of the block they belong to."""
        first = start * self.centers
        if self.bounds is not None:
            own = slice(self.bounds[index], self.bounds[index + 1])
            if own.start < own.stop:
                grad.index_add_(0, self.own_at[own] - first, terms[own])
            return
        at = self.own_at - first
        within = at.remainder(len(grad))  # what belongs elsewhere adds zeros, spread over the rows
        inside = (within == at).view(-1, *[1] * (terms.dim() - 1))
        grad.index_add_(0, within, torch.where(inside, terms, 0.0))


def _inverse_norm(rows: Tensor) -> Tensor:
    """1 / length along the last dim, which is kept with size 1; 0 for a zero row."""
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return torch.where(norm > 0, 1 / norm, 0.0)


def _elementwise(fn: Callable[[Tensor, Tensor], Tensor], cos: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope of an elementwise function of a block; own cosines count as constants."""
    with torch.enable_grad():
        leaf = cos.detach().requires_grad_()
        value = fn(leaf, own)
        if value.shape != cos.shape:
            raise ValueError(f"margin others gave shape {tuple(value.shape)}, expected {tuple(cos.shape)}")
        # none where `fn` is constant, or in inference mode, where nobody asks for it
        slope = torch.autograd.grad(value.sum(), leaf)[0] if value.requires_grad else torch.zeros_like(cos)
    value = value.detach()
    return (value.clone() if value.data_ptr() == cos.data_ptr() else value), slope.contiguous()
