"""Real faces through the service: people it was not trained on are verified and found as offline, to the last pair."""

import json
from pathlib import Path

import numpy as np
import pytest

from plsc import cli
from plsc.data import ImageFolder, read_pairs
from plsc.serve import Client
from plsc.train.evaluate import identify, verify
from plsc.train.export import read_embeddings

from .running import Running

pytestmark = pytest.mark.slow


def test_the_service_gives_the_offline_figures(shared: Path, tmp_path: Path) -> None:
    """A short run, whose quality does not matter: every image is decoded, batched and embedded as in the evaluation."""
    faces = shared / "data" / "faces"
    if not (faces / "lfw112_val.zip").exists():
        pytest.skip("needs the aligned faces of the shared data")
    run = tmp_path / "run"
    flags = ["--data.path", str(faces / "lfw112_train.zip"), "--eval.path", str(faces / "lfw112_val.zip")]
    flags += ["--eval.pairs", str(faces / "val_pairs.txt"), "--max-steps", "25", "--data.image-size", "48"]
    assert cli.train(["faces", "--out", str(run), "--nproc", "1", *flags]) == 0
    result = json.loads((run / "result.json").read_text())
    assert cli.embed([str(run), str(faces / "lfw112_val.zip"), "--out", str(tmp_path / "val.safetensors")]) == 0
    offline = read_embeddings(tmp_path / "val.safetensors")

    data = ImageFolder(faces / "lfw112_val.zip", image_size=48)
    images = [data.encoded(i) for i in range(len(data))]
    with Running(run, "--gallery", str(tmp_path / "val.safetensors")) as server, Client(server.url) as client:
        rows = np.concatenate([client.embed(images[i : i + 16]) for i in range(0, len(images), 16)])
        np.testing.assert_allclose(rows, offline.embeddings, atol=1e-4)

        pairs = read_pairs(faces / "val_pairs.txt", [data.name(i) for i in range(len(data))])
        found = verify(rows, pairs).record()
        for name in ("accuracy", "auc", "tar@far=0.01", "tar@far=0.001"):
            assert found[name] == pytest.approx(result[name], abs=1e-6), name
        for k in range(0, len(pairs), 50):  # the service's own verdict, pair by pair
            first, second = int(pairs.first[k]), int(pairs.second[k])
            answer = client.verify([images[first], images[second]], far=0.01)
            assert answer["same"] == (offline.embeddings[first] @ offline.embeddings[second] >= answer["threshold"])

        labels = np.asarray(data.labels)
        assert identify(rows, labels, ks=(1,))[1] == pytest.approx(result["rank1"], abs=1e-9)
        chosen = np.arange(0, len(images), 29)  # rank-1 over HTTP: the nearest entry but the image itself
        near = [one for i in chosen for one in client.search([images[i]], among="gallery", k=2)]
        cosines = offline.embeddings[chosen] @ offline.embeddings.T
        cosines[np.arange(len(chosen)), chosen] = -2
        assert [int(one[0]["id"]) for one in near] == chosen.tolist()
        assert [int(one[1]["id"]) for one in near] == cosines.argmax(1).tolist()
