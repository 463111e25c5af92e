"""Measures against definitions written out the slow way, against fixed numbers on real faces, and their errors."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.train import metrics


def slow_folds(distances: np.ndarray, issame: np.ndarray, folds: int) -> list[float]:
    """The protocol as it is told: one threshold and one fold at a time."""
    parts = np.array_split(np.arange(len(distances)), folds)
    result = []
    for test in parts:
        train = np.setdiff1d(np.arange(len(distances)), test)
        best, chosen = -1.0, 0.0
        for threshold in np.arange(0, 4, 0.01):
            accuracy = np.mean((distances[train] < threshold) == issame[train])
            if accuracy > best:
                best, chosen = accuracy, threshold
        result.append(np.mean((distances[test] < chosen) == issame[test]))
    return result


@pytest.mark.parametrize(("pairs", "folds"), [(100, 10), (103, 10), (20, 3), (10, 10)])
def test_folds_follow_the_protocol(pairs: int, folds: int) -> None:
    rng = np.random.default_rng(pairs)
    issame = rng.random(pairs) < 0.5
    issame[:2] = True, False
    distances = np.round(rng.normal(np.where(issame, 1.2, 1.9), 0.4).clip(0, 4), 2)  # many lie on a threshold exactly
    found = metrics.fold_accuracy(distances, issame, folds=folds)
    expected = slow_folds(distances, issame, folds)
    assert found.folds == pytest.approx(expected, abs=0)
    assert found.mean == pytest.approx(np.mean(expected)) and found.std == pytest.approx(np.std(expected))


def test_threshold_is_strict_and_first_of_the_best() -> None:
    distances, issame = [0.5] * 4 + [3.0] * 4, [True] * 4 + [False] * 4
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    found = metrics.fold_accuracy(np.array(distances)[order], np.array(issame)[order], folds=4)
    assert found.mean == 1.0 and found.std == 0.0
    assert found.threshold == pytest.approx(0.51)  # 0.50 < 0.50 is false, so 0.51 is the first that accepts


def real_pairs(shared: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Squared distances and kinds of the 2,000 real pairs, and the number of folds."""
    faces = np.load(shared / "data/faces/lfw112_val_mobilefacenet192.npz")
    row = {name.removesuffix(".jpg"): number for number, name in enumerate(faces["names"].tolist())}
    lines = (shared / "data/faces/val_pairs.txt").read_text().splitlines()
    left, right, issame = [], [], []
    for fields in (line.split("\t") for line in lines[1:]):
        first, second = (fields[:2], [fields[0], fields[2]]) if len(fields) == 3 else (fields[:2], fields[2:])
        left.append(row[f"{first[0]}_{int(first[1]):04d}"])
        right.append(row[f"{second[0]}_{int(second[1]):04d}"])
        issame.append(len(fields) == 3)
    return metrics.pair_distances(faces["emb"], left, right), np.array(issame), int(lines[0].split()[0])


def test_real_faces(shared: Path) -> None:
    """Regression values of the InsightFace protocol on these embeddings, agreeing with the slow definition above."""
    distances, issame, folds = real_pairs(shared)
    found = metrics.fold_accuracy(distances, issame, folds=folds)
    assert found.folds == pytest.approx(slow_folds(distances, issame, folds), abs=0)
    assert found.mean == pytest.approx(0.9950, abs=1e-9) and found.std == pytest.approx(0.00866, abs=5e-6)
    assert metrics.auc(1 - distances / 2, issame) == pytest.approx(0.99995, abs=5e-6)
    points = metrics.tar_at_far(1 - distances / 2, issame, [1e-3, 1e-2, 1e-4])
    assert all(point.measured_far <= point.far for point in points[:2])
    assert 0.97 < points[0].tar <= points[1].tar
    assert math.isnan(points[2].tar)  # 1,000 impostor pairs cannot measure one in ten thousand


def test_real_faces_over_a_grid_of_cosines(shared: Path) -> None:
    """The figure published with the data, 0.9955 +- 0.0072, is not that of the InsightFace grid of distances.

    400 cosines from -1 up give it (its author's grid is not recorded, this one was found by trying): which of several
    equally good thresholds is taken moves one pair of the eighth fold.
    """
    distances, issame, folds = real_pairs(shared)
    found = metrics.fold_accuracy(distances, issame, folds=folds, thresholds=2 - 2 * np.linspace(-1, 1, 400))
    assert found.mean == pytest.approx(0.9955, abs=5e-5) and found.std == pytest.approx(0.0072, abs=5e-5)


few = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40).filter(
    lambda pairs: 0 < sum(same for _, same in pairs) < len(pairs)
)


@settings(max_examples=100, deadline=None)
@given(few)
def test_auc_counts_won_comparisons(pairs: list[tuple[int, bool]]) -> None:
    genuine = [score for score, same in pairs if same]
    impostor = [score for score, same in pairs if not same]
    won = sum((g > i) + 0.5 * (g == i) for g in genuine for i in impostor)
    scores, issame = zip(*pairs, strict=True)
    assert metrics.auc(scores, issame) == won / (len(genuine) * len(impostor))


@settings(max_examples=100, deadline=None)
@given(few, st.floats(0.01, 1.0))
def test_tar_is_the_best_whose_far_is_not_exceeded(pairs: list[tuple[int, bool]], far: float) -> None:
    scores, issame = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    (point,) = metrics.tar_at_far(scores, issame, far)
    if math.isnan(point.tar):
        assert 1 / (~issame).sum() > far
        return
    rates = [(np.mean(scores[~issame] >= t), np.mean(scores[issame] >= t)) for t in [*scores, math.inf]]
    assert point.tar == max(tar for measured, tar in rates if measured <= far)
    assert point.measured_far <= far
    assert point.tar == np.mean(scores[issame] >= point.threshold)
    assert point.measured_far == np.mean(scores[~issame] >= point.threshold)


def test_the_threshold_lies_midway_between_scores() -> None:
    """0.75 is accepted and the impostor at 0.25 is not: 0.5. Nothing accepted is inf, everything -inf."""
    scores, issame = [1.0, 0.875, 0.75, 0.25, 0.0], [True, False, True, False, False]
    points = metrics.tar_at_far(scores, issame, [0.34, 0.67, 1.0])
    assert [point.threshold for point in points] == [0.5, 0.125, -math.inf]
    assert [(point.tar, point.measured_far) for point in points] == [(1, 1 / 3), (1, 2 / 3), (1, 1)]
    tied = metrics.tar_at_far([0.9, 0.9, 0.9, 0.1], [True, False, False, False], 0.34)
    assert (tied[0].threshold, tied[0].tar, tied[0].measured_far) == (math.inf, 0, 0)


@pytest.mark.parametrize(
    ("last", "following"), [(1.0, np.nextafter(1.0, 0)), (5e-324, 0.0), (1.0, -math.inf), (1.7e308, 1.6e308)]
)
def test_scores_without_room_between_them(last: float, following: float) -> None:
    (point,) = metrics.tar_at_far([last, last, following], [True, False, False], 0.5)
    assert following < point.threshold <= last and (point.tar, point.measured_far) == (1.0, 0.5)


@settings(max_examples=100, deadline=None)
@given(few, st.floats(0.01, 1.0), st.integers(0, 2**32 - 1))
def test_rounding_of_scores_changes_no_verdict(pairs: list[tuple[int, bool]], far: float, seed: int) -> None:
    scores, issame = np.array([p[0] for p in pairs], np.float64), np.array([p[1] for p in pairs])
    (point,) = metrics.tar_at_far(scores, issame, far)
    if math.isnan(point.tar):
        return
    moved = scores + np.random.default_rng(seed).uniform(-0.499, 0.499, len(scores))  # neighbours are 1 or more apart
    assert np.array_equal(moved >= point.threshold, scores >= point.threshold)
    assert np.mean(moved[~issame] >= point.threshold) == point.measured_far <= far
    assert np.mean(moved[issame] >= point.threshold) == point.tar


def test_far_is_compared_as_a_rate() -> None:
    """0.29 * 100 is 28.999999999999996 in floating point, yet 29 of 100 do not exceed 0.29."""
    scores = np.concatenate([np.arange(100.0), [200.0]])
    (point,) = metrics.tar_at_far(scores, [False] * 100 + [True], 0.29)
    assert point.measured_far == 0.29


def test_roc_runs_from_nothing_to_everything() -> None:
    curve = metrics.roc([0.9, 0.8, 0.8, 0.1], [True, True, False, False])
    assert curve.far.tolist() == [0, 0, 0.5, 1] and curve.tar.tolist() == [0, 0.5, 1, 1]
    assert curve.thresholds.tolist() == [math.inf, 0.9, 0.8, 0.1]
    assert (curve.num_genuine, curve.num_impostor) == (2, 2)


@pytest.mark.parametrize("block", [1, 7, 1024])
def test_ranks_do_not_depend_on_the_block(block: int) -> None:
    rng = np.random.default_rng(0)
    gallery, labels = rng.normal(size=(50, 8)).astype(np.float32), rng.integers(0, 20, 50)
    chosen = rng.integers(0, 50, 30)
    probes, wanted = gallery[chosen] + rng.normal(scale=1.5, size=(30, 8)), labels[chosen]
    cosines = metrics.normalize(probes) @ metrics.normalize(gallery).T
    expected = [
        1 + np.sum(cosines[i][labels != wanted[i]] >= cosines[i][labels == wanted[i]].max()) for i in range(len(probes))
    ]
    assert metrics.ranks(gallery, labels, probes, wanted, block=block).tolist() == expected
    found = metrics.rank_k(gallery, labels, probes, wanted, ks=(1, 5), block=block)
    assert found == {k: np.mean(np.array(expected) <= k) for k in (1, 5)}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_tied_gallery_entries_count_against_the_probe(order: list[int]) -> None:
    vector = np.random.default_rng(1).normal(size=64)
    gallery, labels = np.stack([vector, vector, -vector])[order], np.array([0, 1, 2])[order]
    assert metrics.ranks(gallery, labels, vector[None] * 3, [0], block=2).tolist() == [2]


def test_topk() -> None:
    predictions = [[3, 1, 2], [0, 1, 2], [2, 3, 1], [5, 5, 5]]
    assert metrics.topk_accuracy(predictions, [3, 2, 0, -1], ks=(1, 2, 3)) == {1: 1 / 3, 2: 1 / 3, 3: 2 / 3}


def test_distances_are_of_unit_vectors_and_zero_stays_zero() -> None:
    rows = np.array([[3.0, 0], [0, 0.1], [-7, 0], [0, 0]])
    assert metrics.pair_distances(rows, [0, 0, 0, 3], [0, 1, 2, 0]).tolist() == pytest.approx([0, 2, 4, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.fold_accuracy([0.1] * 9, [True, False, True] * 3), "got 10 for 9 pairs"),
        (lambda: metrics.fold_accuracy([0.1] * 10, [True] * 10), "10 genuine and 0 impostor"),
        (lambda: metrics.auc([0.1, 0.2], [False, False]), "0 genuine and 2 impostor"),
        (lambda: metrics.roc([0.1, math.nan], [True, False]), "1 NaN of 2"),
        (lambda: metrics.auc([0.1, 0.2, 0.3], [True, False]), r"shape \(3,\) with issame \(2,\)"),
        (lambda: metrics.auc([0.1, 0.2], [2, 0]), "expected booleans"),
        (lambda: metrics.tar_at_far([0.1, 0.2], [True, False], 0.0), r"got 0.0, expected a rate in \(0, 1\]"),
        (lambda: metrics.normalize([[1.0], [math.nan]]), "1 of 2 rows.*first: row 1"),
        (lambda: metrics.pair_distances(np.eye(3), [0, 3], [1, 1]), "got rows 0 to 3, expected 0 to 2"),
        (lambda: metrics.pair_distances(np.eye(3), [0], [1, 1]), "1 left and 2 right"),
        (lambda: metrics.ranks(np.eye(3), [0, 1, 2], np.eye(3), [0, 1, 5]), "1 of 3 without.*label 5"),
        (
            lambda: metrics.ranks(np.eye(3), [0, 1, 2], np.ones((1, 2)), [0]),
            "got dimension 2, expected the gallery's 3",
        ),
        (lambda: metrics.topk_accuracy([[1]], [1], ks=(1, 5)), "K >= 5"),
        (lambda: metrics.topk_accuracy([[1]], [-1], ks=(1,)), "no labelled row"),
    ],
)
def test_errors_say_what_was_given(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
