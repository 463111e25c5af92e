"""Pictures of random pixels, and what a data set gives, for tests of folders, lists and decoding."""

import numpy as np
from PIL import Image

from plsc.data import ImageFolder, ImageList

FILES = ["b/2.png", "b/10.jpg", "a b/x.PNG", "a b/y.webp", "Z/u.bmp", "Z/é.jpeg"]


def picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    return Image.fromarray(pixels)


def samples(dataset: ImageFolder | ImageList) -> list[tuple[bytes, int]]:
    return [(dataset[i][0].tobytes(), dataset[i][1]) for i in range(len(dataset))]
