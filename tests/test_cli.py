"""The commands as users start them: flags and their errors, ranks that are stopped, killed or hang, what is printed."""

import contextlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plsc import cli, cli_common, cli_flags
from plsc.comm import Counting, LocalCommunicator
from plsc.train.config import load_recipe
from plsc.train.launch import Outcome

ROOT = Path(__file__).resolve().parents[1]
PARTS = """
import os, sys, time
import torch
from torch import nn
from plsc.data import Synthetic

class DropNet(nn.Module):
    def __init__(self, embedding_size, *, image_size, in_channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(in_channels * image_size**2, 32), nn.ReLU(), nn.Dropout(0.4),
            nn.Linear(32, embedding_size),
        )
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        if self.training:
            time.sleep(float(os.environ.get("DELAY", "0")))
        if self.training and os.environ.get("FAIL_RANK") == os.environ.get("RANK", "0") and self.calls == 3:
            raise {"user": ValueError, "bug": KeyError}[os.environ["FAIL"]]("the images are upside down")
        return self.layers(images)

def data(path, *, image_size, channels):
    return Synthetic(96, 8, image_size=image_size, channels=channels)
"""
RECIPE = """
epochs = 5
batch_size = 12
log_every = 1
save_every = 10
timeout = 120.0
[data]
kind = "parts:data"
image_size = 16
channels = 1
workers = 1
crop = 1
[model]
backbone = "parts:DropNet"
embedding_size = 8
[head]
margin = "cosface"
margin_args = { scale = 16.0 }
[optim]
lr = 0.05
[eval]
num_pairs = 40
folds = 2
"""
STEPS = 40  # 96 images in batches of 12, five times


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe and the user's module it names, in a folder of their own."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "parts.py").write_text(PARTS)
    (folder / "tiny.toml").write_text(RECIPE)
    return folder / "tiny.toml"


@pytest.fixture
def here(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The recipe, from its own folder and in this process, reading without workers."""
    monkeypatch.chdir(recipe.parent)
    path = list(sys.path)
    yield recipe
    sys.path[:] = path
    sys.modules.pop("parts", None)


def losses(out: Path) -> dict[int, float]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def kept(out: Path) -> list[int]:
    """Steps of the checkpoints, oldest first."""
    return sorted(int(path.name.removeprefix("step_")) for path in (out / "checkpoints").glob("step_*"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- in this process


FLAGS = """
seed epochs max-steps batch-size log-every save-every keep out resume nproc timeout max-restarts check plan export
data.kind data.path data.root data.cache data.image-size data.channels data.num-classes data.workers
data.on-bad-image data.per-class data.flip data.crop data.augment data.fonts data.min-faces data.held-out
data.num-samples data.labels
model.backbone model.embedding-size model.weights
head.margin head.margin-args head.sample-rate head.sub-centers head.filter-threshold head.fused
head.weight-dtype head.state-dtype head.unsampled head.store head.cache-mb head.cache-dtype head.product-dtype
head.extend-classes
optim.name optim.lr optim.momentum optim.nesterov optim.weight-decay optim.betas optim.schedule
optim.warmup-epochs optim.power optim.milestones optim.gamma optim.final
strategy.amp strategy.reduce-dtype strategy.reduce-accumulate strategy.bucket-mb strategy.lanes
strategy.topology strategy.compress strategy.compress-args strategy.local-sgd strategy.local-sgd-args
strategy.accumulate strategy.clip-norm strategy.recompute strategy.sync-bn strategy.ps strategy.servers
strategy.ps-args
eval.task eval.kind eval.path eval.pairs eval.sets eval.num-pairs eval.folds eval.batch-size eval.flip
eval.every
"""


def flags_error(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What is printed where flags are refused, without the frame around it."""
    with pytest.raises(SystemExit) as caught:
        cli.train(["glyphs", *args])
    assert caught.value.code == 2
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().err).split())


def test_help_lists_every_flag_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """A new flag is a decision: it has to be written down here."""
    with pytest.raises(SystemExit) as caught:
        cli.train(["glyphs", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    found = re.findall(r"^[│ ] (?:-h, )?--([a-z][\w.-]*)", text, re.MULTILINE)
    assert found == ["help", *FLAGS.split()] and len(found) <= 91
    assert re.search(r"--head\.margin-args \[NAME VALUE", text) and "scale 32.0 margin 0.3" in " ".join(text.split())
    assert "--no-resume" in text and "(default: runs/glyphs)" in text


def test_another_margin_does_not_take_over_the_arguments_of_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train(["glyphs", "--head.margin", "cosface", "--epochs", "0"]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "the recipe's margin_args (scale 32.0 margin 0.3) are those of arcface" in error
    config = cli_flags.parse("plsc-train", ["glyphs", "--head.margin", "cosface", "--head.margin-args"])
    assert (config.head.margin, config.head.margin_args) == ("cosface", {})
    config = cli_flags.parse("plsc-train", ["glyphs", "--head.margin", "cosface", "--head.margin-args", "scale", "30"])
    assert config.head.margin_args == {"scale": 30}
    assert cli_flags.parse("plsc-train", ["glyphs", "--head.margin", "arcface"]).head.margin_args != {}


def test_usage_without_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train([]) == 2 and cli.train(["--nproc", "2"]) == 2 and cli.train(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: plsc-train RECIPE") == 3
    assert cli.evaluate([]) == 2 and cli.export(["-h"]) == 0
    assert "usage: plsc-eval RUN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batchsize", "3"], ["Unrecognized options: --batchsize", "--batch-size INT"]),
        (["--data.imagesize", "3"], ["Unrecognized options", "--data.image-size"]),
        (["--epochs", "few"], ["--epochs", "'few'"]),
        (["--nproc", "0"], ["nproc is 0, expected at least 1"]),
        (["--optim.name", "adam"], ["optim.name is 'adam'; did you mean 'adamw'"]),
        (["--strategy.amp", "fp8"], ["amp 'fp8', expected one of fp32, bf16, fp16"]),
        (["--head.margin-args", "scale"], ["expected names and values in turn, as in `scale 32 margin 0.3`"]),
        (["--head.margin-args", "scale=32"], ["got scale=32, expected names and values in turn"]),
    ],
)
def test_wrong_flags_are_refused(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = flags_error(capsys, *args)
    assert [word for word in words if word not in message] == [], message


def test_flags_override_the_recipe() -> None:
    flags = "--data.image-size 16 --strategy.amp bf16 --head.extend-classes --no-resume --optim.milestones 2 4.5"
    flags += " --head.margin-args scale 16 easy true gradient exact --head.filter-threshold 0.4 --optim.betas 0.5 0.6"
    config, plain = cli_flags.parse("plsc-train", ["glyphs", *flags.split()]), load_recipe("glyphs")
    assert config.head.margin_args == {"scale": 16, "easy": True, "gradient": "exact"}
    assert config.data.image_size == 16 and config.strategy.amp == "bf16" and not config.resume
    assert config.head.extend_classes and config.head.filter_threshold == 0.4 and config.head.margin == "arcface"
    assert config.optim.milestones == (2.0, 4.5) and config.optim.betas == (0.5, 0.6)
    assert config.optim.lr == plain.optim.lr and config.eval == plain.eval
    assert cli_flags.parse("plsc-train", ["glyphs"]) == plain
    assert cli_flags.parse("plsc-train", ["glyphs", "--head.margin-args"]).head.margin_args == {}


def test_wrong_recipes_and_runs_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("epoch = 3")
    (tmp_path / "config.toml").write_text("epochs = 3")
    cases = [
        (cli.train, ["glyph"], "no recipe 'glyph'; did you mean 'glyphs'"),
        (cli.train, [str(tmp_path / "bad.toml")], "unknown key 'epoch'; did you mean 'epochs'"),
        (cli.evaluate, [str(tmp_path / "gone")], "is not a run: it has no config.toml"),
        (cli.evaluate, [str(tmp_path)], "has no whole checkpoint; train it first with plsc-train"),
        (cli.export, [str(tmp_path)], "has no whole checkpoint"),
        (cli.export, [str(tmp_path), "--out", "x"], "--out is for plsc-train"),
    ]
    for command, args, words in cases:
        assert command(args) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and words in err and err.count("\n") == 1 and out == ""


def test_train_resume_eval_and_export_in_this_process(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, looked at from all sides: what is printed and written, what a second command does and does not do."""
    out = tmp_path / "run"
    flags = [str(here), "--out", str(out), "--data.workers", "0"]
    assert cli.train([*flags, "--max-steps", "12", "--no-export"]) == 0
    printed, errors = capsys.readouterr()
    lines = printed.splitlines()
    assert errors == "" and re.fullmatch(r"verification accuracy: \d+\.\d\d %", lines[-1])
    (step,) = [line for line in lines if line.startswith("step 12/12 ")]
    assert re.fullmatch(r"step 12/12  epoch 2/5  loss \d+\.\d+  lr \S+  \d+ images/s  ETA 0:00:00", step)
    assert f"  {out / 'metrics.jsonl'}" in lines and not (out / "export").exists()
    assert kept(out) == [10, 12] and list(losses(out)) == list(range(1, 13))
    config = load_recipe(str(out / "config.toml"))
    assert config == cli_flags.parse("plsc-train", [*flags, "--max-steps", "12", "--no-export"])

    # Commands that do not fit the run leave it as it is.
    before = tree(out)
    assert cli.train([*flags, "--model.embedding-size", "16"]) == 2
    assert "other settings (model.embedding_size" in capsys.readouterr().err
    assert cli.train([*flags, "--no-resume"]) == 2
    assert "has checkpoints already and resume is off" in capsys.readouterr().err
    assert tree(out) == before

    # The same command with more steps continues.
    assert cli.train([*flags, "--max-steps", "13", "--no-export"]) == 0
    assert "resumed at step 12 of 13" in capsys.readouterr().out and list(losses(out)) == list(range(1, 14))

    shown = json.loads((out / "result.json").read_text())
    assert cli.evaluate([str(out), "--eval.batch-size", "7"]) == 0
    assert f"verification accuracy: {shown['accuracy'] * 100:.2f} %" == capsys.readouterr().out.splitlines()[-1]

    def no_verification(*_: Any, **__: Any) -> None:
        raise AssertionError("an export measures nothing")

    monkeypatch.setattr("plsc.train.trainer.verify", no_verification)
    assert cli.export([str(out)]) == 0
    printed, errors = capsys.readouterr()
    assert sorted(path.name for path in (out / "export").iterdir()) == [
        "centres.safetensors",
        "embeddings.safetensors",
        "facts.json",
        "model.onnx",
    ]
    assert f"serve it, with a page to look at: plsc-serve {out}" in printed
    assert "accuracy" not in printed and "torchvision" not in printed + errors and errors == ""
    assert json.loads((out / "result.json").read_text())["step"] == shown["step"]


def test_embeddings_are_computed_once(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import plsc.train.trainer as trainer

    calls, embed = [], trainer.embed
    monkeypatch.setattr(trainer, "embed", lambda *args, **options: calls.append(1) or embed(*args, **options))
    monkeypatch.setattr("plsc.train.artifacts.export_onnx", lambda *_, **__: None)
    monkeypatch.setattr("plsc.cli_serve.bundle_run", lambda out: None)
    flags = ["--out", str(tmp_path / "run"), "--data.workers", "0", "--max-steps", "2"]
    assert cli.train([str(here), *flags]) == 0 and len(calls) == 1
    assert (tmp_path / "run/export/embeddings.safetensors").exists()


def test_resume_with_dropout_is_bit_for_bit(here: Path, tmp_path: Path) -> None:
    flags = [str(here), "--data.workers", "0", "--eval.task", "none", "--no-export", "--save-every", "5"]
    flags += ["--out", str(tmp_path), "--max-steps", "9"]
    assert cli.train(flags) == 0
    straight, saved = losses(tmp_path), tree(tmp_path / "checkpoints/step_00000009")
    shutil.rmtree(tmp_path / "checkpoints/step_00000009")
    (tmp_path / "checkpoints/latest").unlink()
    assert cli.train(flags) == 0
    assert losses(tmp_path) == straight and tree(tmp_path / "checkpoints/step_00000009") == saved


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_in_a_world_of_one_saves(
    number: int, code: int, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from plsc.train.trainer import Trainer

    prepare = Trainer._prepare_step

    def signalling(trainer: Trainer) -> None:
        prepare(trainer)
        if trainer.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "_prepare_step", signalling)
    assert cli.train([str(here), "--out", str(tmp_path), "--data.workers", "0"]) == code
    out, err = capsys.readouterr()
    assert kept(tmp_path) == [4] and "stopped by signal at step 4; run the same command again to continue" in out
    assert err == ("interrupted\n" if code else "") and "accuracy" not in out


def test_a_full_disk_is_named_and_the_previous_checkpoint_kept(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(here), "--out", str(tmp_path), "--data.workers", "0", "--eval.task", "none", "--no-export"]
    assert cli.train([*flags, "--max-steps", "2"]) == 0
    before = tree(tmp_path / "checkpoints")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, limits[1]))
    try:
        code = cli.train([*flags, "--max-steps", "4"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert code == 1 and error.startswith("error: could not write") and "File too large" in error
    assert error.count("\n") == 1 and "step_00000004" in error and tree(tmp_path / "checkpoints") == before
    assert cli.train([*flags, "--max-steps", "4"]) == 0 and kept(tmp_path) == [2, 4]


def test_a_bug_keeps_its_traceback(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "bug")
    monkeypatch.setenv("FAIL_RANK", "0")
    flags = [str(here), "--out", str(tmp_path), "--data.workers", "0"]
    assert cli.train(flags) == 1
    error = capsys.readouterr().err
    assert error.count("Traceback") == 1 and "KeyError: 'the images are upside down'" in error
    monkeypatch.setenv("FAIL", "user")
    assert cli.train(flags) == 2 and capsys.readouterr().err == "error: the images are upside down\n"
    monkeypatch.setenv("PLSC_DEBUG", "1")
    assert cli.train(flags) == 2 and "Traceback" in capsys.readouterr().err


def test_every_output_that_cannot_be_written_is_refused_at_once(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cli, "_launch", lambda *_: pytest.fail("started ranks"))
    for out in ("file", "file/run"):
        assert cli.train([str(here), "--nproc", "2", "--out", str(tmp_path / out)]) == 2
        err = capsys.readouterr().err
        assert err == (
            f"error: --out is '{tmp_path / out}', but {tmp_path / 'file'} is a file; expected a folder, or a new name "
            "for one\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "list.txt").write_text("a.png 0\n")
    for words in (
        ["convert", "list.txt", "file/a.tar"],
        ["split", "list.txt", "a", "file/b"],
        ["pairs", "list.txt", "file/p"],
    ):
        command, source, *targets = words
        assert cli.data([command, str(tmp_path / source), *(str(tmp_path / target) for target in targets)]) == 2
        name = {"convert": "TARGET", "split": "TEST", "pairs": "TARGET"}[command]
        err = capsys.readouterr().err
        assert err.startswith(f"error: the folder of {name} is '{tmp_path / 'file'}', but ") and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "list.txt"]
    for flags in (["--out", f"{tmp_path}/file/a.parquet"], [f"--out={tmp_path}/file/a.parquet"]):
        assert cli.embed(["run", "images", *flags]) == 2
        assert f"the folder of --out is '{tmp_path / 'file'}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "1"}, "expected 0 <= RANK < WORLD_SIZE"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "h0"}, "the environment sets WORLD_SIZE=4 but no rank; set RANK for each"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--check"], ["--plan"], ["--nproc", "2"]], ids=str)
def test_a_launcher_that_leaves_something_out_is_a_sentence(
    environment: dict[str, str],
    words: str,
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.train(["glyphs", *more]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_backbones_that_do_not_fit_are_a_sentence(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here.parent / "odd.py").write_text(
        "from torch import nn\n"
        "def few(embedding_size): ...\n"
        "def wide(embedding_size, *, image_size, in_channels):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, embedding_size + 1))\n"
        "def flat(embedding_size, *, image_size, in_channels):\n"
        "    return nn.Conv2d(in_channels, embedding_size, 16)\n"
        "class Pair(nn.Module):\n"
        "    def __init__(self, embedding_size, *, image_size, in_channels):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(1, 1)\n"
        "    def forward(self, images):\n"
        "        return images, images\n"
    )
    wanted = "for images [12, 1, 16, 16], expected embeddings [12, 8]"
    cases = [
        ("few", "got few(embedding_size), expected one that can be called (8, image_size=16, in_channels=1)"),
        ("wide", f"the backbone odd:wide gave [12, 9] {wanted}"),
        ("flat", f"the backbone odd:flat gave [12, 8, 1, 1] {wanted}"),
        ("Pair", f"the backbone odd:Pair gave a tuple {wanted}"),
    ]
    for name, words in cases:
        flags = ["--out", str(tmp_path / name), "--data.workers", "0", "--model.backbone", f"odd:{name}"]
        assert cli.train([str(here), *flags]) == 2
        err = capsys.readouterr().err
        assert words in err and err.startswith("error: ") and err.count("\n") == 1
    sys.modules.pop("odd", None)


@pytest.mark.parametrize(("code", "hint"), [(0, False), (1, True), (2, False), (3, False), (130, True), (137, True)])
def test_continuing_is_advised_where_it_helps(
    code: int, hint: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a user's mistake (2) or a loss that is not finite (3): the same command would end the same way."""
    monkeypatch.setattr(cli, "launch", lambda *_, **__: Outcome(code, "words"))
    monkeypatch.setattr(cli, "_newest", lambda _: tmp_path / "step_00000004")
    assert cli.train(["glyphs", "--nproc", "2", "--out", str(tmp_path)]) == code
    hints = f"newest checkpoint: {tmp_path / 'step_00000004'}; the same command continues from it\n"
    assert capsys.readouterr().err == "words\n" + hints * hint


def test_a_loss_that_is_not_finite_has_an_exit_code_and_advice_of_its_own(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(here), "--out", str(tmp_path), "--data.workers", "0", "--optim.lr", "1e30"]
    assert cli.train(flags) == 3
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "continues" not in err
    assert "the same command would stop here again: lower the learning rate" in err


def test_a_launchers_ranks_and_nproc_together_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "_work", lambda *_: 0)
    for name, value in {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank, nproc, said in (("0", "2", True), ("1", "2", False), ("0", "4", False), ("0", "1", False)):
        monkeypatch.setenv("RANK", rank)
        assert cli.train(["glyphs", "--nproc", nproc, "--out", str(tmp_path)]) == 0
        words = "nproc is 2, but a launcher has started 4 ranks: those are the ranks\n"
        assert capsys.readouterr().out == words * said


def test_what_every_rank_finds_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("plsc.data.images")
    for rank, expected in ((0, "train thin\nbad image\nval empty\nbad image\n"), (1, "rank 1: bad image\n" * 2)):
        comm = Counting(LocalCommunicator())
        comm.rank = rank
        with cli_common.logging_to_stdout(comm):
            log.warning("%s thin", "train", extra={"once": True})
            log.warning("bad image")
            log.warning("%s thin", "val", extra={"once": True})
            log.warning("%s empty", "val", extra={"once": True})
            log.warning("bad image")
        assert capsys.readouterr().out == expected


def test_commands_by_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([]) == 2 and cli.main(["--help"]) == 0 and cli.main(["tarin"]) == 2
    assert capsys.readouterr().out.count("usage: python -m plsc.cli train | eval | export | embed | data") == 3
    assert cli.main(["eval", str(tmp_path)]) == 2 and "is not a run" in capsys.readouterr().err
    command = [sys.executable, "-m", "plsc.cli", "data", "stats", str(tmp_path / "gone")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# ---- with ranks that are processes


class Started:
    """A command under way in a session of its own, as from a terminal."""

    def __init__(self, recipe: Path, command: str, *args: str, **environment: str) -> None:
        code = f"import sys; from plsc.cli import {command}; sys.exit({command}())"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        for name in ("RANK", "WORLD_SIZE", "PLSC_DEBUG"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=env,
            cwd=recipe.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell that runs tests in the background has Ctrl-C ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # type: ignore[arg-type]
        )

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; all that it had started is gone then."""
        seen = self.family() if self.process.poll() is None else {}
        try:
            out, err = self.process.communicate(timeout=150)
        finally:
            self.kill_all(seen)
        wait_until(lambda: not any(alive(pid) for pid in seen))
        return self.process.returncode, out, err

    def family(self) -> dict[int, str]:
        """Living descendants, with the RANK each was started with."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        found, rest = {}, [self.process.pid]
        while rest:
            parent = rest.pop()
            for pid in [pid for pid, its in parents.items() if its == parent and alive(pid)]:
                rest.append(pid)
                with contextlib.suppress(OSError):
                    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    found[pid] = next((word[5:].decode() for word in environ if word.startswith(b"RANK=")), "")
        return found

    def rank(self, rank: int) -> int:
        """The process of a rank; the reading processes it has forked have higher ids."""
        return min(pid for pid, its in self.family().items() if its == str(rank))

    def wait_for_step(self, out: Path, step: int) -> None:
        def reached() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"ended early: {self.process.communicate()}")
            return (out / "metrics.jsonl").is_file() and max(losses(out), default=0) >= step

        wait_until(reached)

    def kill_all(self, pids: dict[int, str]) -> None:
        """Only where a test has failed is anything left to kill."""
        if self.process.poll() is None:
            for pid in [self.process.pid, *pids]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run of two ranks from start to end, undisturbed: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("whole")
    code, printed, errors = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(out)).end()
    assert code == 0, errors
    return out, printed, errors


@pytest.mark.slow
def test_two_ranks_print_once_and_the_accuracy_last(whole: tuple[Path, str, str]) -> None:
    out, printed, errors = whole
    assert errors == "" and re.fullmatch(r"verification accuracy: \d+\.\d\d %", printed.splitlines()[-1])
    assert printed.count("step 7/40 ") == 1 and printed.count("TRAINING images") == 1 and "rank 1" not in printed
    assert "96 images, 8 classes, 2 ranks" in printed and list(losses(out)) == list(range(1, STEPS + 1))
    assert (out / "export/model.onnx").exists() and (out / "roc.png").exists()
    assert kept(out) == [20, 30, 40] and load_recipe(str(out / "config.toml")).nproc == 2


@pytest.mark.slow
def test_a_run_that_is_stopped_interrupted_and_killed_ends_as_if_it_had_not_been(
    whole: tuple[Path, str, str], recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ["train", str(recipe), "--nproc", "2", "--out", str(out)]

    run = Started(recipe, *command, DELAY="0.1")
    run.wait_for_step(out, 3)
    run.process.terminate()
    code, printed, errors = run.end()
    assert code == 0 and errors == "" and "SIGTERM: stopping after this step" in printed and "accuracy" not in printed
    (stopped,) = kept(out)
    assert 3 <= stopped == max(losses(out)) < 10

    run = Started(recipe, *command, DELAY="0.1")
    run.wait_for_step(out, stopped + 2)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    code, printed, errors = run.end()
    assert code == 130 and f"resumed at step {stopped} of 40" in printed
    assert len(errors.splitlines()) == 1 and errors.startswith("newest checkpoint: ")
    interrupted = kept(out)[-1]
    assert stopped < interrupted == max(losses(out))

    run = Started(recipe, *command, DELAY="0.1")
    run.wait_for_step(out, 11 if interrupted < 10 else 21)
    started = time.monotonic()
    os.kill(run.rank(1), signal.SIGKILL)
    code, printed, errors = run.end()
    assert code == 137 and time.monotonic() - started < 60
    first, hint = errors.splitlines()
    assert first.startswith("error: rank 1 was ended by SIGKILL")
    assert hint.startswith("newest checkpoint: ") and hint.endswith("the same command continues from it")
    before = kept(out)
    assert before[-1] in (10, 20) and max(losses(out)) > before[-1]

    # With one rank instead of two it goes on from there too. Dropout draws by rank: the losses are others.
    alone = tmp_path / "alone"
    shutil.copytree(out, alone)
    flags = ["--nproc", "1", "--max-steps", str(before[-1] + 2), "--eval.task", "none", "--no-export"]
    code, printed, errors = Started(recipe, "train", str(recipe), "--out", str(alone), *flags).end()
    assert code == 0 and f"resumed at step {before[-1]}" in printed and max(losses(alone)) == before[-1] + 2

    code, printed, errors = Started(recipe, *command, "--no-export").end()
    assert code == 0 and errors == "" and kept(out)[-1] == STEPS
    assert losses(out) == losses(whole[0])


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended(recipe: Path, tmp_path: Path) -> None:
    run = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(tmp_path), "--timeout", "15", DELAY="0.1")
    run.wait_for_step(tmp_path, 12)
    os.kill(run.rank(1), signal.SIGSTOP)
    code, _, errors = run.end()
    assert code == 1
    first, hint = errors.splitlines()
    assert first.startswith("error: ") and "rank 1 stopped responding" in first and "step_00000010" in hint


@pytest.mark.slow
def test_ranks_save_and_end_when_the_launcher_is_killed(recipe: Path, tmp_path: Path) -> None:
    run = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(tmp_path), DELAY="0.1")
    run.wait_for_step(tmp_path, 3)
    family = run.family()
    assert {"0", "1"} == set(family.values())
    run.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in family))
    run.process.communicate(timeout=60)
    assert kept(tmp_path) == [max(losses(tmp_path))]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_rank_is_told_once(rank: int, recipe: Path, tmp_path: Path) -> None:
    kind, wanted = [("user", 2), ("bug", 1)][rank]
    run = Started(recipe, "train", str(recipe), "--nproc", "2", "--out", str(tmp_path), FAIL=kind, FAIL_RANK=str(rank))
    code, _, errors = run.end()
    assert code == wanted
    if kind == "user":
        assert errors == "error: the images are upside down\n"
    else:
        assert errors.count("Traceback") == 1 and "KeyError: 'the images are upside down'\n" in errors
        assert "parts.py" in errors and "trainer.py" not in errors and errors.endswith(")\nno checkpoint yet\n")


@pytest.mark.slow
def test_a_run_of_two_ranks_is_measured_on_one_and_exported_on_three(
    whole: tuple[Path, str, str], recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    accuracy = whole[1].splitlines()[-1]
    code, printed, errors = Started(recipe, "evaluate", str(out), "--nproc", "1").end()
    assert code == 0 and errors == "" and printed.splitlines()[-1] == accuracy
    before = tree(out / "export")
    shutil.rmtree(out / "export")
    code, printed, errors = Started(recipe, "export", str(out), "--nproc", "3").end()
    assert code == 0 and errors == "" and "accuracy" not in printed
    assert tree(out / "export").keys() == before.keys()

    # A disk that fails on rank 0 keeps no other rank waiting.
    shutil.rmtree(out / "export")
    (out / "export").touch()
    started = time.monotonic()
    code, _, errors = Started(recipe, "export", str(out), "--nproc", "2").end()
    assert code == 1 and errors.startswith("error: could not export") and errors.count("\n") == 1
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_a_full_file_system_is_named(recipe: Path, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        flags = ["--nproc", "2", "--model.embedding-size", "1024", "--keep", "100", "--save-every", "1", "--no-export"]
        code, printed, errors = Started(recipe, "train", str(recipe), "--out", str(tmp_path / "run"), *flags).end()
        first, hint = errors.splitlines()
        assert code == 1 and "error: could not write" in first and "No space left on device" in first
        steps = kept(tmp_path / "run")
        assert steps and f"step_{steps[-1]:08d}" in hint and f"saved step {steps[-1]} " in printed
        assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_launcher_of_the_users_own_is_left_to_its_job(recipe: Path, tmp_path: Path) -> None:
    """Under torchrun nproc starts nothing; and half an environment is refused in one sentence."""
    program = tmp_path / "start.py"
    program.write_text("import sys; from plsc.cli import train; sys.exit(train())")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    mine = tmp_path / "mine.toml"  # in the file, for torchrun takes --nproc for an abbreviation of its own flag
    mine.write_text("nproc = 5\n" + recipe.read_text())
    args = [str(mine), "--max-steps", "2", "--eval.task", "none", "--no-export"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), *args]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 150, "cwd": recipe.parent}
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], env=env, **options)
    assert done.returncode == 0 and "96 images, 8 classes, 2 ranks" in done.stdout, done.stderr

    alone = [sys.executable, str(program), *args]
    done = subprocess.run(alone, env={**env, "RANK": "0", "WORLD_SIZE": "2"}, **options)
    assert done.returncode == 2 and "error: the environment sets RANK but not MASTER_ADDR, MASTER_PORT" in done.stderr
