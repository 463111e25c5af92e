"""Measures of recognition quality: verification folds, ROC and its points, rank-k identification, top-k accuracy.

Pure functions over numpy arrays, in float64. A score is "higher means more alike" everywhere; a distance is the squared
Euclidean distance of unit vectors, in [0, 4], so that cosine = 1 - distance / 2.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

THRESHOLDS: Floats = np.arange(0, 4, 0.01)  # squared distances tried by the 10-fold protocol
MISSED_SHARE, MISSED_FEW = 0.02, 3  # pairs that better thresholds would tell apart: more than both are worth a word
PAIR_BLOCK = 65_536  # pairs whose embeddings are held at once
TIE = 1e-12  # cosines closer than this are equal: the rounding of a product depends on how it was cut into blocks


@dataclass(frozen=True)
class FoldAccuracy:
    """Verification accuracy over held-out folds, with the threshold that is best on all pairs."""

    mean: float
    std: float  # population standard deviation over folds
    folds: tuple[float, ...]
    threshold: float  # squared distance; a pair is the same person when its distance is strictly below


@dataclass(frozen=True)
class Roc:
    """Receiver operating characteristic at every distinct score: pairs with score >= thresholds[i] are accepted."""

    far: Floats  # false accept rate, rising from 0 to 1
    tar: Floats  # true accept rate, rising from 0 to 1
    thresholds: Floats  # falling; the first is inf (nothing accepted)
    num_genuine: int
    num_impostor: int


@dataclass(frozen=True)
class OperatingPoint:
    """The best true accept rate whose measured false accept rate does not exceed the one asked for.

    All but `far` are nan where fewer than 1/far impostor pairs exist: one false accept would already exceed that rate,
    so it cannot be measured.
    """

    far: float  # asked for
    tar: float
    measured_far: float  # <= far
    threshold: float  # accept score >= threshold; lies between scores; inf accepts nothing, -inf everything


def normalize(embeddings: ArrayLike) -> Floats:
    """Rows scaled to unit length, in float64; a row of zeros has no direction and stays zero.

    Raises ValueError unless `embeddings` is [N, D] and finite.
    """
    rows = np.asarray(embeddings, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"embeddings: got shape {rows.shape}, expected [N, D]")
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise ValueError(
            f"embeddings: got {bad.size} of {len(rows)} rows with NaN or infinity (first: row {bad[0]}), expected "
            "finite values; the model has diverged or overflows in this precision"
        )
    norms = np.linalg.norm(rows, axis=1, keepdims=True)  # [N, 1]
    return rows / np.where(norms == 0, 1.0, norms)


def pair_distances(embeddings: ArrayLike, left: ArrayLike, right: ArrayLike) -> Floats:
    """Squared distances [P] of the normalised embeddings at rows left[i] and right[i], a block of pairs at a time."""
    rows = np.asarray(embeddings)
    first, second = _indices("left", left, len(rows)), _indices("right", right, len(rows))
    if len(first) != len(second):
        raise ValueError(f"pairs: got {len(first)} left and {len(second)} right rows, expected as many of each")
    out = np.empty(len(first))
    for start in range(0, len(first), PAIR_BLOCK):
        block = slice(start, start + PAIR_BLOCK)
        difference = normalize(rows[first[block]]) - normalize(rows[second[block]])  # [block, D]
        out[block] = np.square(difference).sum(axis=1)
    return out


def fold_accuracy(
    distances: ArrayLike, issame: ArrayLike, *, folds: int = 10, thresholds: ArrayLike = THRESHOLDS
) -> FoldAccuracy:
    """Verification accuracy by contiguous folds, the protocol of LFW as the InsightFace project computes it.

    For each fold the threshold is the first of the best on the other folds; its accuracy on the fold counts. A pair is
    called the same person when distance < threshold, strictly. Earlier folds are one longer where folds do not divide
    the pairs. Raises ValueError for fewer pairs than folds, for pairs of one kind only, and for NaN.
    """
    values, same = _labelled(distances, issame, "distances")
    _both_kinds(same)
    tried = np.asarray(thresholds, dtype=np.float64)
    if folds < 2 or len(values) < folds:
        raise ValueError(f"folds: got {folds} for {len(values)} pairs, expected 2 <= folds <= pairs")
    lengths = np.full(folds, len(values) // folds)
    lengths[: len(values) % folds] += 1
    edges = np.concatenate([[0], np.cumsum(lengths)])
    right = np.stack(  # correct decisions in each fold at each threshold  [folds, T]
        [_correct(values[a:b], same[a:b], tried) for a, b in pairwise(edges)]
    )
    total = right.sum(axis=0)  # [T]
    accuracies = np.empty(folds)
    for fold in range(folds):
        training = (total - right[fold]) / (len(values) - lengths[fold])
        accuracies[fold] = right[fold, np.argmax(training)] / lengths[fold]
    lopsided = [fold for fold, (a, b) in enumerate(pairwise(edges)) if same[a:b].all() or not same[a:b].any()]
    if lopsided:
        text = "folds %s hold pairs of one kind only: their accuracy says little; mix the pairs"
        logger.warning(text, lopsided, extra={"once": True})
    _check_reach(values, same, tried, int(total.max()))
    return FoldAccuracy(
        mean=float(accuracies.mean()),
        std=float(accuracies.std()),
        folds=tuple(accuracies.tolist()),
        threshold=float(tried[np.argmax(total)]),
    )


def roc(scores: ArrayLike, issame: ArrayLike) -> Roc:
    """The ROC of scores (higher is more alike): one point a distinct score, tied pairs accepted together."""
    values, same = _labelled(scores, issame, "scores")
    _both_kinds(same)
    genuine, impostor, thresholds = _accepted(values, same)
    return Roc(
        far=impostor / impostor[-1],
        tar=genuine / genuine[-1],
        thresholds=thresholds,
        num_genuine=int(genuine[-1]),
        num_impostor=int(impostor[-1]),
    )


def auc(scores: ArrayLike, issame: ArrayLike) -> float:
    """Area under the ROC: the chance that a genuine pair outscores an impostor pair, a tie counting half (exact)."""
    values, same = _labelled(scores, issame, "scores")
    _both_kinds(same)
    genuine, impostor, _ = _accepted(values, same)
    # twice the number of won comparisons, in whole numbers: each impostor of a tied group against the genuine above
    twice = int((np.diff(impostor) * (genuine[1:] + genuine[:-1])).sum())
    return twice / (2 * int(genuine[-1]) * int(impostor[-1]))


def tar_at_far(scores: ArrayLike, issame: ArrayLike, far: float | Sequence[float]) -> list[OperatingPoint]:
    """True accept rates at the false accept rates asked for, never exceeding them; one OperatingPoint for each.

    The rates are found exactly (nothing is interpolated); ties are accepted together or not at all. The threshold lies
    midway between the last accepted score and the next below it, so that rounding of a score changes no verdict. A rate
    below 1 / (number of impostor pairs) gives nan.
    """
    values, same = _labelled(scores, issame, "scores")
    _both_kinds(same)
    genuine, impostor, thresholds = _accepted(values, same)
    points = []
    for rate in [far] if isinstance(far, int | float) else far:
        if not 0 < rate <= 1:
            raise ValueError(f"far: got {rate}, expected a rate in (0, 1]")
        allowed = _allowed(rate, int(impostor[-1]))
        if allowed == 0:
            points.append(OperatingPoint(float(rate), math.nan, math.nan, math.nan))
            continue
        at = int(np.searchsorted(impostor, allowed, side="right")) - 1  # last point with no more false accepts
        points.append(
            OperatingPoint(
                far=float(rate),
                tar=float(genuine[at] / genuine[-1]),
                measured_far=float(impostor[at] / impostor[-1]),
                threshold=_below(thresholds, at),
            )
        )
    return points


def ranks(
    gallery: ArrayLike, gallery_labels: ArrayLike, probes: ArrayLike, probe_labels: ArrayLike, *, block: int = 1024
) -> Ints:
    """Rank [P] of each probe's best mate in the gallery by cosine: 1 is a hit at once.

    A gallery entry of another label that ties with the mate counts as before it, so the order of the gallery is
    of no account. Never holds more than [block, block] scores. Raises ValueError for probes without a mate.
    """
    entries, people = labelled_rows("gallery", gallery, gallery_labels)
    queries, wanted = labelled_rows("probes", probes, probe_labels)
    if entries.shape[1] != queries.shape[1]:
        raise ValueError(f"probes: got dimension {queries.shape[1]}, expected the gallery's {entries.shape[1]}")
    order = np.argsort(people, kind="stable")
    entries, people = entries[order], people[order]
    first, last = np.searchsorted(people, wanted, "left"), np.searchsorted(people, wanted, "right")
    if (lonely := np.flatnonzero(first == last)).size:
        raise ValueError(
            f"probes: got {lonely.size} of {len(queries)} without a gallery entry of their label (first: probe "
            f"{lonely[0]}, label {wanted[lonely[0]]}), expected a mate for each; leave them out of a closed-set search"
        )
    out = np.ones(len(queries), dtype=np.int64)
    for start in range(0, len(queries), block):
        chosen = slice(start, start + block)
        query = normalize(queries[chosen])  # [b, D]
        mate = _best_mates(entries, query, first[chosen], last[chosen], block)  # [b]
        for at in range(0, len(entries), block):
            cosines = query @ normalize(entries[at : at + block]).T  # [b, g]
            other = people[None, at : at + block] != wanted[chosen, None]
            out[chosen] += (other & (cosines >= mate[:, None] - TIE)).sum(axis=1)
    return out


def rank_k(
    gallery: ArrayLike,
    gallery_labels: ArrayLike,
    probes: ArrayLike,
    probe_labels: ArrayLike,
    *,
    ks: Sequence[int] = (1, 5, 10),
    block: int = 1024,
) -> dict[int, float]:
    """Closed-set identification: the share of probes with an entry of their label among the k best of the gallery."""
    _check_ks(ks)
    found = ranks(gallery, gallery_labels, probes, probe_labels, block=block)
    return {k: float((found <= k).mean()) for k in ks}


def topk_hits(predictions: ArrayLike, labels: ArrayLike, *, ks: Sequence[int] = (1, 5)) -> tuple[dict[int, int], int]:
    """How many labelled rows have their label among their first k predictions, for each k; and how many are labelled.

    predictions: classes [N, K], best first. labels: [N]; rows with label -1 are left out.
    """
    _check_ks(ks)
    guesses, truth = np.asarray(predictions), np.asarray(labels)
    if guesses.ndim != 2 or guesses.shape[1] < max(ks):
        raise ValueError(f"predictions: got shape {guesses.shape}, expected [N, K] with K >= {max(ks)}")
    if truth.shape != guesses.shape[:1]:
        raise ValueError(f"labels: got shape {truth.shape}, expected [{len(guesses)}] as the predictions have")
    counted = truth != -1
    match = (guesses == truth[:, None]) & counted[:, None]  # [N, K]
    return {k: int(match[:, :k].any(axis=1).sum()) for k in ks}, int(counted.sum())


def topk_accuracy(predictions: ArrayLike, labels: ArrayLike, *, ks: Sequence[int] = (1, 5)) -> dict[int, float]:
    """Closed-set accuracy: the share of rows whose label is among their first k predictions (label -1: not counted)."""
    hits, counted = topk_hits(predictions, labels, ks=ks)
    if counted == 0:
        raise ValueError("labels: got no labelled row, expected at least one that is not -1")
    return {k: hit / counted for k, hit in hits.items()}


def _correct(distances: Floats, same: Bools, thresholds: Floats) -> Ints:
    """Correct decisions [T] at each threshold, by counting the distances strictly below it."""
    accepted = np.searchsorted(np.sort(distances[same]), thresholds, side="left")
    mistaken = np.searchsorted(np.sort(distances[~same]), thresholds, side="left")
    return np.asarray(accepted + (int((~same).sum()) - mistaken), dtype=np.int64)


def _check_reach(distances: Floats, same: Bools, tried: Floats, right: int) -> None:
    """Says why pairs that a threshold could tell apart are not told apart by any that is tried."""
    genuine, impostor, thresholds = _accepted(-distances, same)
    exact = genuine - impostor + impostor[-1]  # right at each distinct distance
    best = int(np.argmax(exact))
    missed, pairs = int(exact[best]) - right, len(distances)
    if missed <= max(MISSED_SHARE * pairs, MISSED_FEW):
        return
    low, high = np.quantile(distances, (0.01, 0.99))
    inside = int(((tried > low) & (tried <= high)).sum())
    unit = distances.max() <= 4 + 1e-6
    logger.warning(
        "the thresholds tried tell at most %.2f %% of %d pairs apart, and one at squared distance %.4g would tell %.2f "
        "%%: most distances lie from %.4g to %.4g, where %d of the thresholds lie, from %.4g to %.4g; %s",
        100 * right / pairs,
        pairs,
        -thresholds[best],
        100 * int(exact[best]) / pairs,
        low,
        high,
        inside,
        tried.min(),
        tried.max(),
        "the embeddings point almost one way, as those of a model that has collapsed or is hardly trained: go by the "
        "AUC, and train on or subtract their mean"
        if unit
        else "those are no distances of unit vectors: normalise the embeddings",
        extra={"once": True},
    )


def _accepted(scores: Floats, same: Bools) -> tuple[Ints, Ints, Floats]:
    """Genuine and impostor pairs accepted at each distinct score, from none (threshold inf) to all."""
    order = np.argsort(-scores, kind="stable")
    ordered, kind = scores[order], same[order]
    ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)  # last pair of each tied group
    genuine = np.cumsum(kind, dtype=np.int64)[ends]
    impostor = ends + 1 - genuine
    none = np.zeros(1, dtype=np.int64)
    return (
        np.concatenate([none, genuine]),
        np.concatenate([none, impostor]),
        np.concatenate([[math.inf], ordered[ends]]),
    )


def _allowed(far: float, impostors: int) -> int:
    """The most false accepts whose rate does not exceed far, compared as the rates themselves (0.29 of 100 is 29)."""
    count = math.floor(far * impostors)
    while count < impostors and (count + 1) / impostors <= far:
        count += 1
    while count > 0 and count / impostors > far:
        count -= 1
    return count


def _below(thresholds: Floats, at: int) -> float:
    """A threshold that accepts as thresholds[at] does, as far from the scores on both sides as can be."""
    if at == 0:
        return math.inf
    if at + 1 == len(thresholds):
        return -math.inf
    last, following = float(thresholds[at]), float(thresholds[at + 1])
    middle = last / 2 + following / 2
    return middle if following < middle <= last else last  # neighbouring floats, and infinite ones, have no middle


def _best_mates(entries: NDArray[np.generic], query: Floats, first: Ints, last: Ints, block: int) -> Floats:
    """Best cosine [b] of each query with its mates, entries[first:last], a bounded number of rows at a time."""
    counts = last - first
    best = np.full(len(query), -math.inf)
    edges = np.cumsum(counts)
    total = int(edges[-1])
    for start in range(0, total, block):
        flat = np.arange(start, min(start + block, total))  # the k-th (query, mate) couple
        owner = np.searchsorted(edges, flat, side="right")
        row = first[owner] + flat - (edges[owner] - counts[owner])
        cosines = np.einsum("nd,nd->n", query[owner], normalize(entries[row]))
        np.maximum.at(best, owner, cosines)
    return best


def labelled_rows(
    what: str, embeddings: ArrayLike, labels: ArrayLike, *, called: str = "labels"
) -> tuple[NDArray[np.generic], Ints]:
    """Embeddings [N, D], at least one, and their labels [N]; ValueError names `what` and what labels are `called`."""
    rows, names = np.asarray(embeddings), np.asarray(labels)
    if rows.ndim != 2 or names.shape != rows.shape[:1]:
        raise ValueError(f"{what}: got shapes {rows.shape} and {names.shape}, expected [N, D] and {called} [N]")
    if len(rows) == 0:
        raise ValueError(f"{what}: got none, expected at least one")
    return rows, names.astype(np.int64)


def _indices(what: str, rows: ArrayLike, total: int) -> Ints:
    index = np.asarray(rows)
    if index.ndim != 1 or not (np.issubdtype(index.dtype, np.integer) or index.size == 0):
        raise ValueError(f"{what}: got {index.dtype} of shape {index.shape}, expected row numbers [P]")
    if index.size and (index.min() < 0 or index.max() >= total):
        raise ValueError(f"{what}: got rows {index.min()} to {index.max()}, expected 0 to {total - 1}")
    return index.astype(np.int64)


def _labelled(values: ArrayLike, issame: ArrayLike, what: str) -> tuple[Floats, Bools]:
    numbers, same = np.asarray(values, dtype=np.float64), np.asarray(issame)
    if numbers.ndim != 1 or same.shape != numbers.shape:
        raise ValueError(f"{what}: got shape {numbers.shape} with issame {same.shape}, expected [P] and [P]")
    if not np.isin(same, (0, 1)).all():
        raise ValueError("issame: got values other than 0 and 1, expected booleans")
    if np.isnan(numbers).any():
        raise ValueError(f"{what}: got {int(np.isnan(numbers).sum())} NaN of {len(numbers)}, expected numbers")
    return numbers, same.astype(bool)


def _both_kinds(same: Bools) -> None:
    genuine = int(same.sum())
    if genuine == 0 or genuine == len(same):
        raise ValueError(
            f"issame: got {genuine} genuine and {len(same) - genuine} impostor pairs, expected at least one of each"
        )


def _check_ks(ks: Sequence[int]) -> None:
    if not ks or min(ks) < 1:
        raise ValueError(f"ks: got {tuple(ks)}, expected whole numbers from 1 up")
