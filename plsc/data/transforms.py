"""Random changes to a training image; each takes its numbers from the generator of its sample."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from plsc.data.pixels import mirror

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_SCALINGS = (Image.Resampling.BOX, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.NEAREST)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Called as augment(image, rng) with uint8 [H, W, C]; returns a new image (or view) of the same shape.

    flip: mirrors left-right, one time in two (wrong for letters). crop: shifts by up to so many pixels each way, the
    edge repeated. brightness, contrast, saturation: up to this share up or down. The others are probabilities: grey;
    low_resolution: down to a fifth to a half of the size and back; blur: a radius of 0.5 to 2 hundredths of the width;
    erase: a random rectangle, a fifth to a half of each side, painted in one random grey.
    """

    flip: bool = True
    crop: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    grey: float = 0.0
    low_resolution: float = 0.0
    blur: float = 0.0
    erase: float = 0.0

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ValueError(f"got crop={self.crop}, expected pixels, 0 or more")
        for name in ("brightness", "contrast", "saturation", "grey", "low_resolution", "blur", "erase"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"got {name}={value}, expected a share from 0 to 1")

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        if self.flip and rng.random() < 0.5:
            image = image[:, ::-1]
        if self.crop:
            down, right = rng.integers(-self.crop, self.crop + 1, 2).tolist()
            image = _shift(_plain(image), down, right)
        gain, light, saturation = 1.0, 0.0, 1.0
        if self.brightness or self.contrast:
            change, spread = rng.uniform(-1, 1, 2).tolist()
            gain, light = 1 + spread * self.contrast, 255 * change * self.brightness
        if self.saturation:
            saturation += self.saturation * rng.uniform(-1, 1)
        if self.grey and rng.random() < self.grey:
            saturation = 0.0
        if (gain, light, saturation) != (1.0, 0.0, 1.0):
            image = _colour(image, gain, light, saturation)
        if self.low_resolution and rng.random() < self.low_resolution:
            image = _coarsen(image, rng)
        if self.blur and rng.random() < self.blur:
            radius = image.shape[1] * rng.uniform(0.005, 0.02)
            image = _through_pillow(image, lambda picture: picture.filter(ImageFilter.GaussianBlur(radius)))
        if self.erase and rng.random() < self.erase:
            image = _erase(image, rng)
        return image


# What recipes name. light: what another camera does to a face; strong: also what surveillance pictures suffer.
AUGMENTS = {
    "none": Augment(flip=False),
    "light": Augment(flip=False, brightness=0.1, contrast=0.2, saturation=0.2, grey=0.01, low_resolution=0.05),
    "strong": Augment(
        flip=False,
        brightness=0.2,
        contrast=0.4,
        saturation=0.4,
        grey=0.1,
        low_resolution=0.2,
        blur=0.1,
        erase=0.2,
    ),
}


def _colour(image: NDArray[np.uint8], gain: float, light: float, saturation: float) -> NDArray[np.uint8]:
    """Contrast around the middle grey, light added, and colours moved away from the pixel's own grey by a factor.

    All three are one linear map of a pixel, and so one matrix product. Grey is the luma of ITU-R BT.601.
    """
    channels = image.shape[2]
    matrix = gain * np.eye(channels, dtype=np.float32)
    if channels == 3:
        matrix = matrix * saturation + gain * (1 - saturation) * _LUMA[:, None]
    flat = _plain(image).reshape(-1, channels).astype(np.float32)
    levels = flat @ matrix.astype(np.float32)
    levels += np.float32(127.5 * (1 - gain) + light + 0.5)  # the half: casting cuts off
    return np.clip(levels, 0, 255, out=levels).astype(np.uint8).reshape(image.shape)


def _plain(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The image without negative strides."""
    if image.strides[1] > 0:
        return image
    plain = np.empty(image.shape, np.uint8)
    mirror(image[:, ::-1], plain)
    return plain


def _coarsen(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Scales down by a random way and up again, as a face far from the camera looks."""
    height, width = image.shape[:2]
    share = rng.uniform(0.2, 0.5)
    size = (max(1, round(width * share)), max(1, round(height * share)))
    down, up = (_SCALINGS[k] for k in rng.integers(len(_SCALINGS), size=2).tolist())
    return _through_pillow(image, lambda picture: picture.resize(size, down).resize((width, height), up))


def _through_pillow(image: NDArray[np.uint8], change: Callable[[Image.Image], Image.Image]) -> NDArray[np.uint8]:
    grey = image.shape[2] == 1
    picture = Image.fromarray(np.ascontiguousarray(image[..., 0]) if grey else _plain(image))
    return np.asarray(change(picture)).reshape(image.shape)


def _shift(image: NDArray[np.uint8], down: int, right: int) -> NDArray[np.uint8]:
    """Moves the picture by whole pixels; uncovered rows and columns repeat the edge."""
    height, width = image.shape[:2]
    down, right = (max(-size + 1, min(size - 1, by)) for size, by in ((height, down), (width, right)))
    top, left = max(down, 0), max(right, 0)
    rows, columns = height - abs(down), width - abs(right)
    moved = np.empty(image.shape, np.uint8)
    inside = moved[top : top + rows]
    inside[:, left : left + columns] = image[top - down : top - down + rows, left - right : left - right + columns]
    inside[:, :left] = inside[:, left : left + 1]
    inside[:, left + columns :] = inside[:, left + columns - 1 : left + columns]
    moved[:top] = moved[top]
    moved[top + rows :] = moved[top + rows - 1]
    return moved


def _erase(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    height, width = image.shape[:2]
    tall = max(1, int(height * rng.uniform(0.2, 0.5)))
    wide = max(1, int(width * rng.uniform(0.2, 0.5)))
    top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
    image = image.copy()
    image[top : top + tall, left : left + wide] = rng.integers(256)
    return image
