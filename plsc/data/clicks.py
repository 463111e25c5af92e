"""Reads click logs: batches of numbers, hashed ids and clicks, by several processes, in bounded memory, resumable."""

import glob
import gzip
import logging
import multiprocessing
import os
import threading
import zlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from os import PathLike, fspath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from plsc.data.click_formats import (
    CRITEO,
    Columns,
    Format,
    Hasher,
    LibSVM,
    Lines,
    MultiSlot,
    Parsed,
    parse_lines,
    split_lines,
)
from plsc.data.click_parquet import Parquet

__all__ = ["CRITEO", "Clicks", "Columns", "Format", "LibSVM", "MultiSlot", "Parquet"]

logger = logging.getLogger(__name__)

# dense float32 [B, num_dense], ids int64 [B, num_slots] (MultiSlot: or [B, num_slots, num_ids]), clicked float32 [B]
Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]

MOST_BAD = 0.01  # share of malformed lines above which reading stops
ENOUGH_LINES = 1000  # to judge that share before the end
LEAST_WINDOW = 8192  # lines of a window, when several readers work: what a hand-over costs is spread over them
SPLITS = ("all", "train", "test")


class Piece(NamedTuple):
    """Some records of a file, as they are in it."""

    file: int
    numbers: np.ndarray  # of the records in the file, from 0
    data: bytes


class Read(NamedTuple):
    """What became of a window's records; `bad`: file, number, why."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    lines: int
    bad: list[tuple[int, int, str]]


class Clicks:
    """Batches (dense, ids, clicked) of one pass over files of text (.gz too) or Parquet, in order of files and lines.

    paths       files, or patterns such as "day_*"
    format      CRITEO, Columns(...), LibSVM(...), MultiSlot(...), Parquet(...) or one of your own
    shuffle     0, or the number of rows that are read and mixed at a time
    readers     1: here. n: as many processes parse; batches come as they are ready, with ordered=True in order
    slots       True: a token has another id in every slot. False: one id everywhere (LibSVM's indices)
    split       "train" and "test" are two parts of the lines, drawn by line number, the second of `test_share`

    ids are 64-bit hashes of the tokens, in the whole range of int64: keys for a sparse table. Malformed lines are left
    out (a batch is shorter for it), counted in `malformed`, the first ones logged with file and line; above one in a
    hundred it is a ValueError. Iterating again after a break goes on behind the last batch given. In memory are a
    window of rows a reader, twice over.
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
        ordered: bool = False,
        slots: bool = True,
        split: str = "all",
        test_share: float = 0.1,
    ) -> None:
        listed = [paths] if isinstance(paths, str | PathLike) else list(paths)
        self.files = [file for path in listed for file in _named(fspath(path))]
        if not self.files:
            raise ValueError(
                f"got {', '.join(fspath(path) for path in listed) or 'no paths'}, which names no file; check the path"
            )
        if folders := [file for file in self.files if os.path.isdir(file)]:
            raise ValueError(f"got {folders[0]}, which is a directory; expected files, such as {folders[0]}/*")
        for name, value, least in (("batch_size", batch_size, 1), ("shuffle", shuffle, 0), ("readers", readers, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, expected a whole number, at least {least}")
        if split not in SPLITS or not 0.0 < test_share < 1.0:
            raise ValueError(f"got split {split!r} of {test_share}, expected one of {', '.join(SPLITS)}, of 0 to 1")
        if format.num_slots < 1:
            raise ValueError(f"format: got {format.num_slots} slots (sparse columns), expected at least 1")
        self.format = format
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.readers, self.ordered, self.slots = readers, ordered, slots
        self.split, self.test_share = split, test_share
        lines = shuffle or (LEAST_WINDOW if readers > 1 else 0)
        self.window = max(1, lines // batch_size) * batch_size  # records read and mixed at a time: whole batches
        self.epoch = self.malformed = self._lines = 0
        self._parser = _Parser(format, slots, self.window if shuffle else 0, seed)
        self._restart()

    def _restart(self) -> None:
        self._next = 0  # the first window that was not given out wholly
        self._places: dict[int, tuple[int, int]] = {0: (0, 0)}  # file and line where windows from there on start
        self._ahead: dict[int, int] = {}  # of it and later ones: batches that were given out, -1 for all
        self._counts: dict[int, tuple[int, int]] = {}  # of windows from there on that were read
        self._sure = (0, 0)  # malformed and lines of all windows before
        self._ends: dict[int, int] = {}  # bytes of all files up to the end of windows under way
        self._bytes = 0.0  # given out

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current pass; then the next one begins anew."""
        yield from self._batches()
        self._judge(final=True)
        self.epoch += 1
        self._restart()

    def _batches(self) -> Iterator[Batch]:
        reading = self._several() if self.readers > 1 else self._alone()
        for k, read in reading:
            self._note(k, read)
            size, start = self.batch_size, max(self._ahead.get(k, 0), 0)
            from_bytes, to_bytes = self._bytes, self._ends.pop(k)
            for at in range(start * size, len(read.arrays[2]), size):
                self._ahead[k] = at // size + 1
                share = min(1.0, (at + size) / len(read.arrays[2]))
                self._bytes = from_bytes + max(0.0, to_bytes - from_bytes) * share
                dense, ids, clicked = (torch.from_numpy(array[at : at + size]) for array in read.arrays)
                if at + size >= len(read.arrays[2]):
                    self._finish(k)
                yield dense, ids, clicked
            self._finish(k)

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands, as JSON-able numbers."""
        return {
            "epoch": self.epoch,
            "window": self.window,
            "next": self._next,
            "place": list(self._places[self._next]),
            "ahead": [[k, given, *self._counts[k]] for k, given in sorted(self._ahead.items())],
            "counts": list(self._sure),
            "pass": self._pass(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if missing := [name for name in self.state_dict() if name not in state]:
            raise ValueError(f"got a place without {', '.join(missing)}, expected what state_dict() gives")
        if state["window"] != self.window:
            raise ValueError(
                f"got a place among windows of {state['window']} lines, expected {self.window}; "
                "use the same batch_size and shuffle, and several readers where there were several"
            )
        for name, value in self._pass().items():
            if (told := state["pass"].get(name)) != value:
                raise ValueError(f"got a place in a pass with {name} {told}, expected {value}; use the same {name}")
        if not 0 <= state["place"][0] <= len(self.files) or state["place"][1] < 0:
            raise ValueError(
                f"got a place in file {state['place'][0]}, line {state['place'][1]}, expected one of the "
                f"{len(self.files)} files given"
            )
        self._restart()
        self.epoch, self._next = state["epoch"], state["next"]
        self._places = {self._next: (state["place"][0], state["place"][1])}
        self._ahead = {k: given for k, given, *_ in state["ahead"]}
        self._sure = (state["counts"][0], state["counts"][1])
        self._counts = {k: (bad, lines) for k, _, bad, lines in state["ahead"]}
        self.malformed, self._lines = self._counted()

    def progress(self) -> float:
        """About what share of the pass was given out."""
        total = sum(os.path.getsize(file) for file in self.files)
        return min(1.0, self._bytes / total) if total else 0.0

    def counts(self) -> tuple[int, int]:
        """Malformed lines and all lines of this pass so far; of the last one, until the next begins."""
        return self.malformed, self._lines

    # ---- inside

    def _pass(self) -> dict[str, Any]:
        """What decides which lines a pass gives, in which order."""
        names = [os.path.basename(file) for file in self.files]
        shuffled = {"shuffle": self.shuffle, "seed": self.seed}
        return {**shuffled, "split": self.split, "test_share": self.test_share, "slots": self.slots, "files": names}

    def _counted(self) -> tuple[int, int]:
        """Malformed lines and all lines of the windows that were read; one that is read again counts once."""
        bad, lines = zip(self._sure, *self._counts.values(), strict=True)
        return sum(bad), sum(lines)

    def _note(self, k: int, read: Read) -> None:
        self._counts.pop(k, None)
        for file, number, why in read.bad[: max(0, 5 - self._counted()[0])]:
            line = number + 1 + int(self.format.header)
            logger.warning("%s, line %d is malformed: %s", self.files[file], line, why)
        self._counts[k] = (len(read.bad), read.lines)
        self.malformed, self._lines = self._counted()
        self._judge(final=False)

    def _finish(self, k: int) -> None:
        """A window was given out; those before the first that was not are forgotten."""
        if k < self._next:
            return
        self._ahead[k] = -1
        while self._ahead.get(self._next) == -1 and self._next + 1 in self._places:
            bad, lines = self._counts[self._next]
            self._sure = (self._sure[0] + bad, self._sure[1] + lines)
            for kept in (self._ahead, self._counts, self._places):
                kept.pop(self._next, None)
            self._next += 1

    def _judge(self, *, final: bool) -> None:
        if self.malformed > MOST_BAD * self._lines and (final or self._lines >= ENOUGH_LINES):
            raise ValueError(
                f"{self.malformed} of {self._lines} lines are malformed, expected at most one in a hundred; "
                "the first ones are in the log; check the format"
            )

    def _alone(self) -> Iterator[tuple[int, Read]]:
        for k, pieces in self._windows():
            yield k, self._parser.read(self.epoch, k, pieces)

    def _several(self) -> Iterator[tuple[int, Read]]:
        """Windows parsed by processes; of those handed out, twice as many as there are processes wait at most."""
        pool = ProcessPoolExecutor(
            self.readers,
            mp_context=multiprocessing.get_context("spawn"),  # forking a process that runs threads can hang
            initializer=_start_reader,
            initargs=(self._parser,),
        )
        windows = self._windows()
        under_way: dict[Future[Read], int] = {}
        try:
            while True:
                while len(under_way) < 2 * self.readers and (window := next(windows, None)) is not None:
                    under_way[pool.submit(_read_window, self.epoch, *window)] = window[0]
                if not under_way:
                    return
                waiting = [min(under_way, key=lambda future: under_way[future])] if self.ordered else list(under_way)
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                first = min(done, key=lambda future: under_way[future])
                yield under_way.pop(first), first.result()
        except BrokenProcessPool:
            raise RuntimeError("a reader process died; its messages, if any, are above") from None
        finally:
            windows.close()
            pool.shutdown(wait=True, cancel_futures=True)

    def _windows(self) -> Generator[tuple[int, list[Piece]], None, None]:
        """Number and records of the windows that were not given out yet."""
        k = self._next
        file, number = self._places[k]
        source: Any = None
        try:
            while True:
                pieces, wanting = [], self.window
                while wanting and file < len(self.files):
                    try:
                        if source is None:
                            source = self._open(file, number)
                        records = source.take(wanting)
                    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                        raise ValueError(f"{self.files[file]} is damaged ({error}); take another copy") from None
                    if len(records) == 0:
                        source.close()
                        source, file, number = None, file + 1, 0
                        continue
                    numbers = np.arange(number, number + len(records))
                    number += len(records)
                    data, kept = source.pack(records, self._wanted(file, numbers))
                    if len(kept):
                        pieces.append(Piece(file, numbers[kept], data))
                        wanting -= len(kept)
                self._places[k + 1] = (file, number)
                if not pieces:
                    return
                before = sum(os.path.getsize(done) for done in self.files[:file])
                self._ends[k] = before + (0 if source is None else source.position())
                if self._ahead.get(k) != -1:
                    yield k, pieces
                k += 1
        finally:
            if source is not None:
                source.close()

    def _open(self, file: int, number: int) -> Any:
        opener = getattr(self.format, "open", None)
        path = self.files[file]
        source = Lines(path, self.format.header) if opener is None else opener(path)
        if number and (there := source.skip(number)) < number:
            source.close()
            raise ValueError(
                f"{path} has {there} records, expected more than the {number} that were read before; it was changed "
                "since, so start a new run"
            )
        return source

    def _wanted(self, file: int, numbers: np.ndarray) -> np.ndarray:
        """Which records are of our split: a matter of file and line alone."""
        if self.split == "all":
            return np.ones(len(numbers), bool)
        x = numbers.astype(np.uint64) + np.uint64((file + 1) << 40)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's finaliser
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        test = (x >> np.uint64(11)).astype(np.float64) / 2.0**53 < self.test_share
        return test if self.split == "test" else ~test


def _named(path: str) -> list[str]:
    """A file under its own name, whatever characters that has, or those that a pattern matches."""
    return [path] if os.path.exists(path) else sorted(glob.glob(path))


class _Parser:
    """Turns windows of records into arrays; goes to the readers."""

    def __init__(self, format: Format, slots: bool, shuffle: int, seed: int) -> None:
        self._format, self._slots, self._shuffle, self._seed = format, slots, shuffle, seed
        self._hasher = Hasher(format.num_slots, slots=slots)

    def __getstate__(self) -> tuple[Format, bool, int, int]:
        return self._format, self._slots, self._shuffle, self._seed  # what was hashed stays here

    def __setstate__(self, state: tuple[Format, bool, int, int]) -> None:
        _Parser.__init__(self, *state)

    def read(self, epoch: int, k: int, pieces: Sequence[Piece]) -> Read:
        parsed = [self._piece(piece.data) for piece in pieces]
        arrays = [np.concatenate(parts) for parts in zip(*(each[1:4] for each in parsed), strict=True)]
        if self._shuffle:
            # Keyed by epoch and window: a run that stops and goes on mixes alike.
            order = np.random.default_rng([self._seed, epoch, k]).permutation(len(arrays[0]))
            arrays = [array[order] for array in arrays]
        bad = [
            (piece.file, int(piece.numbers[i]), why)
            for piece, each in zip(pieces, parsed, strict=True)
            for i, why in each.bad
        ]
        return Read((arrays[0], arrays[1], arrays[2]), sum(len(piece.numbers) for piece in pieces), bad)

    def _piece(self, data: bytes) -> Parsed:
        block: Any = getattr(self._format, "parse_block", None)
        if block is not None:
            return block(data, self._hasher)
        return parse_lines(self._format, split_lines(data), self._hasher)


_parser: _Parser | None = None  # of this process, when it is a reader


def _start_reader(parser: _Parser) -> None:
    global _parser
    _parser = parser
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """A reader whose parent was killed would wait for work for ever."""
    connection.wait([sentinel])
    os._exit(1)


def _read_window(epoch: int, k: int, pieces: list[Piece]) -> Read:
    assert _parser is not None
    return _parser.read(epoch, k, pieces)
