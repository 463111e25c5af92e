"""Deals a data set to ranks in equal batches, in an order and with random numbers that no rank count changes.

The order of an epoch is one permutation drawn from (seed, epoch). Step s takes the next `batch_size` samples of it and
rank r the r-th contiguous piece; augmentation is keyed by (seed, epoch, sample). A state therefore resumes exactly, on
any number of ranks and with any number of worker processes.
"""

import functools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.data.order import BalancedOrder, Order
from plsc.data.pipeline import Pipeline
from plsc.data.reading import BadImages, Dataset, Transform
from plsc.data.samples import as_dataset

POLICIES = ("redraw", "raise")  # for images that cannot be read


class Loader:
    """Batches of a data set for one rank, for any number of epochs, resumable between any two steps.

    batch_size is the global one and must be a multiple of world_size; samples left over at the end of an epoch are
    dropped (others in the next epoch when shuffled). `transform(image, rng)` runs in the workers, see `Augment`.
    per_class: K > 0 makes batches of batch_size / K classes with K images each, every class as often as any other
    (`BalancedOrder`); on_bad_image="redraw" then may bring in another class.
    dataset: a `Dataset`, or whatever `as_dataset` takes: a map-style data set or any iterable of (image, label).
    workers: processes that read, `prefetch` batches ahead each; 0 reads in this one. start_method: how they start
    ("spawn", "forkserver", "fork"; Python's default if not given).
    on_bad_image: "raise", or "redraw": in place of an image that cannot be read (ValueError or OSError of the data set)
    stands another sample with its own label, chosen by (seed, epoch, sample), so the same on any number of ranks.
    `num_bad` counts them, the log names each once (20 at most); more than 1 % of a rank's samples of an epoch, and more
    than 3, stop it with a ValueError.
    ValueError: batch_size that does not divide or exceeds the data set, labels of a wrong kind or range; from `epochs`,
    an image that cannot be read, by name. ReadingProcessDied: a worker was killed.
    """

    def __init__(
        self,
        dataset: Dataset | Iterable[Any],
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
        per_class: int = 0,
    ) -> None:
        dataset = as_dataset(dataset)
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
        self._per_class = per_class
        self._order: Order | BalancedOrder
        if per_class:
            labels = np.asarray(dataset.labels, np.int64)
            self._order = BalancedOrder(labels, batch_size, rank, world_size, seed, per_class=per_class)
        else:
            self._order = Order(len(dataset), batch_size, rank, world_size, seed if shuffle else None)
        self._transform = transform
        self._workers, self._prefetch, self._start_method = workers, prefetch, start_method
        self._redraw = on_bad_image == "redraw"
        self._bad = BadImages(len(dataset) // world_size)
        self._pipeline: Pipeline | None = None

    @property
    def num_bad(self) -> int:
        """Images this rank could not read and replaced, since the loader was made."""
        return self._bad.count

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.batch_size

    @property
    def num_passed(self) -> int:
        """Batches up to here since epoch 0, taking `steps_per_epoch` for each epoch that has passed."""
        return (self.epoch + 1) * self.steps_per_epoch - (len(self.dataset) - self.position) // self.batch_size

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
            self._pipeline = Pipeline(
                self.dataset,
                self._order,
                0,
                self.batch_size // self.world_size,
                self.device,
                transform=self._transform,
                seed=self.seed,
                workers=self._workers,
                prefetch=self._prefetch,
                start_method=self._start_method,
                bad=self._bad if self._redraw else None,
                remedy="`plsc-data verify` lists them all"
                if self._redraw
                else "mend or remove it, or draw another in its place with on_bad_image='redraw'",
                whose=f"rank {self.rank}, " if self.world_size > 1 else "",
            )
        order = self._order
        while order.epoch < n:
            if len(self.dataset) - order.position >= self.batch_size:
                try:
                    for batch in self._pipeline:
                        order.position += self.batch_size
                        yield batch
                except Exception:
                    self.close()
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
            "labels": self._labels_digest,
            **({"per_class": self._per_class} if self._per_class else {}),
        }

    @functools.cached_property
    def _labels_digest(self) -> int:
        """Tells samples in another order or with other classes apart, at a gigabyte a second."""
        return zlib.crc32(np.ascontiguousarray(self.dataset.labels, np.int64).data)

    def load_state_dict(self, state: dict[str, Any], *, other_data: bool = False) -> None:
        """Goes to a saved place; call it before `epochs`. ValueError if the state is of another seed or data set.

        other_data: if the samples are not those of the saved loader, the epoch that it was in counts as done.
        """
        mine = self.state_dict()
        if (before := state.get("per_class", 0)) != self._per_class:
            raise ValueError(f"the loader state has per_class={before}, not the {self._per_class} of this loader")
        if missing := mine.keys() - state.keys():
            raise ValueError(
                f"the loader state lacks {', '.join(sorted(missing))}; expected what state_dict() returned"
            )
        same_data = all(state[key] == mine[key] for key in ("num_samples", "labels"))
        for key in ("seed", "shuffle", *(() if other_data else ("num_samples", "labels"))):
            if state[key] != mine[key]:
                what = {"labels": "other labels than", "num_samples": f"{state[key]} samples, not the {mine[key]} of"}
                raise ValueError(
                    f"the loader state has {what.get(key, f'{key}={state[key]}, not the {mine[key]} of')} this loader: "
                    "the order would differ; resume with the same data and seed"
                )
        if not same_data:
            self._order.epoch, self._order.position = int(state["epoch"]) + (state["position"] > 0), 0
            return
        if not (state["epoch"] >= 0 and 0 <= state["position"] <= len(self.dataset)):
            raise ValueError(
                f"got epoch={state['epoch']}, position={state['position']}; expected 0 <= position <= samples"
            )
        self._order.epoch, self._order.position = int(state["epoch"]), int(state["position"])

    def close(self) -> None:
        """Ends the worker processes; they also end with the loader, and `epochs` starts new ones."""
        if self._pipeline is not None:
            self._pipeline.close()
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
    pipeline = Pipeline(dataset, items, start, share, torch.device(device), workers=min(workers, len(items)))
    return _closing(pipeline)


def _closing(pipeline: Pipeline) -> Iterator[tuple[Tensor, Tensor]]:
    try:
        yield from pipeline
    finally:
        pipeline.close()


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
