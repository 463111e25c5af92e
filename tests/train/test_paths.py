"""Paths and kinds that do not fit: the sentence names the setting, and the exit status is that of usage."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plsc import cli
from plsc.data import convert, open_images
from plsc.train.build import FILES, MADE, build_data, build_eval, build_sets
from plsc.train.config import Config, DataConfig, EvalConfig
from plsc.train.failures import EXIT_USAGE, exit_code, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """images/A to D with two images each, an empty folder, a file of bytes."""
    here = tmp_path_factory.mktemp("paths")
    for name in "ABCD":
        (here / "images" / name).mkdir(parents=True)
        for i in (1, 2):
            pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(here / "images" / name / f"{name}_{i:04d}.png")
    (here / "empty").mkdir()
    for name in ("bytes", "bytes.bin"):
        (here / name).write_bytes(bytes(range(256)))
    return here


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def config(data: dict[str, Any] | None = None, **ask: Any) -> Config:
    images = {"kind": "folder", "path": "images", "image_size": 8, **(data or {})}
    return Config(data=DataConfig(**images), eval=EvalConfig(**{"num_pairs": 4, "folds": 2, **ask}))


def refusal(asked: Config) -> str:
    """What is said of a config; the exit status is that of usage."""
    try:
        data = build_data(asked.data, seed=0)
        build_eval(asked, data)
        build_sets(asked)
    except Exception as error:
        assert exit_code(error) == EXIT_USAGE, repr(error)
        return told(error).removeprefix("error: ")
    raise AssertionError("nothing was refused")


GONE = "is 'nope/x', which cannot be opened (no such file or directory); check the path"
FOLDER = "is 'empty', which cannot be opened (is a directory); check the path"
TEXT = "is 'bytes.bin', expected a text file in UTF-8: invalid start byte"


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        ({"path": "images", "pairs": "nope/x"}, f"eval.pairs {GONE}"),
        ({"path": "images", "pairs": "empty"}, f"eval.pairs {FOLDER}"),
        ({"path": "images", "pairs": "bytes.bin"}, f"eval.pairs {TEXT}"),
        ({"path": "images", "pairs": "bytes.bin/x"}, "eval.pairs is 'bytes.bin/x', which cannot be opened (not a dir"),
        ({"path": "images", "sets": ("images=nope/x",)}, f"eval.sets {GONE}"),
        ({"path": "images", "sets": ("images=empty",)}, f"eval.sets {FOLDER}"),
        ({"path": "images", "sets": ("images=bytes.bin",)}, f"eval.sets {TEXT}"),
        ({"kind": "bin", "path": "nope/x"}, f"eval.path {GONE}"),
        ({"kind": "bin", "path": "empty"}, f"eval.path {FOLDER}"),
        ({"kind": "bin"}, "eval.path is not given; eval.kind 'bin' reads from one, pass --eval.path X.bin"),
        ({"kind": "list", "path": "nope/x"}, f"eval.path {GONE}"),
        ({"kind": "foldre", "path": "images"}, "eval.kind is 'foldre'; did you mean 'folder'?; expected one of folder"),
        ({"kind": "bni", "path": "x.bin"}, "eval.kind is 'bni'; did you mean 'bin'?; expected one of "),
        ({"kind": "nowhere:attr", "path": "images"}, "eval.kind is 'nowhere:attr': No module named 'nowhere'"),
        ({"kind": "os:sep", "path": "images"}, "eval.kind is 'os:sep', a str; expected a class"),
        ({"kind": "os:getcwd", "path": "images"}, "eval.kind 'os:getcwd': got getcwd(), expected one that can be"),
        ({"kind": "io:FileIO", "path": "images"}, "eval.kind 'io:FileIO': got FileIO("),
        ({"kind": "glyphs", "path": "images"}, "eval.path is 'images', but eval.kind 'glyphs' reads from none; say"),
    ],
    ids=str,
)
def test_evaluation_settings_are_named(ask: dict[str, Any], text: str, here: Path) -> None:
    assert refusal(config(**ask)).startswith(text)


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_files(kind: str, here: Path) -> None:
    """What is not there, what holds nothing and what is of another kind, for training and for evaluation."""
    for path in ("nope/x", "empty", "bytes"):
        trained, measured = refusal(config({"kind": kind, "path": path})), refusal(config(kind=kind, path=path))
        assert path in trained and trained.replace("data.path", "eval.path") == measured
    assert refusal(config({"kind": kind, "path": ""})) == (
        f"data.path is not given; data.kind {kind!r} reads from one, pass --data.path PATH"
    )
    assert refusal(config(kind=kind)) == (
        f"eval.path is not given; eval.kind {kind!r} reads from one, pass --eval.path PATH"
    )


@pytest.fixture(scope="module")
def containers(folder: Path) -> dict[str, str]:
    """Paths of the images in every container, and the kind that fits each."""
    found = {"images": "folder", "images.zip": "folder", "pairs.bin": "bin"}
    shutil.make_archive(str(folder / "images"), "zip", folder / "images")
    images = [path.read_bytes() for path in sorted((folder / "images").rglob("*.png"))]
    (folder / "pairs.bin").write_bytes(pickle.dumps((images, [True] * 4)))
    for name, kind in (
        ("l.txt", "list"),
        ("r.rec", "rec"),
        ("R/train.rec", "rec"),
        ("t.tar", "tar"),
        ("T/t-{}.tar", "tar"),
        ("p.parquet", "parquet"),
        ("P/p.parquet", "parquet"),
        ("m.lmdb", "lmdb"),
    ):
        if kind in ("parquet", "lmdb"):
            pytest.importorskip({"parquet": "pyarrow", "lmdb": "lmdb"}[kind])
        convert(open_images(folder / "images", image_size=8), folder / name)
        found[name.partition("/")[0]] = kind
    return found | {"T/t-*.tar": "tar"}


@pytest.mark.parametrize("kind", [*FILES, "bin"])
def test_a_path_of_another_kind_says_which_fits(kind: str, containers: dict[str, str], here: Path) -> None:
    for path, fits in containers.items():
        if fits == kind:
            continue
        text = refusal(config(kind=kind, path=path))
        assert text.startswith(f"eval.path is {path!r}, which looks like kind {fits!r}, but eval.kind is {kind!r}; ")
        assert f"expected --eval.kind {fits} (as {kind!r}: " in text
        if kind != "bin":
            text = refusal(config({"kind": kind, "path": path}))
            assert ("--eval.kind bin with" if fits == "bin" else f"--data.kind {fits} (as") in text
    for path, fits in containers.items():
        if fits != "bin":  # what is said leads on
            assert len(build_data(DataConfig(kind=fits, path=path, image_size=8), seed=0)) == 8


@pytest.mark.parametrize("kind", MADE)
def test_a_path_is_not_passed_over(kind: str, here: Path) -> None:
    """Images of one's own given to a recipe that makes its own, for training or for evaluation alone."""
    text = refusal(config({"kind": kind}))
    assert text.startswith(f"data.path is 'images', but data.kind {kind!r} reads from none; say what is there: --data.")
    made = replace(config(path="images"), data=DataConfig(kind=kind, image_size=8, channels=1))
    with pytest.raises(ValueError, match=f"eval.path is 'images', but eval.kind '{kind}' reads from none"):
        build_eval(made, build_data(config().data, seed=0))


def test_what_a_module_makes_is_named_by_its_setting(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(here))
    (here / "mine_of_paths.py").write_text(
        "def bare(path, *, image_size, channels):\n    return [1, 2]\n"
        "def gone(path, *, image_size, channels):\n    return open('labels.txt')\n"
    )
    assert refusal(config(kind="mine_of_paths:bare", path="images")).startswith(
        "eval.kind 'mine_of_paths:bare' gave a list without labels, num_classes, name; expected labels [N]"
    )
    assert refusal(config(kind="mine_of_paths:gone", path="images")) == (
        "eval.path is 'images', which cannot be opened (labels.txt: no such file or directory); check the path"
    )


def test_the_command_ends_with_the_status_of_usage(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.kind", "folder", "--data.path", "images", "--eval.path", "images", "--out", str(tmp_path / "run")]
    assert cli.train(["glyphs", *flags, "--eval.pairs", "nope/x"]) == EXIT_USAGE
    assert capsys.readouterr().err == f"error: eval.pairs {GONE}\n" and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "args", "text"),
    [
        (cli.data, ["align", "images", "out", "--landmarks", "nope/x"], f"--landmarks {GONE}"),
        (cli.data, ["align", "images", "out", "--landmarks", "empty"], f"--landmarks {FOLDER}"),
        (cli.ps, ["train", "ctr", "--data.kind", "criteo", "--data.train", "empty"], "data.train has empty, a folder;"),
        (
            cli.ps,
            ["train", "ctr", "--data.kind", "criteo", "--data.train", "nope/x"],
            "got nope/x, which names no file",
        ),
        (cli.ps, ["train", "word2vec", "empty"], "got empty, expected files of text"),
        (cli.serve, ["empty"], "empty is not a bundle"),
        (cli.evaluate, ["empty"], "empty is not a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_paths_of_other_commands(
    command: Any, args: list[str], text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(args) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"error: {text}")
