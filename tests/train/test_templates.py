"""Templates: pooling, one-to-one and one-to-many against slow definitions, the lists of the protocol."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.train.metrics import Floats, Ints, rank_k
from plsc.train.templates import (
    TemplatePairs,
    Templates,
    average,
    identify_templates,
    pair_scores,
    pool,
    read_landmarks,
    read_template_media,
    read_template_pairs,
    read_template_subjects,
    search,
    tar_at_nearest_far,
    verify_templates,
)


def slow_pool(embeddings: Floats, templates: Ints, media: Ints) -> Floats:
    """The protocol's words, one template and medium at a time."""
    out = []
    for template in np.unique(templates):
        total = np.zeros(embeddings.shape[1])
        for medium in np.unique(media[templates == template]):
            total += embeddings[(templates == template) & (media == medium)].mean(axis=0)
        out.append(total / np.linalg.norm(total))
    return np.array(out)


def slow_open_set(similarity: Floats, people: Ints, wanted: Ints, fpir: float) -> tuple[float, float]:
    """TPIR and threshold from the whole matrix of cosines [P, G]."""
    mates, others, strangers = [], [], []
    for row, subject in zip(similarity, wanted, strict=True):
        if subject in people:
            mates.append(row[people == subject][0])
            others.append(max(row[people != subject], default=-math.inf))
        else:
            strangers.append(row.max())
    ordered = sorted(strangers, reverse=True)
    threshold = ordered[max(int(len(ordered) * fpir) - 1, 0)]
    return float(np.mean([m > o and m > threshold for m, o in zip(mates, others, strict=True)])), threshold


def slow_nearest(scores: Floats, same: np.ndarray, rate: float) -> float:
    """Every corner of the ROC, from the last to the first; the first of the nearest."""
    points = [(0, 0)]
    for threshold in sorted(set(scores.tolist()), reverse=True):
        points.append((int((~same & (scores >= threshold)).sum()), int((same & (scores >= threshold)).sum())))
    inner = points[1:]
    kept = [points[0]]
    for k, (false, true) in enumerate(inner):
        if 0 < k < len(inner) - 1:
            before, after = inner[k - 1], inner[k + 1]
            if (false - before[0], true - before[1]) == (after[0] - false, after[1] - true):
                continue
        kept.append((false, true))
    kept.reverse()
    distances = [abs(false / int((~same).sum()) - rate) for false, _ in kept]
    return kept[distances.index(min(distances))][1] / int(same.sum())


# Pooling


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 9))
def test_pool_is_mean_over_frames_sum_over_media(seed: int, images: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    embeddings = rng.normal(size=(images, 5)).astype(np.float32) + 0.1
    templates, media = rng.integers(0, 9, images) * 7, rng.integers(0, 4, images)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plsc.train.templates.POOL_ROWS", rows)
        pooled = pool(embeddings, templates, media)
    assert (pooled.ids == np.unique(templates)).all()
    np.testing.assert_allclose(pooled.vectors, slow_pool(embeddings.astype(float), templates, media), atol=1e-12)


def test_pool_by_hand() -> None:
    """Two frames of medium 1 count as one image: (0, 2) + (4, 0) and not (0, 1) + (0, 3) + (4, 0)."""
    pooled = pool([[0.0, 1.0], [4.0, 0.0], [0.0, 3.0], [0.0, -5.0]], [8, 8, 8, 3], [1, 2, 1, 1])
    assert pooled.ids.tolist() == [3, 8]
    np.testing.assert_allclose(pooled.vectors, [[0, -1], [4 / 20**0.5, 2 / 20**0.5]])
    weighted = pool([[2.0, 0.0], [0.0, 1.0]], [1, 1], [1, 2], weights=[0.5, 0.25])
    np.testing.assert_allclose(weighted.vectors, [[1 / 1.0625**0.5, 0.25 / 1.0625**0.5]])


def test_pool_refuses() -> None:
    with pytest.raises(ValueError, match="of one N"):
        pool([[1.0, 0.0]], [1, 2], [1])
    with pytest.raises(ValueError, match="of one N"):
        pool([[1.0, 0.0]], [1], [1], weights=[1.0, 1.0])
    with pytest.raises(ValueError, match="of one N"):
        pool(np.empty((0, 2)), [], [])
    with pytest.raises(ValueError, match="NaN"):
        pool([[1.0, math.nan]], [1], [1])


# One to one


def test_pairs_are_compared_by_template_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.train.templates.PAIR_BLOCK", 2)
    templates = Templates(np.array([2, 5, 9]), np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))
    pairs = TemplatePairs(np.array([9, 2, 5]), np.array([5, 9, 5]), np.array([True, False, True]))
    np.testing.assert_allclose(pair_scores(templates, pairs), [0.8, 0.0, 1.0])
    result = verify_templates(templates, pairs, fars=[1e-4, 1.0])
    assert result.auc == 1.0 and result.num_pairs == 3
    assert math.isnan(result.tar[0].tar) and result.tar[1].tar == 1.0  # one impostor cannot measure 1e-4
    assert result.tar_nearest == {1e-4: 1.0, 1.0: 1.0}
    for unknown in (1, 4, 10):
        with pytest.raises(ValueError, match=f"template {unknown}"):
            templates.rows([2, unknown])
    assert templates.chosen([9, 2]).tolist() == [[0.0, 1.0], [1.0, 0.0]]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(2, 60), st.sampled_from([4, 1000]), st.sampled_from([0.01, 0.1, 0.25, 0.5, 1.0])
)
def test_nearest_rate_is_that_of_the_corners(seed: int, count: int, levels: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    same = rng.random(count) < 0.5
    same[:2] = [True, False]
    scores = rng.integers(0, levels, count) / levels + 0.3 * same
    assert tar_at_nearest_far(scores, same, [rate]) == {rate: slow_nearest(scores, same, rate)}


def test_nearest_rate_may_exceed_the_one_asked_for() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    same = np.array([True, False, True, False, False])
    assert tar_at_nearest_far(scores, same, [0.2]) == {0.2: 1.0}  # at 1/3, nearer than 0


# One to many


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(2, 40), st.sampled_from([1, 3, 1024]))
def test_search_equals_the_whole_matrix(seed: int, entries: int, count: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    people = rng.permutation(20)[:entries]
    wanted = rng.integers(0, 20, count)
    wanted[:2] = people[0], 99
    gallery, probes = rng.normal(size=(entries, 4)), rng.normal(size=(count, 4))
    gallery /= np.linalg.norm(gallery, axis=1, keepdims=True)
    probes /= np.linalg.norm(probes, axis=1, keepdims=True)
    similarity = probes @ gallery.T
    rank, mate, other = search(gallery, people, probes, wanted, block=block)
    for p, subject in enumerate(wanted):
        own, rest = similarity[p, people == subject], similarity[p, people != subject]
        assert rank[p] == (1 + (rest > own[0]).sum() if own.size else 0)
        assert math.isnan(mate[p]) if not own.size else mate[p] == pytest.approx(own[0])
        assert other[p] == pytest.approx(max(rest, default=-math.inf))
    result = identify_templates(gallery, people, probes, wanted, fpirs=(0.01, 0.1, 0.6), block=block)
    for point in result.open_set:
        tpir, threshold = slow_open_set(similarity, people, wanted, point.fpir)
        assert point.tpir == pytest.approx(tpir) and point.threshold == pytest.approx(threshold)
        assert point.measured_fpir <= point.fpir
    known = np.isin(wanted, people)
    assert result.num_enrolled == known.sum() and result.num_strangers == (~known).sum()
    assert result.rank == pytest.approx(rank_k(gallery, people, probes[known], wanted[known]))


def test_open_set_by_hand() -> None:
    """Strangers' best: .9 .8 .. .0; at 20 % the second highest, and equal to it is no hit."""
    gallery = np.eye(2)
    angles = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05])
    strangers = np.stack([angles, -np.sqrt(1 - angles**2)], axis=1)
    enrolled = np.array([[0.8, -0.6], [0.95, -((1 - 0.95**2) ** 0.5)], [0.6, 0.8]])
    probes, wanted = np.concatenate([enrolled, strangers]), np.array([1, 1, 1, *range(50, 60)])
    result = identify_templates(gallery, [1, 2], probes, wanted, ks=(1, 2), fpirs=(0.2, 0.1))
    assert [point.threshold for point in result.open_set] == pytest.approx([0.8, 0.9])
    assert [point.tpir for point in result.open_set] == pytest.approx([1 / 3, 1 / 3])
    assert [point.measured_fpir for point in result.open_set] == [0.1, 0.0]
    assert result.rank == {1: pytest.approx(2 / 3), 2: 1.0}


def test_ties_count_against_the_mate() -> None:
    rank, _, _ = search([[1.0, 0.0], [1.0, 0.0]], [1, 2], [[2.0, 0.0]], [2])
    assert rank.tolist() == [2]


def test_average_of_two_galleries() -> None:
    probes, wanted = np.array([[1.0, 0.1], [0.1, 1.0], [1.0, 1.0]]), np.array([1, 2, 3])
    both = [identify_templates(np.eye(2)[[k]], [k + 1], probes, wanted, ks=(1,), fpirs=(0.5,)) for k in (0, 1)]
    mean = average(both)
    assert mean.rank == {1: 1.0} and mean.num_enrolled == 2 and mean.num_strangers == 4
    assert mean.open_set[0].threshold == pytest.approx(
        (both[0].open_set[0].threshold + both[1].open_set[0].threshold) / 2
    )
    with pytest.raises(ValueError, match="other ranks"):
        average([both[0], identify_templates(np.eye(2), [1, 2], probes, wanted, ks=(5,), fpirs=(0.5,))])
    with pytest.raises(ValueError, match="one at least"):
        average([])


def test_without_strangers_or_enrolled() -> None:
    nobody = identify_templates(np.eye(2), [1, 2], np.eye(2), [8, 9])
    assert math.isnan(nobody.rank[1]) and math.isnan(nobody.open_set[0].tpir)
    everybody = identify_templates(np.eye(2), [1, 2], np.eye(2), [1, 2])
    assert everybody.rank[1] == 1.0 and math.isnan(everybody.open_set[0].tpir)


def test_search_refuses() -> None:
    one = [[1.0, 0.0]]
    for arguments, message in (
        (([*one, *one], [3, 3], one, [1]), "subject 3 more than once"),
        ((one, [3], [[1.0]], [1]), "dimension 1"),
        ((one, [3, 4], one, [1]), "expected"),
        ((np.empty((0, 2)), [], one, [1]), "got none"),
    ):
        with pytest.raises(ValueError, match=message):
            search(*arguments)
    with pytest.raises(ValueError, match="fpirs"):
        identify_templates(one, [1], one, [1], fpirs=(0.0,))


# The lists


def test_protocol_from_files(tmp_path: Path) -> None:
    """Images of three people, through every list, as a user would."""
    (tmp_path / "media.txt").write_text("1.jpg 10 1\n2.jpg 10 1\n3.jpg 11 2\n4.jpg 12 -3\n5.jpg 13 4\n")
    (tmp_path / "pairs.txt").write_text("10 11 1\n10 12 0\n")
    (tmp_path / "gallery.csv").write_text("TEMPLATE_ID,SUBJECT_ID,FILENAME\n10,1,1.jpg\n10,1,2.jpg\n12,2,4.jpg\n")
    (tmp_path / "probes.csv").write_text("TEMPLATE_ID,SUBJECT_ID\n11,1\n13,7\n")
    (tmp_path / "points.txt").write_text("".join(f"{k}.jpg {' '.join(map(str, range(10)))} 0.5\n" for k in range(1, 6)))
    media = read_template_media(tmp_path / "media.txt")
    names, points, scores = read_landmarks(tmp_path / "points.txt")
    assert names == media.names and points.shape == (5, 5, 2) and points[0, 1].tolist() == [2, 3]
    embeddings = np.array([[1, 0.1, 0], [1, -0.1, 0], [0.9, 0, 0.1], [0, 1, 0], [0.2, 0, 1]])
    templates = pool(embeddings, media.templates, media.media, weights=scores)
    result = verify_templates(templates, read_template_pairs(tmp_path / "pairs.txt"), fars=[1.0])
    assert result.auc == 1.0
    gallery, people = read_template_subjects(tmp_path / "gallery.csv")
    probes, wanted = read_template_subjects(tmp_path / "probes.csv")
    assert gallery.tolist() == [10, 12] and people.tolist() == [1, 2]
    found = identify_templates(templates.chosen(gallery), people, templates.chosen(probes), wanted)
    assert found.rank[1] == 1.0 and (found.num_enrolled, found.num_strangers) == (1, 1)
    assert found.open_set[0].tpir == 1.0


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_template_media, "a.jpg 1 2\nb.jpg 1\n", "line 2"),
        (read_template_media, "a.jpg 1 x\n", "line 1.*'x'"),
        (read_template_media, "\n", "no lines"),
        (read_template_pairs, "1 2 1\n1 2\n", "expected lines"),
        (read_template_pairs, "1 2\n", "shape"),
        (read_template_pairs, "1 2 1\n1 2 2\n", "got 2 for pair 1"),
        (read_template_pairs, "1 x 1\n", "expected lines"),
        (read_template_subjects, "T,S\n1\n", "line 2"),
        (read_template_subjects, "T,S\n1,2\n1,3\n", "line 3.*subjects 2 and 3"),
        (read_template_subjects, "T,S\n", "no lines"),
        (read_landmarks, "a.jpg 1 2 3\n", "line 1"),
        (read_landmarks, "a.jpg 1 2 3 4 5 6 7 8 9 10 nan\n", "line 1"),
        (read_landmarks, "", "no lines"),
    ],
)
def test_wrong_lists_are_named(tmp_path: Path, read: object, content: str, message: str) -> None:
    (tmp_path / "list").write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "list")  # type: ignore[operator]
