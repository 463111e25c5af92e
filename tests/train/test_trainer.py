"""The training loop: resume to the bit, other world sizes, data from folder or list, bad values, signals."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from plsc.comm import Communicator, run_ranks
from plsc.data import Synthetic
from plsc.fleet import NonFiniteLoss
from plsc.strategies import Strategy
from plsc.train import Trainer
from plsc.train.run import evaluate, train

from .short_runs import BASE, change, losses, run


def weights(trainers: list[Trainer]) -> tuple[Tensor, Tensor]:
    backbone = torch.cat([p.detach().flatten() for p in trainers[0].backbone.parameters()])
    return backbone, torch.cat([trainer.head.weight.detach() for trainer in trainers])


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"head": {"sample_rate": 0.5, "fused": True}},
    "adamw": {"optim": {"name": "adamw", "lr": 0.003}, "strategy": Strategy(accumulate=2)},
    "fp16": {"strategy": Strategy(amp="fp16", clip_norm=5.0)},
    "adaface": {"head": {"margin": "adaface", "margin_args": {}}},
    "linear": {"head": {"margin": "linear", "margin_args": {}}},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_resume_in_mid_epoch_is_bit_for_bit(variant: str, tmp_path: Path) -> None:
    config = change(BASE, **VARIANTS[variant])
    whole, parts = change(config, out=str(tmp_path / "whole")), change(config, out=str(tmp_path / "parts"))
    straight = weights(run(whole, 2))
    run(parts, 2, stop_at=5)
    assert max(losses(parts)) == 5
    resumed = weights(run(parts, 2))
    assert torch.equal(straight[0], resumed[0]) and torch.equal(straight[1], resumed[1])
    assert losses(whole) == losses(parts) and len(losses(whole)) == 16


@pytest.mark.parametrize("variant", ["plain", "sampled", "adaface"])
@pytest.mark.parametrize("worlds", [(4, 1), (2, 3), (1, 6)])
def test_resume_on_another_world_size_continues_the_same_run(variant: str, worlds: tuple, tmp_path: Path) -> None:
    config = change(BASE, **VARIANTS[variant])
    whole, parts = change(config, out=str(tmp_path / "whole")), change(config, out=str(tmp_path / "parts"))
    run(whole, 1)
    run(parts, worlds[0], stop_at=7)
    run(parts, worlds[1])
    expected, got = losses(whole), losses(parts)
    assert list(got) == list(expected)
    assert np.allclose(list(got.values()), list(expected.values()), rtol=1e-4)


def test_killed_run_continues_from_the_last_commit_and_drops_later_records(tmp_path: Path) -> None:
    config = change(BASE, out=str(tmp_path / "run"))
    whole = change(BASE, out=str(tmp_path / "whole"))
    run(whole, 1)

    class Killed(Exception):
        pass

    def body(comm: Communicator) -> None:
        trainer = Trainer(config, comm=comm)
        report, step = trainer.fleet.step, trainer

        def dying(loss: Tensor, optimizer: torch.optim.Optimizer) -> Any:
            if step.step == 7:
                raise Killed
            return report(loss, optimizer)

        trainer.fleet.step = dying  # type: ignore[method-assign]
        trainer.fit()

    with pytest.raises(Killed):
        run_ranks(1, body)
    assert max(losses(config)) == 7
    run(config, 1)
    assert losses(config) == losses(whole)


def test_folder_and_list_give_the_same_losses(tmp_path: Path) -> None:
    images = Synthetic(40, 5, image_size=16, channels=3)
    rows = []
    for i in np.argsort(images.labels, kind="stable"):
        image, label = images[int(i)]
        path = tmp_path / "data" / f"class {label}" / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        rows.append(f"{path.relative_to(tmp_path)}\t{label}\n")
    (tmp_path / "list.txt").write_text("".join(rows))
    common = {"image_size": 16, "channels": 3, "num_classes": 0}
    folder = change(BASE, out=str(tmp_path / "a"), data={"kind": "folder", "path": str(tmp_path / "data"), **common})
    listed = change(BASE, out=str(tmp_path / "b"), data={"kind": "list", "path": str(tmp_path / "list.txt"), **common})
    run(folder, 1)
    run(listed, 1)
    assert losses(folder) == losses(listed)


def test_verification_classification_and_second_evaluation(tmp_path: Path) -> None:
    easy = {"num_samples": 240, "crop": 0, "flip": False}
    config = change(
        BASE,
        out=str(tmp_path / "v"),
        epochs=4,
        data=easy,
        eval={"task": "verification", "num_pairs": 200, "folds": 2, "batch_size": 32, "every": 2},
    )
    result = run_ranks(2, lambda comm: train(config, comm=comm))[0]
    assert result is not None and 0.5 <= result["accuracy"] <= 1.0 and result["auc"] > 0.7
    assert (tmp_path / "v/loss.png").stat().st_size > 1000 and (tmp_path / "v/roc.png").stat().st_size > 1000
    assert json.loads((tmp_path / "v/result.json").read_text())["accuracy"] == result["accuracy"]
    again = run_ranks(3, lambda comm: evaluate(config, comm=comm))[0]
    assert again["accuracy"] == pytest.approx(result["accuracy"], abs=0.02)
    records = [json.loads(line) for line in (tmp_path / "v/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "eval/accuracy" in r][:2] == [40, 80]
    classes = change(
        BASE,
        out=str(tmp_path / "c"),
        epochs=6,
        data=easy,
        eval={"task": "classification"},
        head={"margin": "linear", "margin_args": {}},
    )
    result = run_ranks(2, lambda comm: train(classes, comm=comm))[0]
    assert result is not None and result["top1"] <= result["top5"] and result["top5"] > 0.6


class Exploding(nn.Module):
    """Gives NaN from its second layer at the fourth forward."""

    def __init__(self, embedding_size: int, *, image_size: int, in_channels: int) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.first = nn.Linear(image_size**2 * in_channels, embedding_size)
        self.second = nn.Linear(embedding_size, embedding_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(self.flat(images)))


def test_nan_stops_names_the_first_bad_tensor_and_keeps_the_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    import plsc.train.build as build

    monkeypatch.setattr(build, "build_backbone", lambda config: Exploding(8, image_size=16, in_channels=1))
    config = change(BASE, out=str(tmp_path))

    def body(comm: Communicator) -> Path | None:
        trainer = Trainer(config, comm=comm)
        prepare = trainer._prepare_step

        def poison() -> None:
            prepare()
            if trainer.step == 4:
                trainer.backbone.second.bias.data[0] = float("nan")  # type: ignore[union-attr, index]

        trainer._prepare_step = poison  # type: ignore[method-assign]
        with pytest.raises(NonFiniteLoss, match=r"at step 5; first tensor.*backbone\.second\.bias \(parameter\)"):
            trainer.fit()
        return trainer.checkpoints.latest()

    assert [path and path.name for path in run_ranks(2, body)] == ["step_00000003"] * 2
    healthy = run(change(config, resume=True), 2)
    assert healthy[0].step == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"num_classes": 14}}, "checkpoint has 10 classes.*14"),
        ({"model": {"embedding_size": 16}}, r"16|shape"),
        ({"model": {"backbone": "smallconv"}}, "backbone"),
        ({"optim": {"name": "adamw"}}, r"optim.name: .sgd. -> .adamw.*--model.weights"),
        ({"head": {"margin": "arcface"}}, "head.margin: .cosface. -> .arcface."),
        ({"data": {"image_size": 32}}, "data.image_size: 16 -> 32"),
        ({"strategy": Strategy(amp="fp16")}, "loss scale"),
        ({"seed": 5}, "seed"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    config = change(BASE, out=str(tmp_path), epochs=1)
    run(config, 1)
    with pytest.raises(ValueError, match=message):
        run(change(config, **changes), 2)


def test_more_classes_when_asked_for(tmp_path: Path) -> None:
    config = change(BASE, out=str(tmp_path), epochs=1)
    (old,) = run(config, 1)
    before = old.head.weight.detach().clone()

    def body(comm: Communicator) -> Tensor:
        trainer = Trainer(change(config, data={"num_classes": 14}, head={"extend_classes": True}), comm=comm)
        assert trainer.resume()
        return trainer.head.weight.detach()

    grown = torch.cat(run_ranks(3, body))
    assert grown.shape[0] == 14 and torch.equal(grown[:10], before) and grown[10:].std() > 0


def test_num_classes_smaller_than_the_data_names_both(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.png 0\nb.png 7\n")
    for name in "ab":
        Image.new("RGB", (16, 16)).save(tmp_path / f"{name}.png")
    config = change(BASE, data={"kind": "list", "path": str(tmp_path / "list.txt"), "num_classes": 5, "channels": 3})
    with pytest.raises(ValueError, match=r"5[\s\S]*[78]"):
        Trainer(config)


def test_log_lines_say_step_loss_speed_and_eta(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="plsc"):
        run(change(BASE, out=str(tmp_path), max_steps=2), 1)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step 1/2")]
    assert all(word in line for word in ("loss", "images/s", "ETA", "lr", "epoch 1/2"))


def test_options_of_the_optimizer_may_change_on_resume(tmp_path: Path) -> None:
    config = change(BASE, out=str(tmp_path), optim={"schedule": "constant", "warmup_epochs": 0.0})
    run(config, 2, stop_at=5)
    changed = change(config, optim={"lr": 0.01, "weight_decay": 0.1, "momentum": 0.5})
    trainer = run(changed, 2)[0]
    group = trainer.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.01, 0.1, 0.5)


def test_every_rank_measures_the_model_that_is_saved(tmp_path: Path) -> None:
    """Batch statistics differ between ranks; evaluation takes rank 0's, as the checkpoint does."""
    config = change(
        BASE,
        out=str(tmp_path),
        model={"backbone": "smallconv"},
        eval={"task": "verification", "num_pairs": 60, "folds": 2},
    )
    first = run_ranks(3, lambda comm: train(config, comm=comm))[0]
    again = run_ranks(1, lambda comm: evaluate(config, comm=comm))[0]
    assert first is not None and first["auc"] == pytest.approx(again["auc"], abs=1e-9)
