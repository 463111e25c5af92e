"""plsc-data and plsc-embed as users start them: what is printed, what is written, how they fail."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc import cli
from plsc.data import open_images
from plsc.train.export import read_embeddings

RECIPE = """
epochs = 1
batch_size = 8
export = false
[data]
path = "{faces}"
image_size = 16
workers = 0
augment = "light"
[model]
backbone = "smallconv"
embedding_size = 8
[head]
margin = "cosface"
[eval]
task = "none"
"""


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures of 8 people."""
    root = tmp_path_factory.mktemp("data") / "faces"
    for k in range(40):
        path = root / f"P{k // 5}" / f"P{k // 5}_{k % 5 + 1:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(k).integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    return root


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.data([]) == 2 and cli.data(["verify"]) == 2 and cli.data(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("verify", "stats", "convert", "split", "pairs"))
    assert cli.embed([]) == 2 and cli.embed(["run"]) == 2 and cli.embed(["--help"]) == 0
    assert "usage: plsc-embed RUN DATA" in capsys.readouterr().out


def test_verify_tells_by_its_exit_code(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.data(["verify", str(faces)]) == 0
    assert "nothing that would stop or spoil training" in capsys.readouterr().out
    assert cli.data(["convert", str(faces), str(tmp_path / "x")]) == 0
    (tmp_path / "x/P0/P0_0001.jpg").write_bytes(b"hello")
    assert cli.data(["verify", str(tmp_path / "x")]) == 1
    out = capsys.readouterr().out
    assert "1 images cannot be read: training draws others" in out and "P0/P0_0001.jpg" in out
    assert cli.data(["stats", str(tmp_path / "x")]) == 0
    assert "40 images, 8 classes; a class has 5 to 5" in capsys.readouterr().out


def test_convert_split_pairs(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rec, tar, test, pairs = (str(tmp_path / name) for name in ("a.rec", "train.tar", "test", "pairs.txt"))
    assert cli.data(["convert", str(faces), rec]) == 0
    assert cli.data(["split", rec, tar, test, "--share", "0.5"]) == 0
    assert cli.data(["pairs", test, pairs, "--num-pairs", "8", "--folds", "2"]) == 0
    assert "(4 classes)" in capsys.readouterr().out
    assert open_images(tar).num_classes == 4 and Path(pairs).read_text().startswith("2\t2\n")
    for args, words in (
        (["convert", rec, tar], "exists already"),
        (["verify", str(tmp_path / "gone")], "check the path"),
        (["pairs", rec, pairs], "pairs of one class"),
        (["convert", rec, str(tmp_path / "x.bin")], "only read"),
    ):
        assert cli.data(args) == 2
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err


def test_embed_writes_rows_in_order(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=faces))
    run, tar = str(tmp_path / "run"), str(tmp_path / "v.tar")
    assert cli.train([str(tmp_path / "r.toml"), "--out", run]) == 0
    assert cli.data(["convert", str(faces), tar]) == 0
    capsys.readouterr()
    assert cli.embed([run, tar]) == 0
    assert f"written: {run}/export/v.safetensors" in capsys.readouterr().out
    found = read_embeddings(Path(run, "export/v.safetensors"))
    assert found.embeddings.shape == (40, 8) and found.labels.tolist() == open_images(tar).labels.tolist()
    assert found.names is not None and found.names[7] == "P1/P1_0003.jpg"
    parquet = pytest.importorskip("pyarrow.parquet")
    out = str(tmp_path / "e.parquet")
    assert cli.embed([run, str(faces), "--out", out, "--eval.batch-size", "7"]) == 0
    table = parquet.read_table(out)
    rows = np.array(table["embedding"].to_pylist(), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.allclose(rows, found.embeddings, atol=1e-5) and table["label"].to_pylist() == found.labels.tolist()
    for args, words in (
        ([run, str(faces), "--out", "x.npy"], "expected a file .safetensors or .parquet"),
        ([run, str(tmp_path / "gone")], "check the path"),
        ([str(tmp_path), str(faces)], "is not a run"),
    ):
        assert cli.embed(args) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_embed_on_two_ranks_gives_the_same(faces: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=faces))
    run = str(tmp_path / "run")
    assert cli.train([str(tmp_path / "r.toml"), "--out", run]) == 0
    for ranks in ("1", "2"):
        assert cli.embed([run, str(faces), "--nproc", ranks, "--out", str(tmp_path / f"{ranks}.safetensors")]) == 0
    one, two = (read_embeddings(tmp_path / f"{ranks}.safetensors") for ranks in "12")
    assert np.allclose(one.embeddings, two.embeddings, atol=1e-5) and one.names == two.names


def test_a_bad_image_does_not_stop_a_run(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.data(["convert", str(faces), str(tmp_path / "x")]) == 0
    (tmp_path / "x/P3/P3_0002.jpg").write_bytes(io.BytesIO(b"\xff\xd8 cut").getvalue())
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=tmp_path / "x"))
    run = tmp_path / "run"
    assert cli.train([str(tmp_path / "r.toml"), "--out", str(run), "--log-every", "1"]) == 0
    assert "P3/P3_0002.jpg" in capsys.readouterr().out
    assert len([line for line in (run / "metrics.jsonl").read_text().splitlines() if "loss" in json.loads(line)]) == 5
    assert cli.train([str(tmp_path / "r.toml"), "--out", str(tmp_path / "y"), "--data.on-bad-image", "raise"]) != 0


@pytest.mark.slow
def test_every_container_gives_the_same_losses(faces: Path, tmp_path: Path) -> None:
    found = []
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=faces))
    for kind, name in (
        ("folder", "faces"),
        ("list", "x.txt"),
        ("rec", "x.rec"),
        ("tar", "x.tar"),
        ("parquet", "x.parquet"),
    ):
        if kind == "parquet":
            pytest.importorskip("pyarrow")
        path = faces if kind == "folder" else tmp_path / name
        assert kind == "folder" or cli.data(["convert", str(faces), str(path)]) == 0
        out = tmp_path / f"run-{kind}"
        flags = ["--out", str(out), "--data.kind", kind, "--data.path", str(path), "--log-every", "1"]
        assert cli.train([str(tmp_path / "r.toml"), *flags]) == 0
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if "loss" in line])
    assert len(found[0]) == 5 and all(losses == found[0] for losses in found)
