"""What a request may carry: images as they are or in a form, or embeddings in JSON; read within limits."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import HTTPException
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_KINDS: dict[type, str] = {type(None): "null", list: "a list", str: "a string", bool: "a boolean"}
NUMBER_BYTES = 40  # of JSON that a number may take
DRAIN_BYTES = 64 * 2**20  # of a body that is too large, read on and dropped so that its sender gets to hear of it


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    max_bytes: int = 16 * 2**20  # of its body
    max_pixels: int = 16_000_000  # of an image
    max_images: int = 16  # or embeddings
    body_seconds: float = 15.0  # for its body to arrive
    seconds: float = 60.0  # for its answer


@dataclass(frozen=True)
class Inputs:
    """Either images, encoded, or embeddings [B, D]."""

    images: tuple[bytes, ...] = ()
    embeddings: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.images) if self.embeddings is None else len(self.embeddings)


class _MemoryParser(MultiPartParser):
    """Keeps the files of a form in memory: the body is bounded already. ended: its last boundary has come."""

    spool_max_size = 2**40
    ended = False

    def on_end(self) -> None:
        self.ended = True

    @property
    def crowded(self) -> bool:
        """It was given up for its many files."""
        return self._current_files > self.max_files


async def read_inputs(request: Request, limits: Limits, *, dim: int) -> Inputs:
    """Images or embeddings of a request's body. HTTPException says what is wrong with any other body."""
    kinds = request.headers.getlist("content-type")
    if len(kinds) > 1:
        raise HTTPException(422, f"content type: got {len(kinds)} of them, expected one")
    kind = "".join(kinds).partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind in ("multipart/form-data", "application/json")):
        raise HTTPException(
            415, f"content type: got {kind[:80] or 'none'}, expected image/*, multipart/form-data or application/json"
        )
    most, what = limits.max_bytes, ""
    if kind == "application/json":  # parsed in one go while others wait: no longer than its numbers may be
        most = min(most, limits.max_images * dim * NUMBER_BYTES + 65_536)
        what = f" of JSON, enough for {limits.max_images} embeddings of {dim} numbers; send more in several requests"
    body = await _read_body(request, limits, most, what)
    if kind == "application/json":
        found = Inputs(embeddings=parse_embeddings(body, dim))
    elif kind == "multipart/form-data":
        found = Inputs(images=await _parse_form(request, body, limits))
    else:
        found = Inputs(images=(body,))
    if len(found) > limits.max_images:
        raise HTTPException(413, f"got {len(found)} images or embeddings, expected at most {limits.max_images}")
    if any(not image for image in found.images):
        raise HTTPException(422, "image: got no bytes, expected an image")
    return found


def check_size(data: bytes, limits: Limits, *, name: str) -> None:
    """Raises ValueError where the image is none, or has more pixels than allowed; from its header, before decoding."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name}: {error}; expected at most {limits.max_pixels} pixels") from error
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more, by the kind of damage
        why = "it is none of the known" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(f"{name}: broken or unknown image ({why}); expected one of {', '.join(FORMATS)}") from error
    if width * height > limits.max_pixels:
        raise ValueError(f"{name}: got {width} x {height} pixels, expected at most {limits.max_pixels}")


def parse_embeddings(body: bytes, dim: int) -> NDArray[np.float32]:
    """{"embeddings": [[D numbers], ...]} as an array [B, D]; HTTPException 422 for anything else."""
    wanted = f'expected {{"embeddings": [[{dim} finite numbers], ...]}}'
    try:
        content = json.loads(body)
        if not isinstance(content, dict):
            raise ValueError(_KINDS.get(type(content), "a number"))
        rows = content["embeddings"]
        if not (isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)):
            raise ValueError("embeddings is no list of lists")
        if any(len(row) != dim for row in rows):
            raise ValueError(f"an embedding of {next(len(row) for row in rows if len(row) != dim)} numbers")
        if not all(type(value) in (int, float) for row in rows for value in row):
            raise ValueError("an embedding with something else than numbers")
        found = np.array(rows, np.float64)
        with np.errstate(over="ignore"):
            finite = np.isfinite(found.astype(np.float32)).all()
        if not finite:
            raise ValueError("nan, or a number that is infinite in float32")
        peaks = np.abs(found).max(axis=1, keepdims=True)
        if not peaks.all():
            raise ValueError("an embedding of zeros, which has no direction")
        found /= peaks  # so that no square is too small for float64
        return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)
    except KeyError:
        raise HTTPException(422, f"got no embeddings, {wanted}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HTTPException(422, f"got no JSON ({str(error)[:200]}), {wanted}") from None
    except RecursionError:
        raise HTTPException(422, f"got JSON too deeply nested, {wanted}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise HTTPException(422, f"got {str(error)[:200]}, {wanted}") from None


async def _read_body(request: Request, limits: Limits, most: int, what: str) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() else 0
    parts: list[bytes] = []
    seen = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                seen += len(part)
                if max(seen, size) <= most:
                    parts.append(part)
                elif seen > DRAIN_BYTES:
                    break
    except TimeoutError:
        raise HTTPException(
            408, f"body: {seen} bytes came in {limits.body_seconds:g} s, expected all of it by then"
        ) from None
    except ClientDisconnect:
        raise HTTPException(499, "the client went away") from None
    if max(seen, size) > most:
        raise HTTPException(413, f"body: got {max(seen, size)} bytes, expected at most {most}{what}")
    return b"".join(parts)


async def _parse_form(request: Request, body: bytes, limits: Limits) -> tuple[bytes, ...]:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = _MemoryParser(request.headers, stream(), max_files=limits.max_images, max_fields=4)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, LookupError) as error:
        if parser.crowded:
            most = limits.max_images
            raise HTTPException(413, f"form: got more than {most} images, expected at most {most}") from None
        words = getattr(error, "message", str(error))
        raise HTTPException(422, f"form: {words}; expected files in the field image") from None
    if not parser.ended:
        raise HTTPException(422, "form: got one that is cut, expected its last boundary, --BOUNDARY--; send it again")
    images: list[bytes] = []
    entries: list[tuple[str, Any]] = form.multi_items()
    for name, value in entries:
        if name != "image" or not isinstance(value, UploadFile):
            kind = "file" if isinstance(value, UploadFile) else "text"
            raise HTTPException(422, f"form: got the {kind} field {name[:40]!r}, expected files in the field image")
        images.append(value.file.read())
    if not images:
        raise HTTPException(422, "form: got no image, expected files in the field image")
    return tuple(images)
