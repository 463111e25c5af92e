"""Reads samples into batches: errors that name the sample, and others in the place of images that cannot be read."""

import itertools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.pixels import mirror

logger = logging.getLogger(__name__)

_AUGMENT, _REDRAW = 2, 3  # streams of random numbers; the loader's order is 1
_REDRAWS = 100  # samples tried in place of a bad one
_BAD_SHARE, _BAD_FEW = 0.01, 3  # of a rank's samples in an epoch: more bad ones than both stop the run
_NAMED, _LOGGED = 5, 20  # bad images named in an error, and in the log

Transform = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]
Item = tuple[int, NDArray[Any]]  # (epoch, integers: the samples of a batch)
Bad = tuple[int, str]  # (a sample that cannot be read, why)
# (slot that holds the images, samples read, samples replaced or why there are none)
Read = tuple[int, NDArray[Any], list[Bad] | str]


class Dataset(Protocol):
    """What the loader reads: samples by number, with all labels known beforehand."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """[N] classes from 0, -1 for a sample to ignore."""
        ...

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> tuple[NDArray[np.uint8], int]:
        """The image, uint8 [H, W, C], and its label."""
        ...

    def name(self, i: int, /) -> str:
        """What to call sample i in a message."""
        ...


class BadImage(ValueError):
    """A sample whose image the data set cannot give."""


class Reader:
    """Reads a batch into a slot, in a worker process."""

    def __init__(self, dataset: Dataset, transform: Transform | None, seed: int, *, redraw: bool = False) -> None:
        self.dataset, self._transform = dataset, transform
        self._seed, self._redraw = seed, redraw
        self.slots = torch.empty(0, dtype=torch.uint8)  # [slots, b, H, W, C]
        self._bits = np.random.Philox()
        self._rng = np.random.Generator(self._bits)
        self._counter = np.zeros(4, np.uint64)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": np.array([seed, _AUGMENT], np.uint64)},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def __getitem__(self, numbered: tuple[int, Item]) -> Read:
        slot, (epoch, samples) = numbered
        into = self.slots[slot].numpy()  # [b, H, W, C]
        replaced: list[Bad] = []
        for k, i in enumerate(samples.tolist()):
            try:
                image, j = self.read_any(i, epoch, replaced)
            except BadImage as error:  # raised in the process that asks: there without a worker's traceback
                return slot, samples, str(error)
            if image.shape != into.shape[1:]:
                raise RuntimeError(
                    f"sample {j} ({self.dataset.name(j)}) has shape {image.shape} (H, W, C), others {into.shape[1:]}; "
                    "give the data set one image_size"
                )
            if image.strides[1] < 0:  # mirrored: numpy would copy it pixel by pixel
                mirror(image[:, ::-1], into[k])
            else:
                into[k] = image
            if j != i:
                samples = np.where(np.arange(len(samples)) == k, j, samples)  # a copy: it may be a piece of the order
        return slot, samples, replaced

    def read_any(self, i: int, epoch: int, replaced: list[Bad] | None = None) -> tuple[NDArray[np.uint8], int]:
        """Sample i as the transform leaves it, or, under "redraw", another for one that cannot be read, and which."""
        if not self._redraw:
            return self.read(i, epoch), i
        try:
            return self.read(i, epoch), i
        except BadImage as error:
            failed = (i, str(error))
            reasons = {str(error.__cause__): None}  # a set that keeps its order
        bits = np.random.Philox(key=[self._seed, _REDRAW], counter=[0, 0, epoch, i])
        for j in np.random.Generator(bits).integers(len(self.dataset), size=_REDRAWS).tolist():
            try:
                image = self.read(j, epoch, drawn_as=i)
            except BadImage as error:
                reasons[str(error.__cause__)] = None
                continue
            if replaced is not None:
                replaced.append(failed)
            return image, j
        shown = "; ".join(itertools.islice(reasons, _NAMED))
        raise BadImage(f"none of {_REDRAWS + 1} samples drawn in turn can be read: {shown}")

    def read(self, i: int, epoch: int, *, drawn_as: int | None = None) -> NDArray[np.uint8]:
        """Sample i as the transform leaves it, uint8 [H, W, C]; drawn_as: whose random numbers it takes."""
        try:
            image = self.dataset[i][0]
        except (ValueError, OSError) as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise BadImage(f"sample {i} ({self.dataset.name(i)}) cannot be read: {what}") from error
        except Exception as error:  # whatever it is, the user must learn which sample
            what = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"sample {i} ({self.dataset.name(i)}) cannot be read: {what}") from error
        if self._transform is not None:
            try:
                image = self._transform(image, self._random(epoch, i if drawn_as is None else drawn_as))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise RuntimeError(f"sample {i} ({self.dataset.name(i)}) cannot be changed: {what}") from error
        if image.dtype != np.uint8 or image.ndim != 3:
            raise RuntimeError(
                f"sample {i} ({self.dataset.name(i)}) is {image.dtype} {image.shape}, expected uint8 (H, W, C)"
            )
        return image

    def _random(self, epoch: int, i: int) -> np.random.Generator:
        """The generator of a sample in an epoch; resetting one costs a quarter of making one."""
        self._counter[2], self._counter[3] = epoch, i
        self._bits.state = self._state
        return self._rng


def most_bad(samples: int) -> int:
    """Images that may be unreadable among so many: 1 %, or 3 where that is less."""
    return max(_BAD_FEW, int(samples * _BAD_SHARE))


class BadImages:
    """Counts the samples that were replaced, names each once in the log, and stops when they are too many.

    samples: how many this rank reads in an epoch.
    """

    def __init__(self, samples: int) -> None:
        self.count, self.in_epoch = 0, 0
        self._samples, self._limit = samples, most_bad(samples)
        self._seen: dict[int, str] = {}

    def note(self, bad: list[Bad]) -> None:
        for i, why in bad:
            self.count += 1
            self.in_epoch += 1
            if i not in self._seen:
                self._seen[i] = why if len(self._seen) < _LOGGED else ""
                if self._seen[i]:
                    logger.warning("%s; another sample takes its place", why)
                if len(self._seen) == _LOGGED:
                    logger.warning("%d images cannot be read so far; further ones are only counted", _LOGGED)
        if self.in_epoch > self._limit:
            shown = "; ".join([why for why in self._seen.values() if why][:_NAMED])
            what = "1 %" if self._limit > _BAD_FEW else f"{_BAD_FEW}; 1 % where that is more"
            raise ValueError(
                f"got {self.in_epoch} images that cannot be read among the {self._samples} that a rank reads in an "
                f"epoch, expected at most {self._limit} ({what}): {shown}; `plsc-data verify` lists them all: mend or "
                "remove them"
            )
