"""From a photograph to an aligned face: a detector's five points, put where face networks expect them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Left eye, right eye, nose, corners of the mouth in a 112 x 112 crop: where ArcFace's training data has them.
REFERENCE = np.array(
    [(38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041)]
)
REFERENCE_SIZE = 112
DETECTIONS = ("none", "auto")

Pixels = NDArray[np.uint8]  # [H, W, 3], RGB
Points = NDArray[np.float64]  # [5, 2] of (x, y)
Detector = Callable[[Pixels], list[tuple[float, Points]]]  # (area of the face, its points)


def find_detector(name: str, *, models: Path | None = None) -> Detector | None:
    """The detector that --detector names: None for "none"; for "auto" that of the insightface package.

    It needs insightface and one of its detection models (det_*.onnx or scrfd_*.onnx under ~/.insightface/models) on
    this machine; nothing is downloaded. ValueError says plainly what is missing.
    """
    if name == "none":
        return None
    if name != "auto":
        raise ValueError(f"detector: got {name!r}, expected one of {', '.join(DETECTIONS)}")
    folder = models or Path.home() / ".insightface" / "models"
    files = sorted(file for shape in ("det_*.onnx", "scrfd_*.onnx") for file in folder.rglob(shape))
    try:
        zoo: Any = importlib.import_module("insightface.model_zoo")
    except ImportError as error:
        raise ValueError(
            "detector auto: no face detector is installed (the insightface package is looked for); pip install "
            "insightface, or send aligned crops and leave --detector none"
        ) from error
    if not files:
        raise ValueError(
            f"detector auto: insightface is installed but {folder} has no det_*.onnx or scrfd_*.onnx; put a model pack "
            "there, or send aligned crops and leave --detector none"
        )
    model = zoo.get_model(str(files[0]), providers=["CPUExecutionProvider"])
    model.prepare(ctx_id=-1, input_size=(640, 640))

    def detect(pixels: Pixels) -> list[tuple[float, Points]]:
        boxes, points = model.detect(np.ascontiguousarray(pixels[:, :, ::-1]))  # BGR
        if points is None:
            return []
        return [
            (float((x1 - x0) * (y1 - y0)), np.asarray(p, np.float64))
            for (x0, y0, x1, y1, _), p in zip(boxes, points, strict=True)
        ]

    return detect


def largest_face(pixels: Pixels, detect: Detector, image_size: int, *, name: str = "image") -> Pixels:
    """The largest face of a photograph as an aligned crop [image_size, image_size, 3]; ValueError: there is none."""
    faces = detect(pixels)
    if not faces:
        raise ValueError(f"{name}: the detector finds no face in it; send a clearer photograph, or an aligned crop")
    return align(pixels, max(faces, key=lambda face: face[0])[1], image_size)


def align(pixels: Pixels, points: Points, image_size: int) -> Pixels:
    """The crop in which the five points lie nearest to their places, by turning, scaling and shifting."""
    matrix = similarity(REFERENCE * (image_size / REFERENCE_SIZE), points)  # from the crop to the photograph
    crop = Image.fromarray(pixels).transform(
        (image_size, image_size), Image.Transform.AFFINE, tuple(matrix.flatten()), Image.Resampling.BICUBIC
    )
    return np.asarray(crop)


def similarity(source: Points, target: Points) -> NDArray[np.float64]:
    """The rotation, scale and shift [2, 3] that brings source points nearest to target points, by least squares."""
    mean, goal = source.mean(0), target.mean(0)
    a, b = source - mean, target - goal
    # As complex numbers the best factor is <a, b> / <a, a>: its modulus scales, its angle turns.
    x, y = a[:, 0] + 1j * a[:, 1], b[:, 0] + 1j * b[:, 1]
    factor = (x.conj() @ y) / (x.conj() @ x).real
    turn = np.array([[factor.real, -factor.imag], [factor.imag, factor.real]])
    return np.column_stack([turn, goal - turn @ mean])
