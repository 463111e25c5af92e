"""How the numbers of a class weight and of its momentum are kept: fp32, split, bf16, int8 by row; and their rounding.

A weight is "fp32"; "split", a bfloat16 tensor of the upper halves of the floats, which is what products are made with,
and an int16 tensor `low` of the lower halves, together the exact float; or "bf16". A momentum is "fp32", "bf16", or
"int8" with one scale a row. What loses bits is rounded up or down at random, right on average, by bits that depend on
(seed, step, class, column) alone. `plsc/ops/core/rows.h` does the same in C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plsc.ops.sampling import mix, step_key

WEIGHT_DTYPES = ("fp32", "split", "bf16")
STATE_DTYPES = ("fp32", "bf16", "int8")
PRODUCT_DTYPES = ("auto", "fp32", "bf16")
WIDTHS = {"fp32": 4, "split": 4, "bf16": 2, "int8": 1}  # bytes a number
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Rounding:
    """Where the random bits of one step's rounding come from. first: global class id of the weight's row 0."""

    seed: int = 0
    step: int = 0
    first: int = 0

    @cached_property
    def key(self) -> int:
        """32 bits from seed and step."""
        return int(step_key(self.seed, self.step))

    def bits(self, rows: Tensor, length: int) -> Tensor:
        """32 random bits for each number of the rows [R]: int64 [R, length]."""
        ids = rows + self.first
        keys = mix(mix((ids & _MASK) ^ self.key) ^ ((ids >> 32) & _MASK))
        columns = torch.arange(length, device=rows.device) * 0x9E3779B9
        return mix(keys[:, None] + columns[None])


def is_wide(x: Tensor) -> bool:
    """Whether numbers are computed with as they are kept."""
    return x.dtype in (torch.float32, torch.float64)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> upper halves (bfloat16, cut not rounded) and lower halves (int16)."""
    bits = values.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32)
    high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return high, torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The floats that `split` cut."""
    upper = high.contiguous().view(torch.int16).to(torch.int32) << 16
    return (upper | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16, up with the probability of what is cut off; bits: 16 random ones each, as int64."""
    raw = values.contiguous().view(torch.int32).to(torch.int64) & _MASK
    special = (raw & 0x7F800000) == 0x7F800000
    kept = (raw + torch.where(special, 0, bits)) >> 16
    kept = torch.where((raw & 0x7FFFFFFF) > 0x7F800000, kept | 0x40, kept)  # a NaN stays one
    return torch.where(kept >= 0x8000, kept - 0x10000, kept).to(torch.int16).view(torch.bfloat16)


def to_int8(values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, L] as whole multiples of (largest magnitude) / 127, rounded at random; and that unit, [R]."""
    scale = values.abs().amax(1) / 127.0
    units = torch.floor(values / scale[:, None] + bits.to(torch.float32) / 65536.0).clamp_(-127, 127)
    units = torch.where((scale == 0)[:, None], 0.0, units)
    finite = scale.isfinite()[:, None]
    return torch.where(finite, units, 1.0).to(torch.int8), scale  # what is not finite any more, its unit says
