"""A data set under other class numbers, so that a class keeps its number when others come or go."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.reading import Dataset


class Relabelled:
    """The samples of `data` in their order, with the classes numbered as in `class_names`, which may name more.

    `data` has `class_names`, all of them among the new ones. What else it offers is offered unchanged.
    """

    def __init__(self, data: Dataset, class_names: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(class_names)}
        own: list[str] = [str(name) for name in data.class_names]  # type: ignore[attr-defined]
        if len(numbers) < len(class_names):
            raise ValueError(
                f"got {len(class_names)} class names of which only {len(numbers)} differ, expected no two alike"
            )
        if missing := [name for name in own if name not in numbers]:
            raise ValueError(f"got no number for {len(missing)} classes of the data, such as {missing[0]!r}")
        self._data = data
        table = np.array([*(numbers[name] for name in own), -1], np.int64)  # label -1 stays -1
        self.labels: NDArray[np.int64] = table[np.asarray(data.labels)]
        self.class_names = class_names
        self.num_classes = len(class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        return self._data[i][0], int(self.labels[i])

    def name(self, i: int) -> str:
        return self._data.name(i)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before __init__, when a worker process unpickles: nothing is there to ask
            raise AttributeError(name)
        return getattr(self._data, name)
