"""Averages the gradients of replicated parameters over the ranks while the backward pass still runs."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from plsc.comm import Communicator, Work, shard_of
from plsc.strategies.fusion import measured_buckets
from plsc.strategies.reduction import Lanes, Reduction, make_reduction

ALIGN = 64  # bytes; a slot starts on a cache line, and vector loads of every width stay inside it
_averaged_by = WeakTensorKeyDictionary()  # of each parameter a weak reference to its Reducer


@dataclass
class _Slot:
    """Where the gradient of one parameter lives."""

    index: int  # place of the parameter in the order of registration
    param: nn.Parameter
    bucket: _Bucket
    view: Tensor  # of the parameter's shape and strides, inside bucket.flat
    address: int


@dataclass
class _Bucket:
    """Gradients that travel together."""

    flat: Tensor  # [slots and the gaps between them]; gaps stay zero
    slots: list[_Slot] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)  # parameters whose gradient has not come in this backward
    work: Work[Tensor] | None = None


class Reducer:
    """Replaces each gradient by its mean over the ranks: backward as usual, then finish(), then optimizer.step().

    Gradients are views of flat buckets whose layout depends on the parameters and the arguments alone and never
    changes, and buckets travel in layout order: the same run gives the same bits, also after a restart. Parameters
    that bear a Shard mark and frozen ones are left alone; one that is frozen later, on all ranks, has no gradient until
    it is trained again (its bucket then leaves in finish()). Gradients that were not zeroed are added to, as ever.

    Bucket launches take their place among the other verbs of `comm`, by the order of the backward pass. Where ranks may
    use different parameters in a step and other verbs run inside the backward (SyncBatchNorm, a class-parallel head),
    give the Reducer a communicator of its own: comm.split([range(comm.world_size)]).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        comm: Communicator,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        reduce_dtype: str | Reduction = "fp32",
        lanes: int = 1,
    ) -> None:
        """Collective: the ranks compare what they are going to average.

        Args:
            params: module.parameters(), on their final device and in their final dtype.
            bucket_mb, first_bucket_mb: MiB a bucket is filled to; the first is small so that sending begins early.
                bucket_mb=0: both as a measurement of the ranks' sums says. A state that is loaded then brings its own.
            reduce_dtype: what travels, "fp32", "bf16" or "fp16", or a Reduction; see plsc.strategies.reduction.
            lanes: communicators that buckets take in turn, so that several travel at once.
        """
        if not bucket_mb >= 0 or not first_bucket_mb > 0:
            raise ValueError(
                f"got bucket_mb={bucket_mb}, first_bucket_mb={first_bucket_mb}, expected >= 0 (0: measured) and > 0"
            )
        self.reduction = make_reduction(reduce_dtype) if isinstance(reduce_dtype, str) else reduce_dtype
        self.comm = comm
        self.sync = True  # False: gradients only pile up, as inside accumulate()
        kept = replicated(params)
        _refuse_averaged(kept)
        self.measured = bucket_mb == 0
        if self.measured:
            bucket_mb, first_bucket_mb = measured_buckets(kept, comm)
        self._plan(kept, bucket_mb, first_bucket_mb)
        agree(comm, [f"{tuple(p.shape)} {p.dtype}" for p in kept] + [str(self.state_dict())], "parameters to average")
        self._lanes = Lanes(self.reduction, comm, lanes=lanes)
        self._handles: list[Any] = []
        self._lay_out(kept)

    def finish(self) -> None:
        """After the backward: sends what was not sent yet, waits, and leaves the mean gradient in every .grad.

        A parameter that was not used counts as zero; used on no rank, its .grad is zeros.
        """
        if not self.sync:
            raise RuntimeError("finish() while sync is off would average nothing; call it outside accumulate()")
        for bucket in self._buckets[self._next :]:
            for slot in bucket.slots:
                _adopt(slot)
            self._launch(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
        self._attach()
        self._reset()

    def attach(self) -> None:
        """Leaves this rank's own gradient in every .grad, a view of its bucket; what was not used is zero."""
        for slot in self._slots:
            _adopt(slot)

    def zero_grad(self) -> None:
        """Zeros all gradients, which stay views of the buckets; also clears up after a backward that failed half-way.

        optimizer.zero_grad() does as well: gradients it sets to None are copied into their bucket when they come.
        """
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.flat.zero_()
        self._attach()
        self._reset()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here add to the gradients and communicate nothing; the last one belongs outside."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters it averages."""
        return [slot.param for slot in self._slots]

    @property
    def flats(self) -> list[Tensor]:
        """The buckets, in which all gradients lie after finish() or attach()."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def bytes_per_step(self) -> int:
        """Bytes of gradients that one finish() averages, in the type they travel in; 0 in a world of one."""
        if self.comm.world_size == 1:
            return 0
        return sum(flat.numel() * self.reduction.wire(flat.dtype).itemsize for flat in self.flats)

    def state_dict(self) -> dict[str, Any]:
        """What the order of summation depends on, JSON-able: a run that resumes bit for bit has the same."""
        return {
            "bucket_mb": self.bucket_mb,
            "first_bucket_mb": self.first_bucket_mb,
            "reduce_dtype": self.reduction.name,
            "layout": self.layout,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a measured bucket size; ValueError unless it then averages in the way the saved one did."""
        if self.measured and state["bucket_mb"] != self.bucket_mb:
            params: dict[int, nn.Parameter] = {slot.index: slot.param for slot in self._slots}
            kept = [params[index] for index in range(len(params))]
            self.remove()
            self._plan(kept, state["bucket_mb"], state["first_bucket_mb"])
            self._lay_out(kept)
        for key, value in self.state_dict().items():
            if state.get(key) != value:
                raise ValueError(
                    f"Reducer: got {key} {state.get(key)!r} in the checkpoint, expected {value!r}; "
                    "build it with the saved settings, or do not load its state and accept other rounding"
                )

    def remove(self) -> None:
        """Takes the hooks off the parameters; their gradients keep the memory they have."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _plan(self, kept: Sequence[nn.Parameter], bucket_mb: float, first_bucket_mb: float) -> None:
        self.bucket_mb, self.first_bucket_mb = bucket_mb, first_bucket_mb
        self.layout = plan_buckets(kept, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb)

    def _lay_out(self, kept: Sequence[nn.Parameter]) -> None:
        """Makes the buckets of the plan; gradients are zero."""
        self._buckets = [_fill(kept, indices) for indices in self.layout]
        self._next = 0  # the first bucket not launched yet
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        for slot in self._slots:
            _averaged_by[slot.param] = weakref.ref(self)
            self._handles.append(slot.param.register_hook(_refuse_sparse(slot)))
            self._handles.append(slot.param.register_post_accumulate_grad_hook(self._hook(slot)))
        self.zero_grad()

    def _hook(self, slot: _Slot) -> Callable[[Tensor], None]:
        """What autograd calls when the gradient of the slot's parameter has been added up.

        It holds neither the Reducer nor the parameter: a hook that did would keep both alive for ever, for Python
        cannot see through autograd that nobody else has them.
        """
        weak = weakref.ref(self), weakref.ref(slot)

        def ready(param: Tensor) -> None:
            self, slot = weak[0](), weak[1]()
            if self is None or slot is None:
                return
            if slot.bucket.work is not None:
                raise RuntimeError(
                    f"{_name(slot)} got another gradient after its bucket was sent; call finish() after each backward, "
                    "and where several belong to one step run all but the last inside accumulate()"
                )
            _adopt(slot)
            if self.sync:
                slot.bucket.pending.discard(slot.index)
                while self._next < len(self._buckets) and not self._buckets[self._next].pending:
                    self._launch(self._buckets[self._next])

        return ready

    def _launch(self, bucket: _Bucket) -> None:
        """Starts the averaging of a bucket."""
        bucket.work = self._lanes.start(bucket.flat, turn=self._next)
        self._next += 1

    def _attach(self) -> None:
        for slot in self._slots:
            _check_place(slot)
            grad = slot.view if slot.param.requires_grad else None  # an optimizer moves what has a gradient of zero
            if slot.param.grad is not grad:
                slot.param.grad = grad

    def _reset(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.work = None
            bucket.pending.update(slot.index for slot in bucket.slots)


def replicated(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trainable parameters that are whole on every rank, each once, in the order given."""
    kept: dict[int, nn.Parameter] = {}
    for param in params:
        if not isinstance(param, Tensor):
            raise ValueError(f"got {type(param).__name__} among the parameters; pass module.parameters()")
        if not param.requires_grad or shard_of(param) is not None:
            continue
        if not param.is_floating_point() or not param.is_leaf:
            raise ValueError(f"got a tensor of {param.dtype}, leaf={param.is_leaf}; expected floating-point parameters")
        kept[id(param)] = param
    return list(kept.values())


def _refuse_averaged(params: Sequence[nn.Parameter]) -> None:
    """ValueError for a parameter that another Reducer averages: the second would find its gradient divided already."""

    def taken() -> nn.Parameter | None:
        owners = ((param, _averaged_by.get(param, lambda: None)()) for param in params)
        return next((param for param, owner in owners if owner is not None and owner._handles), None)

    if taken() is not None:
        gc.collect()  # it may only wait for that
    if (param := taken()) is not None:
        raise ValueError(
            f"got a parameter of shape {list(param.shape)} that another Reducer averages already; give all that is "
            "trained together to one (fleet.replicate once, nn.ModuleList of modules that share weights), and call "
            "remove() on one that is no longer used"
        )


def plan_buckets(params: Sequence[Tensor], *, bucket_mb: float, first_bucket_mb: float) -> list[list[int]]:
    """Buckets as lists of indices into params, in the order they are sent.

    Last registered, first in: about the order in which the backward pass finishes gradients. A bucket holds one dtype
    on one device and closes once it has reached its size; buckets are sorted by the parameter that completes them.
    """
    closed: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in reversed(range(len(params))):
        param = params[index]
        key = (param.dtype, param.device)
        indices, size = filling.pop(key, ([], 0))
        indices.append(index)
        size += _aligned(param) * param.element_size()
        if size >= (bucket_mb if closed else first_bucket_mb) * 2**20:
            closed.append(indices)
        else:
            filling[key] = indices, size
    closed.extend(indices for indices, _ in filling.values())
    return sorted(closed, key=lambda indices: -indices[-1])


def broadcast_parameters(module: nn.Module, comm: Communicator) -> None:
    """Gives every rank the parameters and buffers of rank 0; cut parameters keep their own values."""
    named = [*module.named_parameters(), *module.named_buffers()]
    whole = {name: x.detach() for name, x in named if shard_of(x) is None}
    agree(comm, [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in whole.items()], "parameters and buffers")
    for work in [comm.broadcast(x) for x in whole.values()]:
        work.wait()


def agree(comm: Communicator, lines: Sequence[str], what: str) -> None:
    """Raises ValueError on every rank unless all ranks have the same lines; names the first line that differs."""
    if comm.world_size == 1:
        return
    digests = comm.gather_objects(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everybody: list[list[str]] = comm.gather_objects(list(lines))
    other = next(rank for rank, theirs in enumerate(everybody) if theirs != everybody[0])
    first, theirs = everybody[0], everybody[other]
    at = next((i for i, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b), min(len(first), len(theirs)))
    got = [side[at] if at < len(side) else "nothing" for side in (first, theirs)]
    raise ValueError(
        f"{what} differ between ranks: at place {at} rank 0 has {got[0]}, rank {other} has {got[1]}; "
        "build the same model with the same settings on every rank"
    )


def _aligned(param: Tensor) -> int:
    """Elements a slot takes, rounded up to whole lines."""
    line = ALIGN // param.element_size()
    return -(-param.numel() // line) * line


def _fill(params: Sequence[nn.Parameter], indices: Sequence[int]) -> _Bucket:
    """A bucket of zeros with one slot for each of the parameters that `indices` names."""
    flat, views = flat_views([params[index] for index in indices])
    bucket = _Bucket(flat)
    for index, view in zip(indices, views, strict=True):
        bucket.slots.append(_Slot(index, params[index], bucket, view, view.data_ptr()))
    return bucket


def flat_views(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor of zeros and, inside it, a view for each of the tensors, of its shape and on lines of its own.

    A view has the strides of its tensor where that is dense (channels_last too): elementwise work is then fast.
    """
    first, offset, views = tensors[0], 0, []
    flat = torch.zeros(sum(map(_aligned, tensors)), dtype=first.dtype, device=first.device)
    for tensor in tensors:
        views.append(flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), offset))
        offset += _aligned(tensor)
    return flat, views


def _adopt(slot: _Slot) -> None:
    """Sees to it that the gradient is in the bucket: a foreign one is copied in, a missing one is zero."""
    _check_place(slot)
    grad = slot.param.grad
    if grad is slot.view:
        return
    if grad is None:
        slot.view.zero_()
    else:
        slot.view.copy_(grad.detach())
    slot.param.grad = slot.view


def _check_place(slot: _Slot) -> None:
    param, view = slot.param, slot.view
    if view.data_ptr() != slot.address or param.dtype != view.dtype or param.device != view.device:
        raise RuntimeError(
            f"{_name(slot)} was moved or cast after the Reducer was built (now {param.dtype} on {param.device}); "
            "call .to() first and build the Reducer last"
        )


def _refuse_sparse(slot: _Slot) -> Callable[[Tensor | None], None]:
    """Looks at a gradient before autograd adds it to the bucket, where a sparse one would become dense unnoticed."""
    name = _name(slot)

    def check(grad: Tensor | None) -> None:
        if grad is not None and grad.layout != torch.strided:
            raise ValueError(
                f"{name} got a gradient of layout {grad.layout}, expected a dense one; use sparse=False in the "
                "embedding, or keep the parameter out of the Reducer"
            )

    return check


def _name(slot: _Slot) -> str:
    return f"parameter {slot.index} of the Reducer (shape {list(slot.param.shape)})"
