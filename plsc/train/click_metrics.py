"""How well clicks are told apart: AUC, AUC within groups, log loss; fed batch by batch, exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

COMPACT_AT = 1 << 20  # scores kept before equal ones are counted together


class Auc:
    """Area under the ROC curve: the chance that a clicked sample scores above another one, ties counting half.

    Exact: equal scores are kept once, with how often they were clicked and not, so memory grows with the different
    scores only. `clicked` may be fractions: with true probabilities as scores and as clicks it is the best AUC that
    any model can be expected to reach on these samples.
    """

    def __init__(self) -> None:
        self._scores: NDArray[np.float64] = np.empty(0)
        self._counts: NDArray[np.float64] = np.empty((2, 0))  # clicked, not
        self._new: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        self._waiting = 0

    def update(self, scores: ArrayLike, clicked: ArrayLike) -> None:
        """Adds samples; scores rise with the chance of a click (logits or probabilities)."""
        new = _scores(scores)
        self._new.append((new, _clicks(clicked, len(new))))
        self._waiting += len(new)
        if self._waiting >= COMPACT_AT:
            self._compact()

    def value(self) -> float:
        """NaN while there is nothing clicked, or nothing that is not."""
        self._compact()
        positive, negative = self._counts
        below = np.cumsum(negative) - negative
        pairs = positive.sum() * negative.sum()
        return float((positive * (below + 0.5 * negative)).sum() / pairs) if pairs > 0 else float("nan")

    def __len__(self) -> int:
        """Different scores in memory."""
        self._compact()
        return len(self._scores)

    def _compact(self) -> None:
        if not self._waiting:
            return
        scores = np.concatenate([self._scores, *(scores for scores, _ in self._new)])
        clicks = np.concatenate([clicks for _, clicks in self._new])
        counts = np.concatenate([self._counts, [clicks, 1.0 - clicks]], axis=1)
        order = np.argsort(scores, kind="stable")
        scores = scores[order]
        starts = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]])
        self._scores, self._counts = scores[starts], np.add.reduceat(counts[:, order], starts, axis=1)
        self._new, self._waiting = [], 0


class GroupAuc:
    """AUC within each group (a user, say), averaged by the groups' samples; groups of one kind only are left out.

    Groups are integers, strings or finite floats, of one kind in all batches. Zhou et al. 2018 (deep interest network),
    formula 7. Keeps every sample: 9 bytes each and its group's.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.generic]]] = []

    def update(self, scores: ArrayLike, clicked: ArrayLike, groups: ArrayLike) -> None:
        new = _scores(scores)
        ids = _groups(groups)
        if ids.shape != new.shape:
            raise ValueError(f"groups: got shape {ids.shape}, expected {new.shape}: one for every score")
        if self._parts and len(ids) and ids.dtype.kind != (first := self._parts[0][2].dtype).kind:
            raise ValueError(f"groups: got {ids.dtype} after {first}, expected one kind; cast them first")
        if not len(ids):
            return
        self._parts.append((new, _clicks(clicked, len(new)) > 0.5, ids))

    def value(self) -> float:
        """NaN while no group has both kinds."""
        if not sum(len(scores) for scores, _, _ in self._parts):
            return float("nan")
        scores, clicked, groups = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        groups = np.unique(groups, return_inverse=True)[1]
        order = np.lexsort((scores, groups))
        scores, clicked, groups = scores[order], clicked[order], groups[order]
        first = np.r_[True, groups[1:] != groups[:-1]]
        group = np.cumsum(first) - 1
        tie = np.cumsum(first | np.r_[True, scores[1:] != scores[:-1]]) - 1
        places = np.arange(len(scores)) - np.flatnonzero(first)[group]
        ranks = (np.bincount(tie, places) / np.bincount(tie))[tie]  # within the group, from 0; ties share the mean
        sizes = np.bincount(group)
        positive = np.bincount(group, clicked)
        negative = sizes - positive
        both = (positive > 0) & (negative > 0)
        if not both.any():
            return float("nan")
        sums = np.bincount(group, ranks * clicked)[both]
        positive, negative = positive[both], negative[both]
        areas = (sums - positive * (positive - 1) / 2) / (positive * negative)
        return float((areas * sizes[both]).sum() / sizes[both].sum())


class LogLoss:
    """Mean of -log of the probability given to what happened, from logits; and how many clicks are foretold."""

    def __init__(self) -> None:
        self.samples = 0
        self._loss = self._clicks = self._foretold = 0.0

    def update(self, logits: ArrayLike, clicked: ArrayLike) -> None:
        z = _scores(logits)
        y = _clicks(clicked, len(z))
        self._loss += float((np.logaddexp(0.0, z) - y * z).sum())
        self._clicks += float(y.sum())
        self._foretold += float(np.exp(-np.logaddexp(0.0, -z)).sum())
        self.samples += len(z)

    def value(self) -> float:
        return self._loss / self.samples if self.samples else float("nan")

    def calibration(self) -> float:
        """Clicks foretold for every click that came; 1 is right."""
        return self._foretold / self._clicks if self._clicks else float("nan")


def _scores(scores: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(scores, np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise ValueError(f"scores: got shape {array.shape}, expected finite numbers [N]; has the model diverged?")
    return array


def _groups(groups: ArrayLike) -> NDArray[np.generic]:
    array = np.asarray(groups)
    if array.dtype == object and all(isinstance(group, str) for group in array.flat):
        array = array.astype(str)
    if array.size and (array.dtype.kind not in "biufSU" or (array.dtype.kind == "f" and not np.isfinite(array).all())):
        raise ValueError(f"groups: got {array.dtype}, expected integers, strings or finite floats, none missing")
    return array


def _clicks(clicked: ArrayLike, count: int) -> NDArray[np.float64]:
    array = np.asarray(clicked, np.float64)
    if array.shape != (count,) or (count and not (array.min() >= 0 and array.max() <= 1)):
        raise ValueError(
            f"clicked: got shape {array.shape}, expected numbers from 0 to 1, one for each of {count} scores"
        )
    return array
