"""A folder of images by class, with what does not belong there beside them."""

import random
from pathlib import Path

import pytest

from tests.data.pictures import FILES, picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "faces"
    names = FILES.copy()
    random.Random(0).shuffle(names)  # made in an order that is not the sorted one
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(FILES.index(name)).save(root / name)
    (root / "README.txt").write_text("not a class")
    (root / "b" / "notes.txt").write_text("not an image")
    (root / "b" / "._2.png").write_bytes(b"left by an archiver")
    (root / ".hidden").mkdir()
    return root
