"""Fleet: the parts that do what a Strategy asks for; it turns a loss into an agreed step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plsc.comm import Auto, Communicator, connect, connected, route, shard_of
from plsc.data import Dataset, Loader
from plsc.ops.updates import RowUpdate, deferred_updates, merge_updates
from plsc.ps import Communicator as SparseStore
from plsc.ps import Rule, SparseEmbedding
from plsc.ps.choose import open_store
from plsc.strategies import (
    DGC,
    LocalSGD,
    LossScaler,
    Reducer,
    Strategy,
    any_nonfinite,
    autocast,
    broadcast_parameters,
    convert_sync_bn,
    grad_norm,
    make_reduction,
    recompute,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What became of one call of Fleet.step."""

    updated: bool  # an optimizer step was taken
    overflow: bool = False  # fp16: gradients overflowed on some rank, so every rank skipped the step
    grad_norm: float | None = None  # before clipping; None where clipping is off


class NonFiniteLoss(FloatingPointError):
    """The loss is NaN or infinite on some rank; raised on every rank before any weight has changed.

    gradient: the first gradient that is not finite, where it was not the loss.
    """

    def __init__(self, message: str, *, gradient: str | None = None) -> None:
        super().__init__(message)
        self.gradient = gradient


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
            comm = connected() or connect()
        self.comm = comm
        self.device = comm.device
        self.scaler = LossScaler() if self.strategy.amp == "fp16" else None
        self.reducers: list[Reducer | DGC] = []
        self.locals: list[LocalSGD] = []
        self.sparse: list[SparseEmbedding] = []
        self.stores: list[SparseStore] = []
        self._route: Communicator | None = None  # what gradients travel on
        self._names: dict[int, str] = {}  # of replicated parameters
        self._unreached: list[_Unreached] = []  # modules of which no parameter has had a gradient yet
        self._kept: set[int] = set()  # parameters whose replicas are kept together
        self._micro = 0
        self._torn = False  # the last step has failed half-way
        self._pending: list[RowUpdate] = []

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def replicate(self, module: nn.Module, *, sync_bn: bool | None = None) -> nn.Module:
        """Makes a module the same on all ranks and keeps it so, as the strategy says; returns it.

        Applies the strategy's sync_bn (or the argument) and recompute. Collective. Once for each parameter: modules
        that share weights go together, as nn.ModuleList([one, other]).
        """
        module = module.to(self.device)
        for name, param in module.named_parameters():
            if id(param) in self._kept:
                raise ValueError(
                    f"replicate: got a module whose parameter {name!r} is replicated already; call it once, with a "
                    "module that holds all that share weights, such as nn.ModuleList([one, other])"
                )
        if self.strategy.sync_bn if sync_bn is None else sync_bn:
            module = convert_sync_bn(module, self.comm)
        # sync_bn in a recomputed block communicates in the backward again: in the same order on all ranks
        recompute(module, self.strategy.recompute, allow_collectives=True)
        broadcast_parameters(module, self.comm)
        self._names |= {id(param): name for name, param in module.named_parameters()}
        self._spread(module)
        self._unreached.append(_Unreached(module))
        return module

    def embedding(
        self,
        name: str,
        *,
        dim: int,
        pooling: str = "sum",
        padding_key: int | None = None,
        rule: str | Rule | None = None,
        lr: float | None = None,
    ) -> SparseEmbedding:
        """An embedding whose rows live in table `name`, trained as the strategy's `ps` says; see plsc.ps.choose."""
        mode = "direct" if self.strategy.ps == "none" else self.strategy.ps
        store = open_store(
            name,
            dim=dim,
            mode=mode,
            servers=self.strategy.servers,
            args=self.strategy.ps_args,
            rank=self.rank,
            workers=self.world_size,
            rule=rule,
            lr=lr,
        )
        self.stores.append(store)
        self.sparse.append(SparseEmbedding(store, pooling=pooling, padding_key=padding_key))
        return self.sparse[-1]

    def loader(
        self,
        dataset: Dataset | Iterable[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        transform: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
        workers: int = 0,
        on_bad_image: str = "raise",
        per_class: int = 0,
    ) -> Loader:
        """Equal batches for every rank, in an order that no world size changes.

        dataset: a plsc.data.Dataset, a map-style data set or any iterable of (image, label).
        per_class: images of a class side by side in every batch, 0 for a plain shuffle.
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
            on_bad_image=on_bad_image,
            per_class=per_class,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass, in the strategy's precision."""
        return autocast(self.strategy.amp, self.device)

    def step(self, loss: Tensor, optimizer: Optimizer) -> Step:
        """Backward, averaging, and one optimizer step that all ranks take alike; gradients are zeroed after it.

        With accumulation the optimizer steps at every `accumulate`-th call. An fp16 overflow on any rank makes all
        ranks skip (with DGC any gradient that is not finite). Raises NonFiniteLoss on all ranks, before anything has
        changed, if a loss is not finite. After a step that failed half-way on all ranks the next one begins afresh.
        """
        self._check_parameters(optimizer)
        self._check_loss(loss)
        if self._torn:
            self._clear(optimizer)
        self._torn = True
        step = self._take(loss, optimizer)
        self._torn = False
        return step

    def meet(self, optimizer: Optimizer) -> None:
        """Makes the replicas of local SGD the same, momentum included, and has all rows' pushes applied. Collective.

        To be called before evaluation and before a checkpoint.
        """
        for store in self.stores:
            store.flush()
        for local in self.locals:
            local.meet(optimizer)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: for whatever decides how the run goes on. Collective."""
        if self.world_size == 1:
            return flag
        return bool(self.comm.all_reduce(torch.tensor([int(flag)], device=self.device), "max").wait().item())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must have again: loss scale, layout of the buckets, residuals, the measured topology."""
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "kind": self._kind,
            "topology": self._route.state_dict() if isinstance(self._route, Auto) else None,
            "reducers": [reducer.state_dict() for reducer in self.reducers],
            "locals": [local.state_dict() for local in self.locals],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["scaler"] is None) != (self.scaler is None):
            raise ValueError(
                f"fleet: the checkpoint was made {'without' if state['scaler'] is None else 'with'} a loss scale and "
                f"this run is amp={self.strategy.amp!r}; resume with the precision it was trained in"
            )
        if state.get("kind", "reducer") != self._kind:
            raise ValueError(
                f"fleet: the checkpoint was made with {state.get('kind', 'reducer')}, this run has {self._kind}; "
                "resume with the compress and local_sgd it was trained with"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if isinstance(self._route, Auto) and state.get("topology"):
            self._route.load_state_dict(state["topology"])
        parts, saved = [*self.reducers, *self.locals], [*state["reducers"], *state.get("locals", [])]
        if len(parts) != len(saved):
            raise ValueError(
                f"fleet: the checkpoint was made with {len(saved)} replicated modules, this run has {len(parts)}; "
                "replicate the same ones in the same order before loading"
            )
        for part, one in zip(parts, saved, strict=True):
            part.load_state_dict(one)

    # ---- inside

    @property
    def _kind(self) -> str:
        return "local_sgd" if self.strategy.local_sgd else "reducer" if self.strategy.compress == "none" else "dgc"

    def _spread(self, module: nn.Module) -> None:
        """Hands a replicated module to whatever keeps its replicas together."""
        ask = self.strategy
        reduction = make_reduction(ask.reduce_dtype, accumulate=ask.reduce_accumulate)
        if self._route is None:
            self._route = route(self.comm, ask.topology)
        comm, mb, lanes = self._route, ask.bucket_mb, ask.lanes
        if (local := ask.local_sgd_options()) is not None:
            made = LocalSGD(module, comm, options=local, bucket_mb=mb, reduce_dtype=reduction, lanes=lanes)
            self.locals.append(made)
        elif (dgc := ask.dgc_options()) is not None:
            params, clip = module.parameters(), ask.clip_norm
            self.reducers.append(
                DGC(params, comm, options=dgc, clip_norm=clip, bucket_mb=mb, reduce_dtype=reduction, lanes=lanes)
            )
        else:
            self.reducers.append(Reducer(module.parameters(), comm, bucket_mb=mb, reduce_dtype=reduction, lanes=lanes))
        self._kept |= {id(param) for part in (*self.reducers, *self.locals) for param in part.params}

    def _take(self, loss: Tensor, optimizer: Optimizer) -> Step:
        """Backward and, where the accumulation is complete, the rest of a step."""
        self._micro += 1
        last = self._micro == self.strategy.accumulate
        may_skip = self.scaler is not None or self.strategy.compress != "none"
        defer = may_skip or self.strategy.clip_norm > 0 or self.strategy.accumulate > 1
        scaled = loss / self.strategy.accumulate
        for layer in self.sparse:
            layer.grad_scale = 1.0 if self.scaler is None else self.scaler.loss_scale
        with ExitStack() as stack:
            if not last:
                for reducer in self.reducers:
                    stack.enter_context(reducer.accumulate())
            updates: list[RowUpdate] = stack.enter_context(deferred_updates()) if defer else []
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        self._pending = merge_updates([*self._pending, *updates])  # of sampled rows one gradient waits, not one a pass
        for local in self.locals:
            local.note(loss)
        if not last:
            return Step(updated=False)
        for reducer in self.reducers:
            reducer.finish()
        self._check_reached(optimizer)
        return self._finish(optimizer)

    def _finish(self, optimizer: Optimizer) -> Step:
        """Decides together, then steps or skips."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        updates = self._pending
        compressors = [reducer for reducer in self.reducers if isinstance(reducer, DGC)]
        scale, found, clipped = 1.0, None, None
        for local in self.locals:
            local.begin_step()
        if self.scaler is not None:
            scale = 1.0 / self.scaler.loss_scale
            found = self.scaler.unscale_(params)
        elif compressors:
            found = any_nonfinite([param.grad for param in params if param.grad is not None])
        if self.strategy.clip_norm > 0:
            own = {id(param) for compressor in compressors for param in compressor.local_params}  # DGC clips these
            clipped = [param for param in params if id(param) not in own]
        overflow, norm = self._agree(found, clipped, updates, scale)
        if found is not None:
            if self.scaler is not None:
                try:
                    self.scaler.update(overflow)
                except FloatingPointError as error:
                    raise self._collapsed(error, params) from error
            if overflow:
                for compressor in compressors:
                    compressor.skip()
                return self._end(optimizer, Step(updated=False, overflow=True))
        if clipped is not None and norm is not None:
            if not math.isfinite(norm):
                raise NonFiniteLoss(f"the gradient's norm is {norm}; no weight was changed")
            shrink = min(1.0, self.strategy.clip_norm / (norm + 1e-6))
            grads = [param.grad for param in clipped if param.grad is not None]
            if grads:  # else only rows of a head are trained
                torch._foreach_mul_(grads, shrink)
            scale *= shrink
        for update in updates:
            update.apply(scale)
        for compressor in compressors:
            compressor.apply(optimizer)
        optimizer.step()
        return self._end(optimizer, Step(updated=True, grad_norm=norm))

    def _agree(
        self,
        found: Tensor | None,
        clipped: list[nn.Parameter] | None,
        updates: list[RowUpdate],
        scale: float,
    ) -> tuple[bool, float | None]:
        """Whether a gradient is not finite on any rank, and the norm of those to clip: the one wait of such a step.

        found: whether one of this rank's is, apart from `updates`; None: not asked. clipped: None: no norm is wanted.
        """
        numbers: list[Tensor] = []
        squares = [] if clipped is None else [update.square(scale) for update in updates]
        if found is not None:
            rows = [number for update in updates for number in update.numbers()]
            kinds = (
                [found, any_nonfinite([*rows, *(square.sqrt().float() for square in squares)])] if updates else [found]
            )
            worst = torch.stack([kind.to(self.device) for kind in kinds]).amax().to(torch.int64)
            numbers.append(self.comm.all_reduce(worst, "max").wait().double())
        if clipped is not None:
            numbers.append(self._norm(clipped, squares))
        values = torch.stack(numbers).tolist() if numbers else []
        return found is not None and values[0] > 0, values[-1] if clipped is not None else None

    def _collapsed(self, error: FloatingPointError, params: list[nn.Parameter]) -> NonFiniteLoss:
        """The loss scale has fallen to nothing: with the name of the first gradient that is not finite on any rank."""
        names = (
            self._names.get(id(param), f"{'cut ' if shard_of(param) else ''}parameter of shape {tuple(param.shape)}")
            for param in params
            if param.grad is not None and bool(any_nonfinite([param.grad]))
        )
        found = [name for name in self.comm.gather_objects(next(names, None)) if name]
        gradient = f"{found[0]} (gradient)" if found else None
        return NonFiniteLoss(f"{error}; first gradient that is not finite: {gradient}", gradient=gradient)

    def _end(self, optimizer: Optimizer, step: Step) -> Step:
        """What ends a step, taken or skipped."""
        for local in self.locals:
            local.end_step(optimizer)
        self._clear(optimizer)
        return step

    def _clear(self, optimizer: Optimizer) -> None:
        """No gradients and nothing accumulated: where a step begins."""
        self._micro, self._pending = 0, []
        for reducer in self.reducers:
            reducer.zero_grad()
        averaged = {id(param) for reducer in self.reducers for param in reducer.params}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in averaged:
                    param.grad = None

    def _norm(self, params: list[nn.Parameter], squares: list[Tensor]) -> Tensor:
        """Norm of the gradient of everything, 0-d float64: replicated weights once, cut ones summed over ranks.

        squares: of the norms of this rank's rows that wait for their step.

        Between the meetings of local SGD replicas have gradients of their own: the mean of their squares counts.
        """
        apart = {id(param) for local in self.locals for param in local.params}
        square = grad_norm([param for param in params if id(param) not in apart], self.comm).double() ** 2
        rows = square.new_zeros(())
        for each in squares:
            rows += each.to(rows.device)
        if apart:
            replica = grad_norm([param for param in params if id(param) in apart], self.comm).double() ** 2
            rows += replica.to(rows.device) / self.world_size
        return (square + self.comm.all_reduce(rows).wait()).sqrt()

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
        for reducer in self.reducers:
            if isinstance(reducer, DGC):
                reducer.check(optimizer)
        if self.world_size == 1:
            return
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and id(param) not in self._kept and shard_of(param) is None:
                    raise ValueError(
                        f"optimizer group {number} has a parameter of shape {tuple(param.shape)} that is neither "
                        "replicated nor cut; pass its module through fleet.replicate(module), and freeze what is to "
                        "be trained later only after that"
                    )

    def _check_reached(self, optimizer: Optimizer) -> None:
        """Says so, once, where a module is to be trained and the loss of its first step does not depend on it."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for module in [each for each in self._unreached if not each.params.isdisjoint(stepped)]:
            self._unreached.remove(module)
            if module.close() and self.rank == 0:
                logger.warning(
                    "none of the %d trainable parameters of %s that the optimizer has got a gradient: the loss does "
                    "not depend on them, and they only decay; was its output made under torch.no_grad() or detached? "
                    "If only the head is to be trained, leave them out of the optimizer, or call "
                    "requires_grad_(False) before fleet.replicate",
                    len(module.params & stepped),
                    module.name,
                )


class _Unreached:
    """Listens whether autograd comes to any parameter of a module, until it has or its first step has been taken."""

    def __init__(self, module: nn.Module) -> None:
        params = [param for param in module.parameters() if param.requires_grad]
        self.name, self.params, self._reached = type(module).__name__, {id(param) for param in params}, False
        self._handles = [param.register_post_accumulate_grad_hook(self._note) for param in params]

    def close(self) -> bool:
        """Stops listening; whether no gradient has come."""
        for handle in self._handles:
            handle.remove()
        return not self._reached

    def _note(self, _: Tensor) -> None:
        self._reached = True
