"""Data sets of others' making: map-style ones, lists, generators; arrays, tensors, Pillow images."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image

import plsc
from plsc.data import Loader, Samples, Synthetic, batches
from plsc.data.samples import as_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (20, 6, 4, 3), np.uint8)


class MapStyle(torch.utils.data.Dataset):
    """What users of torch have; `kind` says what an image is."""

    def __init__(self, kind: str = "array") -> None:
        self.kind, self.read = kind, 0

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, i: int) -> tuple[object, int]:
        self.read += 1
        image = IMAGES[i]
        made = {
            "array": image,
            "tensor": torch.from_numpy(image).permute(2, 0, 1),
            "pillow": Image.fromarray(image),
        }
        return made[self.kind], i % 5


def pairs() -> Iterator[tuple[np.ndarray, int]]:
    for i in range(len(IMAGES)):
        yield IMAGES[i], i % 5


@pytest.mark.parametrize("kind", ["array", "tensor", "pillow", "list", "generator"])
def test_the_loader_takes_them(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    source = {"list": list(pairs()), "generator": pairs()}.get(kind) or MapStyle(kind)
    loader = Loader(source, 4, shuffle=False)
    found = list(loader.epochs(1))
    assert torch.cat([labels for _, labels in found]).tolist() == [i % 5 for i in range(20)]
    images = torch.cat([batch.clone() for batch, _ in found]).permute(0, 2, 3, 1)
    wanted = (torch.from_numpy(IMAGES).float() - 127.5) / 127.5
    assert torch.equal(images, wanted)
    assert ("read once for their labels" in caplog.text) == (kind != "generator")


def test_fleet_and_batches_take_them() -> None:
    fleet = plsc.Fleet(comm=plsc.comm.LocalCommunicator())
    assert len(list(fleet.loader(pairs(), 4).epochs(1))) == 5
    assert sum(len(labels) for _, labels in batches(Samples(pairs()), 8)) == 20


def test_labels_that_are_known_are_not_read() -> None:
    source = MapStyle()
    source.targets = [i % 5 for i in range(20)]  # type: ignore[attr-defined]
    data = as_dataset(source)
    assert source.read == 0 and data.num_classes == 5 and data.labels.tolist() == source.targets  # type: ignore[attr-defined]
    given = Samples(MapStyle(), labels=range(20), num_classes=30, names=[f"n{i}" for i in range(20)])
    assert given.num_classes == 30 and given.name(3) == "n3" and given[3][1] == 3


def test_data_sets_stay_as_they_are() -> None:
    data = Synthetic(10, 2, image_size=8)
    assert as_dataset(data) is data


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([(IMAGES[0].astype(np.float32), 0)], r"got sample 0 as float32 \(6, 4, 3\), expected uint8"),
        ([(torch.zeros(3, 6, 4), 0)], "float32"),
        ([(IMAGES[0][:, :, :2], 0)], r"\(6, 4, 2\)"),
        ([IMAGES[0]], r"got a ndarray as a sample, expected \(image, label\)"),
        ([], "the data set is empty"),
        (iter(()), "the data set is empty"),
        (7, "got a int, expected a data set or an iterable"),
        ([(IMAGES[0], 1.5)], "whole numbers"),
    ],
)
def test_what_is_none_of_these_is_named(source: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(Loader(source, 1).epochs(1))  # type: ignore[arg-type]
