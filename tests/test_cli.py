"""The commands in this process: what a run prints and writes, what stops it, and how each error is told."""

import json
import logging
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from plsc import cli, cli_common, cli_flags
from plsc.comm import Counting, LocalCommunicator
from plsc.train.config import load_recipe
from plsc.train.launch import Outcome
from tests.cli_runs import kept, losses, tree


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
