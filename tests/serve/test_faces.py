"""Real faces through the service: people it was not trained on are verified and found as offline, to the last pair."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plsc import cli
from plsc.data import ImageFolder, Pairs, read_pairs
from plsc.serve import Client
from plsc.serve.bundle import Threshold, write_bundle
from plsc.train.evaluate import identify, verify
from plsc.train.export import export_centres, export_onnx, model_digest, read_embeddings
from plsc.train.metrics import auc, fold_accuracy, tar_at_far

from .running import Running

pytestmark = pytest.mark.slow


@pytest.fixture
def faces(shared: Path) -> Path:
    found = shared / "data" / "faces"
    if not (found / "lfw112_val.zip").exists():
        pytest.skip("needs the aligned faces of the shared data")
    return found


def judged(scores: list[float], pairs: Pairs) -> dict[str, float]:
    """The figures of an evaluation, from cosines that the service answered."""
    cosines = np.array(scores)
    found = {
        "accuracy": fold_accuracy(2 - 2 * cosines, pairs.same, folds=pairs.num_folds).mean,
        "auc": auc(cosines, pairs.same),
    }
    return found | {f"tar@far={one.far:g}": one.tar for one in tar_at_far(cosines, pairs.same, [1e-2, 1e-3])}


def check_verdicts(
    client: Client, rows: np.ndarray, pairs: Pairs, scores: list[float], result: Mapping[str, float | None]
) -> None:
    """At every rate of the bundle the service's verdicts are those of the evaluation: no pair more, none less.

    It is asked about the pairs that are near the threshold; the others have the scores it answered before.
    """
    limits = client.model()["thresholds"]
    assert [one["far"] for one in limits] == [1e-2, 1e-3]
    for far, threshold in ((one["far"], one["threshold"]) for one in limits):
        same = np.array(scores) >= threshold
        near = np.argsort(np.abs(np.array(scores) - threshold))[:50]
        for at in near.tolist():
            same[at] = client.verify(embeddings=rows[[pairs.first[at], pairs.second[at]]], far=far)["same"]
        assert same[pairs.same].mean() == pytest.approx(result[f"tar@far={far:g}"], abs=1e-12), far
        assert same[~pairs.same].mean() == pytest.approx(far, abs=1e-12), far  # no ties: as many as may be


def test_the_service_gives_the_offline_figures(faces: Path, tmp_path: Path) -> None:
    """A short run, whose quality does not matter: every image is decoded, batched and embedded as in the evaluation."""
    run = tmp_path / "run"
    flags = ["--data.path", str(faces / "lfw112_train.zip"), "--eval.path", str(faces / "lfw112_val.zip")]
    flags += ["--eval.pairs", str(faces / "val_pairs.txt"), "--max-steps", "25", "--data.image-size", "48"]
    assert cli.train(["faces", "--out", str(run), "--nproc", "1", *flags]) == 0
    result = json.loads((run / "result.json").read_text())
    assert cli.embed([str(run), str(faces / "lfw112_val.zip"), "--out", str(tmp_path / "val.safetensors")]) == 0
    offline = read_embeddings(tmp_path / "val.safetensors")

    data = ImageFolder(faces / "lfw112_val.zip", image_size=48)
    images, labels = [data.encoded(i) for i in range(len(data))], np.asarray(data.labels)
    with Running(run, "--gallery", str(tmp_path / "people"), "--delay-ms", "0") as server, Client(server.url) as client:
        rows = np.concatenate([client.embed(images[i : i + 16]) for i in range(0, len(images), 16)])
        np.testing.assert_allclose(rows, offline.embeddings, atol=1e-4)

        pairs = read_pairs(faces / "val_pairs.txt", [data.name(i) for i in range(len(data))])
        answers = [
            client.verify([images[first], images[second]], far=0.01)
            for first, second in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
        ]
        for name, value in judged([one["score"] for one in answers], pairs).items():
            assert value == pytest.approx(result[name], abs=1e-6 if name == "auc" else 1e-12), name
        accepted = np.array([one["same"] for one in answers])  # the service's own verdict, with its own threshold
        assert accepted[pairs.same].mean() == pytest.approx(result["tar@far=0.01"], abs=1e-12)
        assert accepted[~pairs.same].mean() == pytest.approx(0.01, abs=1e-12)
        check_verdicts(client, rows, pairs, [one["score"] for one in answers], result)

        # Rank-1 as the evaluation has it: a gallery of the first image of each person, all others search in it.
        firsts = np.sort(np.unique(labels, return_index=True)[1])
        for i in firsts.tolist():
            client.add(str(labels[i]), [images[i]])
        others = np.setdiff1d(np.arange(len(images)), firsts)
        near = []
        for start in range(0, len(others), 16):
            asked = [images[i] for i in others[start : start + 16]]
            near += [one[0]["name"] for one in client.search(asked, among="gallery", k=1)]
        assert (np.array(near) == labels[others].astype(str)).mean() == pytest.approx(result["rank1"], abs=1e-12)

    with Running(run, "--gallery", str(tmp_path / "val.safetensors")) as server, Client(server.url) as client:
        chosen = np.arange(0, len(images), 29)  # what plsc-embed wrote is a gallery: the nearest entry is the image
        found = [one for i in chosen for one in client.search([images[i]], among="gallery", k=2)]
        cosines = offline.embeddings[chosen] @ offline.embeddings.T
        cosines[np.arange(len(chosen)), chosen] = -2
        assert [int(one[0]["id"]) for one in found] == chosen.tolist()
        assert [int(one[1]["id"]) for one in found] == cosines.argmax(1).tolist()


class Wide(nn.Module):
    """Embeddings as wide as those of the other network; nobody asks for one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(4 * 14 * 14, dim))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.net(images)
        return found


def test_embeddings_of_another_network(faces: Path, tmp_path: Path) -> None:
    """A well trained face network of others, whose embeddings the data bring: rank-1 and verification as offline."""
    known = np.load(faces / "lfw112_val_mobilefacenet192.npz")
    rows, names = known["emb"].astype(np.float32), known["names"].tolist()
    people = np.array([name.rsplit("_", 1)[0] for name in names])
    labels = np.unique(people, return_inverse=True)[1]
    pairs = read_pairs(faces / "val_pairs.txt", names)

    torch.manual_seed(0)
    net = Wide(rows.shape[1]).eval()
    export_onnx(net, tmp_path / "model.onnx", image_size=112)
    export_centres(tmp_path / "centres.safetensors", rows[:8], digest=model_digest(net))
    given = {"onnx": tmp_path / "model.onnx", "centres": tmp_path / "centres.safetensors"}
    points = verify(rows, pairs).tar
    limits = [Threshold(p.threshold, p.far, p.measured_far, p.tar) for p in points if np.isfinite(p.threshold)]
    about = {"name": "wide", "plsc_version": "0", "flip": False, "thresholds": limits}
    bundle = write_bundle(tmp_path / "bundle", **about, **given)
    with (
        Running(bundle, "--gallery", str(tmp_path / "people"), "--delay-ms", "0") as server,
        Client(server.url) as client,
    ):
        at = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
        scores = [client.verify(embeddings=rows[[first, second]])["score"] for first, second in at]
        offline = verify(rows, pairs).record()
        for name, value in judged(scores, pairs).items():
            assert value == pytest.approx(offline[name], abs=1e-6 if name == "auc" else 1e-12), name
        check_verdicts(client, rows, pairs, scores, offline)
        firsts = np.sort(np.unique(labels, return_index=True)[1])
        for i in firsts.tolist():
            client.add(people[i], embeddings=rows[i : i + 1])
        others = np.setdiff1d(np.arange(len(rows)), firsts)
        near = [
            one[0]["name"]
            for start in range(0, len(others), 16)
            for one in client.search(embeddings=rows[others[start : start + 16]], among="gallery", k=1)
        ]
    rank1 = float((np.array(near) == people[others]).mean())
    assert rank1 == pytest.approx(identify(rows, labels, ks=(1,))[1], abs=1e-12) and rank1 > 0.97
