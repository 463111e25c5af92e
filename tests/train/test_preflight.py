"""What a run says before its first step: folders, room for checkpoints, cores, ranks."""

import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plsc.comm import run_ranks
from plsc.train import preflight
from plsc.train.config import Config, DataConfig, EvalConfig, HeadConfig, ModelConfig, OptimConfig
from plsc.train.preflight import check_folder, check_room, checkpoint_bytes, look_ahead, warnings_of
from plsc.train.trainer import Trainer

Usage = namedtuple("Usage", "total used free")


def config(out: Path, **changes: Any) -> Config:
    plain = Config(
        epochs=1,
        batch_size=16,
        out=str(out),
        data=DataConfig(kind="synthetic", num_samples=64, num_classes=500, image_size=32, workers=0),
        model=ModelConfig("plainnet", 64),
        head=HeadConfig(margin="cosface", sub_centers=2),
        eval=EvalConfig(task="none"),
    )
    return replace(plain, **changes)


def test_folders_that_cannot_be_written_are_refused_and_others_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/run", "file/a/b"):
        with pytest.raises(ValueError, match=rf"--out is .*{path}', but .*/file is a file; expected a folder"):
            check_folder(tmp_path / path, "--out")
    with pytest.raises(ValueError, match="nothing can be written into /proc"):
        check_folder("/proc/run", "--out")
    check_folder(tmp_path / "new/deep", "--out")
    check_folder(tmp_path, "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    with pytest.raises(ValueError, match="Permission denied"):
        check_folder(tmp_path / "closed/run", "--out")


@pytest.mark.parametrize(
    "optim", [OptimConfig("sgd"), OptimConfig("sgd", momentum=0.0), OptimConfig("adamw"), OptimConfig("lars")]
)
def test_the_size_of_a_checkpoint_is_foreseen(optim: OptimConfig, tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, optim=optim, head=HeadConfig(margin="cosface", sub_centers=8)))
    expected = checkpoint_bytes(trainer.config, trainer.backbone, trainer.num_classes)
    assert trainer.fit()
    trainer.close()
    path = trainer.checkpoints.latest()
    assert path is not None
    found = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0.9 * found < expected <= found


def test_room_for_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gib = 2**30
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * gib, 0, 4 * gib))
    check_room(tmp_path / "not/yet", gib, keep=3, kept=0)  # 3 and the one that is being written
    check_room(tmp_path, 4 * gib, keep=3, kept=3)
    assert caplog.text == ""
    check_room(tmp_path, gib, keep=4, kept=0)
    assert "has 4.00 GiB left, and 5 more checkpoints of 1.00 GiB are to come" in caplog.text
    with pytest.raises(ValueError, match=r"a checkpoint takes 4.50 GiB and the disk of .* has 4.00 GiB left"):
        check_room(tmp_path, 9 * gib // 2, keep=1, kept=0)


def test_cores_readers_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "num_cores", lambda: 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    plain = config(Path("out"))
    many = replace(plain, data=replace(plain.data, workers=3))
    assert warnings_of(plain, num_classes=10, num_ranks=4) == []
    assert warnings_of(many, num_classes=10, num_ranks=1) == []
    (said,) = warnings_of(many, num_classes=10, num_ranks=2)
    assert "data.workers is 3 on each of 2 ranks: 6 reading processes share 4 cores; --data.workers 2" in said
    assert [line[:20] for line in warnings_of(plain, num_classes=5, num_ranks=6)] == [
        "6 ranks share 4 core",
        "there are 6 ranks an",
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of three machines
    assert warnings_of(plain, num_classes=6, num_ranks=6) == []


def test_ranks_hear_of_a_full_disk_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000, 1000, 0))

    def begin(comm: Any) -> str:
        trainer = Trainer(config(tmp_path), comm=comm)
        with pytest.raises(ValueError, match="could not begin: rank 0: a checkpoint takes") as caught:
            look_ahead(trainer)
        return str(caught.value)

    first, second = run_ranks(2, begin)
    assert first == second and not [record for record in caplog.records if record.name == preflight.__name__]
