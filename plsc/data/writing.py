"""Writers whose file appears when they are closed, whole, and not at all after an error."""

from types import TracebackType
from typing import Self


class WholeOrNothing:
    """As a context: close() at the end of the block, discard() if the block raised."""

    def close(self) -> None:
        """Finishes the file and gives it its name."""
        raise NotImplementedError

    def discard(self) -> None:
        """Drops what was written."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
