"""One step of a head as its sweeps see it: the batch, the rows that meet it, how a product becomes a logit, buffers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plsc.comm import Communicator
from plsc.ops.formats import Rounding
from plsc.ops.optim import RowOptimizer, State


class Workspace:
    """Named buffers that live between steps: a fresh mapping of big temporaries costs more than their arithmetic."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.owner: object = None  # whose exponentials the cache holds: a later forward takes it over

    def get(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor of the given shape, dtype and device of `like`, from a buffer that only grows."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            with torch.inference_mode(False):  # one made inside would be lost to training
                buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)

    def __deepcopy__(self, memo: object) -> Workspace:
        return Workspace()

    def __getstate__(self) -> dict[str, object]:
        return {"_buffers": {}, "owner": None}


@dataclass
class Scoring:
    """How an inner product becomes a logit.

    `target` maps own-class cosines [M] (and norms [M] if given) to the margin's cosines; `others` is elementwise on a
    block [N, n] given the own-class cosines [N, 1]; `bound` is the largest magnitude others can give, inf if unknown.
    """

    scale: float = 1.0
    normalize: bool = True  # cosines; False: plain inner products
    target: Callable[..., Tensor] | None = None
    others: Callable[[Tensor, Tensor], Tensor] | None = None
    bound: float = 1.0
    filter_threshold: float | None = None  # negatives with a cosine above it count as cosine 0


@dataclass
class Problem:
    """One step's batch and the part of the weight that meets it; everything a sweep over the blocks needs."""

    comm: Communicator
    scoring: Scoring
    x: Tensor  # [N, D] embeddings of the global batch, unit length if cosines
    place: Tensor  # [N] row of the own class among `rows`, or -1 where another rank has it or it is ignored
    norms: Tensor | None  # [N] length of the embeddings before normalisation
    num_classes: int
    grad_scale: float = 1.0  # applied to the weight's gradient
    rows: Tensor | None = None  # [R] rows that take part; None: all
    block: int = 4096
    cache_bytes: int = 0
    cache_half: bool = False  # keep the exponentials in bfloat16; in halves they are that anyhow
    half: bool = False  # products of operands in bfloat16
    optimizer: RowOptimizer | None = None
    state: State = field(default_factory=dict)
    rounding: Rounding | None = None  # of a weight or state that loses bits
    applied: Callable[[Tensor | None], None] | None = None  # is told the rows that the optimizer has stepped
    observe: Callable[[Tensor | None], None] | None = None  # sees the own cosines [N] before target is called
    thread: int = field(default_factory=threading.get_ident)
    workspace: Workspace = field(default_factory=Workspace)
