"""What every backend of communication offers: the verbs between ranks, their checks, and a verb under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")

OPS = ("sum", "max", "min")
REDUCIBLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


class CommError(RuntimeError):
    """A verb could not be completed: ranks disagree, one failed, or one does not answer. The message names the rank."""


class Work(Generic[T]):
    """A verb under way. Every Work must be waited for, on every rank; the order of the waits is free."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self._error: Exception | None = None

    def wait(self) -> T:
        """Blocks until the result is there; asked again, gives the same object (or raises the same error) again."""
        if self._finish is not None:
            try:
                self._result = self._finish()
            except Exception as error:
                self._error = error
            self._finish = None  # lets go of the buffers the verb held
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def then(self, fn: Callable[[T], U]) -> Work[U]:
        """A Work whose result is fn of this one's; fn runs inside wait()."""
        return Work(lambda: fn(self.wait()))

    @staticmethod
    def done(result: U) -> Work[U]:
        """A Work that was finished before it began."""
        return Work(lambda: result)


class Communicator(ABC):
    """The ranks of a group and the verbs between them.

    Every verb is collective: all ranks call the same verbs in the same order, from one thread each. The verbs that
    return a Work return at once; tensors handed in stay untouched by the caller until wait() has returned. Results
    never carry a gradient (plsc.ops.collective does). A backend implements the methods with a leading underscore;
    they get checked arguments: detached, contiguous tensors of the right device, and full lists of sizes.
    """

    any_device = False  # True where a backend never moves bytes and takes tensors of every device

    def __init__(
        self, name: str, rank: int, *, world_size: int, device: torch.device, members: Sequence[int] | None = None
    ) -> None:
        """members[r] is the rank in the whole world of this communicator's rank r (absent: the same)."""
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.members: tuple[int, ...] = tuple(range(world_size) if members is None else members)
        self.closed = False

    @classmethod
    def connect(cls, *, timeout: float, init_timeout: float) -> Communicator:
        """Joins the world described by the environment; timeouts in seconds, of one verb and of the start."""
        raise ValueError(f"{cls.__name__} cannot be connected to by name; construct it instead")

    # ---- the verbs

    def all_reduce(self, x: Tensor, op: str = "sum") -> Work[Tensor]:
        """Reduces x over the ranks IN PLACE (sum, max or min); the result is x itself, the same bits on every rank."""
        self._check("all_reduce", x, reduces=True)
        if op not in OPS:
            raise ValueError(f"all_reduce: got op {op!r}, expected one of {', '.join(OPS)}")
        return self._in_place("all_reduce", x, lambda buffer: self._all_reduce(buffer, op))

    def all_gather(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Work[Tensor]:
        """Concatenates every rank's x along dim 0, in rank order, in a new tensor; a 0-d x counts as one row.

        sizes[r] is the number of rows of rank r; without it all ranks have as many rows as this one.
        """
        self._check("all_gather", x)
        x = _plain(x).reshape(1) if x.dim() == 0 else _plain(x)
        rows = self._sizes("all_gather", "sizes", sizes, each=x.shape[0])
        if rows[self.rank] != x.shape[0]:
            raise ValueError(
                f"all_gather: got {x.shape[0]} rows on rank {self.rank}, expected {rows[self.rank]}: sizes[{self.rank}]"
            )
        return self._all_gather(x, rows)

    def reduce_scatter(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Work[Tensor]:
        """Sums x over the ranks and gives each its own rows of the sum, in a new tensor.

        sizes[r] rows go to rank r, and x has sum(sizes) rows; without it the rows are cut evenly and must divide.
        """
        self._check("reduce_scatter", x, reduces=True, rows=True)
        rows = self._sizes("reduce_scatter", "sizes", sizes, total=x.shape[0])
        return self._reduce_scatter(_plain(x), rows)

    def all_to_all(
        self, x: Tensor, *, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
    ) -> Work[Tensor]:
        """Sends send_sizes[r] rows of x to rank r; the new tensor holds recv_sizes[r] rows of rank r, in rank order.

        Without sizes the rows are cut evenly and must divide.
        """
        self._check("all_to_all", x, rows=True)
        if (send_sizes is None) != (recv_sizes is None):
            raise ValueError(
                "all_to_all: got one of send_sizes and recv_sizes, expected both or none; where only the counts sent "
                "are known, exchange them first: comm.all_to_all(torch.tensor(send_sizes, device=comm.device))"
            )
        send = self._sizes("all_to_all", "send_sizes", send_sizes, total=x.shape[0])
        receive = send if recv_sizes is None else self._sizes("all_to_all", "recv_sizes", recv_sizes)
        if send[self.rank] != receive[self.rank]:
            raise ValueError(
                f"all_to_all: rank {self.rank} sends itself {send[self.rank]} rows but expects {receive[self.rank]}"
            )
        return self._all_to_all(_plain(x), send, receive)

    def broadcast(self, x: Tensor, *, root: int = 0) -> Work[Tensor]:
        """Fills x IN PLACE with the x of rank root (a rank of this communicator); the result is x itself."""
        self._check("broadcast", x)
        if not 0 <= root < self.world_size:
            raise ValueError(f"broadcast: got root {root}, expected a rank in [0, {self.world_size})")
        return self._in_place("broadcast", x, lambda buffer: self._broadcast(buffer, root))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._check_open("barrier")
        self._barrier()

    def gather_objects(self, obj: object) -> list[Any]:
        """Any small Python object of every rank, in rank order; blocks. Not meant to be fast."""
        self._check_open("gather_objects")
        return self._gather_objects(obj)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of the group this rank is in; its ranks are numbered in the order the group lists them.

        Collective: every rank passes the same groups, and every rank is in exactly one of them.
        """
        self._check_open("split")
        given = [[int(rank) for rank in group] for group in groups]
        if sorted(rank for group in given for rank in group) != list(range(self.world_size)):
            raise ValueError(
                f"split: got groups {given}, expected every rank of [0, {self.world_size}) in exactly one group"
            )
        return self._split([group for group in given if group])

    def close(self) -> None:
        """Lets go of what the communicator holds; verbs fail afterwards. Closing twice is harmless."""
        self.closed = True

    # ---- what a backend implements

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        """In place on x; the result is x."""

    @abstractmethod
    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        """sizes[rank] == len(x)."""

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        """sum(sizes) == len(x)."""

    @abstractmethod
    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        """sum(send_sizes) == len(x)."""

    @abstractmethod
    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        """In place on x; the result is x."""

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _gather_objects(self, obj: object) -> list[Any]: ...

    @abstractmethod
    def _split(self, groups: list[list[int]]) -> Communicator: ...

    # ---- checks

    def _check_open(self, verb: str) -> None:
        if self.closed:
            raise CommError(f"{verb}: this communicator ({self.name}, rank {self.rank}) is closed")

    def _check(self, verb: str, x: Tensor, *, reduces: bool = False, rows: bool = False) -> None:
        self._check_open(verb)
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            raise ValueError(f"{verb}: got {getattr(x, 'layout', type(x).__name__)}, expected a dense tensor")
        if x.device != self.device and not self.any_device:
            raise ValueError(
                f"{verb}: got a tensor on {x.device}, expected {self.device}: backend {self.name!r} cannot move it; "
                "use x.to(comm.device)"
            )
        if reduces and x.dtype not in REDUCIBLE:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
            raise ValueError(f"{verb}: got dtype {x.dtype}, expected one of {names}; convert the tensor first")
        if rows and x.dim() == 0:
            raise ValueError(f"{verb}: got a 0-d tensor, expected at least one dimension to cut")

    def _sizes(
        self, verb: str, what: str, sizes: Sequence[int] | None, *, each: int | None = None, total: int | None = None
    ) -> list[int]:
        """The full list of rows by rank, checked: `each` is every rank's share if none is given, `total` the sum."""
        if sizes is None:
            if total is not None:
                if total % self.world_size:
                    raise ValueError(
                        f"{verb}: got {total} rows, expected a multiple of {self.world_size} ranks; give {what}="
                    )
                each = total // self.world_size
            assert each is not None
            return [each] * self.world_size
        given = [int(size) for size in sizes]
        if len(given) != self.world_size or min(given, default=0) < 0:
            raise ValueError(
                f"{verb}: got {what} {given}, expected {self.world_size} numbers of rows, none negative: one a rank"
            )
        if total is not None and sum(given) != total:
            raise ValueError(f"{verb}: got {what} {given} (sum {sum(given)}), expected a sum of {total}, the rows of x")
        return given

    def _in_place(self, verb: str, x: Tensor, issue: Callable[[Tensor], Work[Tensor]]) -> Work[Tensor]:
        """Runs an in-place verb on a plain buffer and brings the result back into x, whatever its strides."""
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise ValueError(
                f"{verb}: got an expanded tensor (shape {tuple(x.shape)}, strides {x.stride()}), expected memory of "
                "its own for each element, for the verb writes into it; use x.clone()"
            )
        target = x.detach()
        buffer = target if is_plain(target) else _plain(target)

        def finish() -> Tensor:
            result = work.wait()
            if result is not target:
                target.copy_(result)
            return x

        work = issue(buffer)
        return Work(finish)

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Itself: a copied module goes on talking to the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"


def is_plain(x: Tensor) -> bool:
    """Whether the elements lie in memory as they read: row-major, nothing conjugated or negated lazily."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _plain(x: Tensor) -> Tensor:
    """x without its gradient, as plain memory; shares memory with x where x is plain already."""
    x = x.detach()
    return x if is_plain(x) else x.resolve_conj().resolve_neg().contiguous()


def reduce_parts(parts: Sequence[Tensor], op: str) -> Tensor:
    """Reduces tensors of one shape in the order given, into new memory: the same order gives the same bits.

    Sums of float16 and bfloat16 are accumulated in float32 and rounded once; other types add in their own.
    """
    first = parts[0]
    if op == "sum":
        total = first.float() if first.dtype in (torch.float16, torch.bfloat16) else first.clone()
        for part in parts[1:]:
            total.add_(part)
        return total.to(first.dtype)
    combine = torch.maximum if op == "max" else torch.minimum
    total = first.clone()
    for part in parts[1:]:
        total = combine(total, part)
    return total


# ---- what a rank says it is doing: compared between ranks to name the one that differs


@dataclass(frozen=True)
class Call:
    """One verb as one rank issued it, without the data."""

    verb: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    op: str = ""
    root: int = 0
    sizes: tuple[int, ...] = ()
    send_sizes: tuple[int, ...] = ()
    recv_sizes: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(
        verb: str,
        x: Tensor,
        *,
        op: str = "",
        root: int = 0,
        sizes: Sequence[int] = (),
        send_sizes: Sequence[int] = (),
        recv_sizes: Sequence[int] = (),
    ) -> Call:
        """The call of a verb on tensor x."""
        shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
        return Call(verb, shape, dtype, op, root, tuple(sizes), tuple(send_sizes), tuple(recv_sizes))

    def __str__(self) -> str:
        """'all_reduce sum of float32 (4, 3)'."""
        return f"{self.verb}{self.op and ' ' + self.op}" + (f" of {self.dtype} {self.shape}" if self.dtype else "")


def disagreement(calls: Sequence[Call], members: Sequence[int] | None = None) -> str | None:
    """What differs between the calls of the ranks (calls[r] is rank r's) and on which ranks; None where they agree.

    The rows of all_gather may differ as its sizes say, those of all_to_all as the receivers expect.
    """
    names = range(len(calls)) if members is None else members
    uneven = calls[0].verb in ("all_gather", "all_to_all")
    fields: list[tuple[str, list[Any]]] = [
        ("verb", [call.verb for call in calls]),
        ("dtype", [call.dtype for call in calls]),
        ("op", [call.op for call in calls]),
        ("root", [call.root for call in calls]),
        ("shape after dim 0", [call.shape[1:] for call in calls])
        if uneven
        else ("shape", [call.shape for call in calls]),
        ("sizes", [call.sizes for call in calls]),
        ("groups", [call.groups for call in calls]),
    ]
    for field, values in fields:
        if any(value != values[0] for value in values):
            return f"{field} differs: {_who_has_what(values, names)}"
    for source, sender in enumerate(calls):
        for target, receiver in enumerate(calls):
            if sender.send_sizes and sender.send_sizes[target] != receiver.recv_sizes[source]:
                return (
                    f"sizes differ: rank {names[source]} sends {sender.send_sizes[target]} rows to "
                    f"rank {names[target]}, which expects {receiver.recv_sizes[source]}"
                )
    return None


def ranks_text(ranks: Sequence[int]) -> str:
    """'rank 2' or 'ranks 0, 3'."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def _who_has_what(values: Sequence[Any], names: Sequence[int]) -> str:
    ranks: dict[Any, list[int]] = {}
    for name, value in zip(names, values, strict=True):
        ranks.setdefault(value, []).append(name)
    return ", ".join(f"{ranks_text(who)} {'has' if len(who) == 1 else 'have'} {what}" for what, who in ranks.items())
