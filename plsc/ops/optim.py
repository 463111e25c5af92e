"""Row optimizers: update only the rows of a class weight that took part, with state and step count kept by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plsc.ops import native
from plsc.ops.checks import checked
from plsc.ops.formats import STATE_DTYPES, Rounding, is_wide, join, split, to_bf16, to_int8

State = dict[str, Tensor]
_PIECE_BYTES = 512 << 10  # of a weight's rows a thread works on; their gradient and state come on top


@dataclass
class RowOptimizer:
    """What every row optimizer has; `lr` may be changed between steps (a schedule does), the rest is fixed."""

    lr: float
    weight_decay: float = 0.0
    initial_lr: float = field(init=False)

    def __post_init__(self) -> None:
        self.lr = checked("lr", self.lr, 0.0, math.inf)
        self.weight_decay = checked("weight_decay", self.weight_decay, 0.0, math.inf)
        self.initial_lr = self.lr

    def state(self, weight: Tensor) -> State:
        """Fresh state for a weight: tensors whose dim 0 is the weight's rows."""
        raise NotImplementedError

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        """Applies one step in place. rows, grad: [R, ...]; state: [R, ...] of the same rows; grad may be destroyed.

        However weight and state are kept, they come as floats.
        """
        raise NotImplementedError

    def kernel_options(self, state: State) -> dict[str, Any] | None:
        """The step as plsc.ops.native.step takes it; None if only `update` can do it."""
        return None

    @property
    def unsampled_rows(self) -> str:
        """What becomes of rows that are not sampled: "still", or "decayed" as `idle` says."""
        return getattr(self, "unsampled", "still")

    def idle(self) -> list[list[float]]:
        """What a step does to (weight, momentum) of a row without a gradient, as a 2 x 2 matrix."""
        raise ValueError(f"{type(self).__name__} does not decay rows that are not sampled; expected SGD or AdamW")


@dataclass
class SGD(RowOptimizer):
    """SGD with momentum by row; equal to torch.optim.SGD when every row takes part in every step.

    state_dtype: how the momentum is kept, "fp32" | "bf16" | "int8" (with one scale a row); the last two rounded at
        random, right on average.
    unsampled: "still": rows that a head does not sample stay as they are; "decayed": they decay and drift on as under
        torch.optim.SGD, exactly, at the moment they are next met.
    """

    momentum: float = 0.0
    nesterov: bool = False
    state_dtype: str = "fp32"
    unsampled: str = "still"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_unsampled(self.unsampled)
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype is {self.state_dtype!r}, expected one of {', '.join(STATE_DTYPES)}")
        self.momentum = checked("momentum", self.momentum, 0.0, 1.0, open_high=True)
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov needs a momentum above 0")

    def state(self, weight: Tensor) -> State:
        if not self.momentum:
            return {}
        if self.state_dtype == "fp32":
            return {"momentum": _zeros(weight)}
        if self.state_dtype == "bf16":
            return {"momentum": torch.zeros_like(weight, dtype=torch.bfloat16)}
        return {"momentum": torch.zeros_like(weight, dtype=torch.int8), "momentum_scale": _zeros(weight, by_row=True)}

    def kernel_options(self, state: State) -> dict[str, Any] | None:
        if type(self).update is not SGD.update:
            return None
        return {
            "rule": 1,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "momentum_data": state.get("momentum"),
            "momentum_scale": state.get("momentum_scale"),
        }

    def idle(self) -> list[list[float]]:
        lr, decay, mu = self.lr, self.weight_decay, self.momentum
        if not mu:
            return [[1 - lr * decay, 0.0], [0.0, 1.0]]
        if self.nesterov:
            return [[1 - lr * decay * (1 + mu), -lr * mu * mu], [decay, mu]]
        return [[1 - lr * decay, -lr * mu], [decay, mu]]

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        if self.weight_decay:
            grad.add_(rows, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["momentum"]
            torch.add(grad, velocity, alpha=self.momentum, out=velocity)
            grad = grad.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        rows.sub_(grad, alpha=self.lr)


@dataclass
class AdamW(RowOptimizer):
    """AdamW by row with a step count for each row, so that a rarely sampled class is corrected for its own steps.

    Equal to torch.optim.AdamW when every row takes part in every step. Source: Loshchilov and Hutter 2019.
    unsampled: "still", or "decayed": rows that a head does not sample decay, exactly, at the moment they are next met;
        their moments and step counts wait.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    unsampled: str = "still"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_unsampled(self.unsampled)
        if not isinstance(self.betas, Sequence) or isinstance(self.betas, str) or len(self.betas) != 2:
            raise ValueError(f"betas is {self.betas!r}, expected two numbers in [0, 1), such as (0.9, 0.999)")
        first, second = (checked(f"betas[{i}]", beta, 0.0, 1.0, open_high=True) for i, beta in enumerate(self.betas))
        self.betas = first, second
        self.eps = checked("eps", self.eps, 0.0, math.inf)

    def idle(self) -> list[list[float]]:
        return [[1 - self.lr * self.weight_decay, 0.0], [0.0, 1.0]]

    def state(self, weight: Tensor) -> State:
        steps = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
        return {"exp_avg": _zeros(weight), "exp_avg_sq": _zeros(weight), "steps": steps}

    def kernel_options(self, state: State) -> dict[str, Any] | None:
        if type(self).update is not AdamW.update:
            return None
        return {
            "rule": 2,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "momentum_data": state["exp_avg"],
            "second": state["exp_avg_sq"],
            "steps": state["steps"],
        }

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        beta1, beta2 = self.betas
        step = state["steps"].add_(1).to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if self.weight_decay:
            rows.mul_(1 - self.lr * self.weight_decay)
        size = self.lr / (1 - beta1**step)
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**step).sqrt()).add_(self.eps)
        rows.sub_(size * state["exp_avg"] / denominator)


@dataclass
class LARS(RowOptimizer):
    """LARS with one trust ratio a class row, hence the same for every world size.

    ratio = trust * |w| / (|g| + weight_decay * |w|), 1 where either norm is 0. Source: You et al. 2017.
    """

    momentum: float = 0.9
    trust: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.momentum = checked("momentum", self.momentum, 0.0, 1.0, open_high=True)
        self.trust = checked("trust", self.trust, 0.0, math.inf, open_low=True)

    def state(self, weight: Tensor) -> State:
        return {"momentum": _zeros(weight)}

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        dims = tuple(range(1, rows.dim()))
        w_norm = torch.linalg.vector_norm(rows, dim=dims, keepdim=True)
        g_norm = torch.linalg.vector_norm(grad, dim=dims, keepdim=True)
        ratio = self.trust * w_norm / (g_norm + self.weight_decay * w_norm)
        ratio = torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
        grad.add_(rows, alpha=self.weight_decay).mul_(ratio)
        velocity = state["momentum"]
        torch.add(grad, velocity, alpha=self.momentum, out=velocity)
        rows.sub_(velocity, alpha=self.lr)


def _check_unsampled(word: str) -> None:
    if word not in ("still", "decayed"):
        raise ValueError(f"unsampled is {word!r}, expected still or decayed")


def apply_rows(
    optimizer: RowOptimizer,
    weight: Tensor,
    state: State,
    rows: Tensor | slice | None,
    grad: Tensor,
    *,
    normalize: bool = False,
    rounding: Rounding | None = None,
) -> None:
    """One optimizer step on the chosen rows of `weight` and of its state, everything else untouched.

    grad: [R, ...], may be destroyed. normalize: it is that of w / |w|, divided by |w|, and is led to w first.
    state: what `optimizer.state` made, and "low" beside it where the weight is split. rounding: needed where weight or
    state lose bits.
    """
    rows = slice(0, len(grad)) if rows is None else rows
    with torch.no_grad():
        options = optimizer.kernel_options(state)
        if options is not None:
            options["low"] = state.get("low")
            if rounding is not None:
                options["key"], options["first"] = rounding.key, rounding.first
            if native.step(weight, rows, grad, normalize=normalize, options=options):
                return
        for first, last in pieces(weight, 0, len(grad)):
            cut = rows[first:last] if isinstance(rows, Tensor) else slice(rows.start + first, rows.start + last)
            _apply_piece(optimizer, weight, state, cut, grad[first:last], normalize, rounding)


def _apply_piece(
    optimizer: RowOptimizer,
    weight: Tensor,
    state: State,
    rows: Tensor | slice,
    grad: Tensor,
    normalize: bool,
    rounding: Rounding | None,
) -> None:
    kept = {name: value[rows] for name, value in state.items()}  # views of rows that lie together
    high, low = weight[rows], kept.pop("low", None)
    seen = high if is_wide(high) else high.float()
    if normalize:
        native.take_radial_out(grad, seen)
    values = seen if low is None else join(high, low)
    scales = {name: kept.pop(f"{name}_scale") for name in list(kept) if f"{name}_scale" in kept}
    floats = {name: _floats(value, scales.get(name)) for name, value in kept.items()}
    optimizer.update(values, grad, floats)
    changed = {name: value for name, value in floats.items() if is_wide(kept[name])}
    bits = None
    if len(changed) < len(floats) or (low is None and not is_wide(weight)):
        assert rounding is not None, "what loses bits is rounded by a key"
        numbers = rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop, device=weight.device)
        bits = rounding.bits(numbers, math.prod(weight.shape[1:])).view(values.shape)
    for name, value in floats.items():
        if bits is not None and kept[name].dtype == torch.bfloat16:
            changed[name] = to_bf16(value, bits >> 16)
        elif bits is not None and kept[name].dtype == torch.int8:
            units, scale = to_int8(value.flatten(1), (bits >> 16).flatten(1))
            changed[name], changed[f"{name}_scale"] = units.view(value.shape), scale
    if low is not None:
        values, changed["low"] = split(values)
    elif bits is not None and weight.dtype == torch.bfloat16:
        values = to_bf16(values, bits & 0xFFFF)
    _store(weight, rows, values)
    for name, value in changed.items():
        _store(state[name], rows, value)


def remove_radial(weight: Tensor, rows: Tensor | slice, grad: Tensor) -> None:
    """From the gradient of w / |w|, already divided by |w|, to that of w, for the chosen rows, in place."""
    if native.step(weight, rows, grad, normalize=True, options=None):
        return
    for first, last in pieces(weight, 0, len(grad)):
        cut = rows[first:last] if isinstance(rows, Tensor) else slice(rows.start + first, rows.start + last)
        native.take_radial_out(grad[first:last], weight[cut].to(grad.dtype))


def _floats(value: Tensor, scale: Tensor | None) -> Tensor:
    """State as it is computed with."""
    if scale is not None:
        return value.to(scale.dtype) * scale.view(-1, *[1] * (value.dim() - 1))
    return value if is_wide(value) else value.float()


def _store(target: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    if isinstance(rows, Tensor):
        target.index_copy_(0, rows, values)
    elif target[rows].data_ptr() != values.data_ptr():  # not the view that was worked on
        target[rows] = values


def _zeros(weight: Tensor, *, by_row: bool = False) -> Tensor:
    """Zeros in the dtype that is computed in, as large as the weight or one a row."""
    dtype = weight.dtype if is_wide(weight) else torch.float32
    return torch.zeros(weight.shape[:1] if by_row else weight.shape, dtype=dtype, device=weight.device)


def pieces(weight: Tensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cuts rows [start, stop) so that several passes over one piece stay in a CPU's cache; on a GPU it is one piece."""
    step = max(stop - start, 1)
    if weight.device.type == "cpu":
        row_bytes = max(math.prod(weight.shape[1:]), 1) * weight.element_size()
        step = max(_PIECE_BYTES * torch.get_num_threads() // row_bytes, 1)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
