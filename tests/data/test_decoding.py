"""Decoding: modes, alpha, rotation, both JPEG decoders alike; damage and bombs are refused."""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.data import decoding
from plsc.data.decoding import decode_image

from .pictures import picture


def saved(image: Image.Image, kind: str, *, orientation: int = 0, quality: int = 95) -> bytes:
    file = io.BytesIO()
    if orientation:
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(file, kind, exif=exif, quality=quality)
    else:
        image.save(file, kind, quality=quality)
    return file.getvalue()


def test_decoding_of_other_modes(tmp_path: Path) -> None:
    def encoded(image: Image.Image, name: str) -> bytes:
        image.save(tmp_path / name)
        return (tmp_path / name).read_bytes()

    base = picture(0, (64, 64))
    for mode in ("L", "P", "RGBA", "1"):
        assert decode_image(encoded(base.convert(mode), f"{mode}.png"), 64).shape == (64, 64, 3)
    assert decode_image(encoded(base.convert("CMYK"), "c.jpg"), 64).shape == (64, 64, 3)
    deep = encoded(Image.fromarray(np.full((8, 8), 40_000, np.uint16)), "deep.png")
    assert (decode_image(deep, 8) == 40_000 >> 8).all() and (decode_image(deep, 8, 1) == 40_000 >> 8).all()
    with pytest.raises(ValueError, match="broken or unknown"):
        decode_image(encoded(base, "a.gif"), 64)
    # A large JPEG is decoded at a reduced scale: close to the full way.
    smooth = Image.fromarray(np.linspace(0, 255, 256, dtype=np.uint8)[None].repeat(256, 0)).convert("RGB")
    small = decode_image(encoded(smooth, "s.jpg"), 32).astype(int)
    assert abs(small - np.asarray(smooth.resize((32, 32), Image.Resampling.BOX)).astype(int)).max() <= 4


def test_alpha_is_laid_on_black() -> None:
    pixels = np.full((4, 4, 4), 200, np.uint8)
    pixels[:, 0, 3], pixels[:, 1, 3] = 0, 255
    found = decode_image(saved(Image.fromarray(pixels), "PNG"), 4)
    assert (found[:, 0] == 0).all() and (found[:, 1] == 200).all() and abs(found[:, 2:].astype(int) - 157).max() <= 1
    grey = Image.fromarray(pixels).convert("LA")
    assert (decode_image(saved(grey, "PNG"), 4, 1)[:, 0] == 0).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 250, 10, 10])
    palette.info["transparency"] = 1
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=1)
    assert (decode_image(file.getvalue(), 4) == 0).all()


def png(pixels: np.ndarray, depth: int, clear: list[int]) -> bytes:
    """A PNG by its specification: grey [H, W] or colour [H, W, 3] of `depth` bits, one value of which is clear."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    kind = 2 if pixels.ndim == 3 else 0
    numbers = pixels.reshape(len(pixels), -1)
    bits = (numbers[:, :, None] >> np.arange(depth)[::-1]) & 1  # the highest first
    rows = np.packbits(bits.reshape(len(pixels), -1).astype(np.uint8), axis=1)
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, kind, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    parts = [(b"IHDR", head), (b"tRNS", struct.pack(f">{len(clear)}H", *clear)), (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("depth", "colours"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)])
def test_the_one_clear_colour_of_a_png_is_laid_on_black(depth: int, colours: int, channels: int) -> None:
    most = 2**depth - 1
    pixels = np.random.default_rng(depth).integers(1, most + 1, (8, 8, colours))
    pixels[2, 3] = pixels[5, 1] = clear = (most * np.array([60, 50, 40])[:colours] // 60).tolist()
    wanted = pixels >> 8 if depth == 16 else pixels * 255 // most
    if colours == 1:
        wanted = np.repeat(wanted, 3, 2)
    wanted[(pixels == clear).all(2)] = 0
    if channels == 1:
        wanted = np.asarray(Image.fromarray(wanted.astype(np.uint8)).convert("L"))[:, :, None]
    found = decode_image(png(pixels.squeeze(2) if colours == 1 else pixels, depth, clear), 8, channels)
    assert (found == wanted).all() and (found[[2, 5], [3, 1]] == 0).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(kind: str, orientation: int) -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16, :16] = 240  # the upper left quarter is white, in the file
    found = decode_image(saved(Image.fromarray(pixels), kind, orientation=orientation), 32)
    row, column = [(0, 0), (0, 1), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 0)][orientation - 1]
    quarter = found[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
    assert quarter.mean() > 230 and found.mean() < 70


def test_damaged_exif_costs_no_image() -> None:
    data = saved(picture(0), "JPEG", orientation=6).replace(b"Exif\0\0MM", b"Exif\0\0XX").replace(b"\0\0II", b"\0\0XX")
    assert decode_image(data, 16).shape == (16, 16, 3)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_both_jpeg_decoders_give_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    noise = saved(picture(1, (112, 112)).convert(mode), "JPEG", quality=80)
    fast = decode_image(noise, 112)
    assert decoding._decode_jpeg(noise, 112, "a") is not None
    monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    assert abs(fast.astype(int) - decode_image(noise, 112)).max() <= 2
    for cut in (2, 3, 20, 200, len(noise) // 2, len(noise) - 30):  # whether a damaged one passes, too
        for absent in (True, False):
            if not absent:
                monkeypatch.undo()
            with pytest.raises(ValueError, match=r"a\.jpg: broken"):
                decode_image(noise[:cut], 112, name="a.jpg")
            monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)


@pytest.mark.parametrize("size", [(112, 112), (500, 500), (224, 225), (300, 701), (120, 118), (30, 40), (1000, 900)])
@pytest.mark.parametrize("kind", [{}, {"progressive": True}, {"subsampling": 0}])
def test_jpegs_of_other_sizes_are_scaled_alike_by_both(
    size: tuple[int, int], kind: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg")
    file = io.BytesIO()
    picture(5, (size[0] // 8, size[1] // 8)).resize(size).save(file, "JPEG", quality=85, **kind)
    fast = decode_image(file.getvalue(), 112).astype(int)
    monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    assert abs(fast - decode_image(file.getvalue(), 112)).max() <= 2


def lossy(damage: str, **how: int) -> bytes:
    """A JPEG whose scan lost bytes, or has some too many; its frame is whole."""
    data = saved(picture(3, (8, 8)).resize((64, 64)), "JPEG", **how)
    scan = data.index(b"\xff\xda") + 14
    middle = scan + (len(data) - scan) // 3
    return {
        "cut": data[:middle] + data[-2:],  # two thirds are missing, the end mark is there
        "lost": data[:middle] + data[middle + 512 :],
        "none": data,
        "padded": data[:-2] + b"\1\2\3\4\5" + data[-2:],
        "followed": data + b"a maker's note",
        "revision": data.replace(b"JFIF\0\1", b"JFIF\0\7"),
    }[damage]


@pytest.mark.parametrize("orientation", [0, 6])  # without and with EXIF data: simplejpeg or Pillow decodes
@pytest.mark.parametrize("size", [64, 20])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpegs_that_lost_pixels_are_refused(orientation: int, size: int, channels: int) -> None:
    """libjpeg fills what is missing with grey and warns; what it warns of without losing pixels still loads."""
    pytest.importorskip("simplejpeg")
    whole = decode_image(lossy("none", orientation=orientation), size, channels)
    for damage in ("cut", "lost"):
        with pytest.raises(ValueError, match=r"a\.jpg: damaged JPEG \(Corrupt JPEG data: .*fetch"):
            decode_image(lossy(damage, orientation=orientation), size, channels, name="a.jpg")
    for oddity in ("padded", "followed", "revision"):
        assert (decode_image(lossy(oddity, orientation=orientation), size, channels) == whole).all()


def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = saved(Image.new("L", (3000, 3000)), "PNG")
    assert len(bomb) < 20_000
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8_000_000)
    for kind in ("always", "error"):
        with warnings.catch_warnings(), pytest.raises(ValueError, match=r"b\.png: broken .*(3000 x 3000|9000000)"):
            warnings.simplefilter(kind)  # type: ignore[arg-type]
            decode_image(bomb, 112, name="b.png")


@pytest.mark.parametrize("data", [b"", b"\0" * 1000, b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_named(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"x\.jpg: broken or unknown image"):
        decode_image(data, 112, name="x.jpg")
