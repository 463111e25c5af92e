"""Going on with a run: classes keep their numbers by name, other settings are refused or said, schedules still end."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.comm import Communicator, run_ranks
from plsc.data import ImageFolder, Loader, Relabelled, Synthetic
from plsc.train import Config, Trainer
from plsc.train.build import num_classes
from plsc.train.config import DataConfig, EvalConfig, HeadConfig, ModelConfig, OptimConfig, to_dict
from plsc.train.resume import compare_settings, match_classes, match_trained

IMAGES = 6  # a class


def draw(folder: Path, *names: str) -> None:
    """A class of a few random grey pictures under each name, the same for a name every time."""
    for name in names:
        (folder / name).mkdir(parents=True)
        pixels = np.random.default_rng(sum(name.encode())).integers(0, 256, (IMAGES, 16, 16), np.uint8)
        for i, image in enumerate(pixels):
            Image.fromarray(image).save(folder / name / f"{i}.png")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    draw(tmp_path / "data", "b", "d", "f")
    return Config(
        epochs=4,
        batch_size=6,
        log_every=1,
        export=False,
        out=str(tmp_path / "run"),
        data=DataConfig(path=str(tmp_path / "data"), image_size=16, channels=1, workers=0),
        model=ModelConfig(backbone="plainnet", embedding_size=8),
        head=HeadConfig(margin="cosface", margin_args={"scale": 16.0}),
        optim=OptimConfig(lr=0.05),
        eval=EvalConfig(task="none"),
    )


def change(config: Config, **changes: Any) -> Config:
    made = {
        name: dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **made)


def fit(config: Config, world: int = 1, *, stop_at: int = 0) -> list[Trainer]:
    def body(comm: Communicator) -> Trainer:
        trainer = Trainer(config, comm=comm)
        step = trainer.fleet.step

        def stopping(*args: Any) -> Any:
            if trainer.step + 1 == stop_at:
                trainer._signal = 15
            return step(*args)

        trainer.fleet.step = stopping  # type: ignore[method-assign]
        assert trainer.fit() == (not stop_at)
        trainer.close()
        return trainer

    return run_ranks(world, body)


def records(config: Config) -> list[dict[str, Any]]:
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def test_renamed_added_and_removed_classes_are_named(config: Config) -> None:
    folder = Path(config.data.path)
    fit(config, stop_at=4)
    draw(folder, "a", "e")
    with pytest.raises(ValueError, match=r"2 new \(a, e\); pass --head.extend-classes"):
        fit(config)
    (folder / "d").rename(folder / "c")  # the labels are as before: only the name tells
    with pytest.raises(ValueError, match=r"3 new \(a, c, e\), 1 gone \(d\).*put it back"):
        fit(change(config, head={"extend_classes": True}), 2)


def test_new_classes_come_after_the_old_and_the_run_ends_with_its_epochs(config: Config) -> None:
    old = fit(config, stop_at=4)[0]  # step 4 of 12, in epoch 1 of 0 to 3
    before = old.head.weight.detach().clone()
    draw(Path(config.data.path), "a", "e")
    grown = change(config, head={"extend_classes": True})

    def look(comm: Communicator) -> tuple[Trainer, torch.Tensor]:
        trainer = Trainer(grown, comm=comm)
        assert trainer.resume()
        return trainer, trainer.head.weight.detach().clone()

    resumed = run_ranks(2, look)
    trainer = resumed[0][0]
    assert torch.equal(torch.cat([weight for _, weight in resumed])[:3], before)
    assert list(trainer.data.class_names) == ["b", "d", "f", "a", "e"]  # type: ignore[attr-defined]
    for i, label in enumerate(trainer.data.labels.tolist()):
        assert trainer.data.name(i)[0] == "bdfae"[label] and trainer.data[i][1] == label
    assert (trainer.loader.epoch, trainer.loader.position) == (2, 0)  # epoch 1 was of other images: done
    assert trainer.total_steps == 4 + 2 * 30 // 6

    done = fit(grown, 2, stop_at=7)[0]
    again = fit(config, 1)[0]  # the classes are the run's now: nothing needs to be asked for
    assert again.step == again.total_steps == done.total_steps == 14
    assert again.head.num_classes == 5
    assert records(config)[-1]["lr"] == pytest.approx(0.05 / 14)  # polynomial: 1 - 13 / 14
    assert [record["step"] for record in records(config)] == list(range(1, 15))


def test_other_batches_end_with_the_epochs_and_are_said(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    whole = fit(change(config, out=f"{config.out}-whole"))[0]
    fit(config, stop_at=6)  # half of 4 epochs of 3 steps
    with caplog.at_level(logging.WARNING, logger="plsc"):
        trainer = fit(change(config, batch_size=3, strategy={"amp": "bf16"}), 3)[0]
    (said,) = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert "batch_size: 6 -> 3" in said and "strategy.amp: 'fp32' -> 'bf16'" in said and "18 steps in all" in said
    assert trainer.step == trainer.total_steps == 6 + 2 * 6 and whole.step == 12
    assert records(config)[-1]["lr"] == pytest.approx(0.05 / 18)


@pytest.mark.parametrize("schedule", [{"schedule": "step", "milestones": (0.7, 1.3)}, {"warmup_epochs": 1.7}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_unchanged_run_keeps_its_plan(schedule: dict[str, Any], accumulate: int, config: Config) -> None:
    config = change(config, optim=schedule, strategy={"accumulate": accumulate})
    fresh = fit(config, stop_at=5)[0]
    resumed = Trainer(config)
    assert resumed.resume() and resumed.step == 5
    assert (resumed.schedule, resumed.total_steps) == (fresh.schedule, fresh.total_steps)
    assert fresh.total_steps == 12


def test_more_epochs_go_on(config: Config) -> None:
    fit(change(config, epochs=2))
    trainer = fit(change(config, epochs=3))[0]
    assert trainer.step == trainer.total_steps == 9
    assert fit(change(config, epochs=2))[0].step == 9  # fewer than are done: nothing left to do


def test_another_order_of_the_same_number_of_images_is_refused(tmp_path: Path) -> None:
    data = Synthetic(20, 5, image_size=8, channels=1)
    state = Loader(data, 4).state_dict()
    other = Synthetic(20, 5, image_size=8, channels=1, labels="zipf", seed=1)
    assert not np.array_equal(data.labels, other.labels)
    with pytest.raises(ValueError, match="has other labels than this loader"):
        Loader(other, 4).load_state_dict(state)
    loader = Loader(Synthetic(24, 6, image_size=8, channels=1), 4)
    loader.load_state_dict({**state, "epoch": 2, "position": 8}, other_data=True)
    assert (loader.epoch, loader.position) == (3, 0)
    same = Loader(data, 4)
    same.load_state_dict({**state, "epoch": 2, "position": 8}, other_data=True)  # its own data: goes on where it was
    assert (same.epoch, same.position) == (2, 8)


def test_classification_maps_classes_by_name(config: Config, tmp_path: Path) -> None:
    draw(tmp_path / "test", "d", "f")
    ask = {"task": "classification", "path": str(tmp_path / "test"), "flip": False}
    trainer = Trainer(change(config, eval=ask))
    trainer.out.mkdir()
    assert trainer.eval_data is not None and trainer.eval_data.labels.tolist() == [1] * IMAGES + [2] * IMAGES
    with torch.no_grad():  # a head that tells the classes apart by construction: the images are those trained
        everything = trainer.backbone.eval()(torch.stack([_image(trainer.data, i) for i in range(18)]))
        trainer.head.weight.copy_(everything.reshape(3, IMAGES, -1).mean(1))
        classes = trainer.head.topk(everything[IMAGES:], 1)[1]
        wanted = float((classes[:, 0].numpy() == trainer.eval_data.labels).mean())
    assert trainer.evaluate()["top1"] == pytest.approx(wanted) and wanted > 0.6
    draw(tmp_path / "test", "x")
    with pytest.raises(ValueError, match=r"1 of its classes were not trained \(x\)"):
        Trainer(change(config, eval=ask))


def _image(data: Any, i: int) -> torch.Tensor:
    return torch.from_numpy((data[i][0].astype(np.float32) - 127.5) / 127.5).permute(2, 0, 1)


def test_weights_start_from_the_backbone_of_another_run(config: Config, tmp_path: Path) -> None:
    old = fit(change(config, epochs=1))[0]
    new = change(config, out=str(tmp_path / "new"), model={"weights": config.out}, head={"margin": "arcface"}, epochs=0)
    trainer = fit(new)[0]
    pairs = zip(old.backbone.state_dict().values(), trainer.backbone.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(ValueError, match="nowhere"):
        fit(change(new, out=str(tmp_path / "newer"), model={"weights": str(tmp_path / "nowhere")}))


def test_names_lost_or_foreign_are_an_error(config: Config) -> None:
    fit(config, stop_at=2)
    path = Path(config.out) / "classes.json"
    path.write_text(json.dumps(["b", "f", "d"]))
    with pytest.raises(ValueError, match="not of this run"):
        fit(config)
    path.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*classes\.json"):
        fit(config)


def test_settings_that_only_say_how_to_run_may_differ() -> None:
    config = Config()
    changed = change(config, out="elsewhere", nproc=2, keep=9, data={"workers": 3}, eval={"folds": 5})
    assert compare_settings(json.loads(json.dumps(_plain(config))), changed) == []
    assert compare_settings(_plain(config), change(config, optim={"lr": 0.2})) == ["optim.lr: 0.1 -> 0.2"]
    filtered = change(config, head={"filter_threshold": 0.4})
    assert compare_settings(_plain(filtered), config) == ["head.filter_threshold: 0.4 -> None"]
    with pytest.raises(ValueError, match=r"head.margin_args: \{\} -> \{'scale': 30.0\}"):
        compare_settings(_plain(config), change(config, head={"margin_args": {"scale": 30.0}}))


def _plain(config: Config) -> dict[str, Any]:
    return to_dict(config)


def test_relabelled_is_the_same_data_under_other_numbers(tmp_path: Path) -> None:
    draw(tmp_path, "b", "d")
    data = ImageFolder(tmp_path, image_size=16, channels=1)
    new = Relabelled(data, ["d", "x", "b"])
    assert (len(new), new.num_classes, new.labels.tolist()) == (2 * IMAGES, 3, [2] * IMAGES + [0] * IMAGES)
    assert new[0][1] == 2 and np.array_equal(new[0][0], data[0][0]) and new.encoded(3) == data.encoded(3)
    with pytest.raises(ValueError, match="1 classes of the data, such as 'd'"):
        Relabelled(data, ["b", "x"])
    with pytest.raises(ValueError, match="no two alike"):
        Relabelled(data, ["b", "d", "d"])
    batches = list(Loader(new, 4, workers=1, start_method="spawn").epochs(1))  # goes to a worker and back
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == [0] * IMAGES + [2] * IMAGES


def test_data_without_names_are_left_alone(tmp_path: Path) -> None:
    draw(tmp_path, "b", "d")
    named, numbered = ImageFolder(tmp_path, image_size=16, channels=1), Synthetic(8, 4, image_size=16, channels=1)
    assert match_classes(numbered, ["x"], extend=False, where="here") is numbered
    assert match_classes(named, None, extend=False, where="here") is named
    assert match_trained(numbered, named, where="here") is numbered


def test_weights_are_for_a_beginning(config: Config, tmp_path: Path) -> None:
    """What a run started from stays on record; another origin under way is refused, not ignored."""
    fit(change(config, epochs=1))
    new = change(config, out=str(tmp_path / "new"), model={"weights": config.out})
    fit(new, stop_at=2)
    with pytest.raises(ValueError, match="has begun already"):
        fit(change(new, model={"weights": str(tmp_path)}))
    fit(change(new, model={"weights": ""}))
    assert f'weights = "{config.out}"' in (tmp_path / "new/config.toml").read_text()


def test_labels_far_beyond_the_images_are_refused() -> None:
    data = Synthetic(4, 5000, image_size=8, channels=1)
    with pytest.raises(ValueError, match="4 images but labels up to 4999"):
        num_classes(Config(), data)
    assert num_classes(change(Config(), data={"num_classes": 6000}), data) == 6000
