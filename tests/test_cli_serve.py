"""plsc-export --to, plsc-eval --report and what plsc-serve takes, as users start them, on one small run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc import cli
from plsc.serve.bundle import Bundle
from plsc.train.export import read_embeddings

RECIPE = """
epochs = 2
batch_size = 32
log_every = 10
[data]
kind = "synthetic"
num_samples = 96
num_classes = 8
image_size = 32
channels = 3
workers = 0
[model]
backbone = "smallconv"
embedding_size = 16
[head]
margin = "cosface"
margin_args = { scale = 16.0 }
[eval]
num_pairs = 400
folds = 2
flip = true
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "tiny.toml").write_text(RECIPE)
    assert cli.train([str(folder / "tiny.toml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_a_run_ends_with_a_bundle(run: Path) -> None:
    """Its thresholds are those of the run's own evaluation, its embeddings those of its export."""
    bundle = Bundle.open(run / "bundle", threads=1)
    about, facts = bundle.manifest, json.loads((run / "export/facts.json").read_text())
    assert (about.name, about.num_classes, about.image_size, about.flip) == ("run", 8, 32, True)
    result = json.loads((run / "result.json").read_text())
    for one in about.thresholds:
        assert result[f"tar@far={one.far:g}"] == one.tar and one.measured_far <= one.far
    assert [one.far for one in about.thresholds] == [1e-2] == [one["far"] for one in facts["thresholds"]]
    assert about.thumbnails and bundle.thumbnail(0)  # synthetic images are nobody's
    from plsc.data import Synthetic

    data = Synthetic(96, 8, image_size=32, channels=3, seed=0)
    rows, _ = bundle.model.embed(np.stack([data[i][0] for i in range(96)]))
    offline = read_embeddings(run / "export/embeddings.safetensors")
    np.testing.assert_allclose(rows, offline.embeddings, atol=2e-5)


def test_the_line_before_the_accuracy_names_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.evaluate([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("verification accuracy: ")
    assert lines[-2] == f"serve it, with a page to look at: plsc-serve {run}"


@pytest.mark.slow
def test_parts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to, written in (
        ("pt2", {"model.pt2"}),
        ("safetensors", {"backbone.safetensors", "centres.safetensors", "embeddings.safetensors"}),
        ("onnx", {"model.onnx"}),
    ):
        for name in written:
            (run / "export" / name).unlink(missing_ok=True)
        assert cli.export([str(run), "--to", to]) == 0
        assert written <= {path.name for path in (run / "export").iterdir()}
        said = capsys.readouterr().out.partition("\nwritten:\n")[2].splitlines()
        assert sorted(said) == sorted(f"  {run / 'export' / name}" for name in written)  # and nothing about serving
    program = torch.export.load(run / "export/model.pt2").module()
    bundle = Bundle.open(run / "bundle", threads=1)
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float().sub(127.5).div(127.5)
    found = (program(x) + program(x.flip(-1))).detach()
    found /= found.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(found.numpy(), bundle.model.embed(images)[0], atol=1e-5)
    content = (run / "export/model.pt2").read_bytes()
    assert b"site-packages" not in content and b"sample_inputs" in content
    import zipfile

    with zipfile.ZipFile(run / "export/model.pt2") as archive:
        assert [archive.getinfo(n).file_size for n in archive.namelist() if n.endswith(".pt")] == [0]  # no pickle


def test_storages_and_wrong_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.export([str(run), "--to=bundle", "--storage", "int8"]) == 0
    assert Bundle.open(run / "bundle").manifest.storage == "int8"
    assert cli.export([str(run), "--to", "bundle"]) == 0
    assert Bundle.open(run / "bundle").manifest.storage == "fp32"
    capsys.readouterr()
    for flags, words in (
        (["--to", "tflite"], "got --to tflite"),
        (["--storage", "int4"], "got --storage int4"),
        (["--to", "onnx", "--storage", "int8"], "got --storage int8 with --to onnx, expected it with --to all or"),
        (["--to", "pt2", "--thumbnails"], "got --thumbnails with --to pt2"),
    ):
        assert cli.export([str(run), *flags]) == 2
        assert words in capsys.readouterr().err
    assert cli.export(["--help"]) == 0 and "--storage fp32|fp16|int8" in capsys.readouterr().out


def test_where_a_bundle_cannot_be(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is computed: by an export, and by a training that would end with it."""
    for name in ("export", "train"):
        monkeypatch.setattr(f"plsc.train.run.{name}", lambda *_, **__: pytest.fail("computed first"))
    (run / "bundle" / "people").mkdir()
    try:
        for flags in ([], ["--to", "bundle"], ["--to=all", "--nproc", "2"]):
            assert cli.export([str(run), *flags]) == 2
            assert "bundle: got people beside a bundle's files" in capsys.readouterr().err
        assert cli.train([str(run.parent / "tiny.toml"), "--out", str(run)]) == 2
        assert "got people beside" in capsys.readouterr().err
        for flags in (["--to", "onnx"], ["--to", "pt2"]):  # no bundle: none in the way
            with pytest.raises(pytest.fail.Exception, match="computed first"):
                cli.export([str(run), *flags])
    finally:
        (run / "bundle" / "people").rmdir()


def test_thumbnails_are_of_one_export(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for once is not asked for ever: without the flag neither the bundle nor the export has the images."""
    monkeypatch.setattr("plsc.train.artifacts.DRAWN", ())  # as if they were somebody's
    for flags, there in (["--thumbnails"], True), ([], False):
        assert cli.export([str(run), "--to", "bundle", *flags]) == 0
        assert Bundle.open(run / "bundle").manifest.thumbnails == there
        names = [folder / "thumbnails.safetensors" for folder in (run / "export", run / "bundle")]
        assert [name.exists() for name in names] == [there, there]
        printed = capsys.readouterr().out
        assert ("thumbnails" in printed) == there and f"  {run / 'bundle'}\nserve it" in printed


def test_where_a_report_cannot_be(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is measured."""
    monkeypatch.setattr("plsc.train.run.evaluate", lambda *_, **__: pytest.fail("measured first"))
    (tmp_path / "a.jpg").touch()
    for flags, words in (
        (["--report", str(tmp_path / "a.jpg")], "a.jpg is a file; expected a folder"),
        ([f"--report={tmp_path}/a.jpg/x"], "a.jpg is a file; expected a folder"),
        (["--report", "/proc/self/x"], "nothing can be written into /proc/self"),
        (["--report"], "got --report ''"),
        (["--report", "--nproc", "2"], "got --report '--nproc'"),
    ):
        assert cli.evaluate([str(run), *flags]) == 2
        assert words in capsys.readouterr().err
    assert cli.evaluate(["--help"]) == 0 and "plsc-eval RUN [--report DIR]" in capsys.readouterr().out


def test_a_report_is_one_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.evaluate([str(run), "--report", str(tmp_path / "report")]) == 0
    assert f"report: {tmp_path / 'report/report.html'}" in capsys.readouterr().out
    page = (tmp_path / "report/report.html").read_text()
    accuracy = json.loads((run / "result.json").read_text())["accuracy"]
    assert f"<td>{accuracy:.6g}</td>" in page
    pictures = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert {"roc.png", "scores.png", "nearest.png"} <= pictures  # and confusion.png, where any classes are confused
    assert page.count("data:image/png;base64,") == len(pictures) and not re.search(r'(src|href)="(?!data:)', page)


def test_serving_what_is_no_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.serve([str(tmp_path)]) == 2
    assert "write one with plsc-export RUN --to bundle" in capsys.readouterr().err
    assert cli.serve([]) == 2 and "usage: plsc-serve" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "plsc.serve.server", raising=False)
    assert cli.serve([str(tmp_path)]) == 2
    assert "pip install 'plsc-torch[serve]'" in capsys.readouterr().err


def test_embeddings_never_take_the_name_of_an_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data may be called as they like: RUN/export/centres.safetensors stays the export's, --overwrite or not."""
    monkeypatch.setattr("plsc.train.run.embed_images", lambda *_, **__: pytest.fail("embedded"))
    before = {path: path.stat().st_mtime_ns for path in (run / "export").iterdir()}
    for name in ("centres", "embeddings", "thumbnails.zip", "backbone"):
        for flags in ([], ["--overwrite"]):
            assert cli.embed([str(run), str(tmp_path / name), *flags]) == 2
            assert "which is a name of plsc-export's; give another as --out" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (run / "export").iterdir()} == before
    for flags in (["--out", str(tmp_path / "centres.safetensors")], [f"--out={tmp_path}/centres.parquet"]):
        with pytest.raises(pytest.fail.Exception, match="embedded"):
            cli.embed([str(run), str(tmp_path / "centres"), *flags])


def test_a_gallery_has_a_folder_of_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    for path, words in (
        (run / "export", "expected a gallery, or a new or empty folder"),
        (run / "checkpoints", "expected a gallery, or a new or empty folder"),
        (run / "export" / "centres.safetensors", "got plsc-centres, expected plsc-embeddings"),
        (run / "bundle" / "centres.safetensors", "got plsc-centres, expected plsc-embeddings"),
    ):
        assert cli.serve([str(run), "--gallery", str(path), "--port", "0"]) == 2
        assert words in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "data", "ps", "serve"])
def test_nobody_reads_the_help(command: str) -> None:
    """Ended without a word, as by `| head -1` where all was printed already: status 0, or that of SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    args = ["glyphs", "--help"] if command == "train" else ["--help"]
    for buffered in ("", "1"):
        found = subprocess.run(
            [sys.executable, "-m", "plsc.cli", command, *args],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
            check=False,
        )
        assert (found.stderr, found.returncode in (0, 141)) == ("", True), found
    os.close(writing)
