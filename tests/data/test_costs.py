"""What is costly to decode is told from its bytes: scans counted as they were put in, and ordinary files let pass."""

import io
import struct
import sys

import numpy as np
import pytest
from PIL import Image

from plsc.data.costs import MOST_SCANS, costly, count_scans
from plsc.data.decoding import decode_image, read_pixels

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8))


def encode(kind: str, image: Image.Image = NOISE, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def with_scans(more: int, *, fill: bytes = b"") -> bytes:
    """A progressive JPEG whose last scan comes so many times more. fill: bytes before its mark, which may be there."""
    data = encode("JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + (fill + last) * more + data[-2:]


def with_comment(comment: bytes) -> bytes:
    data = encode("JPEG", progressive=True)
    return data[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + data[2:]


SCRIPT = 10  # scans of libjpeg's own script for progressive colour, jcparam.c


def test_scans_are_those_that_were_put_in() -> None:
    assert count_scans(encode("JPEG")) == 1 and count_scans(encode("JPEG", progressive=True)) == SCRIPT
    for more in (1, 89, 90, 91, 500):
        assert count_scans(with_scans(more)) == count_scans(with_scans(more, fill=b"\xff")) == SCRIPT + more
    noise = np.random.default_rng(1).integers(0, 256, 60_000).astype(np.uint8).tobytes()
    for comment in (b"\xff\xda" * 300, noise + b"\xff\xda\0\0" * 200):
        assert count_scans(with_comment(comment)) == SCRIPT


def test_only_what_is_costly_is_named() -> None:
    assert MOST_SCANS == 100 and not costly(with_scans(90))
    assert costly(with_scans(91)) == "a JPEG of 101 scans, more than 100"
    ordinary = [encode(kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF")]
    ordinary += [encode("JPEG", progressive=True), encode("BMP", NOISE.convert("L")), with_comment(b"\xff\xda" * 300)]
    for data in (*ordinary, b"", b"\xff\xd8", b"BM", *(with_scans(200)[:size] for size in (3, 50, 700))):
        assert costly(data) == ""


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_costly_is_never_decoded(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By no reader of images, with simplejpeg or without; with one scan fewer it is."""
    few, many = with_scans(MOST_SCANS - SCRIPT), with_scans(MOST_SCANS - SCRIPT + 1)
    name = "a.jpg"
    for module in ("simplejpeg", "none"):
        monkeypatch.setattr("plsc.data.decoding._simplejpeg", lambda m=module: sys.modules.get(m))
        assert decode_image(few, 64, channels).shape == (64, 64, channels)
        for read in (
            lambda: decode_image(many, 64, channels, name=lambda: name),
            lambda: read_pixels(many, name=name),
        ):
            with monkeypatch.context() as patched, pytest.raises(ValueError, match=r"a\.jpg: got a JPEG of 101 scans"):
                patched.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
                read()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bmp_of_runs_is_costly(bits: int) -> None:
    """By the format: compression 1 is runs of 8 bits, 2 runs of 4 (BITMAPINFOHEADER, biCompression)."""
    palette = bytes(4 * 2**bits)
    body = b"\x08\x00\x00\x00" * 8 + b"\x00\x01"
    head = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, bits, 1 if bits == 8 else 2, len(body), 0, 0, 0, 0)
    start = 14 + len(head) + len(palette)
    data = b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + palette + body
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (8, 8)
    assert "BMP of runs" in costly(data)
