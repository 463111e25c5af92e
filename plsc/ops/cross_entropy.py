"""Softmax cross-entropy over classes that are split between ranks, block by block: [batch, classes] is never held.

Notation: N samples of the global batch, D embedding size, C classes, R rows of this rank's weight that take part,
K sub-centres. For a sample i with own class y, logits z_ij = scale * f(cos_ij) and z_iy = scale * target(cos_iy):

    loss_i = log(sum_{j != y} exp(z_ij) + exp(z_iy)) - z_iy

Each rank sums S_i = sum_{j != y} exp(z_ij - m) over its classes, with m a constant or the largest logit; the own entry
is left out of its block, never subtracted afterwards (that cancels at scale 64). One all_reduce of (S, own logit) joins
the ranks, whatever C is. As in flash attention, O_i = sum_j exp(z_ij - m) f'(cos_ij) w_j is summed in the same sweep,
so the gradient of the embeddings needs no second one; the weight's gradient takes one more sweep over the blocks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from plsc.comm import Communicator
from plsc.ops.optim import RowOptimizer, RowUpdate, State, apply_rows, collector, pieces

_EXP_RANGE = {torch.float32: 78.0, torch.float64: 600.0}  # exp(+-range) summed over 1e8 classes stays in range


class Workspace:
    """Named buffers that live between steps: a fresh mapping of big temporaries costs more than their arithmetic."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.owner: object = None  # whose exponentials the cache holds: a later forward takes it over

    def get(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor of the given shape, dtype and device of `like`, from a buffer that only grows."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)

    def __deepcopy__(self, memo: object) -> Workspace:
        return Workspace()

    def __getstate__(self) -> dict[str, object]:
        return {"_buffers": {}, "owner": None}


@dataclass
class Scoring:
    """How an inner product becomes a logit.

    `target` maps own-class cosines [M] (and norms [M] if given) to the margin's cosines; `others` is elementwise on a
    block [N, n] given the own-class cosines [N, 1]; `bound` is the largest magnitude others can give, inf if unknown.
    """

    scale: float = 1.0
    normalize: bool = True  # cosines; False: plain inner products
    target: Callable[..., Tensor] | None = None
    others: Callable[[Tensor, Tensor], Tensor] | None = None
    bound: float = 1.0
    filter_threshold: float | None = None  # negatives with a cosine above it count as cosine 0


@dataclass
class Problem:
    """One step's batch and the part of the weight that meets it; everything a sweep over the blocks needs."""

    comm: Communicator
    scoring: Scoring
    x: Tensor  # [N, D] embeddings of the global batch, unit length if cosines
    place: Tensor  # [N] row of the own class among `rows`, or -1 where another rank has it or it is ignored
    norms: Tensor | None  # [N] length of the embeddings before normalisation
    num_classes: int
    grad_scale: float = 1.0  # applied to the weight's gradient
    rows: Tensor | None = None  # [R] rows that take part; None: all
    block: int = 4096
    cache_bytes: int = 0
    optimizer: RowOptimizer | None = None
    state: State = field(default_factory=dict)
    observe: Callable[[Tensor | None], None] | None = None  # sees the own cosines [N] before target is called
    thread: int = field(default_factory=threading.get_ident)
    workspace: Workspace = field(default_factory=Workspace)


def sharded_cross_entropy(
    x: Tensor, norms: Tensor | None, weight: Tensor, bias: Tensor | None, problem: Problem
) -> Tensor:
    """Loss of each of this rank's samples: [B], differentiable in x [B, D], norms [B], weight [R_all, (K,) D], bias.

    `problem.x` holds the same embeddings gathered from all ranks (N = B * world_size, this rank's part at its place).
    The gradient of x and norms is the exact adjoint (summed over ranks); the weight's is multiplied by grad_scale.
    """
    total, own, shift = _SoftmaxSums.apply(x, norms, weight, bias, problem)
    tiny = torch.finfo(total.dtype).tiny
    return F.softplus(total.clamp_min(tiny).log() + shift - own)


class _SoftmaxSums(torch.autograd.Function):
    """(x, norms, weight, bias) -> this rank's part of S [B], own logit [B] and the shift m [B], summed over ranks."""

    @staticmethod
    def forward(ctx, x, norms, weight, bias, problem: Problem):  # type: ignore[no-untyped-def]
        need_x, need_norms, need_weight, need_bias = ctx.needs_input_grad[:4]
        sweep = _Sweep(problem, weight, bias)
        sweep.forward(keep_output=need_x, keep_cache=need_weight or need_bias)
        batch = len(x)
        start = problem.comm.rank * batch
        ctx.sweep, ctx.weight = sweep, weight
        ctx.needs = (need_x, need_norms, need_weight, need_bias)
        ctx.versions = (weight._version, None if bias is None else bias._version)
        ctx.mark_non_differentiable(shift := sweep.shift_of(start, batch))
        part = slice(start, start + batch)
        return sweep.total[part].clone(), sweep.own[part].clone(), shift

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, grad_own, _):  # type: ignore[no-untyped-def]
        sweep, problem = ctx.sweep, ctx.sweep.problem
        need_x, need_norms, need_weight, need_bias = ctx.needs
        comm = problem.comm
        grads = comm.all_gather(torch.stack([grad_total, grad_own], 1)).wait()  # [N, 2]; dW needs every rank's
        g_total, g_own = grads.unbind(1)
        if sweep.released:
            raise RuntimeError("backward through the head twice: call forward again, its buffers are freed after use")
        versions = (ctx.weight._version, None if sweep.bias is None else sweep.bias._version)
        if (need_x or need_weight) and versions != ctx.versions:
            raise RuntimeError("the head's weight changed between its forward and its backward; call forward again")
        grad_x = grad_norms = grad_weight = grad_bias = None
        work = None
        if need_x or need_norms:
            work = comm.reduce_scatter(sweep.input_gradient(g_total, g_own, need_norms))
        if need_weight or need_bias:
            grad_weight, grad_bias = sweep.weight_gradient(g_total, g_own, need_bias)
        if work is not None:
            packed = work.wait()  # [B, D (+ 1)]
            dim = problem.x.shape[1]
            grad_x = packed[:, :dim] if need_x else None
            grad_norms = packed[:, dim] if need_norms else None
        sweep.release()
        return grad_x, grad_norms, grad_weight, grad_bias, None


class _Sweep:
    """The passes over the blocks of one rank's classes: sums forward, gradients backward."""

    def __init__(self, problem: Problem, weight: Tensor, bias: Tensor | None) -> None:
        self.problem, self.parameter = problem, weight  # the parameter itself: updates of one weight are told by it
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.num_rows = len(weight) if problem.rows is None else len(problem.rows)
        self.num_samples = len(problem.x)
        self.released = False
        self.cache: dict[int, Tensor] = {}
        self.maxima: dict[int, Tensor] = {}  # [N] the shift a cached block was made with, where it moves
        scoring = problem.scoring
        self.constant_shift = scoring.scale * scoring.bound <= _EXP_RANGE[problem.x.dtype]
        constant = math.log(max(problem.num_classes, 1)) / 2
        self.shift = problem.x.new_full((self.num_samples,), constant if self.constant_shift else -math.inf)
        self.total = problem.x.new_zeros(self.num_samples)
        self.own = problem.x.new_zeros(self.num_samples)  # own logits
        self.own_center: Tensor | None = None  # [M] the nearest sub-centre
        self.own_cos: Tensor | None = None  # [N] of all ranks' classes, where `others` needs it
        self.output: Tensor | None = None
        self.inverse = self.weight.new_empty(self.num_rows, *self.weight.shape[1:-1], 1)  # 1 / |w|, of each sweep
        # Where nothing stands between cosine and logit the product gives logits at once.
        self.plain = scoring.others is None and scoring.filter_threshold is None and self.bias is None
        self.left = problem.x * scoring.scale if self.plain else problem.x  # [N, D]
        self.mine = (problem.place >= 0).nonzero().squeeze(1)  # [M] samples whose class this rank holds
        self.mine_rows = problem.place[self.mine]  # [M]
        order = self.mine_rows.argsort()
        self.mine, self.mine_rows = self.mine[order], self.mine_rows[order]
        starts = torch.arange(0, self.num_rows + problem.block, problem.block, device=self.mine.device)
        self.mine_bounds = torch.searchsorted(self.mine_rows, starts).tolist()  # own classes of block b: [b], [b + 1]

    def shift_of(self, start: int, batch: int) -> Tensor:
        return self.shift[start : start + batch].clone()

    def release(self) -> None:
        self.released = True
        self.cache, self.maxima, self.output = {}, {}, None

    # ---- forward

    def forward(self, *, keep_output: bool, keep_cache: bool) -> None:
        problem = self.problem
        problem.workspace.owner = self
        self._own_classes()
        if keep_output:
            self.output = torch.zeros_like(problem.x)
        self._plan_cache(keep_cache)
        for index, start in enumerate(range(0, self.num_rows, problem.block)):
            self._sum_block(index, start, min(start + problem.block, self.num_rows))
        if not self.constant_shift:
            self._agree_on_shift()
        packed = torch.stack([self.total, self.own])
        self.total, self.own = problem.comm.all_reduce(packed).wait().unbind(0)

    def _own_classes(self) -> None:
        """Own-class cosines of the samples this rank holds, their margin and its slopes; zeros elsewhere."""
        problem, scoring = self.problem, self.problem.scoring
        w_own = self._gather(self.mine_rows)  # [M, (K,) D]
        x_own = problem.x[self.mine]
        self.own_unit = w_own * _inverse_norm(w_own) if scoring.normalize else w_own
        dots = torch.einsum("md,m...d->m...", x_own, self.own_unit)  # [M, (K)]
        if dots.dim() == 2:
            cos, self.own_center = dots.max(1)
            self.own_unit = self.own_unit[torch.arange(len(cos), device=cos.device), self.own_center]
        else:
            cos = dots
        if self.bias is not None:
            cos = cos + self.bias[self._rows_of(self.mine_rows)]
        if scoring.others is not None:
            everyone = problem.x.new_zeros(self.num_samples)
            everyone[self.mine] = cos
            self.own_cos = problem.comm.all_reduce(everyone).wait()
        if problem.observe is not None:
            problem.observe(self.own_cos)
        self.own[self.mine] = scoring.scale * self._target(cos)

    def _target(self, cos: Tensor) -> Tensor:
        """The margin's cosines [M]; keeps their slopes against cosine and norm for the backward."""
        problem, target = self.problem, self.problem.scoring.target
        self.cos_slope, self.norm_slope = torch.ones_like(cos), None
        if target is None or len(cos) == 0:
            return cos
        with torch.enable_grad():
            cos = cos.detach().requires_grad_()
            inputs = [cos]
            if problem.norms is not None:
                inputs.append(problem.norms[self.mine].detach().requires_grad_())
            moved = target(*inputs)
            if moved.shape != cos.shape:
                raise ValueError(f"margin target gave shape {tuple(moved.shape)}, expected {tuple(cos.shape)}")
            slopes = torch.autograd.grad(moved.sum(), inputs, allow_unused=True) if moved.requires_grad else [None] * 2
        self.cos_slope = torch.zeros_like(cos) if slopes[0] is None else slopes[0]
        self.norm_slope = slopes[1] if len(inputs) > 1 else None
        return moved.detach()

    def _plan_cache(self, keep_cache: bool) -> None:
        """The first blocks keep their exponentials until the backward, as far as the byte budget goes."""
        problem = self.problem
        width = problem.block * (self.weight.shape[1] if self.weight.dim() == 3 else 1)
        block_bytes = self.num_samples * width * problem.x.element_size()
        self.num_cached = problem.cache_bytes // max(block_bytes, 1) if keep_cache else 0

    def _sum_block(self, index: int, start: int, stop: int) -> None:
        unit = self._unit_block(start, stop)
        name = f"cache{index}" if index < self.num_cached else "exponentials"
        raw, slope, center = self._logits(index, start, stop, unit, name)
        if not self.constant_shift and stop > start:
            top = torch.maximum(self.shift, raw.amax(1))
            shrink = torch.exp(self.shift - top).nan_to_num_(nan=0.0)  # -inf - -inf: nothing summed so far
            self.shift = top
            self.total.mul_(shrink)
            if self.output is not None:
                self.output.mul_(shrink[:, None])
        exponentials = self._exponentials(raw, self.shift)
        self.total += exponentials.sum(1)
        if slope is not None:
            exponentials.mul_(slope)
        spread = _spread(exponentials, center, unit)
        if self.output is not None:
            self.output.addmm_(spread, unit.flatten(0, -2))
        if index < self.num_cached:
            self.cache[index] = spread
            if not self.constant_shift:
                self.maxima[index] = self.shift

    def _exponentials(self, raw: Tensor, shift: Tensor) -> Tensor:
        """exp(logit - shift) in place; a row that has met no finite logit yet stays 0."""
        if self.constant_shift:
            return raw.sub_(shift[0]).exp_() if len(shift) else raw
        return raw.sub_(shift.clamp_min(torch.finfo(shift.dtype).min)[:, None]).exp_()

    def _agree_on_shift(self) -> None:
        """The largest logit over all ranks becomes everybody's shift."""
        local = self.shift
        self.shift = self.problem.comm.all_reduce(local.clone(), "max").wait()
        self.shift = torch.where(self.shift.isinf(), 0.0, self.shift)  # a lone class: no other logit anywhere
        shrink = torch.exp(local - self.shift)
        self.total.mul_(shrink)
        if self.output is not None:
            self.output.mul_(shrink[:, None])

    # ---- one block

    def _rows_of(self, rows: Tensor) -> Tensor:
        return rows if self.problem.rows is None else self.problem.rows[rows]

    def _gather(self, rows: Tensor) -> Tensor:
        return self.weight[self._rows_of(rows)]

    def _rows_between(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of those that take part: a view of the weight, or gathered into a reused buffer."""
        problem = self.problem
        if problem.rows is None:
            return self.weight[start:stop]
        block = problem.workspace.get("rows", self.weight, stop - start, *self.weight.shape[1:])
        return torch.index_select(self.weight, 0, problem.rows[start:stop], out=block)

    def _unit_block(self, start: int, stop: int, *, again: bool = False) -> Tensor:
        """Rows [start, stop) at unit length (zero rows stay zero), in a buffer that is reused by the next block.

        Keeps the inverse norms; `again`: they are known from an earlier sweep.
        """
        if not self.problem.scoring.normalize:
            return self._rows_between(start, stop)
        unit = self.problem.workspace.get("unit", self.weight, stop - start, *self.weight.shape[1:])
        for first, last in pieces(self.weight, start, stop):
            rows, inverse = self._rows_between(first, last), self.inverse[first:last]
            if not again:
                inverse.copy_(_inverse_norm(rows))
            torch.mul(rows, inverse, out=unit[first - start : last - start])
        return unit

    def _logits(
        self, index: int, start: int, stop: int, unit: Tensor, name: str
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits [N, n] of a block, -inf at own entries; d logit / d cosine over scale; the sub-centre that won."""
        problem, scoring = self.problem, self.problem.scoring
        flat = unit.flatten(0, -2)  # [n * K, D]
        cos = problem.workspace.get(name, problem.x, self.num_samples, len(flat))
        torch.mm(self.left, flat.T, out=cos)
        center = None
        if unit.dim() == 3:
            cos, center = cos.view(self.num_samples, stop - start, -1).max(2)
        if self.bias is not None:
            cos += self.bias[start:stop] if problem.rows is None else self.bias[problem.rows[start:stop]]
        slope = None
        if scoring.filter_threshold is not None:
            kept = cos <= scoring.filter_threshold
            slope = kept.to(cos.dtype)
            cos.mul_(slope)
        if scoring.others is not None:
            assert self.own_cos is not None
            cos, inner = _elementwise(scoring.others, cos, self.own_cos[:, None])
            slope = inner if slope is None else slope.mul_(inner)
        if scoring.scale != 1.0 and not self.plain:
            cos.mul_(scoring.scale)
        first, last = self.mine_bounds[index], self.mine_bounds[index + 1]
        cos[self.mine[first:last], self.mine_rows[first:last] - start] = -math.inf
        return cos, slope, center

    # ---- backward

    def input_gradient(self, g_total: Tensor, g_own: Tensor, with_norms: bool) -> Tensor:
        """This rank's part of the gradient of all embeddings [N, D], and of their norms as a last column if asked."""
        problem, scale = self.problem, self.problem.scoring.scale
        assert self.output is not None
        grad = self.output.mul_((scale * g_total)[:, None])
        pull = (scale * g_own[self.mine]) * self.cos_slope  # [M]
        grad.index_add_(0, self.mine, self.own_unit * pull[:, None])
        if not with_norms:
            return grad
        column = problem.x.new_zeros(self.num_samples, 1)
        if self.norm_slope is not None:
            column[self.mine, 0] = scale * g_own[self.mine] * self.norm_slope
        return torch.cat([grad, column], 1)

    def weight_gradient(self, g_total: Tensor, g_own: Tensor, need_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """Sweeps the blocks again: returns the gradients of weight and bias, or hands rows to the row optimizer."""
        problem, scoring = self.problem, self.problem.scoring
        pull = problem.x * (scoring.scale * problem.grad_scale * g_total)[:, None]  # [N, D]
        own_pull = scoring.scale * problem.grad_scale * g_own[self.mine] * self.cos_slope  # [M]
        own_rows = problem.x[self.mine] * own_pull[:, None]  # [M, D]
        pending = None if problem.optimizer is None else collector(problem.thread)
        fused = problem.optimizer is not None and pending is None
        whole = grad_bias = None
        if not fused:
            whole = self.weight.new_empty(self.num_rows, *self.weight.shape[1:])
        if need_bias:
            assert self.bias is not None
            grad_bias = torch.zeros_like(self.bias)
        for index, start in enumerate(range(0, self.num_rows, problem.block)):
            stop = min(start + problem.block, self.num_rows)
            spread, shrink = self._exponentials_again(index, start, stop)
            a = pull if shrink is None else pull * shrink[:, None]
            shape = stop - start, *self.weight.shape[1:]
            grad = problem.workspace.get("gradient", self.weight, *shape) if whole is None else whole[start:stop]
            torch.mm(spread.T, a, out=grad.view(-1, grad.shape[-1]))
            own = slice(self.mine_bounds[index], self.mine_bounds[index + 1])
            self._add_own(grad, own_rows[own], own, start)
            if grad_bias is not None:
                coefficient = scoring.scale * problem.grad_scale * g_total
                part = spread.T @ (coefficient if shrink is None else coefficient * shrink)
                part.index_add_(0, self.mine_rows[own] - start, own_pull[own])
                grad_bias[slice(start, stop) if problem.rows is None else problem.rows[start:stop]] = part
            for first, last in pieces(self.weight, start, stop):
                piece = grad[first - start : last - start]
                if scoring.normalize:
                    self._through_normalize(piece, first, last)
                if fused:
                    assert problem.optimizer is not None
                    rows = slice(first, last) if problem.rows is None else problem.rows[first:last]
                    apply_rows(problem.optimizer, self.weight, problem.state, rows, piece)
        return self._deliver(whole, pending), grad_bias

    def _through_normalize(self, grad: Tensor, start: int, stop: int) -> None:
        """From the gradient of w / |w| to that of w: without its radial part, divided by the norm."""
        rows, inverse = self._rows_between(start, stop), self.inverse[start:stop]
        product = torch.mul(rows, grad, out=self.problem.workspace.get("product", self.weight, *rows.shape))
        radial = product.sum(-1, keepdim=True).mul_(inverse).mul_(inverse)
        grad.addcmul_(rows, radial, value=-1).mul_(inverse)

    def _deliver(self, whole: Tensor | None, pending: list[RowUpdate] | None) -> Tensor | None:
        problem = self.problem
        if whole is None:
            return None
        if pending is not None:
            assert problem.optimizer is not None
            pending.append(RowUpdate(problem.optimizer, self.parameter, problem.state, problem.rows, whole))
            return None
        if problem.rows is None:
            return whole
        return torch.zeros_like(self.weight).index_copy_(0, problem.rows, whole)

    def _exponentials_again(self, index: int, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """E * f' of a block spread over sub-centres [N, n * K], cached or computed anew; and a row factor if any."""
        if index in self.cache and self.problem.workspace.owner is self:
            if self.constant_shift:
                return self.cache[index], None
            return self.cache[index], torch.exp(self.maxima[index] - self.shift)
        unit = self._unit_block(start, stop, again=True)
        raw, slope, center = self._logits(index, start, stop, unit, "exponentials")
        exponentials = self._exponentials(raw, self.shift)
        if slope is not None:
            exponentials.mul_(slope)
        return _spread(exponentials, center, unit), None

    def _add_own(self, grad: Tensor, rows: Tensor, own: slice, start: int) -> None:
        """Adds the own-class terms: one rank-1 row a sample."""
        at = self.mine_rows[own] - start
        if self.own_center is None:
            grad.index_add_(0, at, rows)
            return
        flat = grad.view(-1, grad.shape[-1])
        flat.index_add_(0, at * grad.shape[1] + self.own_center[own], rows)


def _inverse_norm(rows: Tensor) -> Tensor:
    """1 / length along the last dim, which is kept with size 1; 0 for a zero row."""
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return torch.where(norm > 0, 1 / norm, 0.0)


def _spread(exponentials: Tensor, center: Tensor | None, unit: Tensor) -> Tensor:
    """[N, n] over classes -> [N, n * K] over sub-centres: the entry goes to the sub-centre that won, 0 elsewhere."""
    if center is None:
        return exponentials
    wide = exponentials.new_zeros(*exponentials.shape, unit.shape[1])
    return wide.scatter_(2, center[:, :, None], exponentials[:, :, None]).flatten(1)


def _elementwise(fn: Callable[[Tensor, Tensor], Tensor], cos: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope of an elementwise function of a block; own cosines count as constants."""
    with torch.enable_grad():
        leaf = cos.detach().requires_grad_()
        value = fn(leaf, own)
        if value.shape != cos.shape:
            raise ValueError(f"margin others gave shape {tuple(value.shape)}, expected {tuple(cos.shape)}")
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    value = value.detach()
    return (value.clone() if value.data_ptr() == cos.data_ptr() else value), slope.contiguous()
