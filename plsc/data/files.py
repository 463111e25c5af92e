"""Stretches of files, read and never mapped: of a memory map a failing disk, or a file cut short meanwhile, kills the
process (SIGBUS); here they are an OSError or a ValueError that names file and byte.
"""

import os
import weakref


def read_file(path: str, offset: int = 0, size: int | None = None) -> bytes:
    """A file whole, or a stretch of it; half the cost of `open` for small ones. ValueError where it ends too early."""
    number = os.open(path, os.O_RDONLY)
    try:
        return _read(path, number, offset, os.fstat(number).st_size - offset if size is None else size, size is None)
    finally:
        os.close(number)


class OpenFile:
    """A file as its bytes: `len` when it was opened, slices read when asked for, by any number of forks and threads."""

    def __init__(self, path: str) -> None:
        self._path, self._number = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)
        self._size = os.fstat(self._number).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, stretch: slice) -> bytes:
        return _read(self._path, self._number, stretch.start, stretch.stop - stretch.start)


def _read(path: str, number: int, offset: int, size: int, may_end: bool = False) -> bytes:
    try:
        data = os.pread(number, size, offset)
        while len(data) < size and (more := os.pread(number, size - len(data), offset + len(data))):
            data += more  # more than 2 GiB, or a network disk
    except OSError as error:
        error.filename = path
        raise
    if len(data) < size and not may_end:
        raise ValueError(f"{path}: got {len(data)} of {size} bytes at byte {offset}; the file changed or is cut short")
    return data
