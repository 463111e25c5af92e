"""Reads plain text for word vectors: words, a vocabulary, and the text as numbers in mapped files."""

import gzip
import heapq
import itertools
import json
import logging
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from plsc.data.clicks import ENOUGH_LINES, MOST_BAD

logger = logging.getLogger(__name__)

TOKENS = ("letters", "spaces")
SENTENCES = ("line", "paragraph")
PIECE = 4 << 20  # bytes that a reader takes at a time
LONGEST = 1000  # words of a sentence; longer lines are cut
BATCH = 10_000  # words of a Sentences, but for what completes the last sentence
_LETTERS = re.compile(r"[^\W\d_]+")

T = TypeVar("T")


class Piece(NamedTuple):
    """Bytes [start, stop) of a file, whole lines; stop -1: the whole file, which is compressed."""

    file: str
    start: int
    stop: int


class Tally(NamedTuple):
    """Lines of a piece, and of the malformed ones the byte where each begins, and why."""

    lines: int
    bad: list[tuple[int, str]]


class Sentences(NamedTuple):
    """Some sentences: tokens int32, of sentence s tokens[starts[s] : starts[s + 1]]; `first` is its number."""

    tokens: np.ndarray
    starts: np.ndarray  # int64 [S + 1]
    first: int
    number: int  # of this batch in the text


class Vocabulary:
    """Words by falling count, those of one count by the alphabet; word i has the number i.

    counts: of words in a text. Words seen less than `min_count` times are left out; max_words keeps the most frequent.
    """

    def __init__(self, counts: dict[str, int], *, min_count: int = 1, max_words: int = 0) -> None:
        kept = [(word, count) for word, count in counts.items() if count >= min_count]
        order = lambda each: (-each[1], each[0])  # noqa: E731
        kept = heapq.nsmallest(max_words, kept, key=order) if max_words else sorted(kept, key=order)
        if len(kept) < 2:
            raise ValueError(
                f"{len(kept)} of {len(counts)} words come {min_count} times or more, expected at least 2; "
                "lower min_count or give more text"
            )
        self.words = [word for word, _ in kept]
        self.counts = np.array([count for _, count in kept], np.int64)
        self.index = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def keep(self, sample: float) -> np.ndarray:
        """Chance that an occurrence of a word stays, float64 [V]: (sqrt(f / sample) + 1) * sample / f, at most 1.

        f is the word's share of the text. As in the authors' program; sample 0 keeps all.
        """
        if sample < 0:
            raise ValueError(f"sample: got {sample}, expected 0 or a share of words such as 1e-3")
        if sample == 0:
            return np.ones(len(self))
        threshold = sample * self.counts.sum() / self.counts
        return np.minimum(1.0, np.sqrt(threshold) + threshold)

    def save(self, path: str | PathLike[str]) -> None:
        """One line a word: the word, its count."""
        lines = [f"{word} {count}\n" for word, count in zip(self.words, self.counts, strict=True)]
        Path(path).write_text("".join(lines), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Vocabulary":
        counts = {}
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            word, _, count = line.rpartition(" ")
            if not word or not count.isdecimal() or word in counts:
                raise ValueError(f"{fspath(path)}, line {number}: got {line!r}, expected a new word and its count")
            counts[word] = int(count)
        return cls(counts)


class Text:
    """Plain text in UTF-8 (.gz and .dz too).

    paths     files, or one of them
    sentence  what words are near each other in: "line", or "paragraph", which ends at an empty line
    tokens    "letters": runs of letters of any script. "spaces": whatever stands between white space
    lower     fold to lower case
    readers   1: here. n: as many processes, each with pieces of 4 MiB of its own (a compressed file is one piece)
    ordered   with several readers: sentences in the order of the files all the same

    Lines that are not UTF-8 are left out, counted in `malformed`, the first ones logged with file and byte; above one
    in a hundred it is a ValueError. In memory are two pieces a reader.
    """

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        sentence: str = "line",
        tokens: str = "letters",
        lower: bool = True,
        readers: int = 1,
        ordered: bool = True,
    ) -> None:
        self.files = [fspath(path) for path in ([paths] if isinstance(paths, str | PathLike) else paths)]
        if not self.files or (missing := [file for file in self.files if not os.path.isfile(file)]):
            raise ValueError(f"got {', '.join(missing) if self.files else 'no paths'}, expected files of text")
        for name, value, known in (("tokens", tokens, TOKENS), ("sentence", sentence, SENTENCES)):
            if value not in known:
                raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")
        if readers < 1:
            raise ValueError(f"readers: got {readers}, expected at least 1")
        self.sentence, self.tokens, self.lower = sentence, tokens, lower
        self.readers, self.ordered = readers, ordered
        self.malformed = self.lines = 0

    def count(self) -> dict[str, int]:
        """How often each word comes: for a Vocabulary."""
        counts: Counter[str] = Counter()
        for some in self._read(_Count(self.tokens, self.lower)):
            counts.update(some)
        return dict(counts)

    def encode(self, vocabulary: Vocabulary, folder: str | PathLike[str]) -> "Encoded":
        """The text as numbers of words, in files of `folder`; words without one are left out, as are sentences of one.

        Files of an earlier call on the same text and vocabulary are used again.
        """
        folder = Path(folder)
        stamps = [[file, os.path.getsize(file), os.stat(file).st_mtime_ns] for file in self.files]
        words = int(np.bitwise_xor.reduce(vocabulary.counts * np.arange(1, len(vocabulary) + 1)))
        how = {"sentence": self.sentence, "tokens": self.tokens, "lower": self.lower}
        made_of = {"text": stamps, **how, "words": [len(vocabulary), words]}
        try:
            return Encoded(folder, made_of)
        except (OSError, ValueError):
            pass  # there is none yet, or of something else
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.json").unlink(missing_ok=True)
        tokens = sentences = 0
        with (folder / "tokens.i32").open("wb") as body, (folder / "lengths.i32").open("wb") as heads:
            for ids, lengths in self._read(_Encode(self.tokens, self.lower, self.sentence, vocabulary)):
                body.write(ids.tobytes())
                heads.write(lengths.tobytes())
                tokens, sentences = tokens + len(ids), sentences + len(lengths)
        if not sentences:
            raise ValueError(f"no sentence of {', '.join(self.files)} has two words of the vocabulary; check tokens")
        about = {**made_of, "tokens_kept": tokens, "sentences": sentences}
        (folder / "text.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        return Encoded(folder, made_of)

    # ---- inside

    def _read(self, work: "Callable[[Iterable[str]], T]") -> Iterator[T]:
        """What `work` makes of each piece's lines."""
        self.malformed = self.lines = 0
        for piece, (result, tally) in _each(work, self._pieces(), self.readers, self.ordered):
            for start, why in tally.bad[: max(0, 5 - self.malformed)]:
                logger.warning("%s, the line at byte %d is malformed: %s", piece.file, start, why)
            self.malformed += len(tally.bad)
            self.lines += tally.lines
            self._judge(final=False)
            yield result
        self._judge(final=True)

    def _judge(self, *, final: bool) -> None:
        if self.malformed > MOST_BAD * self.lines and (final or self.lines >= ENOUGH_LINES):
            raise ValueError(
                f"{self.malformed} of {self.lines} lines are not UTF-8, expected at most one in a hundred; "
                "the first ones are in the log; convert the text, for instance with iconv"
            )

    def _pieces(self) -> Iterator[Piece]:
        for file in self.files:
            if file.endswith((".gz", ".dz")):
                yield Piece(file, 0, -1)
                continue
            size, start = os.path.getsize(file), 0
            with open(file, "rb") as source:
                while start < size:
                    source.seek(min(start + PIECE, size))
                    source.readline()
                    stop = source.tell()
                    yield Piece(file, start, stop)
                    start = stop


class Encoded:
    """A text as numbers of words, in mapped files; `made_of` is what they must have been made of."""

    def __init__(self, folder: str | PathLike[str], made_of: dict[str, Any]) -> None:
        folder = Path(folder)
        about = json.loads((folder / "text.json").read_text(encoding="utf-8"))
        if {name: about.get(name) for name in made_of} != json.loads(json.dumps(made_of)):
            raise ValueError(f"{folder} holds another text")
        self.tokens = np.memmap(folder / "tokens.i32", np.int32, "r", shape=(about["tokens_kept"],))
        lengths = np.memmap(folder / "lengths.i32", np.int32, "r", shape=(about["sentences"],))
        self.starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self.starts[1:])

    def bounds(self, words: int = BATCH) -> np.ndarray:
        """Numbers of the sentences at which batches of about so many words begin, and of the end."""
        at = np.searchsorted(self.starts, np.arange(words, self.starts[-1] + words, words))
        return np.unique(np.minimum(np.r_[0, at], len(self.starts) - 1))

    def batches(self, *, words: int = BATCH, rank: int = 0, world_size: int = 1) -> Iterator[Sentences]:
        """The text in batches of about so many words, in order; of several ranks each gets every world_size-th."""
        bounds = self.bounds(words)
        for number in range(rank, len(bounds) - 1, world_size):
            first, last = int(bounds[number]), int(bounds[number + 1])
            begin, end = self.starts[first], self.starts[last]
            starts = self.starts[first : last + 1] - begin
            yield Sentences(np.ascontiguousarray(self.tokens[begin:end]), starts, first, number)


class _Work:
    """What a reader does with the lines of a piece."""

    def __init__(self, tokens: str, lower: bool) -> None:
        self._tokens, self._lower = tokens, lower

    def split(self, line: str) -> list[str]:
        line = line.lower() if self._lower else line
        return _LETTERS.findall(line) if self._tokens == "letters" else line.split()


class _Count(_Work):
    def __call__(self, lines: Iterable[str]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(self.split(line))
        return counts


class _Encode(_Work):
    def __init__(self, tokens: str, lower: bool, sentence: str, vocabulary: Vocabulary) -> None:
        super().__init__(tokens, lower)
        self._paragraphs = sentence == "paragraph"
        self._index = vocabulary.index

    def __call__(self, lines: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of words, and how many of them each sentence takes."""
        ids: list[int] = []
        lengths: list[int] = []
        index, begin = self._index, 0
        for line in itertools.chain(lines, [""]):
            ids += [index[word] for word in self.split(line) if word in index]
            if self._paragraphs and line.strip():
                continue
            while (length := min(len(ids) - begin, LONGEST)) > 1:
                lengths.append(length)
                begin += length
            del ids[begin:]
        return np.array(ids, np.int32), np.array(lengths, np.int32)


def _lines(piece: Piece, tally: list[tuple[int, str]], counted: list[int]) -> Iterator[str]:
    """Lines of a piece that are UTF-8; the others go to `tally`."""
    with gzip.open(piece.file) if piece.stop < 0 else open(piece.file, "rb") as source:
        source.seek(piece.start)
        at, left = piece.start, piece.stop - piece.start
        while piece.stop < 0 or left > 0:
            block = source.read(left) if piece.stop >= 0 else source.read(PIECE) + source.readline()
            if not block:
                return
            left -= len(block)
            raw = block.split(b"\n")
            if not raw[-1]:
                raw.pop()
            counted[0] += len(raw)
            try:
                yield from block.decode().split("\n")
            except UnicodeDecodeError:
                for line in raw:
                    try:
                        yield line.decode()
                    except UnicodeDecodeError as error:
                        tally.append((at, str(error)))
                    at += len(line) + 1
            else:
                at += len(block)


def _run(work: Callable[[Iterable[str]], T], piece: Piece) -> tuple[T, Tally]:
    bad: list[tuple[int, str]] = []
    counted = [0]
    result = work(_lines(piece, bad, counted))
    return result, Tally(counted[0], bad)


_work: Any = None  # of this process, when it is a reader


def _start_reader(work: Any) -> None:
    global _work
    _work = work


def _run_here(piece: Piece) -> Any:
    return _run(_work, piece)


def _each(
    work: Callable[[Iterable[str]], T], pieces: Iterator[Piece], readers: int, ordered: bool
) -> Iterator[tuple[Piece, tuple[T, Tally]]]:
    """Each piece and what became of it; with several processes twice as many as these are under way at most."""
    if readers == 1:
        for piece in pieces:
            yield piece, _run(work, piece)
        return
    pool = ProcessPoolExecutor(
        readers,
        mp_context=multiprocessing.get_context("spawn"),  # forking a process that runs threads can hang
        initializer=_start_reader,
        initargs=(work,),
    )
    under_way: dict[Future[Any], Piece] = {}
    try:
        while True:
            for piece in itertools.islice(pieces, 2 * readers - len(under_way)):
                under_way[pool.submit(_run_here, piece)] = piece
            if not under_way:
                return
            oldest = next(iter(under_way))
            done, _ = wait([oldest] if ordered else under_way, return_when=FIRST_COMPLETED)
            first = next(future for future in under_way if future in done)
            yield under_way.pop(first), first.result()
    except BrokenProcessPool:
        raise RuntimeError("a reader process died; its messages, if any, are above") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
