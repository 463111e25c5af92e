"""What happens to every pixel: mirroring, and bytes to floats; C++ where it was built, else numpy and torch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.data import native

_AT_ONCE = 2**18  # pixel values: as floats they stay in a core's cache from one pass to the next


def mirror(image: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    """Writes the image [H, W, C] left-right mirrored into an array of the same shape that does not overlap it."""
    height, width, channels = image.shape
    if native.kernels is not None and into.flags.c_contiguous and image.strides[1:] == (channels, 1):
        native.kernels.mirror(image.ctypes.data, into.ctypes.data, height, width, channels, image.strides[0])
    else:
        mirrored = torch.from_numpy(image.copy()).flip(1)  # numpy's own takes five times as long
        into[:] = mirrored.numpy()


def normalise(pixels: Tensor, out: Tensor) -> Tensor:
    """out = (pixels - 127.5) / 127.5 in float32, to the last bit on every processor. Both on the CPU, of one shape."""
    if native.kernels is not None and pixels.is_contiguous() and out.is_contiguous():
        native.kernels.normalise(pixels.data_ptr(), out.data_ptr(), pixels.numel())
        return out
    step = max(1, _AT_ONCE // max(1, pixels[0].numel()))
    for part, source in zip(out.split(step), pixels.split(step), strict=True):
        part.copy_(source).sub_(127.5).div_(127.5)
    return out
