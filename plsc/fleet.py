"""Strategy says what a run asks for; Fleet holds the parts that do it and turns a loss into an agreed step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plsc.comm import Communicator, connect, shard_of, world
from plsc.data import Dataset, Loader
from plsc.ops.optim import RowUpdate, deferred_updates, merge_updates
from plsc.strategies import (
    LossScaler,
    Reducer,
    any_nonfinite,
    autocast,
    broadcast_parameters,
    convert_sync_bn,
    grad_norm,
    recompute,
)

AMP = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Strategy:
    """How a run is spread and in which precision; every field works alone and together with the others.

    amp: "fp32" | "bf16" | "fp16" (with a dynamic loss scale).
    reduce_dtype: what gradients travel in, "fp32" | "bf16".
    bucket_mb: gradients are fused into buckets of this many MiB.
    accumulate: micro-batches an optimizer step; the global batch stays the same, memory shrinks.
    clip_norm: largest norm of the whole gradient, cut weights counted once; 0 is off.
    recompute: "none" | "full" | "every:k": blocks whose activations are computed again in the backward.
    sync_bn: batch statistics over all ranks.
    """

    amp: str = "fp32"
    reduce_dtype: str = "fp32"
    bucket_mb: float = 25.0
    accumulate: int = 1
    clip_norm: float = 0.0
    recompute: str = "none"
    sync_bn: bool = False

    def __post_init__(self) -> None:
        if self.amp not in AMP:
            raise ValueError(f"strategy: got amp {self.amp!r}, expected one of {', '.join(AMP)}")
        if self.reduce_dtype not in ("fp32", "bf16"):
            raise ValueError(f"strategy: got reduce_dtype {self.reduce_dtype!r}, expected fp32 or bf16")
        if self.accumulate < 1 or not self.clip_norm >= 0.0 or not self.bucket_mb > 0.0:
            raise ValueError(
                f"strategy: got accumulate={self.accumulate}, clip_norm={self.clip_norm}, bucket_mb={self.bucket_mb}; "
                "expected accumulate >= 1, clip_norm >= 0 (0 is off), bucket_mb > 0"
            )


@dataclass(frozen=True)
class Step:
    """What became of one call of Fleet.step."""

    updated: bool  # an optimizer step was taken
    overflow: bool = False  # fp16: gradients overflowed on some rank, so every rank skipped the step
    grad_norm: float | None = None  # before clipping; None where clipping is off


class NonFiniteLoss(FloatingPointError):
    """The loss is NaN or infinite on some rank; raised on every rank before any weight has changed."""


class Fleet:
    """The ranks of a run with their strategy: replicate the backbone, cut the head over `comm`, then `step(loss)`.

    Args:
        strategy: default Strategy().
        comm: default: the world that is connected already, else plsc.comm.connect() (torchrun's or Slurm's
            environment, or a world of one).
    """

    def __init__(self, strategy: Strategy | None = None, comm: Communicator | None = None) -> None:
        self.strategy = Strategy() if strategy is None else strategy
        if comm is None:
            comm = world()
            comm = connect() if comm.name == "local" else comm
        self.comm = comm
        self.device = comm.device
        self.scaler = LossScaler() if self.strategy.amp == "fp16" else None
        self.reducers: list[Reducer] = []
        self._checked: set[int] = set()
        self._micro = 0
        self._pending: list[RowUpdate] = []

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def replicate(self, module: nn.Module, *, sync_bn: bool | None = None) -> nn.Module:
        """Makes a module the same on all ranks and averages its gradients from now on; returns it.

        Applies the strategy's sync_bn (or the argument) and recompute. Collective.
        """
        module = module.to(self.device)
        if self.strategy.sync_bn if sync_bn is None else sync_bn:
            module = convert_sync_bn(module, self.comm)
        # sync_bn in a recomputed block communicates in the backward again: in the same order on all ranks
        recompute(module, self.strategy.recompute, allow_collectives=True)
        broadcast_parameters(module, self.comm)
        bucket_mb, dtype = self.strategy.bucket_mb, self.strategy.reduce_dtype
        self.reducers.append(Reducer(module.parameters(), self.comm, bucket_mb=bucket_mb, reduce_dtype=dtype))
        return module

    def loader(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        transform: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
        workers: int = 0,
    ) -> Loader:
        """Equal batches for every rank, in an order that no world size changes.

        batch_size: samples an optimizer step takes over all ranks; with accumulation each call of the model gets
            batch_size / (world_size * accumulate) of them.
        """
        parts = self.world_size * self.strategy.accumulate
        if batch_size % parts:
            raise ValueError(
                f"batch_size is {batch_size}, expected a multiple of world_size * accumulate = {self.world_size} * "
                f"{self.strategy.accumulate} = {parts}; it is the global batch of one optimizer step"
            )
        return Loader(
            dataset,
            batch_size // self.strategy.accumulate,
            rank=self.rank,
            world_size=self.world_size,
            seed=seed,
            shuffle=shuffle,
            transform=transform,
            workers=workers,
            device=self.device,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass, in the strategy's precision."""
        return autocast(self.strategy.amp, self.device)

    def step(self, loss: Tensor, optimizer: Optimizer) -> Step:
        """Backward, averaging, and one optimizer step that all ranks take alike; gradients are zeroed after it.

        With accumulation the optimizer steps at every `accumulate`-th call. An fp16 overflow on any rank makes all
        ranks skip. Raises NonFiniteLoss on all ranks, before anything has changed, if a loss is not finite.
        """
        self._check_parameters(optimizer)
        self._check_loss(loss)
        self._micro += 1
        last = self._micro == self.strategy.accumulate
        defer = self.scaler is not None or self.strategy.clip_norm > 0 or self.strategy.accumulate > 1
        scaled = loss / self.strategy.accumulate
        with ExitStack() as stack:
            if not last:
                for reducer in self.reducers:
                    stack.enter_context(reducer.accumulate())
            updates: list[RowUpdate] = stack.enter_context(deferred_updates()) if defer else []
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        self._pending += updates
        if not last:
            return Step(updated=False)
        self._micro = 0
        for reducer in self.reducers:
            reducer.finish()
        return self._finish(optimizer)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: for whatever decides how the run goes on. Collective."""
        if self.world_size == 1:
            return flag
        return bool(self.comm.all_reduce(torch.tensor([int(flag)], device=self.device), "max").wait().item())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must have again: the loss scale and the layout of the gradient buckets. JSON-able."""
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "reducers": [reducer.state_dict() for reducer in self.reducers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["scaler"] is None) != (self.scaler is None):
            raise ValueError(
                f"fleet: the checkpoint was made {'without' if state['scaler'] is None else 'with'} a loss scale and "
                f"this run is amp={self.strategy.amp!r}; resume with the precision it was trained in"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for reducer, saved in zip(self.reducers, state["reducers"], strict=True):
            reducer.load_state_dict(saved)

    # ---- inside

    def _finish(self, optimizer: Optimizer) -> Step:
        """Decides together, then steps or skips."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        updates, self._pending = merge_updates(self._pending), []
        scale = 1.0
        if self.scaler is not None:
            scale = 1.0 / self.scaler.loss_scale
            found = torch.maximum(
                self.scaler.unscale_(params), any_nonfinite([u.grad for u in updates]).to(self.device)
            )
            overflow = self.any(bool(found))
            self.scaler.update(overflow)
            if overflow:
                self._zero_grad(optimizer)
                return Step(updated=False, overflow=True)
        norm = None
        if self.strategy.clip_norm > 0:
            norm = self._norm(params, updates, scale)
            if not math.isfinite(norm):
                raise NonFiniteLoss(f"the gradient's norm is {norm}; no weight was changed")
            shrink = min(1.0, self.strategy.clip_norm / (norm + 1e-6))
            torch._foreach_mul_([param.grad for param in params if param.grad is not None], shrink)
            scale *= shrink
        for update in updates:
            update.apply(scale)
        optimizer.step()
        self._zero_grad(optimizer)
        return Step(updated=True, grad_norm=norm)

    def _norm(self, params: list[nn.Parameter], updates: list[RowUpdate], scale: float) -> float:
        """Norm of the gradient of everything: replicated weights once, cut ones summed over ranks."""
        square = grad_norm(params, self.comm).double() ** 2
        rows = square.new_zeros(())
        for update in updates:
            rows += (torch.linalg.vector_norm(update.grad) * scale).double() ** 2
        return float((square + self.comm.all_reduce(rows).wait()).sqrt())

    def _zero_grad(self, optimizer: Optimizer) -> None:
        for reducer in self.reducers:
            reducer.zero_grad()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if shard_of(param) is not None:
                    param.grad = None

    def _check_loss(self, loss: Tensor) -> None:
        """Agrees on whether the loss is finite. On a GPU that would stop the host every step: the log steps do it."""
        if loss.dim() != 0:
            raise ValueError(
                f"loss has shape {tuple(loss.shape)}, expected a scalar: the mean over this rank's samples"
            )
        if self.device.type != "cpu":
            return
        value = loss.detach()
        if self.any(not bool(value.isfinite())):
            raise NonFiniteLoss(f"the loss is {float(value)} on rank {self.rank}; no weight was changed")

    def _check_parameters(self, optimizer: Optimizer) -> None:
        """On several ranks every parameter must be averaged or cut, else replicas drift apart unseen."""
        if id(optimizer) in self._checked or self.world_size == 1:
            return
        known = {id(param) for reducer in self.reducers for param in reducer.params}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and id(param) not in known and shard_of(param) is None:
                    raise ValueError(
                        f"optimizer group {number} has a parameter of shape {tuple(param.shape)} that is neither "
                        "replicated nor cut; pass its module through fleet.replicate(module)"
                    )
        self._checked.add(id(optimizer))
