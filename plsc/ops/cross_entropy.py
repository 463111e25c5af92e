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

import torch
from torch import Tensor

from plsc.ops import host
from plsc.ops.problem import Problem
from plsc.ops.sweep import Sweep
from plsc.ops.updates import weight_gradient

UPSTREAM = 2  # columns that travel with the embeddings' gradient to compare the ranks' upstream gradients


def sharded_cross_entropy(
    x: Tensor,
    norms: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    *,
    factors: Tensor,
    reduction: str = "none",
) -> Tensor:
    """Loss of each of this rank's samples times its factor: [B], or their sum if reduction is "sum".

    Differentiable in x [B, D], norms [B], weight [R_all, (K,) D], bias. `problem.x` holds the same embeddings gathered
    from all ranks (N = B * world_size, this rank's part at its place) and factors [N] those of all ranks; a sample of
    factor 0 gives 0. The gradient of x and norms is the exact adjoint (summed over ranks); the weight's is multiplied
    by grad_scale. The gradient that comes back for "sum" must be the same number on every rank, or RuntimeError is
    raised on all (on a GPU an assertion stops the stream); for "none" one more small collective gathers it.
    """
    loss: Tensor = _Loss.apply(x, norms, weight, bias, problem, factors, reduction)
    return loss


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norms, weight, bias, problem: Problem, factors: Tensor, reduction: str):  # type: ignore[no-untyped-def]
        need_x, need_norms, need_weight, need_bias = ctx.needs_input_grad[:4]
        sweep = Sweep(problem, weight, bias)
        sweep.forward(keep_output=need_x or need_norms, keep_cache=need_weight or need_bias)
        ctx.sweep, ctx.factors, ctx.reduction = sweep, factors, reduction
        ctx.needs = (need_x, need_norms, need_weight, need_bias)
        ctx.bias_version = None if bias is None else bias._version
        ctx.part = part = slice(problem.comm.rank * len(x), (problem.comm.rank + 1) * len(x))
        excess = sweep.excess()[part]
        losses = torch.where(factors[part] == 0, 0.0, torch.logaddexp(excess, torch.zeros_like(excess)) * factors[part])
        return losses.sum() if reduction == "sum" else losses

    @staticmethod
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("gradients of gradients are not defined for a class-parallel head")
        sweep, problem = ctx.sweep, ctx.sweep.problem
        need_x, need_norms, need_weight, need_bias = ctx.needs
        comm = problem.comm
        factors = ctx.factors * (upstream if ctx.reduction == "sum" else comm.all_gather(upstream).wait())  # [N]
        if sweep.released:
            raise RuntimeError("backward through the head twice: call forward again, its buffers are freed after use")
        bias_version = None if sweep.bias is None else sweep.bias._version
        if (need_x or need_weight) and not (sweep.is_current() and bias_version == ctx.bias_version):
            raise RuntimeError(
                "the head's weight changed between its forward and its backward, or moved; call forward again. With a "
                "head_optimizer each backward pass steps it: where a loss calls the head twice, as mixup, give it all "
                "samples in one call of head.losses, or collect the steps (plsc.ops.deferred_updates, merge_updates)"
            )
        g_total, g_own = sweep.loss_gradient(factors)
        grad_x = grad_norms = grad_weight = grad_bias = work = None
        if need_x or need_norms:  # known before the second sweep: travels meanwhile
            columns = [sweep.input_gradient(g_total, g_own)]
            if need_norms:
                columns.append(sweep.norm_gradient(g_own)[:, None])
            if ctx.reduction == "sum" and comm.world_size > 1:
                columns.append(torch.stack([upstream, upstream * upstream]).expand(len(factors), UPSTREAM))
            work = comm.reduce_scatter(columns[0] if len(columns) == 1 else torch.cat(columns, 1))
        if need_weight or need_bias:
            grad_weight, grad_bias = weight_gradient(sweep, g_total, g_own, need_bias)
        if work is not None:
            packed, dim = work.wait(), problem.x.shape[1]  # [B, D (+ 1) (+ 2)]
            grad_x = packed[:, :dim] if need_x else None
            grad_norms = packed[:, dim] if need_norms else None
            if ctx.reduction == "sum" and comm.world_size > 1:
                _check_upstream(packed[0, -UPSTREAM:], comm.world_size)
        sweep.release()
        return grad_x, grad_norms, grad_weight, grad_bias, None, None, None


def _check_upstream(sums: Tensor, world_size: int) -> None:
    """From the sums of the ranks' upstream gradients and of their squares: were they one number?"""
    total, squares = sums.double().unbind()
    differ = squares * world_size - total * total > 1e-4 * squares * world_size
    message = (
        "the ranks scaled the head's mean loss differently before backward(), and its weights are already updated "
        "if a head_optimizer does that; for a factor of its own on each rank or sample use head.losses(...)"
    )
    if not host.reads_freely(sums):
        torch._assert_async(~differ, message)  # stops the stream
    elif bool(differ):
        raise RuntimeError(message)
