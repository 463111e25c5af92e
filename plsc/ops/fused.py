"""The fused steps of a head's sweep on a GPU, with the signatures of plsc.ops.native, which has them for CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plsc.ops import kernels
from plsc.ops.launching import launcher_for


def exponentials(
    dots: Tensor,
    inverse: Tensor,
    *,
    place: Tensor,
    start: int,
    shift: float,
    total: Tensor,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> bool:
    """exp(scale * dots * inverse - shift) * inverse, and the sums of its exponentials added to `total`, in one pass.

    As plsc.ops.native.exponentials; False if no kernel can do it, and nothing is done.
    """
    if dots.dtype != torch.float32 or not dots.is_contiguous() or launcher_for(dots.device) is None:
        return False
    shifts, out = total.new_full((len(dots),), shift), dots if out is None else out
    how: dict[str, Any] = {"start": start, "scale": scale, "inverse": inverse, "weigh": True}
    total += kernels.exp_rows(dots, shifts, place, out=out, **how)
    return True


def step(
    weight: Tensor, rows: Tensor | slice, grad: Tensor, *, normalize: bool, options: dict[str, Any] | None
) -> bool:
    """A row optimizer's step, after the gradient of w / |w| is led to w if normalize; False if no kernel can do it.

    grad: [R, D], already divided by |w|. options: what RowOptimizer.kernel_options gives, with "low", "key", "first".
    """
    if options is None or weight.dim() != 2 or not _known(weight, grad, options) or launcher_for(weight.device) is None:
        return False
    where: dict[str, Any] = {"rows": rows} if isinstance(rows, Tensor) else {"start": rows.start}
    where |= {"low": options.get("low"), "normalize": normalize, "weighed": True}
    where |= {"key": options.get("key", 0), "first_class": options.get("first", 0)}
    where |= {name: options[name] for name in ("lr", "weight_decay")}
    momentum = options.get("momentum_data")
    if options["rule"] == 1:
        own = {name: options[name] for name in ("momentum", "nesterov")}
        kernels.sgd_rows(weight, grad, momentum, scales=options.get("momentum_scale"), **own, **where)
    else:
        betas = options["beta1"], options["beta2"]
        assert momentum is not None
        kernels.adam_rows(
            weight, grad, momentum, options["second"], options["steps"], betas=betas, eps=options["eps"], **where
        )
    torch.autograd.graph.increment_version(weight)
    return True


def _known(weight: Tensor, grad: Tensor, options: dict[str, Any]) -> bool:
    """Whether there is a kernel for this rule and these formats."""
    state, second = options.get("momentum_data"), options.get("second")
    kinds = (torch.float32, torch.bfloat16) + ((torch.int8,) if options.get("rule") == 1 else ())
    return (
        options.get("rule") in (1, 2)
        and grad.dtype == torch.float32
        and grad.is_contiguous()
        and weight.dtype in (torch.float32, torch.bfloat16)
        and (state is None or state.dtype in kinds)
        and (second is None or (state is not None and second.dtype == state.dtype))
    )
