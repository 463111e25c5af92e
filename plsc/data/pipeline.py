"""From sample numbers to float batches on a device: read into slots of shared memory, normalised from there."""

import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.data.pixels import normalise
from plsc.data.reading import BadImage, BadImages, Dataset, Item, Read, Reader, Transform
from plsc.data.workers import ReadingProcesses


class Pipeline:
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
        start_method: str | None = None,
        bad: BadImages | None = None,
        remedy: str = "mend or remove it",
        whose: str = "",
    ) -> None:
        """items: a batch each, iterated over anew for every pass. probe: a sample whose size is that of all.

        share: the most samples of a batch. remedy: for an image that cannot be read, put after the message. whose: put
        before reading processes in messages.
        """
        reader = Reader(dataset, transform, seed, redraw=bad is not None)
        self._remedy = remedy
        try:
            image_shape = reader.read_any(probe, 0)[0].shape
        except BadImage as error:
            raise BadImage(f"{error}; {remedy}") from error
        # Of the batches asked for, at most workers * prefetch are not yet taken; the one just taken is still read.
        self._num_slots = workers * prefetch + 1
        shape = (self._num_slots, share, *image_shape)
        reader.slots = _shared(shape) if workers else torch.empty(shape, dtype=torch.uint8)
        self._reader, self._items, self._device = reader, items, device
        self._buffers = Buffers()
        self._bad = bad
        self._processes: ReadingProcesses | None = None
        if workers:
            self._processes = ReadingProcesses(
                reader, workers, ahead=prefetch, start_method=start_method, seed=seed, whose=whose
            )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        labels_of = self._reader.dataset.labels
        for slot, samples, replaced in self._slots_read():
            if isinstance(replaced, str):
                raise BadImage(f"{replaced}; {self._remedy}")
            if replaced:
                assert self._bad is not None
                self._bad.note(replaced)
            images = self._normalise(self._reader.slots[slot, : len(samples)]).permute(0, 3, 1, 2)
            labels = torch.from_numpy(np.asarray(labels_of[samples], np.int64))
            if self._device.type == "cuda":
                labels = labels.pin_memory()
            yield images, labels.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Ends the reading processes; they also end with this object."""
        if self._processes is not None:
            self._processes.close()

    def _slots_read(self) -> Iterator[Read]:
        tasks = ((number % self._num_slots, item) for number, item in enumerate(self._items))
        if self._processes is not None:
            return self._processes.read(tasks)
        return (self._reader[task] for task in tasks)

    def _normalise(self, pixels: Tensor) -> Tensor:
        """(x - 127.5) / 127.5 of uint8 [b, H, W, C] in float32, on the device: a quarter of the bytes travel."""
        if self._device.type == "cpu":
            return normalise(pixels, self._buffers.take(tuple(pixels.shape)))
        if self._device.type == "cuda":
            pixels = pixels.pin_memory()  # a copy, so that the slot is free while the transfer goes on
        return pixels.to(self._device, non_blocking=True).to(torch.float32).sub_(127.5).div_(127.5)


class Buffers:
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
