"""What outlives a server's process: saves, each a folder that appears whole, and the log of writes since the last."""

import json
import logging
import mmap
import os
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from plsc.ps.host import Client, Closing, Host
from plsc.ps.rules import RULES
from plsc.ps.table import Table

logger = logging.getLogger(__name__)

FORMAT = 1
DURABILITY = ("log", "save", "none")
_MARK = b"PSW1"
_HEAD = struct.Struct("<4sIQI")  # mark, bytes of the record's JSON, bytes of its arrays, CRC-32 of both
_LARGEST = 1 << 34
_AUTOMATIC = re.compile(r"auto-(\d{10})")
_TAKEN = re.compile(r"(?:auto|log)-\d*|lock")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
KEPT = 2  # automatic saves; those with a name of their own stay


class Log:
    """Records appended to one file, in the order in which writes are applied. Thread-safe.

    What `write` returned from survives the death of the process; with `sync`, that of the machine as well.
    """

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path = path
        self.sync = sync
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._file).st_size

    def write(self, facts: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        head = {**facts, "arrays": [[name, x.dtype.str, list(x.shape)] for name, x in arrays.items()]}
        text = json.dumps(head).encode()
        parts = [np.ascontiguousarray(x).data.cast("B") for x in arrays.values() if x.size]
        crc = zlib.crc32(text)
        for part in parts:
            crc = zlib.crc32(part, crc)
        start = _HEAD.pack(_MARK, len(text), sum(len(part) for part in parts), crc)
        with self._lock:
            try:
                for part in (memoryview(start + text), *parts):
                    done = 0
                    while done < len(part):
                        done += os.write(self._file, part[done:])
                if self.sync:
                    os.fdatasync(self._file)
            except OSError:
                os.ftruncate(self._file, self.size)  # half a record would hide those that follow
                raise
            self.size += len(start) + len(text) + sum(len(part) for part in parts)

    def close(self) -> None:
        os.close(self._file)


def read_log(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Whole records, oldest first. A last one that was cut short was never acknowledged: it is cut off the file.

    ValueError where a record is damaged and others follow, which were acknowledged.
    """
    with open(path, "rb+") as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            start = file.tell()
            head = file.read(_HEAD.size)
            if not head:
                return
            record = _read_record(file, head, size - start) if len(head) == _HEAD.size else None
            if record is None:
                if _others_follow(file, start):
                    raise ValueError(
                        f"{path} is damaged at byte {start} of {size}, and writes that were acknowledged follow; "
                        f"take another copy of it, or, to go on without them, cut it off there: "
                        f"truncate -s {start} {path}"
                    )
                logger.warning("%s: cutting off %d bytes that were not written to the end", path, size - start)
                file.truncate(start)
                return
            yield record


def _others_follow(file: Any, start: int) -> bool:
    """Whether a whole record stands anywhere behind the one that begins at `start`."""
    file.seek(0, os.SEEK_END)
    size = file.tell()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_MARK, start + 1)
        while at >= 0:
            file.seek(at)
            head = file.read(_HEAD.size)
            if len(head) == _HEAD.size and _read_record(file, head, size - at) is not None:
                return True
            at = data.find(_MARK, at + 1)
    return False


def _read_record(file: Any, head: bytes, left: int) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    mark, text_size, body_size, crc = _HEAD.unpack(head)
    if mark != _MARK or _HEAD.size + text_size + body_size > min(left, _LARGEST):
        return None
    text, body = file.read(text_size), file.read(body_size)
    if zlib.crc32(body, zlib.crc32(text)) != crc:
        return None
    facts = json.loads(text)
    arrays, at = {}, 0
    for name, dtype, shape in facts.pop("arrays"):
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += count * np.dtype(dtype).itemsize
    return facts, arrays


class _Journal:
    """A host's way into the log that is open now."""

    def __init__(self, state: "State", table: str) -> None:
        self._state, self._table = state, table

    def write(self, kind: str, client: Client, sequence: int, arrays: dict[str, np.ndarray], **facts: Any) -> None:
        known = {"table": self._table, "kind": kind, "client": client.id, "rank": client.rank, "sequence": sequence}
        log = self._state.log
        assert log is not None
        log.write({**known, **facts}, arrays)


class State:
    """A server's folder: opened, it brings the hosts to where they were; then it saves them.

    durability  "log": a write is in the log before it is acknowledged, and a new process applies it again. Writes
                wait while a save is made, for it and the log must meet at one point.
                "save": a new process goes back to the last save; training goes on while one is made.
    """

    def __init__(
        self, folder: str | PathLike[str], *, durability: str, index: int, count: int, sync: bool = False
    ) -> None:
        if durability not in DURABILITY:
            raise ValueError(f"durability: got {durability!r}, expected one of {', '.join(DURABILITY)}")
        self.folder = Path(folder)
        self.durability = durability
        self.hosts: dict[str, Host] = {}
        self.log: Log | None = None
        self._place = {"index": index, "count": count}
        self._sync = sync
        self._saving = threading.Lock()
        self._closed = False
        self._number = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".partial-*"):
            left.unlink() if left.is_symlink() else shutil.rmtree(left)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _only_one(self._lock, self.folder)

    def newest(self) -> Path | None:
        found = [path for path in self.folder.iterdir() if _AUTOMATIC.fullmatch(path.name)]
        return max(found, default=None, key=lambda path: path.name)

    def load(self, tables: Mapping[str, Table], options: Mapping[str, dict[str, Any]]) -> dict[str, Host]:
        """Hosts of the tables as they were; of those that no save knows, as they are given. Opens the log.

        options: what Table.load wants beside the file, for each table.
        """
        last = self.newest()
        known: dict[str, Any] = {"tables": {}}
        if last is not None:
            known = json.loads((last / "state.json").read_text(encoding="utf-8"))
            if known["format"] != FORMAT:
                raise ValueError(f"{last} has format {known['format']}, expected {FORMAT}; use the plsc that wrote it")
            if {name: known[name] for name in self._place} != self._place:
                raise ValueError(
                    f"{last} was saved by server {known['index']} of {known['count']}, got server "
                    f"{self._place['index']} of {self._place['count']}; spread the saves anew with plsc-ps reshard"
                )
            self._number = int(last.name.removeprefix("auto-"))
        for name, table in tables.items():
            host = Host(table, name=name)
            if name in known["tables"]:
                assert last is not None
                own = None if table.rule.name in RULES else table.rule
                saved = Table.load(last / f"{name}.table", rule=own, **options[name])
                _same(table, saved, last / f"{name}.table")
                host = Host(saved, name=name)
                host.restore(known["tables"][name])
            self.hosts[name] = host
        self._replay()
        for host in self.hosts.values():
            host.begin()
        if self.durability == "log":
            self.log = Log(self._log_path(self._number), sync=self._sync)
            for name, host in self.hosts.items():
                host.keep(_Journal(self, name))
        return self.hosts

    def _log_path(self, number: int) -> Path:
        return self.folder / f"log-{number:010d}"

    def _replay(self) -> None:
        """Applies the log that began with the save, and those after it, should newer saves have been taken away."""
        saved = self._number
        while (path := self._log_path(self._number)).exists():
            if self.durability != "log" and path.stat().st_size:
                raise ValueError(
                    f"{path} holds writes that no save has, and durability is {self.durability!r}; "
                    "start with durability = 'log' once, save, then change it"
                )
            count = 0
            for record, arrays in read_log(path):
                if record["kind"] == "open" and self._number > saved:  # in the log before this one, too
                    continue
                if (host := self.hosts.get(record["table"])) is not None:
                    host.replay(record, arrays)
                    count += 1
            if count:
                logger.info("%s: applied %d writes again", path, count)
            self._number += 1
        self._number = max(saved, self._number - 1)

    def save(self, name: str | None = None) -> tuple[Path, int]:
        """All tables, under a name of this folder or as the next automatic save; the path and how many rows."""
        if name is not None and (not _NAME.fullmatch(name) or _TAKEN.fullmatch(name)):
            raise ValueError(
                f"name of a save: got {name!r}, expected up to 64 letters, digits, '_', '-' and '.', "
                "not beginning with '.' or '-', nor one of the server's own (auto-..., log-..., lock)"
            )
        with self._saving, ExitStack() as stack:
            if self._closed:
                raise Closing("the folder is closed")
            if self.log is not None:
                for _, host in sorted(self.hosts.items()):
                    stack.enter_context(host.order)
            number = self._number + 1
            target = self.folder / (f"auto-{number:010d}" if name is None else name)
            if os.path.lexists(target):
                raise ValueError(f"{target} exists already; give another name")
            partial = self.folder / f".partial-{number}"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            rows, states, next_log = 0, {}, None
            try:
                for each, host in self.hosts.items():
                    rows += host.table.save(partial / f"{each}.table")
                    # After the table: a push between the two may be lost with this save, but never be applied twice.
                    states[each] = host.state()
                facts = {"format": FORMAT, **self._place, "tables": states}
                _write(partial / "state.json", json.dumps(facts).encode())
                next_log = self._next_log(number) if name is None and self.log is not None else None
                os.rename(partial, target)
            except BaseException:  # what it took of a full disk is the log's, which goes on
                shutil.rmtree(partial, ignore_errors=True)
                if next_log is not None:
                    next_log.close()
                    next_log.path.unlink()
                raise
            if next_log is not None:
                assert self.log is not None
                old, self.log = self.log, next_log
                old.close()
            if name is None:
                self._number = number
            _sync_folder(self.folder)
            if name is None:
                self._forget()
        return target, rows

    def _next_log(self, number: int) -> Log:
        """A log that begins where the new save ends; open rounds are in no table yet."""
        path = self._log_path(number)
        path.unlink(missing_ok=True)  # of a save that was never finished
        log = Log(path, sync=self._sync)
        for name, host in self.hosts.items():
            for client, round, workers, keys, grads in host.open_rounds():
                facts = {"table": name, "kind": "open", "client": "", "rank": client.rank, "sequence": 0}
                log.write({**facts, "round": round, "workers": workers}, {"keys": keys, "grads": grads})
        return log

    def _forget(self) -> None:
        kept = sorted(int(found[1]) for path in self.folder.iterdir() if (found := _AUTOMATIC.fullmatch(path.name)))
        for path in self.folder.iterdir():
            found = re.fullmatch(r"(?:auto|log)-(\d{10})", path.name)
            if found and int(found[1]) < kept[-KEPT:][0]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        """After a save that is under way; another server may then have the folder."""
        with self._saving:
            self._closed = True
            if self.log is not None:
                self.log.close()
                self.log = None
            os.close(self._lock)


def _only_one(lock: int, folder: Path) -> None:
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"{folder} is in use by another server; every server has a folder of its own") from None


def _same(asked: Table, saved: Table, path: Path) -> None:
    got, expected = asked.birth(), saved.birth()
    differ = [f"{name} {expected[name]!r} (got {got[name]!r})" for name in got if got[name] != expected[name]]
    if asked.rule != saved.rule and type(asked.rule).__name__ != type(saved.rule).__name__:
        differ.append(f"rule {saved.rule!r} (got {asked.rule!r})")
    if differ:
        raise ValueError(f"{path} holds a table with {', '.join(differ)}; change the settings, or the folder")


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
