"""The shapes of requests and answers, as the OpenAPI description has them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Problem(BaseModel):
    detail: str
    request_id: str


class Embedded(BaseModel):
    model_digest: str
    embeddings: list[list[float]]  # unit length
    norms: list[float]  # lengths before


class Near(BaseModel):
    score: float  # cosine
    id: str
    name: str | None
    thumbnail: str | None  # where its small picture is, if there is one


class SearchResult(BaseModel):
    among: str
    results: list[list[Near]]  # of each image or embedding, best first


class Verified(BaseModel):
    score: float
    threshold: float | None
    far: float | None  # false accept rate that was measured at the threshold
    same: bool | None  # score >= threshold; null where no threshold was measured


class Listed(BaseModel):
    id: str
    name: str
    thumbnail: str | None


class Added(BaseModel):
    entries: list[Listed]


class GalleryPage(BaseModel):
    total: int
    writable: bool
    entries: list[Listed]


class ClassInfo(BaseModel):
    id: int
    name: str | None
    thumbnail: str | None


class Health(BaseModel):
    status: str
    model_digest: str


class Rate(BaseModel):
    far: float
    threshold: float
    tar: float


class GalleryInfo(BaseModel):
    entries: int
    writable: bool


class ModelInfo(BaseModel):
    name: str
    model_digest: str
    image_size: int
    channels: int
    embedding_size: int
    flip: bool
    metric: str
    num_classes: int
    storage: str
    named: bool
    thresholds: list[Rate]
    default_far: float | None
    gallery: GalleryInfo | None
    max_images: int
    max_bytes: int
    max_pixels: int
    plsc_version: str


_BINARY = {"type": "string", "format": "binary"}
JPEG: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": {"schema": _BINARY}}}}
WORDS = {
    401: "No token, or a wrong one",
    403: "From another site's page",
    404: "Unknown",
    408: "The body came too slowly",
    409: "No gallery, one that is only read, or an id that is taken",
    413: "Too large, or too many images",
    415: "Another content type",
    422: "Not an image, or not what was expected",
    429: "Too many requests at once: try again",
    421: "Another host's name",
    503: "Too many connections, or the service stops: try again",
    504: "No answer in time",
    507: "The gallery's disk does not take it: nothing was changed",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that are not its result."""
    return {status: {"model": Problem, "description": WORDS[status]} for status in (*statuses, 421, 503)}


def body(*, json: bool = True) -> dict[str, Any]:
    """OpenAPI of what read_inputs takes."""
    form = {"type": "object", "required": ["image"], "properties": {"image": {"type": "array", "items": _BINARY}}}
    content: dict[str, Any] = {
        "image/jpeg": {"schema": _BINARY},
        "image/png": {"schema": _BINARY},
        "multipart/form-data": {"schema": form},
    }
    if json:
        row = {"type": "array", "items": {"type": "number"}, "minItems": 1}
        rows = {"type": "array", "items": row, "minItems": 1}
        content["application/json"] = {
            "schema": {"type": "object", "required": ["embeddings"], "properties": {"embeddings": rows}}
        }
    return {"requestBody": {"required": True, "content": content}}
