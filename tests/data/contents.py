"""Small pictures and what a data set holds, for tests of the containers."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from plsc.data.convert import Encoded


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def content(data: Encoded) -> list[tuple[bytes, int]]:
    return [(data.encoded(i), int(data.labels[i])) for i in range(len(data))]


def pack(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path
