"""plsc-data and plsc-embed as users start them: what is printed, what is written, how they fail."""

import io
import json
import pickle
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
    assert all(word in out for word in ("verify", "stats", "convert", "split", "pairs", "align"))
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


def test_verify_opens_what_training_can(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list whose paths start elsewhere, columns of other names, an index kept in a file or made anew."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source = open_images(faces)
    (tmp_path / "l.txt").write_text("".join(f"{source.name(i)} {source.labels[i]}\n" for i in range(40)))
    images = [source.encoded(i) for i in range(40)]
    parquet.write_table(arrow.table({"jpg": images, "who": source.labels}), tmp_path / "p.parquet")
    for name in ("r.rec", "t.tar"):
        assert cli.data(["convert", str(faces), str(tmp_path / name)]) == 0
    (tmp_path / "r.idx").write_text("0\t4\n")
    capsys.readouterr()
    for name, flags in (
        ("l.txt", ["--root", str(faces)]),
        ("p.parquet", ["--image-column", "jpg", "--label-column", "who"]),
        ("r.rec", ["--rebuild-index"]),
        ("t.tar", ["--cache", str(tmp_path / "index")]),
    ):
        assert cli.data(["stats", str(tmp_path / name)]) == (0 if name in ("l.txt", "t.tar") else 2)
        assert cli.data(["verify", str(tmp_path / name), *flags]) == 0
        assert "40 images, 8 classes" in capsys.readouterr().out
    assert (tmp_path / "index").is_file()


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
        (["pairs", rec, str(tmp_path / "more.txt")], "pairs of one class"),
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


def written(path: Path) -> tuple[int, int]:
    """Which file it is and when it was written; not when it was read."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_embed_again(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=faces))
    run, out = str(tmp_path / "run"), tmp_path / "e.safetensors"
    assert cli.train([str(tmp_path / "r.toml"), "--out", run]) == 0
    assert cli.data(["split", str(faces), str(tmp_path / "a"), str(tmp_path / "b"), "--share", "0.5"]) == 0
    again = [run, str(tmp_path / "a"), "--out", str(out)]
    assert cli.embed(again) == 0
    before = written(out)
    assert cli.embed(again) == 0
    assert f"complete already: {out}" in capsys.readouterr().out
    assert written(out) == before
    assert cli.data(["convert", str(tmp_path / "a"), str(tmp_path / "a.tar")]) == 0
    assert cli.embed([run, str(tmp_path / "a.tar"), "--out", str(out)]) == 0  # the same images in another container
    assert f"complete already: {out}" in capsys.readouterr().out and written(out) == before
    other = [run, str(tmp_path / "b"), "--out", str(out)]
    assert cli.embed(other) == 2
    err = capsys.readouterr().err
    assert "got embeddings of other data" in err and "another --out, or --overwrite" in err and err.count("\n") == 1
    assert written(out) == before and cli.embed([*other, "--overwrite"]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    assert read_embeddings(out).names == tuple(open_images(tmp_path / "b").name(i) for i in range(20))


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
    capsys.readouterr()
    assert cli.train([str(tmp_path / "r.toml"), "--out", str(tmp_path / "y"), "--data.on-bad-image", "raise"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: sample ") and "x/P3/P3_0002.jpg" in err and "on_bad_image='redraw'" in err
    assert err.count("\n") == 1  # a sentence, no traceback


def test_a_missing_file_of_a_list_ends_in_a_sentence(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"P{k // 5}/P{k // 5}_{k % 5 + 1:04d}.jpg {k // 5}" for k in range(40)]
    lines[22] = "P4/gone.jpg 4"
    (tmp_path / "l.txt").write_text("\n".join(lines))
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=tmp_path / "l.txt"))
    flags = ["--data.kind", "list", "--data.root", str(faces), "--data.on-bad-image", "raise", "--out"]
    for args in (
        ["--data.workers", "0", *flags, str(tmp_path / "a")],
        ["--data.workers", "1", *flags, str(tmp_path / "b")],
    ):
        assert cli.train([str(tmp_path / "r.toml"), *args]) == 2
        err = capsys.readouterr().err
        assert "l.txt, line 23: cannot read" in err and "No such file" in err and "check data.root" in err
        assert err.count("\n") == 1
    (faces.parent / "copy.txt").write_text("\n".join(f"faces/{line}" for line in lines))
    assert cli.data(["convert", str(faces.parent / "copy.txt"), str(tmp_path / "x.tar")]) == 2
    err = capsys.readouterr().err
    assert "line 23: cannot read" in err and "Traceback" not in err


MORTAL = """
import os, signal
from plsc.data import ImageFolder

class Mortal(ImageFolder):
    def __getitem__(self, i):
        if i == 0 and os.getpid() != self.process:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)

def make(path, image_size, channels):
    data = Mortal(path, image_size=image_size, channels=channels)
    data.process = os.getpid()
    return data
"""


@pytest.mark.slow
def test_a_killed_reading_process_is_what_the_run_ends_with(
    faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not a verb of the other rank, which only saw this one go."""
    (tmp_path / "mortal.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=faces))
    flags = ["--nproc", "2", "--data.kind", "mortal:make", "--data.workers", "1", "--out", str(tmp_path / "run")]
    assert cli.train([str(tmp_path / "r.toml"), *flags]) == 1
    err = capfd.readouterr().err
    assert "reading process 0 of 1" in err and "was killed (signal 9; out of memory?)" in err
    assert "error: rank " in err and "Traceback" not in err


def test_flags_of_balance_and_cache_reach_the_loader(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.data(["convert", str(faces), str(tmp_path / "x.tar")]) == 0
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=tmp_path / "x.tar"))
    flags = ["--data.kind", "tar", "--data.cache", str(tmp_path / "index.npz"), "--log-every", "1", "--out"]
    losses = []
    for more in ([str(tmp_path / "a")], [str(tmp_path / "b"), "--data.per-class", "2"]):
        assert cli.train([str(tmp_path / "r.toml"), *flags, *more]) == 0
        lines = map(json.loads, (Path(more[0]) / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert (tmp_path / "index.npz").stat().st_size > 40 * 8 and len(losses[0]) == len(losses[1]) == 5
    assert losses[0] != losses[1]  # 8 people a batch and two images of 4
    capsys.readouterr()
    assert cli.train([str(tmp_path / "r.toml"), *flags, str(tmp_path / "c"), "--data.per-class", "3"]) == 2
    assert "got per_class=3 with 8 samples a rank in a batch, expected a divisor" in capsys.readouterr().err


def test_several_verification_sets_in_one_run(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {}
    for name, order in (("easy", range(40)), ("other", range(39, -1, -1))):
        images = [(faces / f"P{k // 5}/P{k // 5}_{k % 5 + 1:04d}.jpg").read_bytes() for k in order]
        same = [order[2 * k] // 5 == order[2 * k + 1] // 5 for k in range(20)]
        sets[name] = tmp_path / f"{name}.bin"
        sets[name].write_bytes(pickle.dumps((images, same)))
    assert cli.data(["pairs", str(faces), str(tmp_path / "p.txt"), "--num-pairs", "8", "--folds", "2"]) == 0
    (tmp_path / "r.toml").write_text(RECIPE.format(faces=faces).replace('task = "none"', "folds = 2"))
    flags = ["--eval.kind", "bin", "--eval.path", str(sets["easy"]), "--out", str(tmp_path / "run")]
    wanted = [str(tmp_path / "*.bin"), f"{faces}={tmp_path / 'p.txt'}"]
    assert cli.train([str(tmp_path / "r.toml"), *flags, "--eval.sets", *wanted]) == 0
    found = json.loads((tmp_path / "run/result.json").read_text())
    for name in ("easy", "other", "faces"):
        assert 0 <= found[f"{name}/accuracy"] <= 1 and 0 <= found[f"{name}/auc"] <= 1
    assert found["easy/accuracy"] == found["accuracy"] and found["easy/auc"] == found["auc"]
    assert (tmp_path / "run/roc.png").stat().st_size > 5000
    capsys.readouterr()
    for entry, words in (
        ("gone.bin", "does not exist; expected X.bin"),
        (str(faces), "has no pairs of its own"),
        (f"{faces}={tmp_path / 'gone.txt'}", "gone.txt"),
    ):
        assert cli.train([str(tmp_path / "r.toml"), *flags, "--eval.sets", entry, "--no-resume"]) != 0
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err


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
        ("lmdb", "x.lmdb"),
    ):
        if kind in ("parquet", "lmdb"):
            pytest.importorskip("pyarrow" if kind == "parquet" else "lmdb")
        path = faces if kind == "folder" else tmp_path / name
        assert kind == "folder" or cli.data(["convert", str(faces), str(path)]) == 0
        out = tmp_path / f"run-{kind}"
        flags = ["--out", str(out), "--data.kind", kind, "--data.path", str(path), "--log-every", "1"]
        assert cli.train([str(tmp_path / "r.toml"), *flags]) == 0
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if "loss" in line])
    assert len(found[0]) == 5 and all(losses == found[0] for losses in found)
