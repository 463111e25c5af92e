"""A run on a record file, verified by the pairs of a .bin file: from the recipe's words to the figures."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.data import RecordIO, RecordWriter, VerificationSet
from plsc.train import Config
from plsc.train.build import build_data, build_eval
from plsc.train.config import DataConfig, EvalConfig, HeadConfig, ModelConfig
from plsc.train.run import train


def png(label: int, seed: int) -> bytes:
    image = np.random.default_rng(label).integers(0, 200, (16, 16, 3), np.uint8)
    image += np.random.default_rng(1000 + seed).integers(0, 50, image.shape, np.uint8)
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    with RecordWriter(tmp_path / "train.rec", dialect="insightface") as writer:
        for k in range(48):
            writer.write(k // 6, png(k // 6, k))
    images = [png(100 + k // 2 if k % 4 < 2 else 100 + k, k) for k in range(80)]
    (tmp_path / "pairs.bin").write_bytes(pickle.dumps((images, [k % 2 == 0 for k in range(40)]), 2))
    return Config(
        epochs=1,
        batch_size=12,
        export=False,
        out=str(tmp_path / "run"),
        data=DataConfig(kind="rec", path=str(tmp_path), image_size=16, workers=0),
        model=ModelConfig(backbone="plainnet", embedding_size=8),
        head=HeadConfig(margin="cosface", margin_args={"scale": 16.0}),
        eval=EvalConfig(kind="bin", path=str(tmp_path / "pairs.bin")),
    )


def test_a_run_trains_on_records_and_verifies_pairs(config: Config) -> None:
    result = train(config)
    assert result is not None and 0.5 <= result["accuracy"] <= 1.0


def test_kinds_are_built(config: Config) -> None:
    data = build_data(config.data, seed=0)
    assert isinstance(data, RecordIO) and data.num_classes == 8 and len(data) == 48
    evaluated, pairs = build_eval(config, data)
    assert isinstance(evaluated, VerificationSet) and pairs is not None and len(pairs) == 40
    with pytest.raises(ValueError, match="its own pairs"):
        wrong = EvalConfig(kind="bin", path=config.eval.path, task="classification")
        build_eval(Config(data=config.data, eval=wrong), data)
    with pytest.raises(ValueError, match="expected one of"):
        build_data(DataConfig(kind="bin"), seed=0)
