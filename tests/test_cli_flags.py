"""The commands' flags: what is there, what overrides what, what is refused and how."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from plsc import cli, cli_flags
from plsc.train.config import load_recipe
from tests.cli_runs import ROOT

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


def test_commands_by_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([]) == 2 and cli.main(["--help"]) == 0 and cli.main(["tarin"]) == 2
    assert capsys.readouterr().out.count("usage: python -m plsc.cli train | eval | export | embed | data") == 3
    assert cli.main(["eval", str(tmp_path)]) == 2 and "is not a run" in capsys.readouterr().err
    command = [sys.executable, "-m", "plsc.cli", "data", "stats", str(tmp_path / "gone")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
