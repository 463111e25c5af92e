"""A file of records that only grows: what was appended is on the disk, what was half-written is not read."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from plsc.data.embeddings import atomic_file

logger = logging.getLogger(__name__)

MAGIC = b"plsc journal 1\n\0"
_HEAD = struct.Struct("<4sIII")  # mark, length, CRC-32 of the body, CRC-32 of those three
_MARK = b"\xc5rec"


class Locked(ValueError):
    """Another process has the folder open."""


class Journal:
    """Records of bytes in FOLDER/NAME, of one process at a time.

    append() returns when its record is on the disk, in a file that still has its name. A file whose last record is not
    whole, by a crash or a loss of power in the middle of an append that therefore never returned, is cut back to the
    whole ones; pages reach a disk in any order, so it may be as long as it should be: then its bytes are kept in a
    file beside. A damaged record that has whole ones after it is a ValueError. Bodies should not end with a zero byte:
    a file system may fill with zeros what a crash has cut. Files are their owner's alone (mode 0600): a wider one is
    narrowed when it is opened, with a warning.
    """

    def __init__(self, folder: str | Path, name: str = "journal") -> None:
        self.path = Path(folder) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path.with_suffix(".lock"))
        self._broken: OSError | None = None
        try:
            for left in self.path.parent.glob(f".{name}.*.tmp"):  # by a rewrite that was killed
                left.unlink()
            if not self.path.exists():
                with atomic_file(self.path, private=True) as file:
                    file.write(MAGIC)
                _sync_folder(self.path.parent)
            _narrow(self.path)
            self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 (open for the journal's life)
        except BaseException:
            os.close(self._lock)
            raise
        self._end = 0

    def read(self) -> list[bytes]:
        """All records, oldest first; cuts off what a crash has left unfinished."""
        data = self.path.read_bytes()
        if not data.startswith(MAGIC):
            raise ValueError(f"{self.path}: got no journal of plsc, or of another version; give another folder")
        records, self._end = [], len(MAGIC)
        while self._end < len(data):
            body = _record(data, self._end)
            if body is None:
                self._cut(data)
                break
            records.append(body)
            self._end += _HEAD.size + len(body)
        self._file.seek(self._end)
        return records

    def append(self, body: bytes) -> None:
        """Adds a record; OSError where the disk did not take it, and then it is not there."""
        if self._broken is not None:
            raise self._broken
        record = memoryview(_packed(body))
        self._check_place()
        try:
            done = 0
            while done < len(record):
                done += self._file.write(record[done:]) or 0
            os.fsync(self._file.fileno())
            self._check_place()
        except OSError as error:
            # After a failed fsync nobody knows what is on the disk: cut back, and if that fails too, say no to all.
            try:
                self._file.truncate(self._end)
                self._file.seek(self._end)
                os.fsync(self._file.fileno())
            except OSError as worse:
                self._broken = worse
            raise error
        self._end += len(record)

    def rewrite(self, bodies: Iterable[bytes]) -> None:
        """Puts these records in the place of all there are; the old file stays until the new one is whole."""
        with atomic_file(self.path, private=True) as file:
            file.write(MAGIC)
            for body in bodies:
                file.write(_packed(body))
        try:  # from here on the old file has no name: what is appended to it would be lost
            self._file.close()
            self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
            self._end = self._file.seek(0, os.SEEK_END)
            _sync_folder(self.path.parent)
        except OSError as error:
            self._broken = error
            raise

    def close(self) -> None:
        self._file.close()
        os.close(self._lock)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    def _check_place(self) -> None:
        """OSError where the file or its lock was deleted or replaced: what is written to it nobody will read again."""
        for number, path in ((self._file.fileno(), self.path), (self._lock, self.path.with_suffix(".lock"))):
            try:
                if os.path.samestat(os.fstat(number), os.stat(path)):
                    continue
            except OSError as error:
                logger.error("%s: %s", path, error.strerror)
            words = f"its {path.name} was deleted or replaced while the service runs; restore it and start again"
            logger.error("%s was deleted or replaced while it is in use; nothing more is written", path)
            raise OSError(errno.ESTALE, words)

    def _cut(self, data: bytes) -> None:
        """Drops the unfinished end; a record that has a whole one after it is none of a crash's."""
        at = data.find(_MARK, self._end + 1)
        while at >= 0:
            if _record(data, at) is not None:
                raise ValueError(
                    f"{self.path}: record at byte {self._end} is damaged, and whole ones follow at byte {at}; "
                    "restore the file from a copy"
                )
            at = data.find(_MARK, at + 1)
        if _complete(data, self._end):
            kept = self.path.with_name(f"{self.path.name}.cut-{self._end}-{secrets.token_hex(4)}")
            with atomic_file(kept, private=True) as file:
                file.write(data[self._end :])
            logger.warning(
                "%s: the last record, at byte %d, is all there and does not match its checksum; it is left out, for a "
                "loss of power does this to a change that was never acknowledged, and so does a failing disk to one "
                "that was; its bytes are kept in %s",
                self.path,
                self._end,
                kept.name,
            )
        else:
            logger.warning("%s: the last %d bytes are of an unfinished write; cut", self.path, len(data) - self._end)
        self._file.truncate(self._end)
        os.fsync(self._file.fileno())


def _packed(body: bytes) -> bytes:
    first = struct.pack("<4sII", _MARK, len(body), zlib.crc32(body))
    return first + struct.pack("<I", zlib.crc32(first)) + body


def _record(data: bytes, at: int) -> bytes | None:
    """The body of the whole record that begins there, if one does."""
    if at + _HEAD.size > len(data):
        return None
    mark, length, body_crc, head_crc = _HEAD.unpack_from(data, at)
    if mark != _MARK or zlib.crc32(data[at : at + _HEAD.size - 4]) != head_crc:
        return None
    body = data[at + _HEAD.size : at + _HEAD.size + length]
    return body if len(body) == length and zlib.crc32(body) == body_crc else None


def _complete(data: bytes, at: int) -> bool:
    """Whether all bytes of the record that begins there were written: zeros at the end may be a file system's."""
    written = len(data[at:].rstrip(b"\0"))
    if written < _HEAD.size:
        return False
    _, length, _, head_crc = _HEAD.unpack_from(data, at)
    return zlib.crc32(data[at : at + _HEAD.size - 4]) != head_crc or written >= _HEAD.size + length


def _lock(path: Path) -> int:
    """An open file that no other process has locked; the system drops the lock when this process ends, however."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        raise Locked(f"{path.parent} is in use by another server; stop it, or give another folder") from error
    return number


def _narrow(path: Path) -> None:
    """Takes a file from all but its owner: embeddings of faces are personal data."""
    mode = path.stat().st_mode & 0o777
    if not mode & 0o077:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        logger.warning("%s: others may read it (mode %o), and %s; chmod 600 it", path, mode, error.strerror)
    else:
        logger.warning("%s: others could read it (mode %o); it is its owner's alone now", path, mode)


def _sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
