"""In which order samples come: permutations of an epoch, batches of P classes with K images each, cut among ranks.

Whatever is drawn depends on (seed, epoch, step) alone, so that a place in it is two numbers, the same on any number of
ranks. Nothing here knows the loader: in a cycle of references, worker processes would be ended late and slowly.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from plsc.data.reading import Item

LARGE = 2**20  # samples from which a permutation is computed as it is needed, not held

_ORDER, _CLASSES, _IMAGES, _LARGE = 1, 4, 5, 6  # streams of random numbers; augmentation is 2, redrawing 3
_ROUNDS = 6  # of the Feistel network
_BLOCK = 2**16  # samples whose places are computed together


class Order:
    """Where a loader stands, and the rank's part of each step from there to the end of the epoch.

    seed: None for the samples in their own order.
    """

    def __init__(self, samples: int, batch_size: int, rank: int, world_size: int, seed: int | None) -> None:
        self.epoch, self.position = 0, 0
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._share = batch_size // world_size
        self._first = rank * self._share

    def __iter__(self) -> Iterator[Item]:
        epoch = self.epoch
        order = self._shuffled(epoch)
        block = max(1, _BLOCK // self._share) * self._batch_size
        end = self._samples - self._batch_size + 1
        for at in range(self.position, end, block):
            starts = np.arange(at, min(at + block, end), self._batch_size)
            places = (starts + self._first)[:, None] + np.arange(self._share)  # [steps, share]
            for samples in places if order is None else order(places):
                yield epoch, samples

    def _shuffled(self, epoch: int) -> "Permutation | _Held | None":
        if self._seed is None:
            return None
        return (_Held if self._samples < LARGE else Permutation)(self._samples, self._seed, epoch)


class BalancedOrder:
    """The same for batches of P classes with `per_class` images each, every class as often as any other.

    Classes come in rounds, each a permutation of them all (a rest too small for a batch is left out of the round).
    A class with fewer images than K gives some twice. Samples of label -1 are left out. An epoch has as many steps as
    without balance. ValueError: batch_size no multiple of K, fewer classes with images than P.
    """

    def __init__(
        self,
        labels: NDArray[np.int64],
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        *,
        per_class: int,
    ) -> None:
        self.epoch, self.position = 0, 0
        share = batch_size // world_size
        if per_class < 1 or share % per_class:
            raise ValueError(
                f"got per_class={per_class} with {share} samples a rank in a batch, expected a divisor of these"
            )
        self._steps, self._batch_size, self._seed, self._k = len(labels) // batch_size, batch_size, seed, per_class
        self._share, self._first, self._p = share, rank * share, batch_size // per_class
        rows = np.argsort(labels, kind="stable")
        self._rows = rows[np.searchsorted(labels[rows], 0) :]  # [N] samples by class
        starts = np.flatnonzero(np.diff(labels[self._rows], prepend=-1))
        self._starts = np.append(starts, len(self._rows))  # [C + 1]
        if len(starts) < self._p:
            raise ValueError(
                f"got {len(starts)} classes with images, expected {self._p} at least for a batch of {batch_size} with "
                f"{per_class} of each; use a smaller batch_size or a larger per_class"
            )

    def __iter__(self) -> Iterator[Item]:
        epoch, number = self.epoch, len(self._starts) - 1
        steps_a_round = number // self._p
        before, classes = -1, np.empty(0, np.int64)
        for step in range(self.position // self._batch_size, self._steps):
            turn, inside = divmod(step, steps_a_round)
            if turn != before:
                bits = np.random.Philox(key=[self._seed, _CLASSES], counter=[0, 0, turn, epoch])
                before, classes = turn, np.random.Generator(bits).permutation(number)
            chosen = classes[inside * self._p : (inside + 1) * self._p]
            bits = np.random.Philox(key=[self._seed, _IMAGES], counter=[0, 0, step, epoch])
            batch = self._draw(chosen, np.random.Generator(bits))
            yield epoch, batch[self._first : self._first + self._share]

    def _draw(self, classes: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """K samples of each class, one class after the other  [P * K]."""
        found = np.empty((len(classes), self._k), np.int64)
        for row, c in enumerate(classes.tolist()):
            start, stop = self._starts[c : c + 2].tolist()
            count = stop - start
            found[row] = start + rng.choice(count, self._k, replace=count < self._k)
        return self._rows[found.reshape(-1)]


class _Held:
    """A permutation of 0 to n - 1 that is drawn whole."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._order = np.arange(n)
        bits = np.random.Philox(key=[seed, _ORDER], counter=[0, 0, 0, epoch])
        np.random.Generator(bits).shuffle(self._order)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._order[places]


class Permutation:
    """A permutation of 0 to n - 1 that is computed where it is asked for: a Feistel network that walks cycles.

    The network permutes the least even power of two that holds n (Luby and Rackoff, 1988); a number that leaves the
    range is put through again until it falls into it (Black and Rogaway, 2002), at most four times on average.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._n = n
        self._half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        bits = np.random.Philox(key=[seed, _LARGE], counter=[0, 0, 0, epoch])
        self._keys = bits.random_raw(_ROUNDS)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands at these places, of any shape."""
        values = self._once(places.astype(np.uint64).reshape(-1))
        out = np.flatnonzero(values >= np.uint64(self._n))
        while out.size:
            values[out] = self._once(values[out])
            out = out[values[out] >= np.uint64(self._n)]
        return values.astype(np.int64).reshape(places.shape)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return left << self._half | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's mixing."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
