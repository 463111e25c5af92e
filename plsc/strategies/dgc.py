"""Deep Gradient Compression: each rank sends the few largest entries of what it has accumulated, and keeps the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from plsc.comm import Communicator, Hierarchical, Shard, mark
from plsc.ops import kernels
from plsc.ops.launching import launcher_for
from plsc.strategies.fusion import measured_buckets
from plsc.strategies.precision import any_nonfinite, clip_grad_norm_
from plsc.strategies.reducer import Reducer, agree, replicated
from plsc.strategies.reduction import Reduction

STAGES = 4  # of the warm-up: the density falls by the same factor at each
INDEX = torch.int32  # on the wire; int16 is refused by gloo, and int64 would be as large as two values


@dataclass(frozen=True)
class DGCOptions:
    """What is sent, and when.

    density: share of a tensor's entries that a rank sends each step.
    warmup_steps: steps over which the density falls to it in four stages, from density ** 0.2.
    begin: steps before the warm-up that are ordinary dense ones.
    masking: the momentum of what was sent starts anew. At density 1 nothing is left of momentum then.
    min_numel: smaller tensors, and those of one dimension, are averaged densely.
    fallback: dense steps while the sparse form would send more bytes.
    """

    density: float = 0.001
    warmup_steps: int = 0
    begin: int = 0
    masking: bool = True
    min_numel: int = 16_384
    fallback: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1 or self.warmup_steps < 0 or self.begin < 0 or self.min_numel < 1:
            raise ValueError(
                f"dgc: got density {self.density}, warmup_steps {self.warmup_steps}, begin {self.begin}, min_numel "
                f"{self.min_numel}; expected density in (0, 1], steps >= 0 and min_numel >= 1"
            )

    def density_at(self, step: int) -> float:
        """The density of step `step`, counted from 0; 1 before the warm-up."""
        if step < self.begin:
            return 1.0
        stage = STAGES
        if self.warmup_steps:
            stage = min(STAGES, (step - self.begin) * STAGES // self.warmup_steps)
        return float(self.density ** ((stage + 1) / (STAGES + 1)))


@dataclass
class _Entry:
    """A compressed parameter. All flat tensors [n] are in the order of the parameter's memory."""

    param: nn.Parameter
    velocity: Tensor | None = None  # u: this rank's momentum
    residual: Tensor | None = None  # v: what this rank has not sent yet

    @property
    def flat(self) -> Tensor:
        """The parameter itself, wherever it lies by now."""
        return _memory(self.param.detach())

    @property
    def numel(self) -> int:
        return self.param.numel()

    def state(self) -> tuple[Tensor, Tensor]:
        if self.velocity is None or self.residual is None:
            self.velocity, self.residual = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        return self.velocity, self.residual


class DGC:
    """Takes the place of a Reducer and of SGD's momentum: backward as usual, then step(optimizer).

    The optimizer is torch's SGD; of the compressed parameters DGC itself applies weight decay, momentum and rate, as
    their group says, and the optimizer steps the others, whose gradients are averaged as by a Reducer. A gradient that
    is not finite on one rank makes all of them skip the step, and enters no residual.
    Over a Hierarchical communicator the ranks of a host average densely and compress as one: sparse between hosts.
    Source: Lin et al. 2018, Deep Gradient Compression.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        comm: Communicator,
        *,
        options: DGCOptions | None = None,
        clip_norm: float = 0.0,
        bucket_mb: float = 25.0,
        reduce_dtype: str | Reduction = "fp32",
        lanes: int = 1,
    ) -> None:
        """Collective.

        Args:
            clip_norm: what a rank adds to its compressed tensors in a sparse step has at most the norm
                clip_norm / sqrt(ranks), the gradient of everything else at most clip_norm; 0 is off.
            bucket_mb, reduce_dtype, lanes: of what is averaged densely, as in Reducer.
        """
        self.comm, self.options, self.clip_norm = comm, options or DGCOptions(), clip_norm
        kept = replicated(params)
        large = [param for param in kept if self._compresses(param)]
        small = [param for param in kept if not self._compresses(param)]
        agree(comm, [f"{list(p.shape)} {p.stride()} {p.dtype}" for p in large] + [str(self.options)], "what dgc sends")
        measured = bucket_mb == 0
        if measured:
            bucket_mb, _ = measured_buckets(kept, comm)
        own = comm.split([list(range(comm.world_size))])  # the buckets of the two may come in any order
        self.rest = Reducer(small, comm, bucket_mb=bucket_mb, reduce_dtype=reduce_dtype, lanes=lanes)
        self.wide = Reducer(large, own, bucket_mb=bucket_mb, reduce_dtype=reduce_dtype, lanes=lanes)
        self.rest.measured = self.wide.measured = measured
        self._inside, self._between = _levels(comm)
        self.workers = comm.world_size if self._between is None else self._between.world_size  # that compress
        self._entries = [_Entry(param) for param in large]
        self._places = self._layout()
        self._holds = False  # whether residuals may be unlike zero and momenta unlike on the ranks
        self.steps = 0  # attempted
        self._begin_step()

    # ---- a step

    def step(self, optimizer: Optimizer) -> bool:
        """After the backward: all ranks step, or all skip because some gradient is not finite (then False).

        Gradients are zeroed. What the optimizer steps beside the module's parameters must be finite, too.
        """
        self.check(optimizer)
        self.finish()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        found = any_nonfinite([param.grad for param in params if param.grad is not None])
        good = not bool(self.comm.all_reduce(found.to(self.comm.device), "max").wait())
        if good:
            if self.clip_norm > 0:
                local = {id(param) for param in self.local_params}
                clip_grad_norm_([param for param in params if id(param) not in local], self.clip_norm, self.comm)
            self.apply(optimizer)
            optimizer.step()
        else:
            self.skip()
        self.zero_grad()
        return good

    def finish(self) -> None:
        """Waits for what is averaged densely; in a sparse step the gradients of compressed parameters stay local."""
        self.rest.finish()
        if self.is_sparse:
            self.wide.attach()
        else:
            self.wide.finish()

    @torch.no_grad()
    def apply(self, optimizer: Optimizer) -> None:
        """Steps the compressed parameters and takes their gradients out of the optimizer's sight until zero_grad().

        Their gradients must be finite on all ranks. Collective.
        """
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        mine = [(entry, groups[id(entry.param)]) for entry in self._entries]
        for entry, group in mine:
            if group["weight_decay"]:
                _memory(_grad(entry)).add_(entry.flat, alpha=group["weight_decay"])
        if self.is_sparse:
            self._apply_sparse(mine)
            self._holds = True
        else:
            self._apply_dense(mine)
        for entry in self._entries:
            entry.param.grad = None
        self.skip()

    def skip(self) -> None:
        """Counts a step; momenta and residuals stay as they are."""
        self.steps += 1
        self._begin_step()

    def zero_grad(self) -> None:
        """Zeros all gradients, which stay views of the buckets."""
        self.rest.zero_grad()
        self.wide.zero_grad()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here add to the gradients and communicate nothing; the last one belongs outside."""
        with ExitStack() as stack:
            stack.enter_context(self.rest.accumulate())
            stack.enter_context(self.wide.accumulate())
            yield

    def check(self, optimizer: Optimizer) -> None:
        """Raises ValueError unless the optimizer is SGD, whose momentum can be corrected for what is sent late."""
        frozen = [tuple(entry.param.shape) for entry in self._entries if not entry.param.requires_grad]
        if frozen:
            raise ValueError(
                f"dgc: got a compressed parameter of shape {frozen[0]} that was frozen after DGC was built, expected "
                "the same to be trained throughout: what is still to be sent of it would stay behind; freeze it before "
                "(fleet.replicate), or train without compress"
            )
        if self._layout() != self._places:
            raise ValueError(
                f"dgc: got compressed parameters of shapes and strides {self._layout()}, expected {self._places} as "
                "when DGC was built: what is still to be sent lies in that order; build it last"
            )
        if type(optimizer) is not SGD:
            raise ValueError(
                f"dgc: got the optimizer {type(optimizer).__name__}, expected torch.optim.SGD: only its momentum can "
                "be corrected for gradients that arrive late; with others use reduce_dtype='bf16' or local_sgd"
            )
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(id(entry.param) not in known for entry in self._entries):
            raise ValueError("dgc: got an optimizer without some of the compressed parameters; give it all of them")
        if any(group["dampening"] or group["maximize"] for group in optimizer.param_groups):
            raise ValueError("dgc: got an optimizer with dampening or maximize; expected neither")

    # ---- what it holds

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters it averages, in one way or the other."""
        return [*self.rest.params, *self.wide.params]

    @property
    def local_params(self) -> list[nn.Parameter]:
        """Those whose gradients are this rank's own after finish()."""
        return self.wide.params if self.is_sparse else []

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank gives to the verbs of the next step; 0 in a world of one."""
        if not self.is_sparse:
            return self.rest.bytes_per_step + self.wide.bytes_per_step
        share = 1 if self._inside is None else self._inside.world_size
        return self.rest.bytes_per_step + -(-self._payload(self.density) // share)

    def state_dict(self) -> dict[str, Any]:
        """Steps, and this rank's momenta and residuals as its row of [ranks, n]."""
        shard = Shard.of(self.comm.world_size, self.comm)
        residuals = {
            str(index): {"u": mark(entry.velocity.view(1, -1), shard), "v": mark(entry.residual.view(1, -1), shard)}
            for index, entry in enumerate(self._entries)
            if entry.velocity is not None and entry.residual is not None
        }
        return {
            "steps": self.steps,
            "holds": self._holds,
            "world_size": self.comm.world_size,
            "workers": self.workers,
            "options": asdict(self.options),
            "compressed": self._layout(),
            "residuals": residuals,
            "rest": self.rest.state_dict(),
            "wide": self.wide.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over momenta and residuals; collective where they were saved by another number of ranks.

        Then every rank gets the mean of all: what is still to be sent, divided by the number of ranks, stays the same.
        """
        if state.get("compressed") != self._layout():
            raise ValueError(
                "dgc: the checkpoint compressed other tensors (shapes and strides "
                f"{state.get('compressed')}), expected {self._layout()}; build the same model with the same min_numel"
            )
        self.rest.load_state_dict(state["rest"])
        self.wide.load_state_dict(state["wide"])
        before, residuals = int(state["world_size"]), state["residuals"]
        for index, entry in enumerate(self._entries):
            if not residuals:
                entry.velocity = entry.residual = None
                continue
            for target, rows in zip(
                entry.state(), (residuals[str(index)]["u"], residuals[str(index)]["v"]), strict=True
            ):
                target.copy_(self._own_row(rows.to(target.device), before))
                if self._inside is not None and (before, state.get("workers")) != (self.comm.world_size, self.workers):
                    self._inside.all_reduce(target).wait().div_(self._inside.world_size)
        self.steps, self._holds = int(state["steps"]), bool(state["holds"])
        self._begin_step()

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        self.rest.remove()
        self.wide.remove()

    # ---- inside

    def _compresses(self, param: Tensor) -> bool:
        plain = param.stride() == torch.empty_like(param, device="meta").stride()  # else its memory has gaps
        large = param.dim() > 1 and self.options.min_numel <= param.numel() < 2**31
        return plain and large and param.dtype in (torch.float32, torch.float64)

    def _begin_step(self) -> None:
        """Decides how the next step travels; a function of the step number, so that all ranks decide alike."""
        self.density = self.options.density_at(self.steps)
        self.is_sparse = self.steps >= self.options.begin and bool(self._entries) and self._pays(self.density)
        self.wide.sync = not self.is_sparse

    def _pays(self, density: float) -> bool:
        """Whether the sparse form sends less: to every other rank (or host), against what a ring of them sends."""
        if not self.options.fallback:
            return True
        world = self.workers
        return (world - 1) * self._payload(density) < 2 * (world - 1) / world * self.wide.bytes_per_step

    def _payload(self, density: float) -> int:
        return sum(
            kept_entries(entry.numel, density) * (entry.flat.element_size() + INDEX.itemsize) for entry in self._entries
        )

    def _layout(self) -> list[list[list[int]]]:
        return [[list(entry.param.shape), list(entry.param.stride())] for entry in self._entries]

    def _own_row(self, rows: Tensor, before: int) -> Tensor:
        """This rank's row of what `before` ranks saved, where rows [m, n] are those it has read."""
        if before == self.comm.world_size:
            return rows[0]
        return self.comm.all_reduce(rows.sum(0)).wait().div_(before)

    def _apply_dense(self, mine: list[tuple[_Entry, dict[str, Any]]]) -> None:
        """SGD with momentum on averaged gradients, in the momenta that sparse steps go on from."""
        world = self.comm.world_size
        for entry, group in mine:
            velocity, residual = entry.state()
            if self._holds:  # nothing is left behind when sparse steps end
                self.comm.all_reduce(velocity).wait().div_(world)
                entry.flat.sub_(self.comm.all_reduce(residual).wait().div_(world), alpha=float(group["lr"]))
                residual.zero_()
            entry.flat.sub_(_direction(velocity, _memory(_grad(entry)), group), alpha=float(group["lr"]))
        self._holds = False

    def _apply_sparse(self, mine: list[tuple[_Entry, dict[str, Any]]]) -> None:
        if self._inside is not None:
            ranks = self._inside.world_size  # divided first: the sum of finite gradients may be none
            for work in [self._inside.all_reduce(flat.div_(ranks)) for flat in self.wide.flats]:
                work.wait()
        if self.clip_norm > 0:
            grads = [_grad(entry) for entry, _ in mine]
            norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])))
            limit = self.clip_norm / math.sqrt(self.workers)
            if norm > limit:
                torch._foreach_mul_(grads, limit / norm)
        values, indices = [], []
        for number, (entry, group) in enumerate(mine):
            velocity, residual = entry.state()
            residual.add_(_direction(velocity, _memory(_grad(entry)), group))
            chosen = largest_entries(residual, self.density, start=7919 * number + 104_729 * self.steps)
            values.append(residual[chosen])
            indices.append(chosen.to(INDEX))
            residual[chosen] = 0
            if self.options.masking:
                velocity[chosen] = 0
        self._exchange(mine, values, indices)

    def _exchange(self, mine: list[tuple[_Entry, dict[str, Any]]], values: list[Tensor], indices: list[Tensor]) -> None:
        """One all_gather for everything; what the ranks send is added in their order, so that all get the same bits."""
        parts = [part.view(torch.uint8) for part in (*values, *indices)]
        sizes = [len(part) for part in parts]
        for row in self._gather(torch.cat(parts)):
            pieces = row.split(sizes)
            for number, (entry, group) in enumerate(mine):
                value = pieces[number].clone().view(entry.flat.dtype)  # a copy: bytes in between may lie askew
                index = pieces[len(mine) + number].clone().view(INDEX).long()
                entry.flat.index_add_(0, index, value, alpha=-float(group["lr"]) / self.workers)

    def _gather(self, payload: Tensor) -> Tensor:
        """What each worker sends [bytes] as [workers, bytes]. The ranks of a host share out what it sends."""
        if self._inside is None or self._between is None:
            return self.comm.all_gather(payload).wait().view(self.workers, -1)
        share = -(-len(payload) // self._inside.world_size)
        padded = torch.cat([payload, payload.new_zeros(share * self._inside.world_size - len(payload))])
        mine = padded.view(-1, share)[self._inside.rank]
        theirs = self._between.all_gather(mine).wait()  # [workers * share]
        pieces = self._inside.all_gather(theirs).wait().view(-1, self.workers, share)
        return pieces.transpose(0, 1).reshape(self.workers, -1)[:, : len(payload)]


def _levels(comm: Communicator) -> tuple[Communicator | None, Communicator | None]:
    """The ranks of this host, and those at this rank's place on the others, where a topology goes by hosts."""
    if not isinstance(comm, Hierarchical) or not comm.is_even or len(comm.hosts[0]) == 1:
        return None, None
    places = [[host[place] for host in comm.hosts] for place in range(len(comm.hosts[0]))]
    return comm.inner.split(comm.hosts), comm.inner.split(places)


def kept_entries(numel: int, density: float) -> int:
    """How many of numel entries a rank sends."""
    return max(1, round(numel * density))


def largest_entries(x: Tensor, density: float, *, start: int = 0) -> Tensor:
    """The places of the kept_entries(n, density) entries of x [n] that are largest in magnitude, unordered.

    A threshold from a sample finds candidates without sorting x, the exact choice is among them. start: where the
    sample begins, so that other entries are looked at in another step. Source: Lin et al. 2018, section 5.
    """
    numel, count = x.numel(), kept_entries(x.numel(), density)
    if launcher_for(x.device) is not None:
        return kernels.largest_entries(x, count)
    sampled = min(numel, max(numel // 100, math.ceil(2 / density)))
    if sampled < numel and density <= 0.25:
        stride = max(1, numel // sampled - 1) | 1
        places = (torch.arange(sampled, device=x.device) * stride + start) % numel
        threshold = x[places].abs().topk(math.ceil(sampled * density)).values[-1]
        magnitude = x.abs()
        for _ in range(10):
            candidates = (magnitude >= threshold).nonzero().flatten()
            if len(candidates) >= count:
                return candidates[magnitude[candidates].topk(count, sorted=False).indices]
            threshold = threshold * 0.8
    return x.abs().topk(count, sorted=False).indices


def _direction(velocity: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
    """What SGD would step along, its momentum moved on; u is the buffer of plain momentum, m times that of Nesterov's.

    Such a sum of directions over steps is right whenever it is sent: that is the correction of momentum.
    """
    momentum = group["momentum"]
    if not momentum:
        return grad
    if group["nesterov"]:
        return velocity.add_(grad).mul_(momentum) + grad
    return velocity.mul_(momentum).add_(grad)


def _memory(x: Tensor) -> Tensor:
    """A tensor without gaps as [n], in the order of its memory: shared, not copied."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def _grad(entry: _Entry) -> Tensor:
    assert entry.param.grad is not None, "finish() leaves a gradient in every parameter"
    return entry.param.grad
