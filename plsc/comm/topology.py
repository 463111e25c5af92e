"""Communicators around a communicator: Checked names the rank that differs, Counting counts what travels."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from plsc.comm.communicator import Call, CommError, Communicator, Work, disagreement


class Checked(Communicator):
    """Compares every verb between the ranks before it runs, and raises CommError on all of them where they differ.

    The message names the field (verb, shape, dtype, op, root, sizes) and the ranks. Costs an exchange of objects a
    verb: for debugging, PLSC_DEBUG=1 puts it around the world.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(
            inner.name, inner.rank, world_size=inner.world_size, device=inner.device, members=inner.members
        )
        self.inner = inner
        self.any_device = inner.any_device
        self._number = 0

    def _agree(self, call: Call) -> None:
        number, self._number = self._number, self._number + 1
        calls = self.inner.gather_objects(call)
        different = disagreement(calls, self.members)
        if different:
            raise CommError(f"{call.verb} (verb {number} of rank {self.members[self.rank]}): {different}")

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        self._agree(Call.of("all_reduce", x, op=op))
        return self.inner.all_reduce(x, op)

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        self._agree(Call.of("all_gather", x, sizes=sizes))
        return self.inner.all_gather(x, sizes=sizes)

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        self._agree(Call.of("reduce_scatter", x, sizes=sizes))
        return self.inner.reduce_scatter(x, sizes=sizes)

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        self._agree(Call.of("all_to_all", x, send_sizes=send_sizes, recv_sizes=recv_sizes))
        return self.inner.all_to_all(x, send_sizes=send_sizes, recv_sizes=recv_sizes)

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        self._agree(Call.of("broadcast", x, root=root))
        return self.inner.broadcast(x, root=root)

    def _barrier(self) -> None:
        self._agree(Call("barrier"))
        self.inner.barrier()

    def _gather_objects(self, obj: object) -> list[Any]:
        self._agree(Call("gather_objects"))
        return self.inner.gather_objects(obj)

    def _split(self, groups: list[list[int]]) -> Communicator:
        self._agree(Call("split", groups=tuple(map(tuple, groups))))
        return Checked(self.inner.split(groups))

    def close(self) -> None:
        super().close()
        self.inner.close()


class Counting(Communicator):
    """Counts the calls of this rank by verb (`calls`) and the bytes of the tensors handed to them (`bytes`).

    Payload, not wire: what a verb is given, whatever its algorithm moves. Groups split off count here as well.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(
            inner.name, inner.rank, world_size=inner.world_size, device=inner.device, members=inner.members
        )
        self.inner = inner
        self.any_device = inner.any_device
        self.calls: dict[str, int] = Counter()
        self.bytes: dict[str, int] = Counter()

    def reset(self) -> None:
        """Starts counting at zero again."""
        self.calls.clear()
        self.bytes.clear()

    def _count(self, verb: str, x: Tensor | None = None) -> None:
        self.calls[verb] += 1
        self.bytes[verb] += 0 if x is None else x.numel() * x.element_size()

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        self._count("all_reduce", x)
        return self.inner.all_reduce(x, op)

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        self._count("all_gather", x)
        return self.inner.all_gather(x, sizes=sizes)

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        self._count("reduce_scatter", x)
        return self.inner.reduce_scatter(x, sizes=sizes)

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        self._count("all_to_all", x)
        return self.inner.all_to_all(x, send_sizes=send_sizes, recv_sizes=recv_sizes)

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        self._count("broadcast", x)
        return self.inner.broadcast(x, root=root)

    def _barrier(self) -> None:
        self._count("barrier")
        self.inner.barrier()

    def _gather_objects(self, obj: object) -> list[Any]:
        self._count("gather_objects")
        return self.inner.gather_objects(obj)

    def _split(self, groups: list[list[int]]) -> Communicator:
        self._count("split")
        part = Counting(self.inner.split(groups))
        part.calls, part.bytes = self.calls, self.bytes
        return part

    def close(self) -> None:
        super().close()
        self.inner.close()
