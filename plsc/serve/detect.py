"""From a photograph to the aligned face that a network expects, where a detector is asked for."""

from __future__ import annotations

from plsc.data.align import Detector, Pixels, align, choose, open_detector

DETECTORS = ("none", "auto")


def find_detector(name: str) -> Detector | None:
    """None for "none"; for "auto" the one of plsc.data.align. ValueError says plainly that none is installed."""
    if name == "none":
        return None
    if name != "auto":
        raise ValueError(f"detector: got {name!r}, expected one of {', '.join(DETECTORS)}")
    try:
        return open_detector()
    except ValueError as error:
        raise ValueError(f"detector auto: {error}; or send aligned crops, and leave --detector none") from error


def crop_face(pixels: Pixels, detector: Detector, image_size: int, *, name: str = "image") -> Pixels:
    """The face that a photograph is of, as an aligned crop [S, S, 3]; ValueError where there is none."""
    face = choose(detector(pixels), pixels.shape)
    if face is None:
        raise ValueError(f"{name}: the detector finds no face in it; send a clearer photograph, or an aligned crop")
    return align(pixels, face.points, image_size)
