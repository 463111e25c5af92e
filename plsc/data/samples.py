"""Data sets of others' making: map-style ones and iterables of (image, label), as what the loader reads."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from plsc.data.decoding import to_pixels
from plsc.data.reading import Dataset

logger = logging.getLogger(__name__)

_LABELS = ("labels", "targets")  # attributes that hold all labels; the second is torchvision's name


def as_dataset(source: Any) -> Dataset:
    """The source itself if it is a `Dataset`; else a `Samples` of a map-style data set or an iterable."""
    if all(hasattr(source, name) for name in ("labels", "num_classes", "name", "__getitem__", "__len__")):
        found: Dataset = source
        return found
    return Samples(source)


class Samples:
    """Pairs (image, label) from a map-style data set (torch's, a list) or from any iterable that ends.

    Images: uint8 arrays [H, W], [H, W, C], uint8 tensors [C, H, W] or Pillow images, all of one size and number of
    channels (1 or 3), not normalised. labels: all of them; if not given, the source's `labels` or `targets`, else each
    sample is read once to learn them. An iterable is read to its end and held in memory. num_classes: the largest
    label + 1 unless given. ValueError names the sample that is none of these.
    """

    def __init__(
        self,
        source: Any,
        *,
        labels: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        num_classes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        is_map = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if not is_map and not isinstance(source, Iterable):
            raise ValueError(f"got a {type(source).__name__}, expected a data set or an iterable of (image, label)")
        self._held: list[NDArray[np.uint8]] | None = None
        self._source, self._names = source, names
        if not is_map:
            pairs = [(_pixels(image, k), label) for k, (image, label) in enumerate(map(_pair, source))]
            self._held, self._source = [image for image, _ in pairs], None
            labels = [label for _, label in pairs] if labels is None else labels
        if labels is None:
            labels = _known_labels(source)
        self.labels = _whole_numbers(labels)
        if names is not None and len(names) != len(self.labels):
            raise ValueError(f"got {len(names)} names for {len(self.labels)} samples, expected as many")
        self.num_classes = int(self.labels.max(initial=-1)) + 1 if num_classes is None else num_classes

    def __len__(self) -> int:
        return len(self._source if self._held is None else self._held)

    def name(self, i: int) -> str:
        return f"sample {i}" if self._names is None else self._names[i]

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        image = _pixels(_pair(self._source[i])[0], i) if self._held is None else self._held[i]
        return image, int(self.labels[i])


def _known_labels(source: Any) -> Any:
    for name in _LABELS:
        if (found := getattr(source, name, None)) is not None:
            return found
    logger.warning(
        "a %s without `labels` or `targets`: its %d samples are read once for their labels; plsc.data.Samples takes "
        "them as labels=",
        type(source).__name__,
        len(source),
    )
    return [_pair(source[i])[1] for i in range(len(source))]


def _pair(sample: Any) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise ValueError(f"got a {type(sample).__name__} as a sample, expected (image, label)")
    return sample[0], sample[1]


def _whole_numbers(labels: Any) -> NDArray[np.int64]:
    if isinstance(labels, list | tuple):
        labels = [label.item() if hasattr(label, "item") else label for label in labels]
    found = np.asarray(labels)
    if found.size == 0:
        raise ValueError("the data set is empty")
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"got labels as {found.dtype} {found.shape}, expected whole numbers, one a sample")
    return found.astype(np.int64)


def _pixels(image: Any, i: int) -> NDArray[np.uint8]:
    """uint8 [H, W, C] of what people have as an image."""
    if isinstance(image, Image.Image):
        return to_pixels(image)
    if hasattr(image, "detach"):  # a torch tensor [C, H, W]
        image = image.detach().cpu().numpy()
        image = image.transpose(1, 2, 0) if image.ndim == 3 else image
    found = np.asarray(image)
    if found.ndim == 2:
        found = found[:, :, None]
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] not in (1, 3):
        raise ValueError(
            f"got sample {i} as {found.dtype} {found.shape}, expected uint8 [H, W, 1 or 3] (a tensor: [C, H, W]) or a "
            "Pillow image, not normalised: the loader does that"
        )
    pixels: NDArray[np.uint8] = found
    return pixels
