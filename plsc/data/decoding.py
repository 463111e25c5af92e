"""Encoded images as pixels: JPEG, PNG, WebP and BMP of any mode, size and orientation; damage named, bombs refused."""

import functools
import importlib
import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from plsc.data.costs import costly

logger = logging.getLogger(__name__)

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_JPEG = b"\xff\xd8"
_LOST = ("premature end of data segment", "bad Huffman code", "bad arithmetic code", "instead of RST")

Name = str | Callable[[], str]


def decode_image(data: bytes, image_size: int, channels: int = 3, *, name: Name = "image") -> NDArray[np.uint8]:
    """Decodes an encoded image into uint8 [image_size, image_size, channels], RGB or grey.

    Another size is scaled to the square (bilinear over the whole source area, aspect ratio not kept; a JPEG of twice
    the size or more is decoded at a reduced scale first). EXIF rotation is applied, alpha is laid on black, of 16-bit
    pixels the upper 8 bits are kept. JPEGs go through simplejpeg where that is installed: the same pixels as Pillow's
    to within 2 levels (the same ones, where both have the same libjpeg-turbo), in half the time, and damage that Pillow
    passes over is seen. ValueError with `name` (or what it returns, asked only then) for a broken image and for one of
    more pixels than Image.MAX_IMAGE_PIXELS, or of more work than its pixels account for (`costly`).
    """
    _refuse_costly(data, name)
    mode = "RGB" if channels == 3 else "L"
    pixels = _decode_jpeg(data, image_size, name) if channels == 3 and data[:2] == _JPEG else None
    if pixels is not None and pixels.shape[:2] == (image_size, image_size):
        return pixels
    image = _open_image(data, mode, image_size, name)[0] if pixels is None else Image.fromarray(pixels)
    if image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(image_size, image_size, channels)


def read_pixels(data: bytes, *, name: str = "image") -> tuple[NDArray[np.uint8], str]:
    """An encoded image at its own size as uint8 [H, W, 3], and what kind it is: format and mode, such as "JPEG RGB"."""
    _refuse_costly(data, name)
    image, kind = _open_image(data, "RGB", None, name)
    return np.asarray(image), kind


def _open_image(data: bytes, mode: str, image_size: int | None, name: Name) -> tuple[Image.Image, str]:
    """Decodes by Pillow, upright and of that mode; a JPEG much larger than image_size at a reduced scale."""
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        kind, most = f"{image.format} {image.mode}", Image.MAX_IMAGE_PIXELS
        if most is not None and image.width * image.height > most:
            raise ValueError(f"{image.width} x {image.height} pixels, more than the {most} that Pillow deems safe")
        if image_size is not None and min(image.size) >= 2 * image_size:
            image.draft(mode, (image_size, image_size))
        image.load()
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more, by the kind of damage
        why = "it is none of the known" if isinstance(error, UnidentifiedImageError) else error
        known = ", ".join(_FORMATS)
        raise ValueError(f"{_text(name)}: broken or unknown image ({why}); expected one of {known}") from error
    if data[:2] == _JPEG:
        _refuse_damage(jpeg_warning(data), name)
    if image.info.get("exif"):
        image = _upright(image)
    plain = image.mode == mode and "transparency" not in image.info
    return (image if plain else _convert(image, mode, name, depth=data[24] if kind.startswith("PNG") else 8)), kind


def _decode_jpeg(data: bytes, image_size: int, name: Name) -> NDArray[np.uint8] | None:
    """A plain JPEG in RGB, at the scale that Pillow's draft takes; None where Pillow has to look: EXIF, CMYK, error."""
    simplejpeg, most = _simplejpeg(), Image.MAX_IMAGE_PIXELS
    if simplejpeg is None or b"Exif\0\0" in data:
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in ("YCbCr", "Gray") or (most is not None and height * width > most):
            return None
        scale = next((scale for scale in (8, 4, 2) if min(height, width) >= scale * image_size), 1)
        size = {"min_height": -(-height // scale), "min_width": -(-width // scale)}
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", min_factor=scale, **size)
    except ValueError as error:
        _refuse_damage(str(error), name)
        return None
    return pixels


def jpeg_warning(data: bytes) -> str:
    """What libjpeg remarks about a JPEG that it decodes; "" if nothing, or without simplejpeg (Pillow does not tell).

    Decoded at an eighth of the size, which takes half the time.
    """
    simplejpeg = _simplejpeg()
    try:
        if simplejpeg is not None:
            simplejpeg.decode_jpeg(data, "GRAY", min_factor=8, min_height=1, min_width=1)
    except ValueError as error:
        return str(error)
    return ""


def _refuse_costly(data: bytes, name: Name) -> None:
    if why := costly(data):
        raise ValueError(f"{_text(name)}: got {why}; save it anew as an ordinary JPEG or PNG")


def _refuse_damage(warning: str, name: Name) -> None:
    """ValueError for those of libjpeg's warnings that tell of lost pixels.

    The others come with pictures that look as they should, too: odd headers, bytes between a picture and its end mark.
    """
    if any(text in warning for text in _LOST):
        raise ValueError(f"{_text(name)}: damaged JPEG ({warning}); fetch the image again")


@functools.cache
def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF data say; as it is, where these cannot be read."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:  # the pixels are sound: a camera's odd note is no reason to lose them
        logger.debug("EXIF data cannot be read: %s", error)
        return image


def _text(name: Name) -> str:
    return name if isinstance(name, str) else name()


def _convert(image: Image.Image, mode: str, name: Name, *, depth: int = 8) -> Image.Image:
    """To RGB or L from any mode that files of the known formats have; depth: bits of a number in the file."""
    clear = _clear_pixels(image, depth)
    if clear is not None:
        image = image.copy()
        del image.info["transparency"]
    image = _without_alpha(image, mode, name)
    if clear is not None and clear.any():
        image.paste(0, mask=Image.fromarray(clear))
    return image


def _clear_pixels(image: Image.Image, depth: int) -> NDArray[np.bool_] | None:
    """Where a picture without alpha has the one colour that its PNG file calls clear [H, W]; None if it names none.

    The file names it in its own bits: Pillow spreads fewer than 8 over 0 to 255 and, of colours, keeps the upper 8.
    """
    colour = image.info.get("transparency")
    if image.mode not in ("1", "L", "RGB", "I", "I;16") or not isinstance(colour, int | tuple):
        return None
    found, wanted = np.asarray(image), np.asarray(colour)
    if image.mode == "1":
        return np.asarray(found == (wanted > 0))
    if image.mode == "RGB":
        return np.asarray((found == (wanted >> 8 if depth == 16 else wanted)).all(-1))
    return np.asarray(found == (wanted * 255 // (2**depth - 1) if image.mode == "L" and depth < 8 else wanted))


def _without_alpha(image: Image.Image, mode: str, name: Name) -> Image.Image:
    if image.mode[0] == "F":
        raise ValueError(f"{_text(name)}: got pixels of mode {image.mode}, expected whole numbers; convert the file")
    if image.mode[0] == "I":  # 16 bits
        pixels = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(pixels).convert(mode)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return image.convert(mode)


def to_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """A Pillow image as uint8 [H, W, C]: grey stays grey, all else becomes RGB."""
    mode = "L" if image.mode in ("1", "L") else "RGB"
    pixels = np.asarray(image if image.mode == mode else _convert(image, mode, "image"))
    return pixels[:, :, None] if mode == "L" else pixels
