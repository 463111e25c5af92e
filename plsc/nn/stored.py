"""A class-parallel head whose class centres lie in a store of rows, as plsc.ps.Table: memory bounds no class count.

A step reads the rows of the sampled classes, and hands their gradient to the store, whose rule steps them.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plsc.nn.class_parallel import block_rows, check_queries, init_blocks
from plsc.nn.head import TOPK_ROWS, ClassParallelHead, normalize
from plsc.nn.row_store import RowStore
from plsc.ops.cross_entropy import sharded_cross_entropy
from plsc.ops.optim import RowOptimizer
from plsc.ops.problem import Problem
from plsc.ops.sweep import Sweep
from plsc.ops.topk import split_topk
from plsc.ops.updates import GradientUpdate, collector

logger = logging.getLogger(__name__)

STD = 0.01  # of the rows of a head in memory
_TOLD = 512  # bytes of what a state_dict says of the store: always as many, for a checkpoint compares shapes
_FILE = re.compile(r"classes-(\d{12})-(\d{12})-of-(\d{12})\.table")  # first class, the one after the last, all


class StoreSteps(RowOptimizer):
    """The store's rule, in the place of a row optimizer: a schedule sets the store's learning rate through it."""

    def __init__(self, store: RowStore) -> None:
        self.store = store
        self.weight_decay, self.initial_lr = float(getattr(store.rule, "weight_decay", 0.0)), store.lr

    @property
    def lr(self) -> float:  # type: ignore[override]
        return self.store.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        if lr != self.store.lr:
            self.store.lr = lr


@dataclass
class StoredUpdate(GradientUpdate):
    """A gradient for some classes, not pushed yet."""

    head: StoredHead | None = None

    def apply(self, scale: float = 1.0) -> None:
        assert self.head is not None
        self.head.push(self.rows, self.grad if scale == 1.0 else self.grad.mul_(scale))


class StoredHead(ClassParallelHead):
    """What ClassParallelHead(..., weight=store) makes: class c is the row under key c of the store.

    Every rank reads and steps the classes of its shard only, so each may have a table of its own or all share one.
    Rows are born as the store has it, from (its seed, key); `seed` decides which classes are sampled. In eval() and
    under no_grad the loss is over all classes, which are read block by block; it then has no gradient.
    """

    store: RowStore
    _anchor: Tensor  # where the module was moved to, and what updates of its rows are told by

    def _check_options(self, head_optimizer: RowOptimizer | None, weight_dtype: str, sample_rate: float) -> None:
        if head_optimizer is not None:
            raise ValueError(
                f"head_optimizer: got {type(head_optimizer).__name__} with weight=store, expected none: the store's "
                "rule steps the rows; make it with lr=0.1 and rule=plsc.ps.Momentum(momentum=0.9, weight_decay=5e-4) "
                "or rule=plsc.ps.AdamW(...)"
            )
        if weight_dtype != "fp32":
            raise ValueError(
                f"weight_dtype: got {weight_dtype!r} with weight=store, expected fp32: the store decides how rows "
                "are kept; make the table with dtype='bf16' or 'fp16'"
            )
        if sample_rate >= 1.0:
            raise ValueError(
                f"sample_rate: got {sample_rate} with weight=store, expected less than 1, such as 0.1: every "
                "step would read all classes from the store; a head that trains all of them keeps them in memory"
            )

    def _make_weight(self, shape: tuple[int, int], std: float) -> None:
        """None: the rows are in the store."""

    def _attach(self, store: RowStore) -> None:
        width = self.sub_centers * self.embedding_size
        missing = [name for name in ("dim", "lr", "rule", "last_save", "pull", "push") if not hasattr(store, name)]
        if missing:
            raise ValueError(
                f"weight: got {type(store).__name__} without {', '.join(missing)}, expected a store of rows such as "
                "plsc.ps.Table or what plsc.ps.connect returns"
            )
        if store.dim != width:
            raise ValueError(
                f"weight: got a store of dim {store.dim}, expected {width}: embedding_size {self.embedding_size} for "
                f"each of {self.sub_centers} centres; make the table with dim={width}"
            )
        birth: dict[str, Any] = getattr(store, "birth", dict)()
        if birth.get("init") in ("zeros", "constant"):
            raise ValueError(
                f"weight: got a store with init={birth['init']!r}, expected normal or uniform: class centres that are "
                "born alike have no direction of their own"
            )
        if not getattr(store, "keeps_rows", True):
            raise ValueError(
                "weight: got a table with max_rows or admission, which would forget classes; expected one that keeps "
                "every row: neither max_rows, admit_after nor admit_probability"
            )
        if self.comm.world_size > 1 and getattr(store, "averages", False):
            raise ValueError(
                f"weight: got {type(store).__name__}, which divides what is pushed by the number of workers, but a "
                "class is pushed by one rank alone, for the whole batch; expected the store itself, Direct or Async"
            )
        self.store = store
        self.head_optimizer = StoreSteps(store)
        self.register_buffer("_anchor", torch.zeros(1), persistent=False)

    # ---- rows

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.sub_centers, self.embedding_size) if self.sub_centers > 1 else (self.embedding_size,)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The shape of this rank's rows, without their numbers: a tensor on "meta". `rows` has the numbers."""
        return torch.empty((self.shard.size, *self._shape), device="meta")

    def pull(self, rows: Tensor, *, create: bool) -> Tensor:
        """Rows [R] of this rank's classes, [R, (K,) D], where `rows` is."""
        found: Tensor = self.store.pull(rows.cpu() + self.shard.start, create=create)
        return found.view(len(rows), *self._shape).to(rows.device)

    def push(self, rows: Tensor, grad: Tensor) -> None:
        """Hands the gradient [R, (K,) D] of rows [R] to the store."""
        flat = grad.detach().flatten(1).float().cpu().contiguous()
        refused = self.store.push(rows.cpu() + self.shard.start, flat)
        if refused:
            logger.warning("%d of %d class gradients held a NaN or an infinity; their rows stay", refused, len(rows))

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of this rank's classes: [n, (K,) D]; those never trained as they would be born."""
        start, stop, _ = slice(start, stop).indices(self.shard.size)
        numbers = torch.arange(start, max(start, stop), device=self._anchor.device)
        return self.pull(numbers, create=False)

    def fill(self) -> None:
        """Sets this rank's rows to what a head in memory with this seed starts with: all are written now."""
        self._needs("fill", "assign")
        shape = (self.sub_centers, self.embedding_size)
        for at, rows in init_blocks(self.shard, shape, std=STD, seed=self.seed):
            keys = torch.arange(at.start, at.stop) + self.shard.start
            self.store.assign(keys, rows.flatten(1))  # type: ignore[attr-defined]

    def bytes_per_class(self) -> float:
        """None on the device: they are in the store."""
        return 0.0

    # ---- the loss

    def _check_inputs(self, embeddings: Tensor, labels: Tensor) -> None:
        super()._check_inputs(embeddings, labels)
        if not self.training and torch.is_grad_enabled() and embeddings.requires_grad:
            raise RuntimeError(
                "in eval() a head over a store reads all classes block by block and gives no gradient; "
                "use torch.no_grad(), or head.train() to train on a sample of them"
            )

    def _block_for(self, num_samples: int) -> int:
        width = self.sub_centers * self.embedding_size
        return self.block or block_rows(num_samples * self.sub_centers, width, device=self._anchor.device.type)

    def _cross_entropy(
        self, unit: Tensor, norms: Tensor | None, problem: Problem, *, factors: Tensor, reduction: str
    ) -> Tensor:
        problem.optimizer = None  # the gradient of the rows that were read comes back whole, and is pushed
        if problem.rows is None:
            return self._exact(len(unit), problem, factors, reduction)
        rows, problem.rows = problem.rows, None
        weight = _Pulled.apply(torch.zeros((), device=unit.device, requires_grad=True), self, rows)
        return sharded_cross_entropy(unit, norms, weight, None, problem, factors=factors, reduction=reduction)

    @torch.no_grad()
    def _exact(self, batch: int, problem: Problem, factors: Tensor, reduction: str) -> Tensor:
        sweep = _Streamed(problem, self)
        sweep.forward(keep_output=False, keep_cache=False)
        part = slice(self.comm.rank * batch, (self.comm.rank + 1) * batch)
        excess = sweep.excess()[part]
        losses = torch.where(factors[part] == 0, 0.0, torch.logaddexp(excess, torch.zeros_like(excess)) * factors[part])
        return losses.sum() if reduction == "sum" else losses

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_queries(embeddings, k, self)
        unit, _ = normalize(embeddings.to(self.dtype))
        starts = range(0, self.shard.size, TOPK_ROWS)
        blocks = (F.normalize(self.rows(at, at + TOPK_ROWS), dim=-1).to(unit.device) for at in starts)
        return split_topk(unit, blocks, k, comm=self.comm, shard=self.shard)

    # ---- saving

    def save_classes(self, folder: str | PathLike[str]) -> Path:
        """Writes this rank's table into `folder`, as of this step; every rank calls it, then plsc.save(head=...).

        The state_dict tells which save it belongs to. For a plsc.ps.Table; servers are told to save where they are.
        """
        self._needs("save_classes", "save", "merge")
        shard = self.shard
        path = Path(folder) / f"classes-{shard.start:012d}-{shard.stop:012d}-of-{shard.total:012d}.table"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.store.save(path, tag=f"step {int(self.num_steps)}")  # type: ignore[attr-defined]
        return path

    def load_classes(self, folder: str | PathLike[str]) -> None:
        """Reads what any number of ranks have saved by `save_classes` into this rank's table, which must be new."""
        self._needs("load_classes", "merge", "erase", "items")
        store: Any = self.store
        if len(store):
            raise ValueError(f"load_classes: got a table with {len(store)} rows, expected a new one")
        found = [match for path in Path(folder).glob("*.table") if (match := _FILE.fullmatch(path.name))]
        parts = sorted((int(match[1]), int(match[2]), match[0]) for match in found)  # start, stop, name
        stops = [0, *(stop for _, stop, _ in parts)]
        if {int(match[3]) for match in found} != {stops[-1]} or stops[:-1] != [start for start, _, _ in parts]:
            said = ", ".join(name for _, _, name in parts) or "no file of save_classes"
            raise ValueError(f"{folder} holds {said}; expected one file of each rank of one world")
        if stops[-1] > self.num_classes:
            raise ValueError(
                f"{folder} holds {stops[-1]} classes, this head {self.num_classes}; classes are never dropped: build "
                f"it with {stops[-1]} or more"
            )
        shard, saves = self.shard, set()
        for start, stop, name in parts:
            if max(start, shard.start) < min(stop, shard.stop):
                store.merge(Path(folder) / name)
                saves.add(store.last_save)
                if start < shard.start or stop > shard.stop:
                    for keys, _ in list(store.items()):
                        store.erase(keys[(keys < shard.start) | (keys >= shard.stop)])
        if len(saves) > 1:
            raise ValueError(f"{folder} holds files of different steps ({', '.join(sorted(saves))}); take another save")

    def _needs(self, what: str, *names: str) -> None:
        if any(not hasattr(self.store, name) for name in names):
            raise ValueError(
                f"{what}: got a head over {self.store!r}, expected one over a plsc.ps.Table; servers save by "
                "store.save(name), and load when they start"
            )

    def get_extra_state(self) -> Tensor:
        """Which save of the store goes with this state, as the bytes of a JSON text: checkpoints hold no pickles."""
        told = {"classes": self.num_classes, "rule": self.store.rule.name, "save": self.store.last_save}
        return torch.frombuffer(bytearray(json.dumps(told).encode().ljust(_TOLD)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        told = json.loads(bytes(state.tolist()))
        if told["classes"] > self.num_classes:
            raise ValueError(
                f"the checkpoint's head has {told['classes']} classes, this one {self.num_classes}; classes are never "
                f"dropped: build it with {told['classes']} or more"
            )
        if told["save"] != self.store.last_save:
            logger.warning(
                "the checkpoint was made beside save %r of the store, this one is at %r; load the classes first",
                told["save"],
                self.store.last_save,
            )

    # ---- of a module: there is no weight to move, mark or copy

    def _mark(self) -> None:
        pass

    def _apply(self, fn: Any, recurse: bool = True) -> StoredHead:
        return nn.Module._apply(self, fn, recurse)  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a head over a store cannot be copied: both would train one table; make another head and store")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a head over a store cannot be pickled: its rows are not in it; use save_classes and plsc.save")

    def __setstate__(self, state: Mapping[str, Any]) -> NoReturn:
        raise TypeError("a head over a store cannot be pickled")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight={self.store!r}"


ClassParallelHead.over_store = StoredHead


class _Pulled(torch.autograd.Function):
    """Rows of the sampled classes; their gradient goes to the store when backward reaches it, or to who collects."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, head: StoredHead, rows: Tensor) -> Tensor:
        ctx.head, ctx.rows, ctx.thread = head, rows, threading.get_ident()
        return head.pull(rows, create=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        head: StoredHead = ctx.head
        assert head.head_optimizer is not None
        update = StoredUpdate(head.head_optimizer, head._anchor, {}, ctx.rows, grads[0].detach(), head=head)
        pending = collector(ctx.thread)
        if pending is None:
            update.apply()
        else:
            pending.append(update)
        return None, None, None


class _Stored:
    """In the place of a weight where a few of its rows are picked."""

    def __init__(self, head: StoredHead) -> None:
        self._head = head

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self._head.pull(rows, create=False)


class _Streamed(Sweep):
    """The forward sweep over all classes of a store, of which it holds a block at a time."""

    def __init__(self, problem: Problem, head: StoredHead) -> None:
        super().__init__(problem, head.weight, None)
        self._head = head
        self.weight = _Stored(head)  # type: ignore[assignment]

    def _rows_between(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        numbers = torch.arange(start, stop, device=self.problem.x.device)
        return self._operands(self._head.pull(numbers, create=False), slice(0, stop - start), stop - start)
