"""Made-up images of any number of classes, drawn on the fly: for benchmarks and tests of learning without data."""

import numpy as np
from numpy.typing import NDArray

_CELLS = 8  # a class is a pattern of 8 x 8 coloured cells
_PROTOTYPE, _SAMPLE = 1, 2  # streams of random numbers


class Synthetic:
    """Sample i is the pattern of its class plus noise of its own; both depend on (seed, class or i) alone.

    labels: "uniform" deals the classes in turn; "zipf" draws class k with probability about 1 / (k + 1).
    `__getitem__` returns uint8 [image_size, image_size, channels] and the label.
    """

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        image_size: int = 112,
        channels: int = 3,
        labels: str = "uniform",
        seed: int = 0,
    ) -> None:
        for name, value in (("num_samples", num_samples), ("num_classes", num_classes), ("image_size", image_size)):
            if value < 1:
                raise ValueError(f"got {name}={value}, expected at least 1")
        if channels not in (1, 3):
            raise ValueError(f"got channels={channels}, expected 3 or 1")
        self.num_classes, self.image_size, self.channels, self.seed = num_classes, image_size, channels, seed
        self.labels: NDArray[np.int64]
        if labels == "uniform":
            self.labels = np.arange(num_samples, dtype=np.int64) % num_classes
        elif labels == "zipf":
            # The inverse of the distribution function ln(1 + k) / ln(1 + num_classes).
            draw = np.random.default_rng(seed).random(num_samples)
            self.labels = np.minimum((num_classes + 1.0) ** draw - 1.0, num_classes - 1).astype(np.int64)
        else:
            raise ValueError(f"got labels={labels!r}, expected 'uniform' or 'zipf'")
        self._cell = np.arange(image_size) * _CELLS // image_size  # [image_size] the cell of a row or column

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return f"synthetic {i}"

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        if not 0 <= i < len(self):
            raise IndexError(f"got sample {i}, expected 0 to {len(self) - 1}")
        label = int(self.labels[i])
        cells = self._draw(_PROTOTYPE, label, _CELLS * _CELLS * self.channels).reshape(_CELLS, _CELLS, self.channels)
        noise = self._draw(_SAMPLE, i, self.image_size**2 * self.channels)
        image = (cells // 2)[self._cell][:, self._cell]  # [S, S, C] of 0..127
        return image + (noise // 2).reshape(image.shape), label  # at most 254

    def _draw(self, stream: int, index: int, count: int) -> NDArray[np.uint8]:
        bits = np.random.Philox(key=[self.seed, stream], counter=[0, 0, 0, index])
        return np.frombuffer(np.random.Generator(bits).bytes(count), np.uint8)
