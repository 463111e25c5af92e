"""Files that appear under their name whole or not at all, whoever else writes to it and whoever dies on the way."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from os import PathLike
from pathlib import Path


@contextmanager
def atomic_path(path: str | PathLike[str]) -> Iterator[str]:
    """A path beside `path` to write and sync a file at; it takes that name where the block ends well, else it goes.

    Writers of one path do not meet, the last one stays. What writers left that were killed is removed.
    """
    target = Path(path)
    for remain in target.parent.glob(f".{escape(target.name)}.*.partial"):
        _remove_unheld(remain)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    held = _create_held(scratch)
    try:
        yield str(scratch)
        os.replace(scratch, target)
        _sync_folder(target.parent)
    finally:
        scratch.unlink(missing_ok=True)
        os.close(held)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """One at a time, of threads and of processes; on a disk without locks all at once."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _hold(file)
        yield
    finally:
        os.close(file)


def _create_held(path: Path) -> int:
    while True:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        _hold(file)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # another writer took it for a remain before it was locked


def _hold(file: int, wait: int = 0) -> bool:
    """Locks an open file for as long as this process has it open; False where another does, or it has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | wait)
    except OSError:
        return False
    return True


def _remove_unheld(path: Path) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or not ours to read
        return
    try:
        if _hold(file, fcntl.LOCK_NB):
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _sync_folder(folder: Path) -> None:
    try:
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a folder that cannot be read can still hold the file
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)
