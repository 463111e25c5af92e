"""What a head asks of a store of rows."""

from __future__ import annotations

from typing import Any, Protocol


class RowStore(Protocol):
    """What a head asks of a store; plsc.ps.Table has it, and all that stands in its place."""

    lr: float

    @property
    def dim(self) -> int: ...

    @property
    def rule(self) -> Any: ...

    @property
    def last_save(self) -> str | None: ...

    def pull(self, keys: Any, *, create: bool = True, out: Any = None) -> Any: ...

    def push(self, keys: Any, grads: Any, *, shows: Any = None, clicks: Any = None) -> int: ...
