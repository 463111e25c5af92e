"""The fused steps of the head and the reductions: a CUDA kernel where one runs, its twin in plain torch elsewhere.

Every function here exists with the same signature in plsc.ops.twins, which defines what it computes; PLSC_KERNELS=0
forces the twins. Kernels compute in float32 and take float32, bfloat16 and float16; float64 and tensors with gaps go to
the twins. Tensors that do not belong together (device, type, shape) are a ValueError before any kernel runs. None of
them waits for the device, except sample_classes, whose result has a length.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from plsc.comm import Shard
from plsc.ops import sampling, twins
from plsc.ops.launching import NAMES, Launcher, aligned, f32, fits, flag, i64, launcher_for

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PACKS, _ROWS = 4, 4  # of softmax.cu: groups of four classes of a thread, samples of a block
_EXP_PAIRS = {
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
}
_VELOCITIES = (torch.float32, torch.bfloat16, torch.int8)
_SELECT_WIDTHS = (11, 10, 10)  # bits of the magnitude that each histogram of select.cu settles
_CHUNK = 1 << 16  # entries whose kept ones a block of select.cu lists
_WAVE = 1024  # blocks of a kernel whose threads go through a vector in strides


def _launcher(*tensors: Tensor | None) -> Launcher | None:
    """What runs a kernel on these tensors, if they are of types that kernels know and lie without gaps."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.dtype not in _FLOATS or not tensor.is_contiguous() for tensor in given):
        return None
    return launcher_for(given[0].device)


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
    """exp(scale * cos - shift) of a block, the own class left out; returns the sums over the block [N] in float32.

    Args:
        product: [N, n] inner products with class rows; cos = product * inverse.
        shift: [N].  place: [N] int64 row of the own class, of which this block holds [start, start + n).
        out: [N, n] what is stored; may be product itself.
        inverse: [n] 1 / norm of the rows; weigh: what is stored is multiplied by it, ready for a product with the rows.
    """
    launcher = _launcher(product, out, shift)
    if launcher is None or (product.dtype, out.dtype) not in _EXP_PAIRS:
        return twins.exp_rows(product, shift, place, out=out, start=start, scale=scale, inverse=inverse, weigh=weigh)
    samples, classes = product.shape
    _fits_block(product, place, out, inverse, shift=shift)
    grid, partial = _softmax_grid(product, launcher)
    kernel = f"exp_rows_{NAMES[product.dtype]}_{NAMES[out.dtype]}"
    args: list[object] = [product, inverse, shift, place, out, partial, i64(samples), i64(classes), i64(start)]
    args += [f32(scale), flag(weigh), aligned(classes, product, inverse, out)]
    launcher.launch("softmax", kernel, grid=grid, args=args)
    return partial.sum(1)


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
    """The gradient of a block's cosines: coefficient * exp(scale * cos - shift), at the own class own_value.

    Returns the sums of gradient * cosine over the block [N]: the part along the embedding that its normalisation takes
    out. coefficient, own_value: [N]; the rest as in exp_rows.
    """
    launcher = _launcher(product, out, shift, coefficient, own_value)
    if launcher is None or (product.dtype, out.dtype) not in _EXP_PAIRS:
        return twins.grad_rows(
            product,
            shift,
            place,
            coefficient,
            own_value,
            out=out,
            start=start,
            scale=scale,
            inverse=inverse,
            weigh=weigh,
        )
    samples, classes = product.shape
    _fits_block(product, place, out, inverse, shift=shift, coefficient=coefficient, own_value=own_value)
    grid, partial = _softmax_grid(product, launcher)
    kernel = f"grad_rows_{NAMES[product.dtype]}_{NAMES[out.dtype]}"
    args: list[object] = [
        product,
        inverse,
        shift,
        place,
        coefficient,
        own_value,
        out,
        partial,
        i64(samples),
        i64(classes),
    ]
    args += [i64(start), f32(scale), flag(weigh), aligned(classes, product, inverse, out)]
    launcher.launch("softmax", kernel, grid=grid, args=args)
    return partial.sum(1)


def online_rows(
    product: Tensor, place: Tensor, *, start: int = 0, scale: float = 1.0, inverse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest logit of a block m [N] and sum of exp(logit - m) [N], the own class left out; (-inf, 0) if none is left.

    Arguments as in exp_rows. For logits without a known bound.
    """
    launcher = _launcher(product)
    if launcher is None:
        return twins.online_rows(product, place, start=start, scale=scale, inverse=inverse)
    samples, classes = product.shape
    _fits_block(product, place, product, inverse)
    grid, maxima = _softmax_grid(product, launcher, rows=1)
    if classes == 0:
        return product.new_full((samples,), -math.inf, dtype=torch.float32), maxima.sum(1)
    sums = torch.empty_like(maxima)
    args: list[object] = [product, inverse, place, maxima, sums, i64(samples), i64(classes), i64(start), f32(scale)]
    args.append(aligned(classes, product, inverse))
    launcher.launch("softmax", f"online_{NAMES[product.dtype]}", grid=grid, args=args)
    top = maxima.amax(1)
    shift = torch.where(top == -math.inf, 0.0, top)
    return top, (sums * torch.exp(maxima - shift[:, None])).sum(1)


def _fits_block(product: Tensor, place: Tensor, out: Tensor, inverse: Tensor | None, **by_sample: Tensor) -> None:
    (samples, classes), device = product.shape, product.device
    fits(device, torch.int64, (samples,), place=place)
    fits(device, out.dtype, (samples, classes), out=out)
    fits(device, torch.float32, (classes,), inverse=inverse)
    fits(device, torch.float32, (samples,), **by_sample)


def _softmax_grid(product: Tensor, launcher: Launcher, *, rows: int = _ROWS) -> tuple[tuple[int], Tensor]:
    """Blocks of softmax.cu for [N, n], `rows` samples in each, and memory for what each says of its samples."""
    samples, classes = product.shape
    chunks = -(-classes // (launcher.threads * 4 * _PACKS))
    partial = product.new_empty(samples, chunks, dtype=torch.float32)
    return (-(-samples // rows) * chunks,), partial


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
    """SGD with momentum on rows of a weight, in place, from the gradient of unit rows.

    Args:
        weight: [C, D] float32; bfloat16 (rounded by chance); with `low` [C, D] int16 the upper 16 bits of a float32.
        grad: [R, D] float32 gradient of w; if normalize, of w / |w|, already divided by |w| if weighed.
        velocity: [C, D] float32, bfloat16 (rounded by chance), int8 with `scales` [C]; None: no momentum.
        inverse: [R] receives 1 / |w| of the new rows as a product sees them.
        rows: [R] row numbers; None: start, start + 1, ...  first_class: the class of row 0.
        key: 32 bits that set a step's random numbers; they depend on (key, class, place in the row) alone.
    """
    if velocity is not None and velocity.dtype not in (*_VELOCITIES, torch.float16, torch.float64):
        raise ValueError(f"velocity: got {velocity.dtype}, expected a floating type, or int8 with scales")
    if velocity is not None and (velocity.dtype == torch.int8) != (scales is not None):
        raise ValueError(f"velocity of {velocity.dtype}: got scales {scales}, expected them with int8 and only there")
    _fits_start(weight, grad, rows, start)
    launcher = _launcher(grad) if _stored(weight, grad, low, velocity) else None
    if launcher is None or not (velocity is None or velocity.dtype in _VELOCITIES):
        twins.sgd_rows(
            weight,
            grad,
            velocity,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            low=low,
            scales=scales,
            normalize=normalize,
            inverse=inverse,
            rows=rows,
            start=start,
            first_class=first_class,
            weighed=weighed,
            key=key,
        )
        return
    state = "float" if velocity is None else NAMES[velocity.dtype]
    _fits_rows(weight, grad, low, inverse, rows, velocity=velocity)
    fits(grad.device, torch.float32, (len(weight),), scales=scales)
    args: list[object] = [weight, low, velocity, scales, grad, inverse, rows]
    args += _row_args(weight, grad, (velocity, low), start, first_class, _ways(normalize, weighed), key)
    args += [f32(lr), f32(0.0 if velocity is None else momentum), f32(weight_decay)]
    args.append(flag(nesterov and velocity is not None))
    launcher.launch("update", f"sgd_{_format(weight, low)}_{state}", grid=_row_grid(grad, launcher), args=args)


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
    """AdamW on rows of a weight, in place. average, square: [C, D] float32 or bfloat16; steps: [C] float32 counts.

    The rest as in sgd_rows.
    """
    _fits_start(weight, grad, rows, start)
    launcher = _launcher(average, square) if _stored(weight, grad, low) and average.dtype == square.dtype else None
    if launcher is None or average.dtype == torch.float16:
        twins.adam_rows(
            weight,
            grad,
            average,
            square,
            steps,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            low=low,
            normalize=normalize,
            inverse=inverse,
            rows=rows,
            start=start,
            first_class=first_class,
            weighed=weighed,
            key=key,
        )
        return
    _fits_rows(weight, grad, low, inverse, rows, average=average, square=square)
    fits(grad.device, torch.float32, (len(weight),), steps=steps)
    args: list[object] = [weight, low, average, square, steps, grad, inverse, rows]
    args += _row_args(weight, grad, (average, square, low), start, first_class, _ways(normalize, weighed), key)
    args += [f32(lr), *map(f32, betas), *(f32(math.log(beta)) for beta in betas), f32(eps), f32(weight_decay)]
    kernel = f"adam_{_format(weight, low)}_{NAMES[average.dtype]}"
    launcher.launch("update", kernel, grid=_row_grid(grad, launcher), args=args)


def _fits_rows(
    weight: Tensor,
    grad: Tensor,
    low: Tensor | None,
    inverse: Tensor | None,
    rows: Tensor | None,
    **state: Tensor | None,
) -> None:
    device, whole, count = grad.device, tuple(weight.shape), len(grad)
    fits(device, torch.float32, (count, weight.shape[1]), grad=grad)
    fits(device, weight.dtype, whole, weight=weight)
    fits(device, torch.int16, whole, low=low)
    fits(device, torch.float32, (count,), inverse=inverse)
    fits(device, torch.int64, (count,), rows=rows)
    for name, tensor in state.items():
        if tensor is not None:
            fits(device, tensor.dtype, whole, **{name: tensor})


def _fits_start(weight: Tensor, grad: Tensor, rows: Tensor | None, start: int) -> None:
    if rows is None and not 0 <= start <= len(weight) - len(grad):
        raise ValueError(
            f"start: got {start} for {len(grad)} rows, expected them within the weight's {len(weight)} rows"
        )


def _stored(weight: Tensor, grad: Tensor, *beside: Tensor | None) -> bool:
    """Whether a kernel knows this weight and its gradient, and all lies without gaps."""
    known = grad.dtype == torch.float32 and weight.dtype in (torch.float32, torch.bfloat16)
    return known and all(tensor is None or tensor.is_contiguous() for tensor in (weight, grad, *beside))


def _format(weight: Tensor, low: Tensor | None) -> str:
    return NAMES[weight.dtype] if low is None else "split"


def _ways(normalize: bool, weighed: bool) -> int:
    """What update.cu calls normalize."""
    return 0 if not normalize else 2 if weighed else 1


def _row_grid(grad: Tensor, launcher: Launcher) -> tuple[int]:
    return (-(-len(grad) * 32 // launcher.threads),)  # a warp a row


def _row_args(
    weight: Tensor,
    grad: Tensor,
    others: tuple[Tensor | None, ...],
    start: int,
    first_class: int,
    normalize: int,
    key: int,
) -> list[object]:
    dim = weight.shape[1]
    packed = aligned(dim, weight, grad, *others)
    numbers = [i64(len(grad)), i64(dim), i64(start), i64(first_class)]
    return [*numbers, np.int32(normalize), packed, np.uint32(key & 0xFFFFFFFF)]


# ---- which classes take part


def sample_classes(labels: Tensor, shard: Shard, *, rate: float, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """plsc.ops.sampling.sample_classes, the same bits; on a GPU one wait for the number of rows."""
    launcher = launcher_for(labels.device)
    if launcher is None or shard.size == 0 or not 0.0 <= rate <= 1.0:
        return sampling.sample_classes(labels, shard, rate=rate, seed=seed, step=step)
    labels = labels.to(torch.int64).contiguous()
    first = shard.start // sampling.BLOCK
    blocks = (shard.stop - 1) // sampling.BLOCK + 1 - first
    bitmap = torch.zeros(blocks * (sampling.BLOCK // 32), dtype=torch.int32, device=labels.device)
    counts = torch.empty(blocks, dtype=torch.int64, device=labels.device)
    place = torch.empty_like(labels)
    each_label = (-(-len(labels) // launcher.threads),)
    bounds = [i64(shard.start), i64(shard.stop)]
    args: list[object] = [labels, bitmap, i64(len(labels)), *bounds, i64(first)]
    launcher.launch("sample", "sample_labels", grid=each_label, args=args)
    low, high = struct.unpack("<II", struct.pack("<q", seed))
    exact = [np.float64(rate * size) for size in (sampling.BLOCK, shard.total % sampling.BLOCK)]
    args = [bitmap, counts, *bounds, i64(shard.total), i64(first), np.uint32(low), np.uint32(high)]
    args += [np.uint32(step & 0xFFFFFFFF), *exact]
    launcher.launch("sample", "sample_mark", grid=(blocks,), args=args)
    ends = counts.cumsum(0)
    rows = torch.empty(int(ends[-1]), dtype=torch.int64, device=labels.device)
    launcher.launch(
        "sample", "sample_rows", grid=(blocks,), args=[bitmap, ends, counts, rows, i64(shard.start), i64(first)]
    )
    args = [labels, bitmap, ends, counts, place, i64(len(labels)), *bounds, i64(first)]
    launcher.launch("sample", "sample_place", grid=each_label, args=args)
    return rows, place


# ---- the best classes, the largest entries, the cast to a half type


def merge_topk(
    scores: Tensor, classes: Tensor, found: Tensor | None, *, k: int, first: int = 0, filler: int = -1
) -> tuple[Tensor, Tensor]:
    """The k best of each sample among (scores, classes) [N, m] and `found` [N, n], the classes first, first + 1, ...

    Scores fall, among equal ones the lower class comes first, NaN before all; -inf and `filler` where candidates run
    out. What `classes` names `filler` is no candidate. Classes are at least 0 and below 2**32 - 1.
    """
    scores, classes = scores.contiguous(), classes.contiguous()
    found = None if found is None else found.contiguous()
    count = 0 if found is None else found.shape[1]
    launcher = _launcher(scores) if found is None or found.dtype == scores.dtype else None
    if launcher is None:
        return twins.merge_topk(scores, classes, found, k=k, first=first, filler=filler)
    fits(scores.device, torch.int64, tuple(scores.shape), classes=classes)
    fits(scores.device, scores.dtype, (len(scores), count), found=found)
    if not 0 <= first <= 2**32 - 1 - count:
        raise ValueError(f"merge_topk: got classes {first} to {first + count - 1}, expected them in [0, 2**32 - 1)")
    best, ids = scores.new_empty(len(scores), k), classes.new_empty(len(scores), k)
    args: list[object] = [scores, classes, found]
    args += [best, ids, i64(scores.shape[1]), i64(count), i64(first), i64(k), i64(filler)]
    launcher.launch("topk", f"merge_{NAMES[scores.dtype]}", grid=(len(scores),), args=args)
    return best, ids


def largest_entries(x: Tensor, count: int) -> Tensor:
    """The places of the `count` entries of x [n] that are largest in magnitude, rising: [count] int64.

    NaN counts as largest; of equal magnitudes those in front are kept. All of x where it has fewer than `count`.
    """
    if x.dim() != 1 or count < 0:
        raise ValueError(f"largest_entries: got {count} of {tuple(x.shape)}, expected a count >= 0 and a vector [n]")
    x, count = x.contiguous(), min(count, len(x))
    launcher = _launcher(x)
    if launcher is None or count == 0:
        return twins.largest_entries(x, count)
    kind, n = NAMES[x.dtype], x.numel()
    state = torch.zeros(2, dtype=torch.int64, device=x.device)
    state[1] = count
    histogram = torch.zeros(2048, dtype=torch.int32, device=x.device)
    shift = 31
    for width in _SELECT_WIDTHS:
        shift -= width
        args: list[object] = [x, state, histogram, i64(n), np.int32(shift), np.int32(width)]
        launcher.launch("select", f"select_histogram_{kind}", grid=(_strided(n, launcher),), args=args)
        launcher.launch("select", "select_bin", grid=(1,), args=[state, histogram, np.int32(width)], threads=32)
    chunks = -(-n // _CHUNK)
    counts = torch.empty(2, chunks, dtype=torch.int64, device=x.device)
    launcher.launch("select", f"select_count_{kind}", grid=(chunks,), args=[x, state, counts, i64(n), i64(_CHUNK)])
    ends = counts.cumsum(1)
    chosen = torch.empty(count, dtype=torch.int64, device=x.device)
    args = [x, state, counts, ends, chosen, i64(n), i64(_CHUNK)]
    launcher.launch("select", f"select_write_{kind}", grid=(chunks,), args=args)
    return chosen


def largest_magnitude(x: Tensor) -> Tensor:
    """max |x| as a 0-d float32; NaN if one is in x, 0 if x is empty."""
    x = x.contiguous()
    launcher = _launcher(x)
    if launcher is None:
        return twins.largest_magnitude(x)
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    grid = (_strided(-(-x.numel() // 4), launcher),)
    args: list[object] = [x, largest, i64(x.numel()), aligned(0, x)]
    launcher.launch("half", f"largest_{NAMES[x.dtype]}", grid=grid, args=args)
    return largest


def cast_scaled(
    x: Tensor, dtype: torch.dtype, *, largest: Tensor | None = None, divisor: float = 1.0, down: bool = False
) -> Tensor:
    """x / divisor * 2**e in another type, where e brings `largest` (0-d float32) to [2**14, 2**15); down: * 2**-e.

    Without `largest`, or where it is not finite, nothing is scaled. A `largest` in float64 goes to the twin.
    """
    if largest is not None:
        kind = torch.float64 if largest.dtype == torch.float64 else torch.float32
        fits(x.device, kind, (), largest=largest)
    x = x.contiguous()
    launcher = _launcher(x)
    if launcher is None or dtype not in _FLOATS or (largest is not None and largest.dtype == torch.float64):
        return twins.cast_scaled(x, dtype, largest=largest, divisor=divisor, down=down)
    out = torch.empty_like(x, dtype=dtype)
    grid = (-(-x.numel() // (4 * launcher.threads)),)
    args: list[object] = [x, out, largest, i64(x.numel()), f32(divisor), flag(down), aligned(0, x, out)]
    launcher.launch("half", f"cast_{NAMES[x.dtype]}_{NAMES[dtype]}", grid=grid, args=args)
    return out


def _strided(items: int, launcher: Launcher) -> int:
    """Blocks for a vector that threads go through in strides."""
    return min(-(-items // launcher.threads), _WAVE)
