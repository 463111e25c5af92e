"""Verification pairs: LFW's format and pairs drawn from labels."""

from pathlib import Path

import numpy as np
import pytest

from plsc.data import ImageFolder, Pairs, make_pairs, read_pairs

NAMES = [f"{person}/{person}_{i:04d}.jpg" for person in ("Ann", "Bob", "Cy") for i in (1, 2, 3)]
LINES = ["2\t1", "Ann\t1\t3", "Ann\t2\tBob\t1", "Cy 1 2", "", "Bob 3 Cy 3"]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("names", [NAMES, [name.split("/")[1] for name in NAMES]])
def test_lfw_format(tmp_path: Path, names: list[str]) -> None:
    pairs = read_pairs(write(tmp_path / "pairs.txt", LINES), names)
    assert pairs.first.tolist() == [0, 1, 6, 5] and pairs.second.tolist() == [2, 3, 7, 8]
    assert pairs.same.tolist() == [True, False, True, False] and pairs.num_folds == 2 and len(pairs) == 4


def test_one_fold_format(tmp_path: Path) -> None:
    pairs = read_pairs(write(tmp_path / "pairs.txt", ["2", "Ann 1 3", "Ann 1 2", "Cy 1 Ann 2", "Cy 2 Bob 2"]), NAMES)
    assert pairs.num_folds == 1 and pairs.same.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "expected a first line"),
        (["Ann 1 3"], "expected a first line"),
        (LINES[:-1], "got 3 pairs, expected 2 folds of 1"),
        ([*LINES[:3], "Cy one 2", LINES[-1]], "line 4: got 'Cy one 2'"),
        ([*LINES[:3], "Cy 1 2 3 4", LINES[-1]], "line 4"),
        ([*LINES[:3], "Cy 1 9", LINES[-1]], "1 images are not in the data set: Cy_0009"),
        ([LINES[0], LINES[1], LINES[3], LINES[2], LINES[5]], "a fold has not 1 pairs of each kind"),
    ],
)
def test_wrong_files(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs(write(tmp_path / "pairs.txt", lines), NAMES)


def check(pairs: Pairs, labels: np.ndarray, num_pairs: int, folds: int) -> None:
    assert len(pairs) == num_pairs and pairs.num_folds == folds
    assert (labels[pairs.first] >= 0).all() and (labels[pairs.second] >= 0).all()
    assert ((labels[pairs.first] == labels[pairs.second]) == pairs.same).all()
    assert (pairs.first != pairs.second).all()
    people = []
    for fold in np.split(np.arange(num_pairs), folds):
        assert pairs.same[fold].sum() == len(fold) // 2
        people.append(set(labels[pairs.first[fold]]) | set(labels[pairs.second[fold]]))
    assert sum(map(len, people)) == len(set().union(*people))


def test_drawn_pairs() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 80, 600)
    labels[:200] = 5  # one class with many images
    pairs = make_pairs(labels, num_pairs=400, folds=5, seed=3)
    check(pairs, labels, 400, 5)
    assert len({frozenset(pair) for pair in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)}) == 400
    assert (labels[pairs.first[pairs.same]] == 5).sum() <= 10  # the large class does not fill a fold
    again, other = (
        make_pairs(labels, num_pairs=400, folds=5, seed=3),
        make_pairs(labels, num_pairs=400, folds=5, seed=4),
    )
    assert (again.first == pairs.first).all() and (again.second == pairs.second).all()
    assert not (other.first == pairs.first).all()


def test_drawing_every_pair_there_is() -> None:
    labels = np.repeat(np.arange(4), 3)  # each fold: 2 classes of 3 images, 6 pairs of one class, 9 of two
    check(make_pairs(labels, num_pairs=24, folds=2), labels, 24, 2)
    with pytest.raises(ValueError, match="fold 0 has 6 pairs of one class, expected 7"):
        make_pairs(labels, num_pairs=28, folds=2)


def test_too_few_or_uneven() -> None:
    with pytest.raises(ValueError, match="multiple of 2"):
        make_pairs(np.arange(4), num_pairs=30, folds=10)
    with pytest.raises(ValueError, match="0 pairs of one class"):
        make_pairs(np.arange(100), num_pairs=20)
    with pytest.raises(ValueError, match="0 pairs of two classes"):
        make_pairs(np.zeros(100, int), num_pairs=2, folds=1)
    with pytest.raises(ValueError, match="0 pairs of one class"):
        make_pairs(np.full(3, -1), num_pairs=2, folds=1)


def test_real_pairs(shared: Path) -> None:
    faces = shared / "data/faces"
    dataset = ImageFolder(faces / "lfw112_val.zip")
    pairs = read_pairs(faces / "val_pairs.txt", dataset.names)
    check(pairs, dataset.labels, 2000, 10)
    # Embeddings of a known network, in the order of the archive: the pairs must come out as it tells them apart.
    known = np.load(faces / "lfw112_val_mobilefacenet192.npz")
    assert list(known["names"]) == list(dataset.names)
    embedding = known["emb"].astype(np.float32)
    cosine = (embedding[pairs.first] * embedding[pairs.second]).sum(1)
    assert max(((cosine > t) == pairs.same).mean() for t in np.linspace(0, 1, 101)) > 0.99


def test_a_container_without_names_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"8 images are not in .*'v\.rec, key 0' and so on.*\.rec has no names"):
        read_pairs(write(tmp_path / "pairs.txt", LINES), [f"v.rec, key {k}" for k in range(9)])
