"""Batch normalisation whose statistics are those of the batches of all ranks together; works on every backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from plsc.comm import Communicator

REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over [B, C, ...] of all ranks; batches may differ in size between ranks, an empty one included.

    Collective in training, forward and backward, one small verb each. Input gradients follow the law of gradients: they
    belong to the sum of the ranks' losses, as those of every collective here, and whoever averages parameter gradients
    over ranks turns that into the mean. Evaluation and a world of one are plain BatchNorm.
    """

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.comm = comm

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm: got shape {list(input.shape)}, expected [B, {self.num_features}, ...]")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or self.comm.world_size == 1:
            return super().forward(input)
        result: Tensor
        result, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.comm)
        if self.track_running_stats:
            self._track(mean, var * count / (count - 1))
        return result

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Moves the running statistics towards this batch's; var is the unbiased one, as in BatchNorm."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            running.mul_(1 - share).add_(now.to(running.dtype), alpha=share)


def convert_sync_bn(module: nn.Module, comm: Communicator) -> nn.Module:
    """Replaces every BatchNorm1d, 2d and 3d in the module (and torch's SyncBatchNorm) by ours, over `comm`.

    Returns the module, or its replacement where it is a BatchNorm itself. Parameters and buffers are the same objects
    under the same keys, so an optimizer built before still holds them. Hooks on replaced modules are lost.
    """
    return _convert(module, comm, {})


def _convert(module: nn.Module, comm: Communicator, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:  # one module in two places stays one module
        return done[module]
    done[module] = module
    if type(module) in REPLACED or isinstance(module, SyncBatchNorm):
        assert isinstance(module, _BatchNorm)
        done[module] = _replace(module, comm)
    elif isinstance(module, _BatchNorm):
        raise ValueError(
            f"convert_sync_bn: got a {type(module).__name__}, expected BatchNorm1d, 2d or 3d themselves: a subclass "
            "may compute something else; run a lazy one once first, replace others by hand"
        )
    for name, child in list(module._modules.items()):
        if child is not None:
            setattr(module, name, _convert(child, comm, done))
    return done[module]


def _replace(norm: _BatchNorm, comm: Communicator) -> SyncBatchNorm:
    new = SyncBatchNorm(
        norm.num_features, comm, eps=norm.eps, momentum=norm.momentum, affine=False, track_running_stats=False
    )
    new.affine, new.track_running_stats, new.training = norm.affine, norm.track_running_stats, norm.training
    new.weight, new.bias = norm.weight, norm.bias
    new.running_mean, new.running_var = norm.running_mean, norm.running_var
    new.num_batches_tracked = norm.num_batches_tracked
    return new


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias over the union batch; computes in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _union_statistics(x, comm)
        inv_std = torch.rsqrt(var + eps)  # [C]
        scale = inv_std if weight is None else inv_std * weight
        y = (x - _wide(mean, x)) * _wide(scale, x)
        if bias is not None:
            y += _wide(bias, x)
        ctx.comm, ctx.has_bias = comm, bias is not None
        ctx.save_for_backward(x, weight, mean, inv_std, count)
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        over = _all_but_channels(x)
        centred = x - _wide(mean, x)
        sum_grad = grad.to(mean.dtype).sum(over)  # [C]
        sum_dot = (grad * centred).sum(over)  # [C]
        dx = None
        if ctx.needs_input_grad[0]:
            # scale * (grad - mean of grad - normalised x * mean of grad * normalised x), means over the union batch
            total, total_dot = ctx.comm.all_reduce(torch.stack([sum_grad, sum_dot])).wait() / count
            dx = grad - _wide(total, x) - centred * _wide(total_dot * inv_std**2, x)
            dx = (dx * _wide(inv_std if weight is None else inv_std * weight, x)).to(x.dtype)
        d_weight = None if weight is None else (sum_dot * inv_std).to(weight.dtype)
        d_bias = sum_grad.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx, d_weight, d_bias, None, None


def _union_statistics(x: Tensor, comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C] and biased variance [C] over all ranks' x, and the number of values a channel (0-d), in one all_gather.

    Combined from each rank's own mean and sum of squared deviations, which loses no digits to large means.
    Source: Chan, Golub and LeVeque 1983, formula 2.1.
    """
    num = x.numel() // x.shape[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if num:
        var, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
    else:
        var = mean = wide.new_zeros(x.shape[1])
    mine = torch.cat([mean.new_full((1,), num), mean, var * num])
    counts, means, deviations = comm.all_gather(mine[None]).wait().split([1, len(mean), len(mean)], 1)  # [W, 1 or C]
    count = counts.sum()
    if num <= 1 and bool(count <= 1):  # with more here there are more in all: no sync
        raise ValueError(f"SyncBatchNorm: got {int(count)} values a channel on all ranks together, expected over 1")
    union = (counts * means).sum(0) / count
    return union, (deviations.sum(0) + (counts * (means - union) ** 2).sum(0)) / count, count


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    """values [C] shaped to broadcast against x [B, C, ...]."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
