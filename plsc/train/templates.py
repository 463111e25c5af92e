"""Recognition by templates, the protocol of IJB-B and IJB-C: several images of a person make one vector.

A template is a set of images, some of them frames of one video (a medium). Its vector is the sum over media of the mean
over a medium's frames, scaled to unit length. Templates are compared one to one (verification) and one to many
(identification), by cosine. Pure functions over numpy arrays, in float64; no matrix of all probes by all gallery
entries is ever held.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from plsc.train.metrics import (
    PAIR_BLOCK,
    TIE,
    Bools,
    Floats,
    Ints,
    OperatingPoint,
    auc,
    labelled_rows,
    normalize,
    roc,
    tar_at_far,
)

FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
FPIRS = (0.01, 0.1)
POOL_ROWS = 32_768  # images whose embeddings are held in float64 at once


@dataclass(frozen=True)
class TemplateMedia:
    """Which template and medium each image belongs to."""

    names: list[str]  # [N] image files
    templates: Ints  # [N]
    media: Ints  # [N]


@dataclass(frozen=True)
class TemplatePairs:
    """Templates to compare one to one."""

    first: Ints  # [P] template numbers
    second: Ints  # [P]
    same: Bools  # [P] true where both show one person


@dataclass(frozen=True)
class Templates:
    """Unit vectors of templates, in the order of their numbers; a template of zeros stays zero."""

    ids: Ints  # [T] rising
    vectors: Floats  # [T, D]

    def rows(self, ids: ArrayLike) -> Ints:
        """Where templates stand  [P]. ValueError for one that has no images."""
        wanted = np.asarray(ids, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        if (unknown := np.flatnonzero(self.ids[at] != wanted)).size:
            raise ValueError(
                f"templates: got {unknown.size} of {len(wanted)} without images (first: template "
                f"{wanted[unknown[0]]}), expected the images of every template; check that the lists belong together"
            )
        return at

    def chosen(self, ids: ArrayLike) -> Floats:
        """Vectors of templates  [P, D]."""
        return self.vectors[self.rows(ids)]


@dataclass(frozen=True)
class TemplateVerification:
    """Verification of template pairs.

    tar keeps the false accept rate asked for (nothing is rounded in the model's favour). tar_nearest takes the point of
    the ROC whose rate is nearest, above or below, as the InsightFace project's published figures do.
    """

    auc: float
    tar: tuple[OperatingPoint, ...]
    tar_nearest: dict[float, float]
    num_pairs: int


@dataclass(frozen=True)
class OpenSetPoint:
    """Share of enrolled probes that are found first and above the threshold, and how often strangers pass it."""

    fpir: float  # asked for
    tpir: float  # nan without strangers or without enrolled probes
    measured_fpir: float
    threshold: float  # a cosine above it counts, strictly


@dataclass(frozen=True)
class Identification:
    """Search of probes in a gallery; probes whose subject is not enrolled are strangers."""

    rank: dict[int, float]  # share of enrolled probes whose subject is among the k best
    open_set: tuple[OpenSetPoint, ...]
    num_enrolled: int
    num_strangers: int


def read_template_media(path: str | os.PathLike[str]) -> TemplateMedia:
    """Reads lines `image template medium` (ijbc_face_tid_mid.txt)."""
    names, numbers = [], []
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for line, text in enumerate(file, 1):
            if fields := text.split():
                if len(fields) != 3:
                    raise ValueError(f"{path}, line {line}: got {text.strip()!r}, expected `image template medium`")
                names.append(fields[0])
                numbers.append((_number(path, line, fields[1]), _number(path, line, fields[2])))
    if not names:
        raise ValueError(f"{path}: got no lines, expected `image template medium`")
    table = np.array(numbers, np.int64)
    return TemplateMedia(names, table[:, 0].copy(), table[:, 1].copy())


def read_template_pairs(path: str | os.PathLike[str]) -> TemplatePairs:
    """Reads lines `template template same`, same being 1 or 0 (ijbc_template_pair_label.txt, 16 million lines)."""
    try:
        table = np.loadtxt(path, np.int64, ndmin=2, comments=None)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}; expected lines `template template 0/1`") from error
    if table.shape[0] == 0 or table.shape[1] != 3:
        raise ValueError(f"{path}: got a table of shape {table.shape}, expected lines `template template 0/1`")
    if (wrong := np.flatnonzero((table[:, 2] != 0) & (table[:, 2] != 1))).size:
        raise ValueError(f"{path}: got {table[wrong[0], 2]} for pair {wrong[0]}, expected 1 (same) or 0")
    return TemplatePairs(table[:, 0].copy(), table[:, 1].copy(), table[:, 2] == 1)


def read_template_subjects(path: str | os.PathLike[str]) -> tuple[Ints, Ints]:
    """Reads a gallery or probe list: a heading, then lines `template,subject,...`, one an image (ijbc_1N_*.csv).

    Returns each template once [T] and its subject [T].
    """
    found: dict[int, int] = {}
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for line, text in enumerate(file, 1):
            fields = text.strip().split(",")
            if line == 1 or fields == [""]:
                continue
            if len(fields) < 2:
                raise ValueError(f"{path}, line {line}: got {text.strip()!r}, expected `template,subject,...`")
            template, subject = _number(path, line, fields[0]), _number(path, line, fields[1])
            if found.setdefault(template, subject) != subject:
                raise ValueError(
                    f"{path}, line {line}: got template {template} of subjects {found[template]} and {subject}, "
                    "expected one"
                )
    if not found:
        raise ValueError(f"{path}: got no lines below the heading, expected `template,subject,...`")
    return np.array(list(found), np.int64), np.array(list(found.values()), np.int64)


def read_landmarks(path: str | os.PathLike[str]) -> tuple[list[str], Floats, Floats]:
    """Reads lines `image x1 y1 ... x5 y5 score` (ijbc_name_5pts_score.txt).

    Returns names [N], the five points of each face [N, 5, 2] in pixels, and the detector's scores [N].
    """
    names, numbers = [], []
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for line, text in enumerate(file, 1):
            if not (fields := text.split()):
                continue
            try:
                values = [float(field) for field in fields[1:]]
            except ValueError:
                values = []
            if len(values) != 11 or not all(map(math.isfinite, values)):
                raise ValueError(f"{path}, line {line}: got {text.strip()!r}, expected an image, 5 points and a score")
            names.append(fields[0])
            numbers.append(values)
    if not names:
        raise ValueError(f"{path}: got no lines, expected an image, 5 points and a score in each")
    table = np.array(numbers)
    return names, table[:, :10].reshape(-1, 5, 2), table[:, 10]


def pool(
    embeddings: ArrayLike, templates: ArrayLike, media: ArrayLike, *, weights: ArrayLike | None = None
) -> Templates:
    """Vectors of templates from embeddings [N, D] of images: mean over a medium, sum over media, unit length.

    Embeddings are taken as they are: not normalised, their length tells quality. weights: [N] factors of the images,
    such as the detector's scores. One medium may stand in several templates.
    """
    rows = np.asarray(embeddings)
    owner, medium = np.asarray(templates, np.int64), np.asarray(media, np.int64)
    factors = np.ones(len(rows)) if weights is None else np.asarray(weights, np.float64)
    if rows.ndim != 2 or len(rows) == 0 or not owner.shape == medium.shape == factors.shape == rows.shape[:1]:
        raise ValueError(
            f"templates: got embeddings {rows.shape}, templates {owner.shape}, media {medium.shape}, weights "
            f"{factors.shape}, expected [N, D] and [N] of one N"
        )
    order = np.lexsort((medium, owner))
    owner, medium = owner[order], medium[order]
    begins = np.append(True, owner[1:] != owner[:-1])  # a template
    starts = np.flatnonzero(begins)
    media_starts = np.flatnonzero(begins | np.append(True, medium[1:] != medium[:-1]))
    ends = np.append(starts[1:], len(rows))
    sums = np.empty((len(starts), rows.shape[1]))
    done = 0
    while done < len(starts):  # as many whole templates as fit
        low = int(starts[done])
        stop = max(done + 1, int(np.searchsorted(ends, low + POOL_ROWS, side="right")))
        high = int(ends[stop - 1])
        chosen = order[low:high]
        values = rows[chosen].astype(np.float64) * factors[chosen, None]  # [n, D]
        first, last = np.searchsorted(media_starts, (low, high))
        cuts = media_starts[first:last]
        counts = np.diff(np.append(cuts, high))
        means = np.add.reduceat(values, cuts - low) / counts[:, None]  # [media, D]
        sums[done:stop] = np.add.reduceat(means, np.searchsorted(cuts, starts[done:stop]))
        done = stop
    return Templates(owner[starts], normalize(sums))


def pair_scores(templates: Templates, pairs: TemplatePairs) -> Floats:
    """Cosines [P] of pairs of templates, a block of pairs at a time."""
    first, second = templates.rows(pairs.first), templates.rows(pairs.second)
    out = np.empty(len(first))
    for start in range(0, len(first), PAIR_BLOCK):
        block = slice(start, start + PAIR_BLOCK)
        out[block] = np.einsum("nd,nd->n", templates.vectors[first[block]], templates.vectors[second[block]])
    return out


def verify_templates(
    templates: Templates, pairs: TemplatePairs, *, fars: Sequence[float] = FARS
) -> TemplateVerification:
    """Verification of pairs of templates (1:1). Raises ValueError for templates without images, pairs of one kind."""
    scores = pair_scores(templates, pairs)
    return TemplateVerification(
        auc=auc(scores, pairs.same),
        tar=tuple(tar_at_far(scores, pairs.same, fars)),
        tar_nearest=tar_at_nearest_far(scores, pairs.same, fars),
        num_pairs=len(scores),
    )


def tar_at_nearest_far(scores: ArrayLike, issame: ArrayLike, fars: Sequence[float] = FARS) -> dict[float, float]:
    """True accept rates at the corners of the ROC whose false accept rate is nearest to those asked for, even if above.

    The rule of the InsightFace project's IJB figures: points on a straight stretch of the curve do not count, of
    equally near rates the higher one is taken, of points with one rate the highest. `tar_at_far` never exceeds a rate.
    """
    curve = roc(scores, issame)
    false = np.rint(curve.far[1:] * curve.num_impostor)  # accepted, from the highest score on
    true = np.rint(curve.tar[1:] * curve.num_genuine)
    corner = np.ones(len(false), dtype=bool)
    if len(false) > 2:
        corner[1:-1] = (np.diff(false, 2) != 0) | (np.diff(true, 2) != 0)
    far = np.append(0, false[corner])[::-1] / curve.num_impostor
    tar = np.append(0, true[corner])[::-1] / curve.num_genuine
    return {float(rate): float(tar[np.argmin(np.abs(far - rate))]) for rate in fars}


def identify_templates(
    gallery: ArrayLike,
    gallery_subjects: ArrayLike,
    probes: ArrayLike,
    probe_subjects: ArrayLike,
    *,
    ks: Sequence[int] = (1, 5, 10),
    fpirs: Sequence[float] = FPIRS,
    block: int = 1024,
) -> Identification:
    """Search of probes [P, D] in a gallery [G, D] with one template a subject (1:N), closed and open set.

    Closed set: rank of the mate among the gallery, ties against it. Open set: the threshold is the k-th highest of the
    strangers' best cosines, k = fpir * strangers rounded down, at least 1; a hit is first and strictly above it.
    """
    if not ks or min(ks) < 1 or not all(0 < rate <= 1 for rate in fpirs):
        raise ValueError(f"got ks={tuple(ks)}, fpirs={tuple(fpirs)}, expected whole numbers from 1 and rates in (0, 1]")
    rank, mate, best_other = search(gallery, gallery_subjects, probes, probe_subjects, block=block)
    enrolled = rank > 0
    strangers = np.sort(best_other[~enrolled])[::-1]
    number = int(enrolled.sum())
    points = []
    for fpir in fpirs:
        if number == 0 or strangers.size == 0:
            points.append(OpenSetPoint(float(fpir), math.nan, math.nan, math.nan))
            continue
        threshold = float(strangers[max(int(strangers.size * fpir) - 1, 0)])
        hits = int(((rank == 1) & (mate > threshold)).sum())
        points.append(OpenSetPoint(float(fpir), hits / number, float((strangers > threshold).mean()), threshold))
    return Identification(
        rank={k: float((rank[enrolled] <= k).mean()) if number else math.nan for k in ks},
        open_set=tuple(points),
        num_enrolled=number,
        num_strangers=int(strangers.size),
    )


def search(
    gallery: ArrayLike, gallery_subjects: ArrayLike, probes: ArrayLike, probe_subjects: ArrayLike, *, block: int = 1024
) -> tuple[Ints, Floats, Floats]:
    """For each probe: rank of its mate (0: not enrolled), the mate's cosine (nan), the best cosine of other subjects.

    Each [P]; the last is -inf where the gallery holds the mate only. Never holds more than [block, block] cosines.
    """
    entries, people = labelled_rows("gallery", gallery, gallery_subjects, called="subjects")
    queries, wanted = labelled_rows("probes", probes, probe_subjects, called="subjects")
    if entries.shape[1] != queries.shape[1]:
        raise ValueError(f"probes: got dimension {queries.shape[1]}, expected the gallery's {entries.shape[1]}")
    order = np.argsort(people, kind="stable")
    entries, people = entries[order], people[order]
    if (twice := np.flatnonzero(people[1:] == people[:-1])).size:
        raise ValueError(f"gallery: got subject {people[twice[0]]} more than once, expected one template a subject")
    at = np.minimum(np.searchsorted(people, wanted), len(people) - 1)
    enrolled = people[at] == wanted
    rank = enrolled.astype(np.int64)
    mate, best_other = np.full(len(queries), math.nan), np.full(len(queries), -math.inf)
    for start in range(0, len(queries), block):
        chosen = slice(start, start + block)
        query, known = normalize(queries[chosen]), enrolled[chosen]  # [b, D]
        own = np.where(known, np.einsum("nd,nd->n", query, normalize(entries[at[chosen]])), math.nan)
        mate[chosen] = own
        for first in range(0, len(entries), block):
            cosines = query @ normalize(entries[first : first + block]).T  # [b, g]
            inside = known & (at[chosen] >= first) & (at[chosen] < first + cosines.shape[1])
            cosines[np.flatnonzero(inside), at[chosen][inside] - first] = -math.inf  # the mate itself
            rank[chosen] += (cosines >= own[:, None] - TIE).sum(axis=1)  # nan: none
            np.maximum(best_other[chosen], cosines.max(axis=1), out=best_other[chosen])
    return rank, mate, best_other


def average(results: Sequence[Identification]) -> Identification:
    """The mean over galleries (G1 and G2, or S1 and S2), rate by rate; thresholds too. ValueError if they differ."""
    if not results or any(
        list(one.rank) != list(results[0].rank)
        or [point.fpir for point in one.open_set] != [point.fpir for point in results[0].open_set]
        for one in results
    ):
        raise ValueError("got results with other ranks or rates, expected the same of each gallery, and one at least")
    points = zip(*(one.open_set for one in results), strict=True)
    return Identification(
        rank={k: _mean([one.rank[k] for one in results]) for k in results[0].rank},
        open_set=tuple(
            OpenSetPoint(
                fpir=each[0].fpir,
                tpir=_mean([point.tpir for point in each]),
                measured_fpir=_mean([point.measured_fpir for point in each]),
                threshold=_mean([point.threshold for point in each]),
            )
            for each in points
        ),
        num_enrolled=sum(one.num_enrolled for one in results),
        num_strangers=sum(one.num_strangers for one in results),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(path: str | os.PathLike[str], line: int, text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise ValueError(f"{path}, line {line}: got {text[:40]!r}, expected a whole number")
    return int(text)
