"""Evaluation over ranks: embeddings of a data set, and from them verification, identification and classification."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from plsc.comm import CommError, Communicator, Shard, world
from plsc.data import Dataset, Pairs, batches
from plsc.train.metrics import (
    OperatingPoint,
    Roc,
    auc,
    fold_accuracy,
    pair_distances,
    rank_k,
    roc,
    tar_at_far,
    topk_hits,
)

GATHER_ROWS = 16_384  # embeddings a rank sends at once: the device holds world_size times as many
FARS = (1e-4, 1e-3, 1e-2)

Progress = Callable[[int, int], None]  # (samples done, samples in all) of this rank, after every batch


class TopK(Protocol):
    """What classification needs of a head whose classes are spread over the ranks."""

    num_classes: int

    def topk(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and classes, each [B, k], best first; every rank calls it together with the same B."""
        ...


@dataclass(frozen=True)
class VerificationResult:
    """How well pairs are told apart. Thresholds are cosines; `roc` holds every point, for plotting."""

    accuracy: float  # mean of the held-out folds
    std: float
    folds: tuple[float, ...]
    threshold: float  # a cosine: the one above which most pairs of all folds are right
    auc: float
    tar: tuple[OperatingPoint, ...]
    mean_norm: float  # of the embeddings as given; with flip those are sums of two: about twice as long
    num_pairs: int
    roc: Roc

    def record(self) -> dict[str, float | None]:
        """Plain numbers for a line of JSON; None where a rate cannot be measured with so few impostor pairs."""
        numbers: dict[str, float | None] = {
            "accuracy": self.accuracy,
            "std": self.std,
            "threshold": self.threshold,
            "auc": self.auc,
            "mean_norm": self.mean_norm,
        }
        for point in self.tar:
            numbers[f"tar@far={point.far:g}"] = None if np.isnan(point.tar) else point.tar
        return numbers


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts the module into eval mode, and each of its parts back into the mode it was in (frozen parts stay frozen)."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch's wrappers: data-parallel ones talk to other ranks, compiled ones rename their parts."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def embed(
    backbone: nn.Module,
    dataset: Dataset,
    *,
    comm: Communicator | None = None,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    flip: bool = True,
    autocast: torch.dtype | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> NDArray[np.float32]:
    """Embeddings [N, D] of a data set in its order, not normalised, the same array on every rank; collective.

    Each rank embeds one contiguous range of the samples, batch_size (of a rank) at a time; images stay uint8 until
    their batch. flip adds the embedding of the mirrored image. comm: the current world unless given; device: comm's.
    An error on one rank is raised on all.
    """
    comm = comm or world()
    shard = _cut(dataset, batch_size, comm)
    rows, _, width = _embed_shard(
        backbone,
        dataset,
        shard=shard,
        comm=comm,
        batch_size=batch_size,
        device=device,
        flip=flip,
        autocast=autocast,
        workers=workers,
        progress=progress,
        check=None,
    )
    return _gather_rows(rows.reshape(shard.size, width), shard, comm)


def verify(
    embeddings: ArrayLike, pairs: Pairs, *, folds: int | None = None, fars: Sequence[float] = FARS
) -> VerificationResult:
    """Verification of pairs of rows of the embeddings [N, D]: contiguous folds, exact AUC, true accept rates at `fars`.

    folds: those of the pairs unless given. Raises ValueError for pairs without folds, fewer pairs than folds, pairs of
    one kind only, embeddings that are not finite.
    """
    rows = np.asarray(embeddings)
    folds = pairs.num_folds if folds is None else folds
    if folds < 2:
        raise ValueError(
            "pairs: got 1 fold, expected at least 2; pass folds=, with both kinds of pairs in each stretch"
        )
    distances = pair_distances(rows, pairs.first, pairs.second)
    accuracy = fold_accuracy(distances, pairs.same, folds=folds)
    cosines = 1 - distances / 2
    return VerificationResult(
        accuracy=accuracy.mean,
        std=accuracy.std,
        folds=accuracy.folds,
        threshold=1 - accuracy.threshold / 2,
        auc=auc(cosines, pairs.same),
        tar=tuple(tar_at_far(cosines, pairs.same, fars)),
        mean_norm=float(np.linalg.norm(rows, axis=1).mean()),
        num_pairs=len(distances),
        roc=roc(cosines, pairs.same),
    )


def identify(
    embeddings: ArrayLike, labels: ArrayLike, *, ks: Sequence[int] = (1, 5, 10), block: int = 1024
) -> dict[int, float]:
    """Closed-set identification within one labelled set [N, D]: the share of probes found among the k best.

    The first sample of each label is the gallery, the others are the probes; labels with one sample make the search
    harder, samples of label -1 are left out. plsc.train.metrics.rank_k takes any other gallery.
    """
    rows, names = np.asarray(embeddings), np.asarray(labels)
    if names.ndim != 1 or len(names) != len(rows):
        raise ValueError(f"labels: got shape {names.shape}, expected [{len(rows)}], one an embedding")
    rows, names = rows[names != -1], names[names != -1]
    enrolled = np.zeros(len(names), dtype=bool)
    enrolled[np.unique(names, return_index=True)[1]] = True
    if enrolled.all():
        raise ValueError(f"labels: got {len(names)} different ones, expected at least two samples of one label")
    return rank_k(rows[enrolled], names[enrolled], rows[~enrolled], names[~enrolled], ks=ks, block=block)


def classify(
    backbone: nn.Module,
    head: TopK,
    dataset: Dataset,
    *,
    comm: Communicator | None = None,
    batch_size: int = 256,
    ks: Sequence[int] = (1, 5),
    device: torch.device | str | None = None,
    flip: bool = False,
    autocast: torch.dtype | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> dict[int, float]:
    """Closed-set accuracy: the share of samples whose label is among the head's k best classes; collective.

    Every rank embeds its range of the samples, then all call head.topk together equally often with batch_size rows
    each (the last ones padded). Samples with label -1 are not counted. k beyond the number of classes counts them all.
    """
    comm = comm or world()
    shard = _cut(dataset, batch_size, comm)

    def check(labels: NDArray[np.int64]) -> None:
        if labels.size and (labels.min() < -1 or labels.max() >= head.num_classes):
            raise ValueError(
                f"labels: got {labels.min()} to {labels.max()}, expected -1 (not counted) or a class of the head's "
                f"{head.num_classes}; evaluate unseen classes by pairs instead"
            )

    rows, labels, width = _embed_shard(
        backbone,
        dataset,
        shard=shard,
        comm=comm,
        batch_size=batch_size,
        device=device,
        flip=flip,
        autocast=autocast,
        workers=workers,
        progress=progress,
        check=check,
    )
    place = comm.device if device is None else torch.device(device)
    depth = min(max(ks, default=1), head.num_classes)
    counted = {k: min(k, depth) for k in ks}
    totals = torch.zeros(len(ks) + 1, dtype=torch.int64)
    for start in range(0, max(shard.sizes()), batch_size):  # the same number of rounds on every rank
        chosen = rows.reshape(shard.size, width)[start : start + batch_size]
        padded = torch.ones(batch_size, width)
        padded[: len(chosen)] = torch.from_numpy(chosen)
        _, classes = head.topk(padded.to(place), depth)  # [batch_size, depth]
        hits, labelled = topk_hits(
            classes[: len(chosen)].cpu().numpy(), labels[start : start + batch_size], ks=sorted(set(counted.values()))
        )
        totals += torch.tensor([*(hits[counted[k]] for k in ks), labelled])
    *found, labelled = comm.all_reduce(totals.to(comm.device)).wait().tolist()
    if labelled == 0:
        raise ValueError("labels: got no labelled sample, expected at least one that is not -1")
    return {k: hit / labelled for k, hit in zip(ks, found, strict=True)}


def _cut(dataset: Dataset, batch_size: int, comm: Communicator) -> Shard:
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
    if len(dataset) == 0:
        raise ValueError("dataset: got no samples, expected at least one")
    return Shard.of(len(dataset), comm)


def _embed_shard(
    backbone: nn.Module,
    dataset: Dataset,
    *,
    shard: Shard,
    comm: Communicator,
    batch_size: int,
    device: torch.device | str | None,
    flip: bool,
    autocast: torch.dtype | None,
    workers: int,
    progress: Progress | None,
    check: Callable[[NDArray[np.int64]], None] | None,
) -> tuple[NDArray[np.float32], NDArray[np.int64], int]:
    """This rank's embeddings [n, D] and labels [n], and D, which a rank without samples learns from the others.

    No verb is called while a rank works alone, so one that fails keeps nobody waiting: its error is told to all.
    """
    rows, labels = np.empty((0, 0), dtype=np.float32), np.empty(0, dtype=np.int64)
    failure: Exception | None = None
    try:
        place = comm.device if device is None else torch.device(device)
        model = unwrapped(backbone)
        with evaluating(model), torch.no_grad(), _precision(place, autocast):
            done = 0
            source = batches(dataset, batch_size, start=shard.start, stop=shard.stop, workers=workers, device=place)
            for images, names in source:
                found = _embed_batch(model, images, flip=flip)
                if done == 0:
                    rows = np.empty((shard.size, found.shape[1]), dtype=np.float32)
                    labels = np.empty(shard.size, dtype=np.int64)
                rows[done : done + len(found)] = found.cpu().numpy()
                labels[done : done + len(found)] = names.cpu().numpy()
                done += len(found)
                if progress is not None:
                    progress(done, shard.size)
        if done != shard.size:
            raise ValueError(f"dataset: got {done} samples for rows {shard.start} to {shard.stop}")
        if check is not None:
            check(labels)
    except Exception as error:  # told to the other ranks below, then raised
        failure = error
    return rows, labels, _agree(comm, failure, rows.shape[1])


def _embed_batch(model: nn.Module, images: Tensor, *, flip: bool) -> Tensor:
    """Embeddings [B, D] in float32; with flip, the sum with those of the mirrored images."""
    found = model(images)
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != len(images):
        shape = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"backbone: got output of shape {shape}, expected embeddings [B, D] with B = {len(images)}")
    found = found.float()
    return found + model(images.flip(-1)).float() if flip else found


def _precision(place: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(place.type, dtype=dtype)


def _agree(comm: Communicator, failure: Exception | None, width: int) -> int:
    """The embedding size all ranks found (a rank without samples has 0); raises on every rank where one failed."""
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    reports = comm.gather_objects((message, width))
    if failure is not None:
        raise failure
    for rank, (message, _) in enumerate(reports):
        if message is not None:
            raise CommError(f"evaluation failed on rank {rank}: {message}")
    widths = {found for _, found in reports if found}
    if len(widths) != 1:
        raise ValueError(f"backbone: got embedding sizes {sorted(widths)} on different ranks, expected one")
    return int(widths.pop())


def _gather_rows(rows: NDArray[np.float32], shard: Shard, comm: Communicator) -> NDArray[np.float32]:
    """All ranks' rows in order, on every rank, through the device a bounded number at a time."""
    out = np.empty((shard.total, rows.shape[1]), dtype=np.float32)
    starts = np.concatenate([[0], np.cumsum(shard.sizes())])
    for start in range(0, max(shard.sizes()), GATHER_ROWS):
        sizes = [max(0, min(GATHER_ROWS, size - start)) for size in shard.sizes()]
        mine = torch.from_numpy(rows[start : start + GATHER_ROWS]).to(comm.device)
        parts = comm.all_gather(mine, sizes=sizes).wait().cpu().numpy()
        for rank, part in enumerate(np.split(parts, np.cumsum(sizes)[:-1])):
            out[starts[rank] + start : starts[rank] + start + len(part)] = part
    return out
