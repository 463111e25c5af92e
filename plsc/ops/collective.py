"""The verbs between ranks as functions with gradients; the backward of each is its exact adjoint.

Adjoint means: summed over the ranks, <A x, y> = <x, A' y>. No factor of the number of ranks hides here. Every rank
must run the backward of every verb, in the same order: the input requires a gradient on all ranks or on none.
All functions are collective and block; results are new tensors. Gradients of gradients are not defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plsc.comm import Communicator

Sizes = Sequence[int] | None


def all_gather(x: Tensor, comm: Communicator, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Every rank's x along dim 0, in rank order; sizes[r] is the number of rows of rank r where they differ.

    x [n_r, ...] -> [sum of n_r, ...]. Adjoint: reduce_scatter.
    """
    result: Tensor = _AllGather.apply(x, comm, sizes)
    return result


def reduce_scatter(x: Tensor, comm: Communicator, *, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's rows of the sum of x over the ranks; sizes[r] rows go to rank r, without it as many to each.

    x [sum of n_r, ...] -> [n_r, ...]. Adjoint: all_gather.
    """
    result: Tensor = _ReduceScatter.apply(x, comm, sizes)
    return result


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """The sum of x over the ranks, on every rank. Its own adjoint."""
    result: Tensor = _AllReduce.apply(x, comm)
    return result


def broadcast(x: Tensor, comm: Communicator, *, root: int = 0) -> Tensor:
    """The x of rank root, on every rank; the others bring a tensor of the same shape and dtype.

    Adjoint: root gets the sum of all ranks' gradients, the others get zeros.
    """
    result: Tensor = _Broadcast.apply(x, comm, root)
    return result


def all_to_all(
    x: Tensor,
    comm: Communicator,
    *,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sends send_sizes[r] rows to rank r and receives recv_sizes[r] from it; without sizes, as many to each.

    x [sum of send_sizes, ...] -> [sum of recv_sizes, ...]. Adjoint: the rows travel back.
    """
    result: Tensor = _AllToAll.apply(x, comm, send_sizes, recv_sizes)
    return result


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """x itself; in the backward the gradient is multiplied by factor."""
    result: Tensor = _ScaleGrad.apply(x, factor)
    return result


def _copy(x: Tensor) -> Tensor:
    """A row-major copy that an in-place verb may write into; gradients often come expanded or strided."""
    return x.clone(memory_format=torch.contiguous_format)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, sizes: Sizes) -> Tensor:
        ctx.comm, ctx.sizes, ctx.shape = comm, sizes, x.shape
        return comm.all_gather(x, sizes=sizes).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.comm.reduce_scatter(grad, sizes=ctx.sizes).wait().reshape(ctx.shape), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, sizes: Sizes) -> Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return comm.reduce_scatter(x, sizes=sizes).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.comm.all_gather(grad, sizes=ctx.sizes).wait(), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(_copy(x)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.comm.all_reduce(_copy(grad)).wait(), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, root: int) -> Tensor:
        ctx.comm, ctx.root = comm, root
        return comm.broadcast(_copy(x), root=root).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.comm.all_reduce(_copy(grad)).wait()
        return total if ctx.comm.rank == ctx.root else total.zero_(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, send_sizes: Sizes, recv_sizes: Sizes) -> Tensor:
        ctx.comm, ctx.send_sizes, ctx.recv_sizes = comm, send_sizes, recv_sizes
        return comm.all_to_all(x, send_sizes=send_sizes, recv_sizes=recv_sizes).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.comm.all_to_all(grad, send_sizes=ctx.recv_sizes, recv_sizes=ctx.send_sizes).wait()
        return back, None, None, None


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.factor, None
