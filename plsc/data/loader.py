"""Deals a data set to ranks in equal batches, in an order and with random numbers that no rank count changes.

The order of an epoch is one permutation drawn from (seed, epoch). Step s takes the next `batch_size` samples of it and
rank r the r-th contiguous piece; augmentation is keyed by (seed, epoch, sample). A state therefore resumes exactly, on
any number of ranks and with any number of worker processes.
"""

import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from plsc.data.reading import BadImage, BadImages, Dataset, Item, Read, Reader, Transform

POLICIES = ("redraw", "raise")  # for images that cannot be read
_ORDER = 1  # stream of random numbers


class Loader:
    """Batches of a data set for one rank, for any number of epochs, resumable between any two steps.

    batch_size is the global one and must be a multiple of world_size; samples left over at the end of an epoch are
    dropped (others in the next epoch when shuffled). `transform(image, rng)` runs in the workers, see `Augment`.
    workers: processes that read, `prefetch` batches ahead each; 0 reads in this one. start_method: how they start
    ("spawn", "forkserver", "fork"; Python's default if not given).
    on_bad_image: "raise", or "redraw": in place of an image that cannot be read (ValueError or OSError of the data set)
    stands another sample with its own label, chosen by (seed, epoch, sample), so the same on any number of ranks.
    `num_bad` counts them, the log names each once (20 at most); more than one and more than 1 % of a rank's samples of
    an epoch stop it with a ValueError.
    ValueError: batch_size that does not divide or exceeds the data set, labels of a wrong kind or range; from `epochs`,
    an image that cannot be read, by name.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        transform: Transform | None = None,
        workers: int = 0,
        device: str | torch.device = "cpu",
        prefetch: int = 2,
        start_method: str | None = None,
        on_bad_image: str = "raise",
    ) -> None:
        _check_dataset(dataset)
        if on_bad_image not in POLICIES:
            raise ValueError(f"got on_bad_image={on_bad_image!r}, expected one of {', '.join(POLICIES)}")
        if not 0 <= rank < world_size:
            raise ValueError(f"got rank={rank} and world_size={world_size}, expected 0 <= rank < world_size")
        if batch_size < 1 or batch_size % world_size:
            near = max(1, round(batch_size / world_size)) * world_size
            raise ValueError(
                f"got a global batch_size of {batch_size} on {world_size} ranks, expected a multiple of {world_size}; "
                f"use {near}"
            )
        if len(dataset) < batch_size:
            raise ValueError(
                f"the data set has {len(dataset)} samples, fewer than one global batch of {batch_size}; "
                "use a smaller batch_size"
            )
        if not 0 <= seed < 2**63:
            raise ValueError(f"got seed={seed}, expected 0 or more, less than 2**63")
        self.dataset, self.batch_size, self.rank, self.world_size = dataset, batch_size, rank, world_size
        self.seed, self.shuffle = seed, shuffle
        self.device = torch.device(device)
        self._order = _Order(len(dataset), batch_size, rank, world_size, seed if shuffle else None)
        self._transform = transform
        self._workers, self._prefetch, self._start_method = workers, prefetch, start_method
        self._redraw = on_bad_image == "redraw"
        self._bad = BadImages(len(dataset) // world_size)
        self._pipeline: _Pipeline | None = None

    @property
    def num_bad(self) -> int:
        """Images this rank could not read and replaced, since the loader was made."""
        return self._bad.count

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.batch_size

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._order.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have taken."""
        return self._order.position

    def epochs(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches until epoch n is reached: a loader resumed in epoch 7 yields the rest of 7 and 8 to n - 1.

        images float32 [B/W, C, H, W] as (x - 127.5) / 127.5 and labels int64 [B/W], on the device. `epoch` and
        `position` already count the batch just yielded, so a state taken in the loop's body resumes after it.
        """
        if self._pipeline is None:
            self._pipeline = _Pipeline(
                self.dataset,
                self._order,
                0,
                self.batch_size // self.world_size,
                self.device,
                transform=self._transform,
                seed=self.seed,
                workers=self._workers,
                prefetch=self._prefetch,
                persistent=True,
                start_method=self._start_method,
                bad=self._bad if self._redraw else None,
            )
        order = self._order
        while order.epoch < n:
            if len(self.dataset) - order.position >= self.batch_size:
                try:
                    for batch in self._pipeline:
                        order.position += self.batch_size
                        yield batch
                except Exception:
                    self._pipeline = None
                    raise
            order.epoch, order.position = order.epoch + 1, 0
            self._bad.in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, in JSON's types; the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": len(self.dataset),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved place; call it before `epochs`. ValueError if the state is of another seed or data set."""
        mine = self.state_dict()
        if missing := mine.keys() - state.keys():
            raise ValueError(
                f"the loader state lacks {', '.join(sorted(missing))}; expected what state_dict() returned"
            )
        for key in ("seed", "shuffle", "num_samples"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"the loader state has {key}={state[key]}, this loader {mine[key]}: the order would differ; "
                    "resume with the same data and seed"
                )
        if not (state["epoch"] >= 0 and 0 <= state["position"] <= len(self.dataset)):
            raise ValueError(
                f"got epoch={state['epoch']}, position={state['position']}; expected 0 <= position <= samples"
            )
        self._order.epoch, self._order.position = int(state["epoch"]), int(state["position"])

    def close(self) -> None:
        """Ends the worker processes; they also end with the loader, and `epochs` starts new ones."""
        self._pipeline = None


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    start: int = 0,
    stop: int | None = None,
    workers: int = 0,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples start to stop (the end) in order, the last batch as small as need be: for evaluation.

    Yields images float32 [b, C, H, W] as (x - 127.5) / 127.5 and labels int64 [b]; nothing for an empty range.
    """
    _check_dataset(dataset)
    stop = len(dataset) if stop is None else stop
    if batch_size < 1:
        raise ValueError(f"got batch_size={batch_size}, expected at least 1")
    if not 0 <= start <= stop <= len(dataset):
        raise ValueError(f"got the range {start} to {stop}, expected one within 0 to {len(dataset)}")
    items = [(0, np.arange(at, min(at + batch_size, stop))) for at in range(start, stop, batch_size)]
    if not items:
        return iter(())
    share = min(batch_size, stop - start)
    return iter(_Pipeline(dataset, items, start, share, torch.device(device), workers=min(workers, len(items))))


class _Order:
    """Where a loader stands, and the rank's part of each step from there to the end of the epoch.

    Knows nothing of the loader: in a cycle of references, worker processes would be ended late and slowly.
    """

    def __init__(self, samples: int, batch_size: int, rank: int, world_size: int, seed: int | None) -> None:
        self.epoch, self.position = 0, 0
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._share = batch_size // world_size
        self._first = rank * self._share

    def __iter__(self) -> Iterator[Item]:
        epoch = self.epoch
        order = np.arange(self._samples, dtype=np.int32 if self._samples < 2**31 else np.int64)
        if self._seed is not None:
            bits = np.random.Philox(key=[self._seed, _ORDER], counter=[0, 0, 0, epoch])
            np.random.Generator(bits).shuffle(order)
        for at in range(self.position, self._samples - self._batch_size + 1, self._batch_size):
            yield epoch, order[at + self._first : at + self._first + self._share]


class _Pipeline:
    """Batches of uint8 read into slots of memory that worker processes share, and turned into floats on a device.

    Pixels stay in the order that decoders give, colour by colour: convolutions prefer it, and nothing is transposed.
    Only the number of a slot crosses between processes. Slots and the floats made of them are used again: at these
    sizes the system's work of handing out fresh pages costs as much as a third of decoding.
    """

    def __init__(
        self,
        dataset: Dataset,
        items: Iterable[Item],
        probe: int,
        share: int,
        device: torch.device,
        *,
        transform: Transform | None = None,
        seed: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        persistent: bool = False,
        start_method: str | None = None,
        bad: BadImages | None = None,
    ) -> None:
        reader = Reader(dataset, transform, seed, redraw=bad is not None)
        image_shape = reader.read_any(probe, 0)[0].shape
        # Of the batches asked for, at most workers * prefetch are not yet taken; the one just taken is still read.
        num_slots = workers * prefetch + 1
        shape = (num_slots, share, *image_shape)
        reader.slots = _shared(shape) if workers else torch.empty(shape, dtype=torch.uint8)
        self._reader, self._device, self._workers = reader, device, workers
        self._buffers = _Buffers()
        self._bad = bad
        self._loader: DataLoader[Read] = DataLoader(
            reader,  # type: ignore[arg-type]
            batch_size=None,  # the reader makes whole batches
            sampler=_Numbered(items, num_slots),
            collate_fn=_same,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=persistent and workers > 0,
            multiprocessing_context=start_method if workers else None,
            generator=torch.Generator(),  # else each epoch takes a number from the global one, and resume differs
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        labels_of = self._reader.dataset.labels
        for slot, samples, replaced in self._slots_read():
            if isinstance(replaced, str):
                raise BadImage(replaced)
            if replaced:
                assert self._bad is not None
                self._bad.note(replaced)
            images = self._normalise(self._reader.slots[slot, : len(samples)]).permute(0, 3, 1, 2)
            labels = torch.from_numpy(np.asarray(labels_of[samples], np.int64))
            yield images, labels.to(self._device)

    def _slots_read(self) -> Iterator[Read]:
        if not self._workers:
            yield from self._loader
            return
        iterator = iter(self._loader)
        try:
            yield from iterator
        except Exception as error:
            # The frames it passed hold the queues of the workers, in a cycle: they would end late, after a timeout.
            # What happened in the worker is in the error's text.
            traceback.clear_frames(error.__traceback__)
            failure = error.with_traceback(None)
        else:
            return
        del iterator, self._loader
        raise failure

    def _normalise(self, pixels: Tensor) -> Tensor:
        """(x - 127.5) / 127.5 of uint8 [b, H, W, C] in float32, on the device: a quarter of the bytes travel."""
        if self._device.type == "cpu":
            images = self._buffers.take(tuple(pixels.shape))
            array, source, middle = images.numpy(), pixels.numpy(), np.float32(127.5)
            for at in range(0, len(array), 4):  # a few images at a time: the second pass finds them in the cache
                part = array[at : at + 4]
                np.subtract(source[at : at + 4], middle, out=part, dtype=np.float32)  # converts on the way
                np.divide(part, middle, out=part)
            return images
        if self._device.type == "cuda":
            pixels = pixels.pin_memory()  # a copy, so that the slot is free while the transfer goes on
        return pixels.to(self._device, non_blocking=True).to(torch.float32).sub_(127.5).div_(127.5)


class _Numbered:
    """Items with the slot each is to be read into, in turn."""

    def __init__(self, items: Iterable[Item], num_slots: int) -> None:
        self._items, self._num_slots = items, num_slots

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        return ((number % self._num_slots, item) for number, item in enumerate(self._items))


class _Buffers:
    """Float arrays handed out as tensors, and again once nothing holds the tensor's memory any more.

    A tensor made by from_numpy keeps a reference to its array as long as its storage lives, whoever holds that (a
    view, autograd): the array's reference count tells.
    """

    def __init__(self, kept: int = 4) -> None:
        self._kept = kept
        self._arrays: list[NDArray[np.float32]] = []
        self._free_count = -1

    def take(self, shape: tuple[int, ...]) -> Tensor:
        for k, count in enumerate(map(self._count, range(len(self._arrays)))):
            if count == self._free_count and self._arrays[k].shape == shape:
                return torch.from_numpy(self._arrays[k])
        if len(self._arrays) == self._kept:
            return torch.empty(shape)
        self._arrays.append(np.empty(shape, np.float32))
        self._free_count = self._count(-1)
        return torch.from_numpy(self._arrays[-1])

    def _count(self, k: int) -> int:
        return sys.getrefcount(self._arrays[k])


def _shared(shape: tuple[int, ...]) -> Tensor:
    """Memory that worker processes can write to. ValueError where the system's share of it is too small."""
    size, where = math.prod(shape), "/dev/shm"
    if os.path.isdir(where) and (free := shutil.disk_usage(where).free) < size:
        raise ValueError(
            f"the loader's workers need {size / 2**20:.0f} MiB of shared memory, {where} has {free / 2**20:.0f} MiB "
            "free; use fewer workers or a smaller prefetch, or start the container with a larger --shm-size"
        )
    return torch.empty(shape, dtype=torch.uint8).share_memory_()


def _same(item: Any) -> Any:
    return item


def _check_dataset(dataset: Dataset) -> None:
    labels = dataset.labels
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        kind = f"{labels.dtype} {labels.shape}" if isinstance(labels, np.ndarray) else type(labels).__name__
        raise ValueError(f"got labels as {kind}, expected a one-dimensional numpy array of integers; convert them")
    if len(labels) != len(dataset):
        raise ValueError(f"got {len(labels)} labels for {len(dataset)} samples, expected as many")
    if len(labels) == 0:
        raise ValueError("the data set is empty")
    low, high = int(labels.min()), int(labels.max())
    if low < -1 or high >= dataset.num_classes:
        raise ValueError(
            f"got labels from {low} to {high} with num_classes={dataset.num_classes}, "
            f"expected 0 to {dataset.num_classes - 1}, or -1 to ignore a sample"
        )
