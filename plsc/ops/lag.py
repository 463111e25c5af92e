"""Weight decay and momentum of rows that are not sampled, made up for when they are next met, exactly.

While a row gets no gradient, a step of SGD takes its weight and momentum through a 2 x 2 matrix that all rows share,
(w, v) -> (a w + b v, c w + d v). A row that missed k steps needs the product of the last k matrices, of which a table
is kept: the work is that of the rows met, not of all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from plsc.ops import host
from plsc.ops.formats import Rounding
from plsc.ops.optim import RowOptimizer, State, apply_rows

LIMIT = 1024  # steps a row may miss; then all rows catch up, at the cost of one full step


@dataclass
class _CatchUp(RowOptimizer):
    """The missed steps as one: `grad` holds a 2 x 2 matrix for each row."""

    lr: float = 0.0

    def update(self, rows: Tensor, grad: Tensor, state: State) -> None:
        a, b, c, d = (grad[:, i].to(rows.dtype).view(-1, *[1] * (rows.dim() - 1)) for i in range(4))
        velocity = state.get("momentum")
        if velocity is None:
            rows.mul_(a)
            return
        before = rows.clone()
        rows.mul_(a).addcmul_(b, velocity)
        velocity.mul_(d).addcmul_(c, before)


@dataclass
class Lag:
    """The steps since all rows were last up to date; `touched` [C_local] int32: how many of them a row has taken."""

    touched: Tensor
    clock: int = 0
    products: Tensor = field(default_factory=lambda: torch.eye(2, dtype=torch.float64)[None])  # [k] of the last k steps

    def met(self, optimizer: RowOptimizer, rows: Tensor | None) -> None:
        """A step was taken by these rows [R] (None: all); the others have missed it."""
        (a, b), (c, d) = optimizer.idle()
        weight, velocity = self.products.unbind(1)  # [k, 2] each
        moved = torch.stack([a * weight + b * velocity, c * weight + d * velocity], 1)
        self.products = torch.cat([torch.eye(2, dtype=torch.float64, device=moved.device)[None], moved])
        self.clock += 1
        self.touched[slice(None) if rows is None else rows] = self.clock

    def catch_up(self, weight: Tensor, state: State, rows: Tensor, rounding: Rounding | None) -> None:
        """Brings these rows to today, in place."""
        missed = (self.clock - self.touched[rows]).long()
        if host.reads_freely(missed):  # elsewhere the matrix of those that missed nothing is the identity
            behind = missed > 0
            rows, missed = rows[behind], missed[behind]
        matrices = self.products[missed].flatten(1)  # [R, 4]
        kept: State = {name: state[name] for name in ("momentum", "momentum_scale", "low") if name in state}
        apply_rows(_CatchUp(), weight, kept, rows, matrices, rounding=rounding)
        self.touched[rows] = self.clock

    def catch_up_all(self, weight: Tensor, state: State, rounding: Rounding | None, *, block: int = 4096) -> None:
        """Brings every row to today and begins to count anew."""
        if self.clock == 0:
            return
        for start in range(0, len(weight), block):
            numbers = torch.arange(start, min(start + block, len(weight)), device=weight.device)
            self.catch_up(weight, state, numbers, rounding)
        self.touched.zero_()
        self.clock, self.products = 0, self.products[:1]
