"""What the kernels of cuda/ compute, in plain torch: what runs where there is no kernel, and the truth of their tests.

Signatures and results are those of plsc.ops.kernels, where they are described.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plsc.ops.formats import join, split, to_bf16, to_int8
from plsc.ops.sampling import mix

_LAST = 2**63 - 1  # a class behind all others
FP16_TOP = 15  # the largest element is scaled to below 2**15: a sum in float16 then stays below its 65504

# ---- softmax over a block of classes


def exp_rows(
    product: Tensor,
    shift: Tensor,
    place: Tensor,
    *,
    out: Tensor,
    start: int = 0,
    scale: float = 1.0,
    inverse: Tensor | None = None,
    weigh: bool = False,
) -> Tensor:
    cos = _cosines(product, inverse)
    values = cos.mul_(scale).sub_(shift[:, None]).exp_()
    at, column = _own(place, start, product.shape[1])
    values[at, column] = 0.0
    sums = values.sum(1)
    out.copy_(_weighed(values, inverse) if weigh else values)
    return sums


def grad_rows(
    product: Tensor,
    shift: Tensor,
    place: Tensor,
    coefficient: Tensor,
    own_value: Tensor,
    *,
    out: Tensor,
    start: int = 0,
    scale: float = 1.0,
    inverse: Tensor | None = None,
    weigh: bool = False,
) -> Tensor:
    cos = _cosines(product, inverse)
    values = (cos * scale).sub_(shift[:, None]).exp_().mul_(coefficient[:, None])
    at, column = _own(place, start, product.shape[1])
    values[at, column] = own_value[at]
    sums = (values * cos).sum(1)
    out.copy_(_weighed(values, inverse) if weigh else values)
    return sums


def online_rows(
    product: Tensor, place: Tensor, *, start: int = 0, scale: float = 1.0, inverse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits = _cosines(product, inverse).mul_(scale)
    at, column = _own(place, start, product.shape[1])
    logits[at, column] = -math.inf
    if logits.shape[1] == 0:
        return logits.new_full((len(logits),), -math.inf), logits.new_zeros(len(logits))
    maxima = logits.amax(1)
    shift = torch.where(maxima == -math.inf, 0.0, maxima)
    return maxima, (logits - shift[:, None]).exp_().sum(1)


def _cosines(product: Tensor, inverse: Tensor | None) -> Tensor:
    """In float32 or wider, in memory of its own."""
    wide = product.to(torch.promote_types(product.dtype, torch.float32), copy=True)
    return wide if inverse is None else wide.mul_(inverse)


def _weighed(values: Tensor, inverse: Tensor | None) -> Tensor:
    return values if inverse is None else values * inverse


def _own(place: Tensor, start: int, classes: int) -> tuple[Tensor, Tensor]:
    """Samples whose own class is in the block, and its column."""
    at = ((place >= start) & (place < start + classes)).nonzero().squeeze(1)
    return at, place[at] - start


# ---- one optimizer step on rows of a class weight


def sgd_rows(
    weight: Tensor,
    grad: Tensor,
    velocity: Tensor | None,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    low: Tensor | None = None,
    scales: Tensor | None = None,
    normalize: bool = False,
    inverse: Tensor | None = None,
    rows: Tensor | None = None,
    start: int = 0,
    first_class: int = 0,
    weighed: bool = False,
    key: int = 0,
) -> None:
    index = _row_numbers(len(grad), rows, start, weight)
    w = _read_weight(weight, low, index)
    g = _through_normalize(weight[index].to(w.dtype), grad, weighed) if normalize else grad
    random = _random_bits(key, index + first_class, weight.shape[1])
    if weight_decay:
        g = g + w * weight_decay
    if velocity is None:
        v = g
    elif velocity.dtype == torch.int8:
        assert scales is not None
        v = g + velocity[index].to(w.dtype) * scales[index, None] * momentum
        velocity[index], scales[index] = to_int8(v, random >> 16)
    else:
        v = g + velocity[index].to(w.dtype) * momentum
        velocity[index] = _rounded(v, random >> 16, velocity.dtype)
    step = g + v * momentum if nesterov else v
    _write_weight(weight, low, index, w - step * lr, random, inverse)


def adam_rows(
    weight: Tensor,
    grad: Tensor,
    average: Tensor,
    square: Tensor,
    steps: Tensor,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    low: Tensor | None = None,
    normalize: bool = False,
    inverse: Tensor | None = None,
    rows: Tensor | None = None,
    start: int = 0,
    first_class: int = 0,
    weighed: bool = False,
    key: int = 0,
) -> None:
    index = _row_numbers(len(grad), rows, start, weight)
    w = _read_weight(weight, low, index)
    g = _through_normalize(weight[index].to(w.dtype), grad, weighed) if normalize else grad
    random = _random_bits(key, index + first_class, weight.shape[1])
    beta1, beta2 = betas
    steps[index] += 1
    step = steps[index, None].to(w.dtype)
    m, s = average[index].to(w.dtype), square[index].to(w.dtype)
    m = m + (g - m) * (1.0 - beta1)
    s = s * beta2 + g * g * (1.0 - beta2)
    size = lr / -torch.expm1(step * math.log(beta1))
    root = torch.sqrt(-torch.expm1(step * math.log(beta2)))
    w = w * (1.0 - lr * weight_decay) - size * m / (s.sqrt() / root + eps)
    average[index] = _rounded(m, random >> 16, average.dtype)
    square[index] = _rounded(s, random >> 16, square.dtype)
    _write_weight(weight, low, index, w, random, inverse)


def _row_numbers(count: int, rows: Tensor | None, start: int, weight: Tensor) -> Tensor:
    return torch.arange(start, start + count, device=weight.device) if rows is None else rows


def _read_weight(weight: Tensor, low: Tensor | None, index: Tensor) -> Tensor:
    """Rows in float32 or wider."""
    if low is not None:
        return join(weight[index], low[index])
    return weight[index].to(torch.promote_types(weight.dtype, torch.float32))


def _write_weight(
    weight: Tensor, low: Tensor | None, index: Tensor, w: Tensor, random: Tensor, inverse: Tensor | None
) -> None:
    """Stores rows, and the inverse norm of what a product will see of them."""
    if low is not None:
        weight[index], low[index] = split(w)
    else:
        weight[index] = _rounded(w, random & 0xFFFF, weight.dtype)
    if inverse is not None:
        squares = weight[index].to(w.dtype).square().sum(1)
        inverse.copy_(torch.where(squares > 0, 1.0 / squares.sqrt(), squares * 0.0))


def _through_normalize(w: Tensor, grad: Tensor, weighed: bool) -> Tensor:
    """From the gradient of w / |w| to that of w, as products see it: without its part along w, divided by the norm."""
    squares = w.square().sum(1)
    radial = torch.where(squares > 0, (w * grad).sum(1) / squares, squares * 0.0)
    grad = grad - w * radial[:, None]
    return grad if weighed else grad * torch.where(squares > 0, 1.0 / squares.sqrt(), squares * 0.0)[:, None]


def _random_bits(key: int, classes: Tensor, dim: int) -> Tensor:
    """32 bits for each element of the rows, from (key, class, place in the row): [R, dim] int64."""
    row = mix(mix(classes ^ key) ^ (classes >> 32))
    return mix(row[:, None] + torch.arange(dim, device=classes.device) * 0x9E3779B9)


def _rounded(x: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; bfloat16 is rounded up or down with the chance that makes the mean exact, from 16 random bits."""
    return to_bf16(x.to(torch.float32), random) if dtype == torch.bfloat16 else x.to(dtype)


# ---- the best classes, the largest entries, the cast to a half type


def merge_topk(
    scores: Tensor, classes: Tensor, found: Tensor | None, *, k: int, first: int = 0, filler: int = -1
) -> tuple[Tensor, Tensor]:
    real = classes != filler
    scores, classes = torch.where(real, scores, -math.inf), torch.where(real, classes, _LAST)
    if found is not None:
        ids = torch.arange(first, first + found.shape[1], device=found.device).expand_as(found)
        scores, classes = torch.cat([scores, found], 1), torch.cat([classes, ids], 1)
    missing = k - scores.shape[1]
    if missing > 0:
        scores = torch.cat([scores, scores.new_full((len(scores), missing), -math.inf)], 1)
        classes = torch.cat([classes, classes.new_full((len(classes), missing), _LAST)], 1)
    order = classes.argsort(dim=1, stable=True)
    scores, classes = scores.gather(1, order), classes.gather(1, order)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    classes = classes.gather(1, order)
    return scores.gather(1, order), torch.where(classes == _LAST, filler, classes)


def largest_entries(x: Tensor, count: int) -> Tensor:
    return x.abs().argsort(descending=True, stable=True)[:count].sort().values


def largest_magnitude(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return torch.zeros((), dtype=dtype, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).to(dtype)


def cast_scaled(
    x: Tensor, dtype: torch.dtype, *, largest: Tensor | None = None, divisor: float = 1.0, down: bool = False
) -> Tensor:
    wide = x.to(torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32))
    if divisor != 1.0:
        wide = wide / divisor
    return (wide if largest is None else wide * _power_of_two(largest, down)).to(dtype)


def _power_of_two(largest: Tensor, down: bool) -> Tensor:
    """Exactly 2**e, 0-d, with largest * 2**e in [2**14, 2**15), or 2**-e if down; 1 where largest is not finite.

    Built from its bits, on the device: logarithms round, and reading the number would stop the host.
    """
    kind, bias, shift = (torch.int64, 1023, 52) if largest.dtype == torch.float64 else (torch.int32, 127, 23)
    exponent = FP16_TOP - torch.frexp(largest).exponent
    exponent = torch.where(largest.isfinite(), exponent, 0).clamp(1 - bias, bias - 1).to(kind)
    return ((bias + (-exponent if down else exponent)) << shift).view(largest.dtype)
