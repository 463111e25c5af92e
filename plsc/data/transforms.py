"""Random changes to a training image; each takes its numbers from the generator of its sample."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Called as augment(image, rng) with uint8 [H, W, C]; returns a new image (or view) of the same shape.

    flip: mirrors left-right, one time in two (wrong for letters). crop: shifts by up to so many pixels each way, the
    edge repeated. brightness, contrast: up to this share of the range up or down. erase: probability of painting a
    random rectangle, a fifth to a half of each side, in one random grey.
    """

    flip: bool = True
    crop: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    erase: float = 0.0

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ValueError(f"got crop={self.crop}, expected pixels, 0 or more")
        for name in ("brightness", "contrast", "erase"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"got {name}={value}, expected a share from 0 to 1")

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        if self.flip and rng.random() < 0.5:
            image = image[:, ::-1]
        if self.crop:
            down, right = rng.integers(-self.crop, self.crop + 1, 2).tolist()
            image = _shift(image, down, right)
        if self.brightness or self.contrast:
            light, spread = rng.uniform(-1, 1, 2).tolist()
            levels = (np.arange(256) - 127.5) * (1 + spread * self.contrast) + 127.5 + 255 * light * self.brightness
            image = np.clip(np.rint(levels), 0, 255).astype(np.uint8)[image]
        if self.erase and rng.random() < self.erase:
            image = _erase(image, rng)
        return image


def _shift(image: NDArray[np.uint8], down: int, right: int) -> NDArray[np.uint8]:
    """Moves the picture by whole pixels; uncovered rows and columns repeat the edge."""
    height, width = image.shape[:2]
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    return image[rows[:, None], columns]


def _erase(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    height, width = image.shape[:2]
    tall = max(1, int(height * rng.uniform(0.2, 0.5)))
    wide = max(1, int(width * rng.uniform(0.2, 0.5)))
    top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
    image = image.copy()
    image[top : top + tall, left : left + wide] = rng.integers(256)
    return image
