"""AUC, grouped AUC and log loss against their definitions and against values that scikit-learn 1.9.1 gave."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.train import click_metrics
from plsc.train.click_metrics import Auc, GroupAuc, LogLoss


def by_pairs(scores: np.ndarray, clicked: np.ndarray) -> float:
    """The definition: every (clicked, not clicked) pair, ties half."""
    difference = scores[clicked == 1][:, None] - scores[clicked == 0][None]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    scores = random.normal(size=500).round(1)  # many ties
    return scores, (random.random(500) < 1 / (1 + np.exp(-scores))).astype(int), random.integers(0, 9, 500)


def test_values_of_scikit_learn() -> None:
    """roc_auc_score, the same by group weighted by samples, and log_loss of `drawn(0)`."""
    scores, clicked, groups = drawn(0)
    auc, group_auc, loss = Auc(), GroupAuc(), LogLoss()
    auc.update(scores, clicked)
    group_auc.update(scores, clicked, groups)
    loss.update(scores, clicked)
    assert auc.value() == pytest.approx(SKLEARN[0], abs=1e-12)
    assert group_auc.value() == pytest.approx(SKLEARN[1], abs=1e-12)
    assert loss.value() == pytest.approx(SKLEARN[2], abs=1e-12)


SKLEARN = (0.7772879294618424, 0.7805546205956612, 0.5633941578696615)


@pytest.mark.parametrize("compact_at", [1, 7, 10**9])
def test_batches_do_not_matter(compact_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click_metrics, "COMPACT_AT", compact_at)
    scores, clicked, groups = drawn(1)
    auc, group_auc = Auc(), GroupAuc()
    for some in np.array_split(np.random.default_rng(2).permutation(500), 13):
        auc.update(scores[some], clicked[some])
        group_auc.update(scores[some], clicked[some], groups[some])
    assert auc.value() == pytest.approx(by_pairs(scores, clicked), abs=1e-12)
    assert len(auc) == len(np.unique(scores))  # memory: different scores, not samples
    areas = [by_pairs(scores[groups == g], clicked[groups == g]) for g in range(9)]
    expected = np.average(areas, weights=[(groups == g).sum() for g in range(9)])
    assert group_auc.value() == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 3)), max_size=40))
def test_any_samples(rows: list[tuple[int, bool, int]]) -> None:
    scores, clicked, groups = (np.array([row[i] for row in rows], float) for i in range(3))
    auc, group_auc = Auc(), GroupAuc()
    auc.update(scores, clicked)
    group_auc.update(scores, clicked, groups)
    mixed = [g for g in np.unique(groups) if 0 < clicked[groups == g].mean() < 1]
    if 0 < clicked.sum() < len(rows):
        assert auc.value() == pytest.approx(by_pairs(scores, clicked))
    else:
        assert np.isnan(auc.value())
    if mixed:
        areas = [by_pairs(scores[groups == g], clicked[groups == g]) for g in mixed]
        sizes = [(groups == g).sum() for g in mixed]
        assert group_auc.value() == pytest.approx(np.average(areas, weights=sizes))
    else:
        assert np.isnan(group_auc.value())


@pytest.mark.parametrize("names", [[-5, 2**62], [0.2, 0.7], ["ann", "bob"], [b"a", b"b"], [False, True]])
def test_groups_of_any_kind(names: list) -> None:
    random = np.random.default_rng(0)
    scores, clicked, group = random.normal(size=60), random.integers(0, 2, 60), random.integers(0, 2, 60)
    got = GroupAuc()
    for part in (slice(0, 25), slice(25, 25), slice(25, 60)):
        got.update(scores[part], clicked[part], [names[i] for i in group[part]])
    each = [(by_pairs(scores[group == i], clicked[group == i]), (group == i).sum()) for i in (0, 1)]
    assert got.value() == pytest.approx(sum(auc * count for auc, count in each) / 60)
    got = GroupAuc()
    got.update([0.1], [1], np.array(["ann"], object))
    for wrong in ([1], [float("nan")], [None]):
        with pytest.raises(ValueError, match="groups"):
            got.update([0.1], [1], wrong)


def test_best_auc_from_true_chances() -> None:
    chances = np.random.default_rng(3).random(400).round(2)
    auc = Auc()
    auc.update(chances, chances)
    wins = (chances[:, None] > chances) + 0.5 * (chances[:, None] == chances)
    weights = chances[:, None] * (1 - chances)
    assert auc.value() == pytest.approx((wins * weights).sum() / weights.sum(), abs=1e-12)


def test_log_loss_of_extreme_logits() -> None:
    loss = LogLoss()
    loss.update([1000.0, -1000.0, 0.0], [1, 1, 0])
    assert loss.value() == pytest.approx((0 + 1000 + np.log(2)) / 3)
    assert loss.calibration() == pytest.approx(1.5 / 2)


def test_bad_input() -> None:
    for metric in (Auc(), LogLoss()):
        with pytest.raises(ValueError, match="finite"):
            metric.update([0.0, np.nan], [0, 1])
        with pytest.raises(ValueError, match="one for each of 2"):
            metric.update([0.0, 1.0], [0, 1, 1])
        with pytest.raises(ValueError, match="from 0 to 1"):
            metric.update([0.0, 1.0], [-1, 1])
    with pytest.raises(ValueError, match="groups"):
        GroupAuc().update([0.0, 1.0], [0, 1], [1])
