"""Real aligned faces: the same run from an archive and from every container that plsc-data makes of it."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from plsc.comm import run_ranks
from plsc.data import convert, open_images
from plsc.train import Config, Trainer
from plsc.train.config import DataConfig, EvalConfig, HeadConfig, ModelConfig, OptimConfig


@pytest.mark.slow
def test_every_container_gives_the_same_losses_and_accuracy(shared: Path, tmp_path: Path) -> None:
    archive = shared / "data/faces/lfw112_val.zip"
    folder = tmp_path / "faces"
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    people = sorted(path.name for path in folder.iterdir())
    lines = [
        f"{path.relative_to(folder)} {label}\n" for label, name in enumerate(people) for path in images(folder, name)
    ]
    (tmp_path / "faces.txt").write_text("".join(lines))
    pairs = str(shared / "data/faces/val_pairs.txt")
    base = Config(
        epochs=1,
        max_steps=12,
        batch_size=64,
        log_every=1,
        export=False,
        data=DataConfig(kind="folder", path=str(archive), image_size=32, workers=0, crop=2),
        model=ModelConfig(backbone="plainnet", embedding_size=32),
        head=HeadConfig(margin="cosface", margin_args={"scale": 16.0}),
        optim=OptimConfig(lr=0.02),
        eval=EvalConfig(kind="folder", path=str(archive), pairs=pairs),
    )
    sources = {
        "zip": ("folder", str(archive)),
        "dir": ("folder", str(folder)),
        "list": ("list", str(tmp_path / "faces.txt")),
    }
    for kind in ("rec", "tar", "parquet", "lmdb"):
        if kind in ("parquet", "lmdb"):
            pytest.importorskip("pyarrow" if kind == "parquet" else "lmdb")
        sources[kind] = (kind, convert(open_images(archive), str(tmp_path / f"x.{kind}")))
    found = {}
    for name, (kind, path) in sources.items():
        data = replace(base.data, kind=kind, path=path, root=str(folder) if kind == "list" else "")
        config = replace(base, out=str(tmp_path / name), data=data)

        def body(comm, config=config):  # type: ignore[no-untyped-def]
            trainer = Trainer(config, comm=comm)
            assert trainer.fit()
            result = trainer.evaluate()
            return result["accuracy"], result["auc"]

        accuracies = run_ranks(2, body)
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = (accuracies, [record["loss"] for record in records if "loss" in record])
    assert all(each == found["zip"] for each in found.values()) and len(found["zip"][1]) == 12
    assert found["zip"][0][0][1] > 0.55  # area under the curve, after twelve steps of a toy network


def images(folder: Path, name: str) -> list[Path]:
    return sorted((folder / name).iterdir())
