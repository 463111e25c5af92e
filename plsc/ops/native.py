"""The passes over memory of a class-parallel head on CPUs: one C++ kernel each, and the same in torch operations.

The twin in torch is the truth, runs on every device and dtype, and is what runs where the extension was not built or
PLSC_KERNELS=0 says so. Kernels take contiguous CPU tensors whose numbers are float32, or bfloat16 in a weight. The
matrix products between the passes stand here as well, by torch.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from plsc.ops.formats import is_wide

Chosen = Tensor | slice  # of a weight's rows: [R] int64 numbers, or from start to stop
_FORMATS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
_SPLIT = 3
_MIXED = ("cuda", "meta")  # devices that multiply bfloat16 into float32


def _load() -> ModuleType | None:
    try:
        return importlib.import_module("plsc.ops._kernels")
    except ImportError:  # not built
        return None


_native: Any = _load()


def enabled(*tensors: Tensor | None) -> bool:
    """Whether the kernels are there, wanted, and can take these tensors."""
    if _native is None or os.environ.get("PLSC_KERNELS", "1") == "0":
        return False
    return all(t is None or (t.device.type == "cpu" and t.is_contiguous()) for t in tensors)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def rows_args(weight: Tensor, rows: Chosen) -> tuple[int, int, int, int, int]:
    """D, K, and the rows as the kernels take them: address of their numbers or 0, the first, how many."""
    dim, centers = weight.shape[-1], weight.shape[1] if weight.dim() == 3 else 1
    if isinstance(rows, slice):
        return dim, centers, 0, rows.start, rows.stop - rows.start
    return dim, centers, rows.data_ptr(), 0, len(rows)


def weight_format(weight: Tensor, low: Tensor | None) -> int:
    return _FORMATS[weight.dtype] if low is None else _SPLIT


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """a @ b, summed in the dtype of `out`; operands in bfloat16 are not rounded again, and their products are exact.

    On a GPU float32 from bfloat16 is what its tensor cores give; elsewhere the operands are widened first.
    """
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if out.dtype == torch.float32 and a.device.type in _MIXED:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def multiplies_halves(device: torch.device) -> bool:
    """Whether products of bfloat16 are the fast ones: on a GPU of compute capability 8.0 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def read_rows(weight: Tensor, rows: Chosen, *, out: Tensor | None, inverse: Tensor | None) -> Tensor:
    """The chosen rows as they meet the products, and 1 / length of each vector (0 for a zero one) in `inverse`.

    weight: [C, (K,) D]; out: [R, (K,) D] in the dtype that products are made of, or None for a view of rows that lie
    together and need no conversion; inverse: [R * K] of what is returned, or None where it is not wanted.
    """
    values = weight[rows] if out is None else out
    index = None if isinstance(rows, slice) else rows
    known = weight.dtype in (torch.float32, torch.bfloat16) and (out is None or out.dtype == torch.float32)
    if known and enabled(weight, out, inverse, index):
        dim, centers, *which = rows_args(weight, rows)
        assert inverse is None or inverse.dtype == torch.float32
        assert out is None or out.numel() == which[2] * dim * centers
        fmt, threads = _FORMATS[weight.dtype], torch.get_num_threads()
        _native.load(fmt, weight.data_ptr(), dim, centers, *which, address(out), address(inverse), threads)
        return values
    if out is not None:
        if isinstance(rows, slice):
            out.copy_(weight[rows])
        elif weight.dtype == out.dtype:
            torch.index_select(weight, 0, rows, out=out)
        else:
            out.copy_(weight.index_select(0, rows))
    if inverse is not None:
        torch.linalg.vector_norm(values.flatten(0, -2), dim=-1, dtype=inverse.dtype, out=inverse)
        inverse.copy_(torch.where(inverse > 0, 1 / inverse, 0.0))
    return values


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
) -> Tensor:
    """exp(scale * dots * inverse - shift) * inverse, and the sums of its exponentials added to `total`.

    dots: [N, n] products with the rows [start, start + n), may be destroyed; inverse: [n]; place: [N] own row of each
    sample or -1; an own entry is left out: 0 in both. total: [N]. out: [N, n] in any dtype, or None: in place.
    """
    where: dict[str, Any] = {"place": place, "start": start, "shift": shift, "total": total}
    if dots.is_cuda and _on_gpu().exponentials(dots, inverse, scale=scale, out=out, **where):
        return dots if out is None else out
    _exponentials(dots if scale == 1.0 else dots.mul_(scale), inverse, **where)
    return dots if out is None else out.copy_(dots)


def _exponentials(dots: Tensor, inverse: Tensor, *, place: Tensor, start: int, shift: float, total: Tensor) -> None:
    if dots.dtype == torch.float32 and enabled(inverse, place, total) and dots.device.type == "cpu":
        assert dots.stride(1) == 1 and inverse.dtype == total.dtype == torch.float32 and place.dtype == torch.int64
        num, width = dots.shape
        where = (dots.data_ptr(), num, width, dots.stride(0), inverse.data_ptr(), place.data_ptr())
        _native.exponentials(*where, start, shift, total.data_ptr(), torch.get_num_threads())
        return
    dots.mul_(inverse).sub_(shift)
    leave_out(dots, place, start)
    total += dots.exp_().sum(1)
    dots.mul_(inverse)


def _on_gpu() -> ModuleType:
    """The same steps for tensors on a GPU; looks for CuPy when it is first asked."""
    return importlib.import_module("plsc.ops.fused")


def leave_out(logits: Tensor, place: Tensor, start: int) -> None:
    """Puts -inf where a block [N, n] of logits meets the samples' own classes."""
    own = place - start
    inside = (own >= 0) & (own < logits.shape[1])
    at = own.clamp(0, logits.shape[1] - 1)[:, None]  # no index is picked by a mask: that would stop the host on a GPU
    logits.scatter_(1, at, torch.where(inside[:, None], -torch.inf, logits.gather(1, at)))


def take_radial_out(grad: Tensor, rows: Tensor) -> None:
    """From the gradient of w / |w|, already divided by |w|, to that of w, in place: without its part along w.

    grad, rows: [R, (K,) D].
    """
    square = (rows * rows).sum(-1, keepdim=True)
    part = (rows * grad).sum(-1, keepdim=True).div_(torch.where(square > 0, square, torch.inf))
    grad.addcmul_(rows, part, value=-1)


def step(weight: Tensor, rows: Chosen, grad: Tensor, *, normalize: bool, options: dict[str, Any] | None) -> bool:
    """`take_radial_out` if normalize, then a row optimizer's step, in one pass; False if no kernel can do it.

    options: what RowOptimizer.kernel_options gives; None: no step, the gradient is all that is wanted.
    """
    if weight.is_cuda:
        return bool(_on_gpu().step(weight, rows, grad, normalize=normalize, options=options))
    options = {} if options is None else options
    low, momentum = options.get("low"), options.get("momentum_data")
    scale, second, steps = (options.get(name) for name in ("momentum_scale", "second", "steps"))
    index = None if isinstance(rows, slice) else rows
    if grad.dtype != torch.float32 or not enabled(weight, grad, index, low, momentum, scale, second, steps):
        return False
    if weight.dtype not in _FORMATS or any(t is not None and not is_wide(t) for t in (scale, second, steps)):
        return False
    dim, centers, *which = rows_args(weight, rows)
    assert grad.numel() == which[2] * dim * centers
    number = {
        name: float(options.get(name, 0.0)) for name in ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps")
    }
    _native.step(
        weight_format(weight, low),
        weight.data_ptr(),
        address(low),
        dim,
        centers,
        *which,
        grad.data_ptr(),
        normalize,
        options.get("rule", 0),
        number["lr"],
        number["weight_decay"],
        number["momentum"],
        bool(options.get("nesterov", False)),
        number["beta1"],
        number["beta2"],
        number["eps"],
        0 if momentum is None else _FORMATS[momentum.dtype],
        address(momentum),
        address(scale),
        address(second),
        address(steps),
        options.get("key", 0),
        options.get("first", 0),
        torch.get_num_threads(),
    )
    if options:
        torch.autograd.graph.increment_version(weight)
    return True
