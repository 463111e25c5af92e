"""A data set whose pictures say their own numbers, and the order in which a loader gives them."""

import json

import numpy as np
from torch import Tensor

from plsc.data import Loader

N, B = 50, 12


class Numbers:
    """Sample i is a picture whose pixels say i; label i % 7. `broken` samples raise."""

    def __init__(self, count: int = N, broken: tuple[int, ...] = ()) -> None:
        self.labels, self.num_classes, self.broken = np.arange(count) % 7, 7, broken

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return f"number-{i}.jpg"

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i in self.broken:
            raise OSError("disk on fire")
        return np.full((3, 2, 3), i % 256, np.uint8), int(self.labels[i])


def numbers(images: Tensor) -> list[int]:
    return (images[:, 0, 0, 0] * 127.5 + 127.5).round().int().tolist()


def order(world_size: int, epochs: int, state: dict | None = None, steps: int | None = None) -> list[list[int]]:
    """The samples of each step, ranks one after the other."""
    loaders = [Loader(Numbers(), B, rank=r, world_size=world_size, seed=5) for r in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    found = []
    for parts in zip(*(loader.epochs(epochs) for loader in loaders), strict=True):
        assert all(len(labels) == B // world_size for _, labels in parts)
        for images, labels in parts:
            assert labels.tolist() == [i % 7 for i in numbers(images)]
        found.append([i for images, _ in parts for i in numbers(images)])
        if len(found) == steps:
            break
    assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
    return found
