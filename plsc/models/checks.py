"""What every model of this package asks of its arguments and of its input images."""

from typing import Any

from torch import Tensor


def check_sizes(embedding_size: int, image_size: int, in_channels: int) -> None:
    """Raises ValueError unless the images are square of a multiple of 16, grey or RGB, and the embedding not empty."""
    if embedding_size < 1:
        raise ValueError(f"embedding_size is {embedding_size}, expected at least 1")
    if image_size < 16 or image_size % 16 != 0:
        raise ValueError(f"image_size is {image_size}, expected a multiple of 16; resize the images, 112 is usual")
    if in_channels not in (1, 3):
        raise ValueError(f"in_channels is {in_channels}, expected 1 (grey) or 3 (RGB)")


def check_images(images: Tensor, image_size: int, in_channels: int) -> None:  # [B, C, S, S]
    """Raises ValueError unless `images` are [B, in_channels, image_size, image_size]."""
    if tuple(images.shape[1:]) != (in_channels, image_size, image_size):
        raise ValueError(
            f"images are {list(images.shape)}, expected [B, {in_channels}, {image_size}, {image_size}]; "
            "build the model with another image_size or in_channels, or resize the images"
        )


def check_embeddings(found: Any, images: Tensor, *, model: str, embedding_size: int) -> Tensor:
    """What a backbone gave for `images`; ValueError unless it is [B, embedding_size]."""
    shape = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
    if shape != [len(images), embedding_size]:
        raise ValueError(
            f"the backbone {model} gave {shape} for images {list(images.shape)}, expected embeddings "
            f"[{len(images)}, {embedding_size}]: one row of --model.embedding-size numbers an image"
        )
    assert isinstance(found, Tensor)
    return found
