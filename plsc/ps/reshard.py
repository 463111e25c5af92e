"""Saves of S servers as saves of another number of servers: every row, bit for bit, goes to where its key now lives."""

import json
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from plsc.ps.log import FORMAT
from plsc.ps.store import place
from plsc.ps.table import read_header

# Of the file that Table.save writes; docs/ps.md describes it.
_MAGIC = b"PLSCPST1"
_BLOCK = struct.Struct("<4sIII")
_BLOCK_BYTES = 1 << 20


def reshard(saves: Sequence[str | PathLike[str]], folders: Sequence[str | PathLike[str]]) -> int:
    """From the saves of all old servers to the folders of the new ones, which must be empty; rows of all tables."""
    states = [json.loads((Path(save) / "state.json").read_text(encoding="utf-8")) for save in saves]
    said = sorted((state["index"], state["count"]) for state in states)
    if said != [(index, len(saves)) for index in range(len(saves))]:
        words = ", ".join(f"{index} of {count}" for index, count in said)
        raise ValueError(f"got saves of servers {words}; expected one of each, 0 to {said[0][1] - 1}")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"got a folder twice in {', '.join(map(str, folders))}; every new server has one of its own")
    for folder in folders:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if any(Path(folder).iterdir()):
            raise ValueError(f"{folder} is not empty; name new folders, one for each new server")
    partials = [Path(folder) / ".partial-1" for folder in folders]
    for partial in partials:
        partial.mkdir()
    total = 0
    try:
        for name in states[0]["tables"]:
            total += _spread(
                [Path(save) / f"{name}.table" for save in saves], [partial / f"{name}.table" for partial in partials]
            )
    except BaseException:
        for partial in partials:
            shutil.rmtree(partial)
        raise
    rounds = {name: max(state["tables"][name]["round"] for state in states) for name in states[0]["tables"]}
    for index, partial in enumerate(partials):
        # Workers of the old servers cannot go on with the new ones: nothing is remembered of their pushes.
        tables = {name: {"round": round, "clients": {}} for name, round in rounds.items()}
        facts = {"format": FORMAT, "index": index, "count": len(folders), "tables": tables}
        (partial / "state.json").write_text(json.dumps(facts), encoding="utf-8")
        os.rename(partial, partial.parent / "auto-0000000001")
    return total


def _spread(sources: Sequence[Path], targets: Sequence[Path]) -> int:
    headers = [read_header(source) for source in sources]
    same = ("dim", "dtype", "rule", "init", "init_scale", "seed", "counters", "state")
    for source, header in zip(sources, headers, strict=True):
        if differ := [name for name in same if header[name] != headers[0][name]]:
            raise ValueError(f"{source} and {sources[0]} differ in {', '.join(differ)}; they are not of one run")
    merged = {**headers[0], "base": None, "clock": max(header["clock"] for header in headers)}
    writers = [_Writer(target, {**merged, "id": uuid.uuid4().hex}) for target in targets]
    for source, header in zip(sources, headers, strict=True):
        later = np.uint32((merged["clock"] - header["clock"]) % 2**32)  # servers count different pushes: ages stay
        for keys, seen, rows in _blocks(source):
            seen = seen + later
            where = place(keys, len(targets))
            for index, writer in enumerate(writers):
                mine = where == index
                writer.add(keys[mine], seen[mine], rows[mine])
    for writer in writers:
        writer.close()
    return sum(writer.rows for writer in writers)


def _blocks(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """keys [n], clock when last pushed to [n], rows as bytes [n, stride]; checksums are compared."""
    with open(path, "rb") as file:
        file.read(len(_MAGIC))
        (size,) = struct.unpack("<I4x", file.read(8))
        file.seek(size, os.SEEK_CUR)
        while True:
            mark, count, length, crc = _BLOCK.unpack(_exactly(file, _BLOCK.size, path))
            if mark == b"END!":
                return
            data = _exactly(file, length, path)
            if mark != b"ROWS" or zlib.crc32(data) != crc or count == 0:
                raise ValueError(f"{path} is damaged; take another save")
            keys = np.frombuffer(data, "<u8", count)
            seen = np.frombuffer(data, "<u4", count, 8 * count)
            yield keys, seen, np.frombuffer(data, np.uint8, offset=12 * count).reshape(count, -1)


def _exactly(file: BinaryIO, size: int, path: Path) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{path} ends early; take another save")
    return data


class _Writer:
    """A file as Table.save writes it, row by row."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.rows = 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._held = 0
        text = json.dumps(header).encode()
        self._file.write(_MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text)

    def add(self, keys: np.ndarray, seen: np.ndarray, rows: np.ndarray) -> None:
        self._parts.append((keys, seen, rows))
        self._held += rows.nbytes + 12 * len(keys)
        if self._held >= _BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        keys, seen, rows = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        self._parts, self._held = [], 0
        if len(keys):
            data = keys.tobytes() + seen.tobytes() + rows.tobytes()
            self._file.write(_BLOCK.pack(b"ROWS", len(keys), len(data), zlib.crc32(data)) + data)
            self.rows += len(keys)

    def close(self) -> None:
        if self._parts:
            self._flush()
        end = struct.pack("<4sQ", b"END!", self.rows)
        self._file.write(end + struct.pack("<I", zlib.crc32(end)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
