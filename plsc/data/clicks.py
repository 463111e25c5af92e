"""Reads click logs: text lines of a label, numbers and categories, in batches of tensors, bounded memory, resumable."""

import glob
import gzip
import hashlib
import logging
import math
import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]  # dense float32 [B, num_dense], ids int64 [B, num_slots], clicked [B]
Row: TypeAlias = tuple[bool, list[float], list[str]]  # clicked, numbers, a token for every slot

MOST_BAD = 0.01  # share of malformed lines above which reading stops
ENOUGH_LINES = 1000  # to judge that share before the end
CACHED_TOKENS = 1_000_000


class Format(Protocol):
    """How a line is read: what a format of your own needs."""

    @property
    def num_dense(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def header(self) -> bool: ...  # the first line of every file is not data

    def parse(self, line: str) -> Row: ...  # ValueError: the line is malformed


@dataclass(frozen=True)
class Columns:
    """Lines of columns, counted from 0. Missing numbers are 0; numbers become log(1 + x), below 0 they count as 0."""

    label: int
    dense: Sequence[int]
    sparse: Sequence[int]
    delimiter: str = ","
    header: bool = False
    clicked: str = "1"
    not_clicked: str = "0"
    num_columns: int = 0  # 0: at least as many as are used

    @property
    def num_dense(self) -> int:
        return len(self.dense)

    @property
    def num_slots(self) -> int:
        return len(self.sparse)

    def parse(self, line: str) -> Row:
        words = [word.strip() for word in line.split(self.delimiter)]
        least = self.num_columns or 1 + max(self.label, *self.dense, *self.sparse)
        if len(words) < least or (self.num_columns and len(words) > least):
            raise ValueError(f"got {len(words)} columns, expected {least}")
        label = words[self.label]
        if label not in (self.clicked, self.not_clicked):
            raise ValueError(f"got label {label!r}, expected {self.clicked!r} or {self.not_clicked!r}")
        numbers = [float(words[i]) if words[i] else 0.0 for i in self.dense]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("got a number that is not finite")
        return label == self.clicked, [math.log1p(max(x, 0.0)) for x in numbers], [words[i] for i in self.sparse]


@dataclass(frozen=True)
class LibSVM:
    """Lines `label index:1 index:1 ...`, label 1 or not, at most num_slots features; fewer are filled up as missing."""

    num_slots: int
    num_dense: int = 0
    header: bool = False

    def parse(self, line: str) -> Row:
        label, *words = line.split()
        tokens = []
        for word in words:
            index, colon, value = word.partition(":")
            if not index.isdigit() or (colon and float(value) != 1.0):
                raise ValueError(f"got {word!r}, expected index:1")
            tokens.append(index)
        if label not in ("1", "+1", "0", "-1") or len(tokens) > self.num_slots:
            raise ValueError(
                f"got label {label!r} and {len(tokens)} features, expected 1, 0 or -1 and {self.num_slots}"
            )
        return label in ("1", "+1"), [], tokens + [""] * (self.num_slots - len(tokens))


CRITEO = Columns(0, range(1, 14), range(14, 40), delimiter="\t", num_columns=40)


class Clicks:
    """Batches (dense, ids, clicked) of one pass over text files, .gz too, in the order of the files and lines.

    paths       files, or patterns such as "day_*"
    format      CRITEO, Columns(...), LibSVM(...) or one of your own
    shuffle     0, or the number of rows that are read and mixed at a time
    readers     1: here. n: as many processes take a share of the files each, and batches come as they are ready
    slots       True: a token has another id in every slot. False: one id everywhere (LibSVM's indices)

    ids are 64-bit hashes of the tokens, in the whole range of int64: keys for a sparse table. Malformed lines are left
    out, counted in `malformed`, the first ones logged with file and line; above one in a hundred it is a ValueError.
    """

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        format: Format = CRITEO,
        *,
        batch_size: int = 4096,
        shuffle: int = 0,
        seed: int = 0,
        readers: int = 1,
        slots: bool = True,
    ) -> None:
        listed = [paths] if isinstance(paths, str | PathLike) else list(paths)
        self.files = [file for path in listed for file in sorted(glob.glob(fspath(path)))]
        if not self.files:
            raise ValueError(
                f"got {', '.join(fspath(path) for path in listed) or 'no paths'}, which names no file; check the path"
            )
        for name, value, least in (("batch_size", batch_size, 1), ("shuffle", shuffle, 0), ("readers", readers, 1)):
            if value < least:
                raise ValueError(f"{name}: got {value}, expected at least {least}")
        self.format = format
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.readers = min(readers, len(self.files))
        self.slots = slots
        self.epoch = 0
        self.malformed = 0
        self._lines = 0
        self._at = (0, 0, 0)  # file, line where the window starts, rows of the window that were given out
        self._counts = (0, 0)  # malformed and lines before that window, which is read again by who goes on
        self._shares: list[dict[str, Any]] = []  # of the readers, when there are several
        self._cache: list[dict[str, int]] = [{} for _ in range(format.num_slots if slots else 1)]

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current pass; then the next one begins anew."""
        yield from self._several() if self.readers > 1 else self._windows()
        self._judge(final=True)
        self.epoch += 1
        self.malformed = self._lines = 0
        self._at, self._counts, self._shares = (0, 0, 0), (0, 0), []

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands, as JSON-able numbers; several readers each have a place of their own."""
        return {
            "epoch": self.epoch,
            "at": list(self._at),
            "counts": list(self._counts),
            "readers": self.readers,
            "shares": self._shares,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["readers"] != self.readers:
            raise ValueError(f"got the place of {state['readers']} readers, expected {self.readers}; use as many")
        self.epoch = state["epoch"]
        self._at = tuple(state["at"])
        self.malformed, self._lines = self._counts = tuple(state["counts"])
        self._shares = list(state["shares"])

    def counts(self) -> tuple[int, int]:
        """Malformed lines and all lines of this pass so far."""
        return self.malformed, self._lines

    def _windows(self) -> Iterator[Batch]:
        """Reads a window of rows, mixes it, cuts it into batches; a window is as many whole batches as fit."""
        size = max(1, self.shuffle // self.batch_size) * self.batch_size
        lines = self._numbered(*self._at[:2])
        number = self._at[:2]
        given = self._at[2]
        rows: list[Row] = []
        for file, line, text in lines:
            row = self._parse(file, line, text)
            if row is None:
                continue
            rows.append(row)
            if len(rows) == size:
                yield from self._batches(rows, number, given)
                number, given, rows = (file, line + 1), 0, []
                self._at, self._counts = (*number, 0), (self.malformed, self._lines)
                self._judge(final=False)
        if rows:
            yield from self._batches(rows, number, given)

    def _batches(self, rows: list[Row], start: tuple[int, int], given: int) -> Iterator[Batch]:
        order = np.arange(len(rows))
        if self.shuffle:
            # Keyed by epoch and place: a run that stops and goes on mixes the window alike.
            np.random.default_rng([self.seed, self.epoch, *start]).shuffle(order)
        for at in range(given, len(rows), self.batch_size):
            chosen = [rows[i] for i in order[at : at + self.batch_size]]
            self._at = (*start, at + len(chosen))
            yield self._tensors(chosen)

    def _tensors(self, rows: list[Row]) -> Batch:
        clicked = torch.tensor([row[0] for row in rows], dtype=torch.float32)
        dense = torch.tensor([row[1] for row in rows], dtype=torch.float32).reshape(len(rows), self.format.num_dense)
        ids = torch.tensor([self._ids(row[2]) for row in rows], dtype=torch.int64).reshape(len(rows), -1)
        return dense, ids, clicked

    def _ids(self, tokens: list[str]) -> list[int]:
        ids = []
        for slot, token in enumerate(tokens):
            cache = self._cache[slot if self.slots else 0]
            known = cache.get(token)
            if known is None:
                if len(cache) * len(self._cache) >= CACHED_TOKENS:
                    cache.clear()
                text = f"{slot}\t{token}" if self.slots else token
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                known = cache[token] = int.from_bytes(digest, "little", signed=True)
            ids.append(known)
        return ids

    def _numbered(self, file: int, line: int) -> Iterator[tuple[int, int, str]]:
        """(file, line, text) from a place on; lines count from 0, a header too."""
        for index in range(file, len(self.files)):
            path = self.files[index]
            opener = gzip.open if path.endswith(".gz") else open
            first = line if index == file else 0
            with opener(path, "rt", encoding="utf-8", errors="replace", newline="\n") as lines:
                for number, text in enumerate(lines):
                    if number >= first and not (number == 0 and self.format.header):
                        yield index, number, text.rstrip("\r\n")

    def _parse(self, file: int, line: int, text: str) -> Row | None:
        if not text.strip():
            return None
        self._lines += 1
        try:
            return self.format.parse(text)
        except ValueError as error:
            self.malformed += 1
            if self.malformed <= 5:
                logger.warning("%s, line %d is malformed: %s", self.files[file], line + 1, error)
            return None

    def _judge(self, *, final: bool) -> None:
        if self.malformed > MOST_BAD * self._lines and (final or self._lines >= ENOUGH_LINES):
            raise ValueError(
                f"{self.malformed} of {self._lines} lines are malformed, expected at most one in a hundred; "
                "the first ones are in the log; check the format"
            )

    def _several(self) -> Iterator[Batch]:
        """Batches of reader processes, as they come. A bounded queue holds readers back."""
        context = multiprocessing.get_context("spawn")  # forking a process that runs threads can hang
        inbox: Any = context.Queue(2 * self.readers)
        self._shares = self._shares or [{} for _ in range(self.readers)]
        counts = [(0, 0)] * self.readers
        started = []
        try:
            for i in range(self.readers):
                options = {
                    "batch_size": self.batch_size,
                    "shuffle": self.shuffle,
                    "seed": self.seed + i,
                    "slots": self.slots,
                }
                share = (self.files[i :: self.readers], self.format, options, self.epoch, self._shares[i])
                started.append(context.Process(target=_read_share, args=(i, share, inbox), daemon=True))
                started[-1].start()
            left = self.readers
            while left:
                i, arrays, state, now = _receive(inbox, started)
                if isinstance(state, str):
                    raise ValueError(state)
                self._shares[i], counts[i] = state, now
                self.malformed, self._lines = (sum(column) for column in zip(*counts, strict=True))
                if arrays is None:
                    left -= 1
                else:
                    yield torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]), torch.from_numpy(arrays[2])
        finally:
            for process in started:
                process.terminate()
                process.join()
            inbox.close()


def _receive(inbox: Any, started: Sequence[Any]) -> tuple[int, Any, Any, tuple[int, int]]:
    while True:
        try:
            return inbox.get(timeout=5)
        except queue.Empty:
            dead = [process.exitcode for process in started if process.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"a reader process died with exit code {dead[0]}; its messages are above") from None


def _read_share(i: int, share: tuple[Any, ...], inbox: Any) -> None:
    """A reader process: its batches with its place after each, at last its final counts, or what went wrong."""
    files, format, options, epoch, state = share
    try:
        clicks = Clicks([glob.escape(file) for file in files], format, **options)
        clicks.epoch = epoch
        if state:
            clicks.load_state_dict(state)
        if not (state and state.get("done")):
            for batch in clicks._windows():
                inbox.put((i, tuple(tensor.numpy() for tensor in batch), clicks.state_dict(), clicks.counts()))
        clicks._counts = clicks.counts()
        inbox.put((i, None, {**clicks.state_dict(), "done": True}, clicks.counts()))
    except (ValueError, OSError, EOFError) as error:
        inbox.put((i, None, f"{type(error).__name__}: {error}", (0, 0)))
