"""Local SGD: every rank steps on its own gradients, and the ranks average their weights every few steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plsc.comm import Communicator, shard_of
from plsc.strategies.fusion import measured_buckets
from plsc.strategies.reducer import agree, flat_views, plan_buckets, replicated
from plsc.strategies.reduction import Full, Lanes, Reduction, make_reduction

MAX_PERIOD = 16  # of the adaptive one: beyond it accuracy falls for little less communication


@dataclass(frozen=True)
class LocalSGDOptions:
    """How often the ranks meet, and what they make of it.

    every: optimizer steps between two meetings.
    begin: steps at the start with a meeting after each (post-local SGD; Lin et al. 2020).
    adaptive: the period follows the loss and the learning rate, from `every` on (AdaComm; Wang and Joshi 2019).
    outer_lr, outer_momentum: of the Nesterov SGD that steps the common weights along the mean of what the ranks have
        moved; 1 and 0 is the plain mean, 0.7 and 0.9 DiLoCo's (Douillard et al. 2023).
    """

    every: int = 8
    begin: int = 0
    adaptive: bool = False
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1 or self.begin < 0 or not 0 < self.outer_lr < math.inf or not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"local_sgd: got every {self.every}, begin {self.begin}, outer_lr {self.outer_lr}, outer_momentum "
                f"{self.outer_momentum}; expected every >= 1, begin >= 0, outer_lr a number > 0, outer_momentum "
                "in [0, 1)"
            )
        if self.adaptive and self.every > MAX_PERIOD:
            raise ValueError(f"local_sgd: got every {self.every} with adaptive, expected at most {MAX_PERIOD}")


@dataclass
class _Bucket:
    """Tensors that travel together: values that all ranks have alike, and how far each rank's own are from them.

    For weights those of the last meeting. Statistics move in the forward, before anybody says that a step begins: for
    them rank 0's at this meeting, so that a constant stays what it is.
    """

    tensors: list[Tensor]
    anchor: Tensor
    anchors: list[Tensor]  # views of anchor
    moved: Tensor
    moves: list[Tensor]  # views of moved
    names: list[str]  # of statistics, which are averaged; empty for weights, which the outer optimizer steps
    velocity: Tensor | None = None  # of the outer optimizer

    @property
    def outer(self) -> bool:
        return not self.names


class LocalSGD:
    """Takes the place of averaging gradients: begin_step() before each optimizer step, end_step() after it.

    A step that the optimizer skipped counts as well, so that all ranks meet at the same time. At a meeting weights and
    floating-point buffers (batch statistics) become their mean over the ranks, the same bits on each; other buffers are
    rank 0's. Momentum stays with its rank until meet(). Parameters that bear a Shard mark keep meeting in every step.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        options: LocalSGDOptions | None = None,
        bucket_mb: float = 25.0,
        reduce_dtype: str | Reduction = "fp32",
        lanes: int = 1,
    ) -> None:
        """Collective; the ranks must start from the same weights (broadcast_parameters).

        bucket_mb: as in Reducer, 0 is measured.
        reduce_dtype, lanes: what the differences to the last meeting travel in and on, as in Reducer.
        """
        self.comm, self.options = comm, options or LocalSGDOptions()
        self.params: list[nn.Parameter] = replicated(module.parameters())
        buffers = {name: buffer for name, buffer in module.named_buffers() if shard_of(buffer) is None}
        # By name: a forward may put a new tensor in the place of the old one.
        self._module, self._statistics = module, [name for name, x in buffers.items() if x.is_floating_point()]
        self._counts = [name for name in buffers if name not in self._statistics]
        reduction = make_reduction(reduce_dtype) if isinstance(reduce_dtype, str) else reduce_dtype
        averaged = (*self.params, *(buffers[name] for name in self._statistics))
        self._layout = [[list(x.shape), list(x.stride())] for x in averaged]
        about = [*map(str, self._layout), str(self.options), f"{len(self._counts)} counts", reduction.name]
        agree(comm, about, "what local SGD averages")
        self._weight_lanes, self._statistic_lanes = Lanes(reduction, comm, lanes=lanes), Lanes(Full(), comm)
        self.measured = bucket_mb == 0
        self._lay_out(measured_buckets(self.params, comm)[0] if self.measured else bucket_mb)
        self.steps = 0  # attempted
        self.since = 0  # steps since the last meeting
        self._anchored = False  # whether what the ranks had at the last meeting is known
        self.period = self.options.every
        self._first: tuple[float, float] | None = None  # loss and learning rate of the first meeting
        self._losses: list[Tensor] = []
        self._samples = 0.0

    # ---- a step

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before the optimizer's step: where the ranks have just met, remembers the weights they start from."""
        if not self._anchored:
            for bucket in self._buckets:
                if bucket.outer:
                    torch._foreach_copy_(bucket.anchors, bucket.tensors)
            self._anchored = True

    def note(self, loss: Tensor, *, samples: float = 1.0) -> None:
        """The loss of this step (a period that adapts needs it) and the weight of this rank in the mean."""
        self._losses.append(loss.detach())
        self._samples += samples

    def end_step(self, optimizer: Optimizer) -> bool:
        """After the optimizer's step, taken or skipped; True where the ranks met."""
        self.steps += 1
        self.since += 1
        due = self.steps <= self.options.begin or self.since >= self.period
        if due:
            self._average(optimizer)
        return due

    def meet(self, optimizer: Optimizer) -> None:
        """Makes all ranks the same now, the optimizer's momentum included: before evaluation and checkpoints.

        Collective. Changes nothing where they are the same already.
        """
        if self.since:
            self._average(optimizer)
        if self.comm.world_size > 1:
            self._average_state(optimizer)

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[LocalSGD]:
        """Your own loop: inside, every optimizer.step() is a step of local SGD; at the end the ranks meet.

        Every rank must call step() as often. Where a step may be skipped on one rank (GradScaler), call begin_step()
        and end_step() yourself.
        """

        def after(*_: object) -> None:
            self.end_step(optimizer)

        handles = [
            optimizer.register_step_pre_hook(lambda *_: self.begin_step()),
            optimizer.register_step_post_hook(after),
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
        self.meet(optimizer)

    # ---- what it holds

    @property
    def bytes_per_meeting(self) -> int:
        """Bytes of weights that a meeting averages, in the type they travel in; 0 in a world of one."""
        if self.comm.world_size == 1:
            return 0
        wire = self._weight_lanes.reduction.wire
        return sum(b.anchor.numel() * wire(b.anchor.dtype).itemsize for b in self._buckets if b.outer)

    def state_dict(self) -> dict[str, Any]:
        """The period and the outer momentum; the ranks must have met, for a checkpoint holds one set of weights."""
        if self.since and self.comm.world_size > 1:
            raise ValueError(
                f"local_sgd: got {self.since} steps since the ranks met, expected none: their weights differ; call "
                "fleet.meet(optimizer), or meet(optimizer) of LocalSGD, before saving"
            )
        velocities = {str(i): b.velocity for i, b in enumerate(self._buckets) if b.velocity is not None}
        return {
            "steps": self.steps,
            "period": self.period,
            "first": None if self._first is None else list(self._first),
            "options": asdict(self.options),
            "layout": self._layout,
            "bucket_mb": self.bucket_mb,
            "velocities": velocities,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a meeting; the weights are the module's."""
        if state.get("layout") != self._layout:
            raise ValueError("local_sgd: the checkpoint averaged other tensors; build the same model")
        mb = state.get("bucket_mb", self.bucket_mb)
        if mb != self.bucket_mb and self.measured:
            self._lay_out(mb)
        if mb != self.bucket_mb and state["velocities"]:
            raise ValueError(
                f"local_sgd: got bucket_mb {mb} in the checkpoint, expected {self.bucket_mb}: its outer momentum lies "
                "in such buckets; build it with the saved bucket_mb"
            )
        self.steps, self.period = int(state["steps"]), int(state["period"])
        self.since, self._anchored = 0, False
        if state["options"]["every"] != self.options.every:
            self.period = self.options.every
        self._first = None if state["first"] is None else (float(state["first"][0]), float(state["first"][1]))
        self._losses, self._samples = [], 0.0
        for index, bucket in enumerate(self._buckets):
            saved = state["velocities"].get(str(index))
            bucket.velocity = None if saved is None else saved.to(bucket.anchor.device, copy=True)

    # ---- inside

    def _lay_out(self, bucket_mb: float) -> None:
        self.bucket_mb = bucket_mb
        self._buckets = [
            *_buckets(self.params, bucket_mb=bucket_mb),
            *_buckets(self._buffers(self._statistics), bucket_mb=bucket_mb, names=self._statistics),
        ]

    def _buffers(self, names: Sequence[str]) -> list[Tensor]:
        return [self._module.get_buffer(name) for name in names]

    @torch.no_grad()
    def _average(self, optimizer: Optimizer) -> None:
        """One meeting. What the ranks have moved travels, not the weights: small numbers suffer less in half types."""
        share = self._agree_on_period(optimizer)
        self.begin_step()  # where every step since the last meeting was skipped
        self.since, self._anchored = 0, False
        if self.comm.world_size == 1 and self.options.outer_lr == 1 and not self.options.outer_momentum:
            return
        works = []
        for bucket in self._buckets:
            if not bucket.outer:
                bucket.tensors = self._buffers(bucket.names)
                for name, tensor, anchor in zip(bucket.names, bucket.tensors, bucket.anchors, strict=True):
                    if tensor.shape != anchor.shape:
                        raise ValueError(
                            f"local_sgd: got buffer {name!r} of shape {list(tensor.shape)}, expected "
                            f"{list(anchor.shape)} as when LocalSGD was built; keep its shape"
                        )
                torch._foreach_copy_(bucket.anchors, bucket.tensors)
                works.append(self.comm.broadcast(bucket.anchor))
        for work in works:
            work.wait()
        works = []
        for turn, bucket in enumerate(self._buckets):
            torch._foreach_copy_(bucket.moves, bucket.tensors)
            bucket.moved.sub_(bucket.anchor)
            if share != 1:
                bucket.moved.mul_(share)
            lanes = self._weight_lanes if bucket.outer else self._statistic_lanes
            works.append(lanes.start(bucket.moved, turn=turn))
        works += [self.comm.broadcast(count) for count in self._buffers(self._counts)]
        for work in works:
            work.wait()
        for bucket in self._buckets:
            self._step_outer(bucket)
            torch._foreach_copy_(bucket.tensors, bucket.anchors)

    def _step_outer(self, bucket: _Bucket) -> None:
        """Moves the anchor along the mean; with momentum as torch's Nesterov SGD does on the gradient -moved."""
        momentum = self.options.outer_momentum
        if not bucket.outer:
            bucket.anchor.add_(bucket.moved)
            return
        if momentum:
            if bucket.velocity is None:
                bucket.velocity = torch.zeros_like(bucket.moved)
            bucket.velocity.mul_(momentum).add_(bucket.moved)
            for tensor, move in zip(bucket.tensors, bucket.moves, strict=True):
                if not tensor.requires_grad:  # frozen since: it stands still
                    bucket.velocity.as_strided(move.shape, move.stride(), move.storage_offset()).zero_()
            bucket.moved.add_(bucket.velocity, alpha=momentum)
        bucket.anchor.add_(bucket.moved, alpha=self.options.outer_lr)

    def _agree_on_period(self, optimizer: Optimizer) -> float:
        """The share of this rank in the mean, times the number of ranks; sets the next period from agreed numbers."""
        weight = self._samples if self._losses else 1.0
        loss = float(torch.stack(self._losses).double().mean()) if self._losses else math.nan
        if self.options.adaptive and not self._losses:
            raise ValueError("local_sgd: got no loss for the adaptive period; call note(loss) in every step")
        rate = float(optimizer.param_groups[0]["lr"])
        self._losses, self._samples = [], 0.0
        mine = torch.tensor([weight, weight * loss, weight * rate], dtype=torch.float64, device=self.comm.device)
        total, loss, rate = self.comm.all_reduce(mine).wait().tolist()
        if not total > 0:
            raise ValueError(
                f"local_sgd: got {total} samples on all ranks, expected more than 0; see note(loss, samples)"
            )
        if self.options.adaptive:
            now = loss / total, rate / total
            self._first = now if self._first is None else self._first
            if self.steps > self.options.begin:
                self.period = adapted_period(self.options.every, self._first, now, self.period)
        return weight * self.comm.world_size / total

    @torch.no_grad()
    def _average_state(self, optimizer: Optimizer) -> None:
        """The mean of what the optimizer keeps, where a rank that has never used a parameter counts as zero.

        Counters become those of the first rank that has used it.
        """
        about = [_describe(optimizer.state.get(param, {}), param) for param in self.params]
        found = []
        for param, kept in zip(self.params, zip(*self.comm.gather_objects(about), strict=True), strict=True):
            for name, told in next(filter(None, kept), {}).items():
                state = optimizer.state[param]
                if told.averaged:
                    if name not in state:  # in the order of the parameter's memory, as an optimizer makes it
                        like = param if told.shape == param.shape else param.new_empty(told.shape)
                        state[name] = torch.zeros_like(like, dtype=told.dtype)
                    found.append(state[name])
                elif told.dtype is None:
                    state[name] = told.value
                else:
                    if name not in state:
                        state[name] = torch.zeros((), dtype=told.dtype, device=param.device if told.beside else "cpu")
                    state[name].fill_(told.value)
        works = []
        for indices in plan_buckets(found, bucket_mb=25.0, first_bucket_mb=25.0):
            some = [found[index] for index in indices]
            flat, views = flat_views(some)
            torch._foreach_copy_(views, some)
            works.append((self._statistic_lanes.start(flat), views, some))
        for work, views, some in works:
            work.wait()
            torch._foreach_copy_(some, views)


@dataclass(frozen=True)
class _Kept:
    """One thing that an optimizer keeps for a parameter, without what the ranks average."""

    averaged: bool = False  # a tensor for its elements; else a number, such as what counts steps
    value: Any = None  # of a number
    dtype: torch.dtype | None = None  # of a tensor
    shape: tuple[int, ...] = ()
    beside: bool = True  # on the parameter's device


def _describe(state: Mapping[str, Any], param: Tensor) -> dict[str, _Kept]:
    """What a rank's optimizer keeps for a parameter; whatever is neither a number nor averaged stays with the rank."""
    told = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            if value is None or isinstance(value, bool | int | float):
                told[name] = _Kept(value=value)
        elif value.is_floating_point() and name != "step" and (value.dim() or not param.dim()):
            told[name] = _Kept(averaged=True, dtype=value.dtype, shape=tuple(value.shape))
        elif not value.dim():
            told[name] = _Kept(value=value.item(), dtype=value.dtype, beside=value.device == param.device)
    return told


def adapted_period(start: int, first: tuple[float, float], now: tuple[float, float], before: int) -> int:
    """AdaComm's period: ceil(sqrt(rate_0 / rate * loss / loss_0) * start), between 1 and MAX_PERIOD.

    first, now: loss and learning rate. Where the formula says nothing (a loss or rate not above 0) it stays as before.
    Source: Wang and Joshi 2019, Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off.
    """
    values = (*first, *now)
    if not all(math.isfinite(value) and value > 0 for value in values):
        return before
    ratio = first[1] / now[1] * now[0] / first[0]
    return max(1, min(MAX_PERIOD, math.ceil(math.sqrt(ratio) * start - 1e-9)))


def _buckets(tensors: Sequence[Tensor], *, bucket_mb: float, names: Sequence[str] = ()) -> list[_Bucket]:
    made = []
    for indices in plan_buckets(tensors, bucket_mb=bucket_mb, first_bucket_mb=bucket_mb):
        some = [tensors[index] for index in indices]
        anchor, anchors = flat_views(some)
        moved, moves = flat_views(some)
        called = [names[index] for index in indices] if names else []
        made.append(_Bucket(some, anchor, anchors, moved, moves, called))
    return made
