"""Skip-gram with negative sampling on the rows of two stores: of words as they are read, and as they are predicted."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from plsc.ps.geo import Geo
from plsc.ps.rules import SGD
from plsc.ps.store import Store
from plsc.ps.table import Table


@dataclass
class Trained:
    """What some sentences gave: words left by sub-sampling, pairs, and the loss summed over `sampled` of the pairs."""

    kept: int = 0
    pairs: int = 0
    loss: float = 0.0
    sampled: int = 0

    def __iadd__(self, other: "Trained") -> "Trained":
        self.kept += other.kept
        self.pairs += other.pairs
        self.loss += other.loss
        self.sampled += other.sampled
        return self


class WordLoop:
    """Trains rows of words by stochastic gradient, sentence after sentence, in the native core (Mikolov et al. 2013).

    inputs, outputs   stores of one dimension; word w has row w in each. A Table is trained where its rows lie (threads
                      that share it: Hogwild), of a Geo its local copy. Of any other store rows are pulled, trained,
                      and what they moved by is pushed: its rule must be SGD, whose rate then cancels
    keep [V]          chance that an occurrence of a word stays
    weights [V]       how often a word is drawn as a negative
    window            reach to either side, reduced at random for each centre word
    negatives         words drawn against a centre word: for each pair, or, shared=True, for all its pairs at once
    instructions      "plain", "avx2" or "avx512" instead of the best this processor has; sums round differently

    Draws depend on (seed, epoch, number of the sentence) alone. Threads may call train at once.
    """

    def __init__(
        self,
        inputs: Store,
        outputs: Store,
        *,
        keep: np.ndarray,
        weights: np.ndarray,
        window: int = 5,
        negatives: int = 5,
        shared: bool = False,
        seed: int = 0,
        instructions: str = "",
    ) -> None:
        if inputs.dim != outputs.dim:
            raise ValueError(f"got rows of {inputs.dim} and of {outputs.dim}, expected two stores of one dimension")
        if window < 1 or negatives < 1:
            raise ValueError(f"got window={window}, negatives={negatives}, expected at least 1 of each")
        if keep.shape != weights.shape or keep.ndim != 1 or not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(f"got keep {keep.shape}, weights {weights.shape}, expected one of each for every word")
        self.inputs, self.outputs = inputs, outputs
        self.num_words = len(keep)
        thresholds = np.minimum(np.asarray(keep, np.float64) * 2.0**32, 2.0**32 - 1).astype(np.uint32)
        self._core = _native()(
            thresholds, np.asarray(weights, np.float64), window, negatives, shared, seed, instructions
        )
        self._sides = [_side(store, self.num_words) for store in (inputs, outputs)]
        # For Geo's pace: of an occurrence that stays, its pairs, and the steps of rows that are drawn against them.
        self._keep, self._pairs = thresholds / 2.0**32, window + 1.0
        self._drawn = (1.0 if shared else self._pairs) * negatives * weights / weights.sum()

    def train(self, tokens: np.ndarray, starts: np.ndarray, *, first: int, epoch: int, lr: float) -> Trained:
        """One pass over sentences tokens[starts[s] : starts[s + 1]] (int32, int64), of which the first has a number."""
        if tokens.dtype != np.int32 or starts.dtype != np.int64:
            raise ValueError(f"got tokens {tokens.dtype}, starts {starts.dtype}, expected int32 and int64")
        text = (tokens, starts, first, epoch)
        marks = np.zeros((2, self.num_words), np.uint8)
        if not all(isinstance(side, _InPlace) for side in self._sides):
            self._core.touched(*text, marks[0], marks[1])
        moves = [side.begin(np.flatnonzero(mark)) for side, mark in zip(self._sides, marks, strict=True)]
        done = self._core.train(*text, moves[0].addresses, moves[1].addresses, self.inputs.dim, lr)
        if any(side.counts_steps for side in self._sides):
            moves[0].steps, moves[1].steps = self.steps(tokens[starts[0] : starts[-1]])
        goals = [side.end(move) for side, move in zip(self._sides, moves, strict=True)]
        for side, goal in zip(self._sides, goals, strict=True):  # both copies' exchanges are under way
            side.wait(goal)
        return Trained(*done)

    def steps(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How often training these words steps each row of the inputs and outputs, [V], on average over the draws."""
        kept = np.bincount(tokens, minlength=self.num_words) * self._keep
        return kept * self._pairs, kept * self._pairs + kept.sum() * self._drawn

    def noise(self) -> tuple[np.ndarray, np.ndarray]:
        """How negatives are drawn: slot i is word i with chance thresholds[i] / 2^32, else word aliases[i]."""
        thresholds, aliases = np.empty((2, self.num_words), np.uint32)
        self._core.noise(thresholds, aliases)
        return thresholds, aliases


@dataclass
class _Move:
    """Where rows lie during one call: an address a word, 0 for none; of copies also their keys, now and before.

    steps [V]: how often a row is stepped, on average over the draws.
    """

    addresses: np.ndarray
    keys: np.ndarray
    rows: np.ndarray | None = None
    before: np.ndarray | None = None
    steps: np.ndarray | None = None


class _InPlace:
    """All rows of a table, where they are."""

    counts_steps = False

    def __init__(self, table: Table, num_words: int) -> None:
        self._all = _Move(table.addresses(np.arange(num_words, dtype=np.uint64)), np.empty(0, np.uint64))

    def begin(self, words: np.ndarray) -> _Move:
        return self._all

    def end(self, move: _Move) -> int:
        return 0

    def wait(self, goal: int) -> None:
        pass


class _InCopy:
    """Rows of a Geo's local copy, which are fetched when they first come."""

    def __init__(self, store: Geo, num_words: int) -> None:
        self._store = store
        self._addresses = np.zeros(num_words, np.uint64)
        self.counts_steps = store.pace is not None

    def begin(self, words: np.ndarray) -> _Move:
        keys = words.astype(np.uint64)
        new = words[self._addresses[words] == 0]
        if len(new):
            self._store.fetch(new.astype(np.uint64))
            self._addresses[new] = self._store.local.addresses(new.astype(np.uint64))
        return _Move(self._addresses, keys)

    def end(self, move: _Move) -> int:
        steps = None if move.steps is None else move.steps[move.keys].astype(np.float32)
        return self._store.touch(move.keys, steps, wait=False)

    def wait(self, goal: int) -> None:
        self._store.wait(goal)


class _Pulled:
    """Rows that are pulled, trained here, and pushed as what they moved by."""

    counts_steps = False

    def __init__(self, store: Store, num_words: int) -> None:
        if store.rule != SGD():
            raise ValueError(f"got a store with the rule {store.rule!r}, expected SGD(): rows travel as differences")
        self._store, self._num_words = store, num_words
        self._own = threading.local()

    def begin(self, words: np.ndarray) -> _Move:
        keys = words.astype(np.uint64)
        rows = np.ascontiguousarray(self._store.pull(keys))
        if not hasattr(self._own, "addresses"):
            self._own.addresses = np.zeros(self._num_words, np.uint64)
        addresses = self._own.addresses  # of words that are not in this call: stale, and not read
        stride = np.uint64(rows.strides[0])
        addresses[words] = np.uint64(rows.ctypes.data) + np.arange(len(words), dtype=np.uint64) * stride
        return _Move(addresses, keys, rows, rows.copy())

    def end(self, move: _Move) -> int:
        assert move.rows is not None and move.before is not None
        move.before -= move.rows
        move.before /= np.float32(self._store.lr)
        self._store.push(move.keys, move.before)
        return 0

    def wait(self, goal: int) -> None:
        pass


def _side(store: Store, num_words: int) -> Any:
    if isinstance(store, Table):
        return _InPlace(store, num_words)
    return _InCopy(store, num_words) if isinstance(store, Geo) else _Pulled(store, num_words)


def _native() -> Any:
    try:
        from plsc.ps._core import SkipGram
    except ImportError as error:
        raise ImportError(
            f"word vectors need plsc's native core, which was not built when plsc was installed ({error}); "
            "install a C++17 compiler (g++), then install plsc again"
        ) from None
    return SkipGram
