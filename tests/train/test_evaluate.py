"""Evaluation over ranks gives what one rank gives, leaves the model as it was, and fails on all ranks alike."""

import copy
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plsc.comm import CommError, Communicator, Shard, run_ranks
from plsc.data import Pairs, Synthetic, make_pairs, read_pairs
from plsc.train.evaluate import VerificationResult, classify, embed, evaluating, identify, unwrapped, verify
from plsc.train.metrics import THRESHOLDS, fold_accuracy, pair_distances

SAMPLES, CLASSES, SIZE, DIM = 23, 7, 16, 6


class Faces(Synthetic):
    """The made-up data set, with a record of what was read and a sample that cannot be."""

    def __init__(self, num_samples: int = SAMPLES, *, broken: int = -1) -> None:
        super().__init__(num_samples, CLASSES, image_size=SIZE)
        self.read: list[int] = []
        self.broken = broken

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if i == self.broken:
            raise OSError("the disk is gone")
        self.read.append(i)
        return super().__getitem__(i)


@cache
def template() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.PReLU(4), nn.Flatten(), nn.Linear(4 * 7 * 7, DIM))
    net(torch.randn(8, 3, SIZE, SIZE))  # statistics other than 0 and 1
    return net


def make_backbone() -> nn.Module:
    """A copy: ranks are threads, and share torch's random numbers."""
    return copy.deepcopy(template())


class NearestCentre:
    """A head that holds all centres on every rank and notes how it is called."""

    def __init__(self, centres: Tensor, comm: Communicator) -> None:
        self.centres, self.comm, self.num_classes = centres, comm, len(centres)
        self.batches: list[int] = []

    def topk(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        sizes = self.comm.gather_objects(len(embeddings))  # a rank that does not come would leave the others waiting
        assert set(sizes) == {len(embeddings)}
        self.batches.append(len(embeddings))
        scores, classes = (embeddings @ self.centres.T).topk(k)
        return scores, classes


def plain_embeddings(dataset: Synthetic, *, flip: bool) -> Tensor:
    images = torch.stack([torch.from_numpy(dataset[i][0]).permute(2, 0, 1) for i in range(len(dataset))]).float()
    images = (images - 127.5) / 127.5
    backbone = make_backbone().eval()
    with torch.no_grad():
        found: Tensor = backbone(images)
        return found + backbone(images.flip(3)) if flip else found


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(
    ("ranks", "batch_size", "samples"), [(1, 5, 23), (2, 23, 23), (3, 4, 23), (4, 2, 5), (3, 1, 2)]
)
def test_embeddings_are_those_of_one_rank(ranks: int, batch_size: int, samples: int, flip: bool) -> None:
    """The last batch may be partial, and 5 samples on 4 ranks leave one of them none."""
    expected = plain_embeddings(Faces(samples), flip=flip).numpy()

    def body(comm: Communicator) -> tuple[Any, list[int]]:
        dataset = Faces(samples)
        return embed(make_backbone(), dataset, comm=comm, batch_size=batch_size, flip=flip), dataset.read

    for rank, (found, read) in enumerate(run_ranks(ranks, body)):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        shard = Shard(samples, rank, ranks)
        own = read[len(read) - shard.size :]  # the loader may look at one sample before, for the shape
        assert own == list(range(shard.start, shard.stop))


def test_gathering_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.train.evaluate.GATHER_ROWS", 3)
    expected = plain_embeddings(Faces(), flip=True).numpy()
    for found in run_ranks(3, lambda comm: embed(make_backbone(), Faces(), comm=comm, batch_size=8)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    backbone = make_backbone().train()
    backbone[1].eval()  # a frozen part
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    seen: list[tuple[int, int]] = []
    embed(backbone, Faces(5), batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert [part.training for part in backbone] == [True, False, True, True, True] and backbone.training
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in backbone.parameters())
    assert seen == [(2, 5), (4, 5), (5, 5)]
    with pytest.raises(KeyError), evaluating(backbone):
        assert not backbone.training
        raise KeyError
    assert backbone.training and not backbone[1].training


def test_autocast_gives_float32_close_to_full_precision() -> None:
    found = embed(make_backbone(), Faces(), batch_size=9, autocast=torch.bfloat16)
    expected = plain_embeddings(Faces(), flip=True).numpy()
    assert found.dtype == np.float32 and not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())


def test_wrappers_are_taken_off() -> None:
    inner = make_backbone()
    assert unwrapped(nn.DataParallel(inner)) is inner
    compiled = nn.Module()
    compiled._orig_mod = inner  # as torch.compile names it
    assert unwrapped(nn.DataParallel(compiled)) is inner


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    heard: dict[int, str] = {}

    def body(comm: Communicator) -> None:
        try:
            embed(make_backbone(), Faces(broken=20), comm=comm, batch_size=4)
        except (CommError, ValueError) as error:
            heard[comm.rank] = str(error)

    run_ranks(3, body)
    assert "failed on rank 2" in heard[0] and "the disk is gone" in heard[0]
    assert heard[1] == heard[0] and "the disk is gone" in heard[2]


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 23), (3, 5), (4, 2)])
def test_classification(ranks: int, batch_size: int) -> None:
    dataset = Faces()
    dataset.labels[3] = -1
    embeddings = plain_embeddings(dataset, flip=False)
    torch.manual_seed(1)
    centres = torch.randn(CLASSES, DIM)
    order = (embeddings @ centres.T).argsort(1, descending=True).numpy()
    counted = dataset.labels >= 0
    hit = order[counted] == dataset.labels[counted, None]
    expected = {1: hit[:, :1].any(1).mean(), 3: hit[:, :3].any(1).mean(), 9: 1.0}  # 9: more than there are classes

    def body(comm: Communicator) -> tuple[dict[int, float], list[int]]:
        own = Faces()
        own.labels[3] = -1
        head = NearestCentre(centres, comm)
        return classify(make_backbone(), head, own, comm=comm, batch_size=batch_size, ks=(1, 3, 9)), head.batches

    for found, calls in run_ranks(ranks, body):
        assert found == pytest.approx(expected)
        rounds = math.ceil(math.ceil(SAMPLES / ranks) / batch_size)
        assert calls == [batch_size] * rounds


def test_classification_refuses_labels_the_head_has_not() -> None:
    def body(comm: Communicator) -> None:
        classify(make_backbone(), NearestCentre(torch.ones(CLASSES - 1, DIM), comm), Faces(), comm=comm, batch_size=9)

    with pytest.raises((ValueError, CommError), match=r"head's 6"):
        run_ranks(2, body)


def test_classification_with_the_class_parallel_head() -> None:
    nn_package = pytest.importorskip("plsc.nn")
    dataset = Faces()
    embeddings = plain_embeddings(dataset, flip=False)
    centres = torch.nn.functional.normalize(torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(2)))
    order = (embeddings @ centres.T).argsort(1, descending=True).numpy()
    expected = float((order[:, 0] == dataset.labels).mean())

    def body(comm: Communicator) -> dict[int, float]:
        head = nn_package.ClassParallelHead(DIM, CLASSES, comm=comm)
        with torch.no_grad():
            head.weight.copy_(centres[head.shard.start : head.shard.stop])
        return classify(make_backbone(), head, Faces(), comm=comm, batch_size=4)

    for found in run_ranks(3, body):
        assert found[1] == pytest.approx(expected)


def test_verification_of_separable_and_random_embeddings() -> None:
    labels = np.repeat(np.arange(40), 5)
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(40, 16))
    pairs = make_pairs(labels, num_pairs=200, folds=5, seed=1)
    good = verify(centres[labels] + rng.normal(scale=0.1, size=(200, 16)), pairs, fars=(0.01, 1e-6))
    assert good.accuracy > 0.97 and good.auc == 1.0 and len(good.folds) == 5
    assert -1 < good.threshold < 1 and good.num_pairs == 200
    record = good.record()
    assert record["tar@far=0.01"] == 1.0 and record["tar@far=1e-06"] is None
    assert all(value is None or isinstance(value, float) for value in record.values())
    bad = verify(rng.normal(size=(200, 16)), pairs)
    assert 0.3 < bad.accuracy < 0.7 and 0.3 < bad.auc < 0.7


def test_folds_of_one_kind_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """Pairs in 5 folds, same before different in each, cut into 10: the accuracy means nothing then."""
    pairs = make_pairs(np.repeat(np.arange(40), 5), num_pairs=200, folds=5, seed=1)
    verify(np.random.default_rng(0).normal(size=(200, 16)), pairs, folds=10)
    assert "hold pairs of one kind only" in caplog.text


@pytest.mark.parametrize("folds", [5, 10])
def test_embeddings_that_point_one_way_are_pointed_out(folds: int, caplog: pytest.LogCaptureFixture) -> None:
    """All squared distances below 0.01, the second threshold that is tried: 50 % at an AUC of 1."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(60), 4)
    people = rng.normal(size=(60, 16))
    rows = people[labels] + rng.normal(scale=0.1, size=(240, 16))
    pairs = make_pairs(labels, num_pairs=200, folds=folds, seed=1)
    apart = verify(rows, pairs)
    assert apart.accuracy > 0.95 and not caplog.records
    close = rows * 0.01 + 10 * np.eye(16)[0]
    found = verify(close, pairs)
    assert found.accuracy == 0.5 and found.auc > 0.999
    distances = pair_distances(close, pairs.first, pairs.second)
    assert distances.max() < THRESHOLDS[1]
    (record,) = caplog.records
    text = record.getMessage()
    assert getattr(record, "once", False)  # every rank measures every pair
    assert text.startswith("the thresholds tried tell at most 50.00 % of 200 pairs apart, and one at squared distance ")
    edge, best = re.findall(r"squared distance (\S+) would tell (\S+) %", text)[0]
    low, high, inside = re.findall(r"lie from (\S+) to (\S+), where (\d+) of the", text)[0]
    assert float(best) / 100 == ((distances <= float(edge) * (1 + 1e-3)) == pairs.same).mean() > 0.99
    assert 0 <= float(low) < float(edge) < float(high) < 0.01 and inside == "0" and "point almost one way" in text


def test_distances_beyond_the_thresholds_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """Distances of embeddings that nobody normalised, from 100 on: none is below a threshold."""
    same = np.tile([True, False], 50)
    found = fold_accuracy(np.where(same, 100.0, 200.0) + np.arange(100) / 100, same)
    assert found.mean == 0.5
    text = caplog.records[0].getMessage()
    assert "at squared distance 101 would tell 100.00 %" in text and "where 0 of the thresholds lie" in text
    assert text.endswith("those are no distances of unit vectors: normalise the embeddings")


def test_few_pairs_between_two_thresholds_are_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    same = np.tile([True, False], 10)
    distances = np.where(same, 0.5, 1.5)
    distances[:6] = [1.501, 1.502, 1.503, 1.504, 1.505, 1.506]  # three of each kind within one step
    fold_accuracy(distances, same, folds=2)
    assert not caplog.records


def test_verification_of_real_faces(shared: Path) -> None:
    faces = np.load(shared / "data/faces/lfw112_val_mobilefacenet192.npz")
    pairs = read_pairs(shared / "data/faces/val_pairs.txt", faces["names"].tolist())
    found = verify(faces["emb"].astype(np.float32), pairs)
    assert isinstance(found, VerificationResult)
    assert (found.accuracy, found.auc) == (pytest.approx(0.9950, abs=1e-9), pytest.approx(0.99995, abs=5e-6))
    assert found.mean_norm == pytest.approx(1, abs=1e-3)
    people = np.array([name.rsplit("_", 1)[0] for name in faces["names"].tolist()])
    ranks = identify(faces["emb"].astype(np.float32), np.unique(people, return_inverse=True)[1])
    assert 0.97 < ranks[1] <= ranks[5] <= ranks[10] <= 1


def test_identification() -> None:
    rows = np.array([[1.0, 0], [0, 1], [1, 0.1], [0.9, 1], [-1, 0]])
    assert identify(rows, [0, 1, 0, 0, -1], ks=(1, 2)) == {1: 0.5, 2: 1.0}
    with pytest.raises(ValueError, match="two samples of one label"):
        identify(rows, np.arange(5))


def test_errors() -> None:
    with pytest.raises(ValueError, match="batch_size: got 0"):
        embed(make_backbone(), Faces(), batch_size=0)
    with pytest.raises(ValueError, match=r"output of shape \(5, 4, 7, 7\)"):
        embed(make_backbone()[:1], Faces(5))
    everyone = Pairs(np.arange(3), np.arange(3), np.ones(3, dtype=bool), 3)
    with pytest.raises(ValueError, match="3 genuine and 0 impostor"):
        verify(np.eye(3), everyone)
    with pytest.raises(ValueError, match="got 1 fold"):
        verify(np.eye(3), replace(everyone, num_folds=1))
    with pytest.raises(ValueError, match="NaN or infinity"):
        verify(np.full((3, 2), np.nan), everyone)
