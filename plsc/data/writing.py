"""Writers whose file appears when they are closed, whole, and not at all after an error."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WholeOrNothing:
    """As a context: close() at the end of the block, discard() if the block or close() raised."""

    path: str

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
        if kind is not None:
            name_full_disk(error, self.path)
            self.discard()
            return
        try:
            self.close()
        except BaseException as failed:  # a full disk shows at the last flush
            name_full_disk(failed, self.path)
            self.discard()
            raise


def name_full_disk(error: BaseException | None, path: str) -> None:
    """Puts the file's name into an error of a write that found no space: such errors come without one."""
    if isinstance(error, OSError) and error.errno in _NO_SPACE and error.filename is None:
        error.filename = path


def drop(closers: Iterable[Callable[[], object]], drafts: Iterable[str]) -> None:
    """Closes what writes the drafts, though a full disk may not take what still waits, and removes them."""
    for close in closers:
        with contextlib.suppress(Exception):
            close()
    for draft in drafts:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)
