"""A small bundle, made once: a network that keeps enough of an image to tell colours and places apart."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from plsc.data.embeddings import write_safetensors
from plsc.serve.bundle import Bundle, Threshold, write_bundle
from plsc.serve.service import thumbnail
from plsc.train.export import export_centres, export_onnx, model_digest

SIZE, DIM, CLASSES = 112, 24, 30
NAMES = [f"Person {i}" for i in range(CLASSES - 2)] + ["<b>bold & co</b>", "../../etc/passwd"]


class Small(nn.Module):
    """Averages of an image's patches, mixed; not symmetric, so that a mirror image differs."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten())
        self.out = nn.Linear(8 * 49, DIM)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.out(self.pool(images))
        return found


def draw(seed: int, size: int = SIZE) -> np.ndarray:
    """An image uint8 [size, size, 3] of its own: a few coloured blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (7, 7, 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(blocks).resize((size, size), Image.Resampling.NEAREST))


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.fixture(scope="session")
def backbone() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="session")
def exported(backbone: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's export folder: class i is the direction of draw(i), with flip."""
    folder = tmp_path_factory.mktemp("export")
    export_onnx(backbone, folder / "model.onnx", image_size=SIZE)
    pictures = [draw(i) for i in range(CLASSES)]
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float().sub(127.5).div(127.5)
    with torch.no_grad():
        rows = backbone(x) + backbone(x.flip(-1))
    export_centres(folder / "centres.safetensors", rows, digest=model_digest(backbone), class_names=NAMES)
    small = [thumbnail(one) for one in pictures]
    offsets = np.cumsum([0, *map(len, small)], dtype=np.int64)
    blob = np.frombuffer(b"".join(small), np.uint8)
    tensors = [("offsets", "int64", offsets.shape, [offsets]), ("images", "uint8", blob.shape, [blob])]
    write_safetensors(folder / "thumbnails.safetensors", tensors, {"format": "plsc-thumbnails"})
    return folder


@pytest.fixture(scope="session")
def make_bundle(exported: Path) -> Callable[..., Path]:
    def make(target: Path, **options: object) -> Path:
        given: dict = {
            "name": "small",
            "plsc_version": "0",
            "flip": True,
            "thresholds": [Threshold(0.5, 1e-2, 0.009, 0.99), Threshold(0.7, 1e-3, 0.001, 0.9)],
            "thumbnails": exported / "thumbnails.safetensors",
            **options,
        }
        return write_bundle(target, onnx=exported / "model.onnx", centres=exported / "centres.safetensors", **given)

    return make


@pytest.fixture(scope="session")
def bundle_path(make_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("served") / "bundle")


@pytest.fixture(scope="session")
def bundle(bundle_path: Path) -> Bundle:
    return Bundle.open(bundle_path, threads=1)


DIGEST = hashlib.sha256(b"a model").hexdigest()
