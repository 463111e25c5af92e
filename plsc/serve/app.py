"""The service over HTTP: its routes, its page, its OpenAPI description."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Annotated, Any
from urllib.parse import parse_qsl

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from plsc.serve.bodies import Inputs, read_inputs
from plsc.serve.counters import exposition
from plsc.serve.gallery import Entry, Gallery, ReadOnly, Taken, UnknownEntry, check_name
from plsc.serve.gate import Gate, problem
from plsc.serve.schemas import (
    JPEG,
    Added,
    ClassInfo,
    Embedded,
    GalleryPage,
    Health,
    Listed,
    ModelInfo,
    Near,
    SearchResult,
    Verified,
    body,
    errors,
)
from plsc.serve.service import Found, Service, describe

PAGE = {
    "/": ("index.html", "text/html"),
    "/page/app.js": ("app.js", "text/javascript"),
    "/page/style.css": ("style.css", "text/css"),
}
MAX_K = 100
IDS = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"


def create_app(
    start: Callable[[], Service],
    *,
    token: str | None = None,
    any_host: bool = False,
    docs: bool = True,
    crowded: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The application. start: makes the service, once the event loop runs. token, any_host, crowded: see Gate."""
    running: list[Service] = []

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        running.append(start())
        yield
        await running[0].close()

    app = FastAPI(
        title="plsc",
        summary="Embeddings of images, and whom they are of",
        version="1",
        lifespan=life,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
        dependencies=[Depends(_check_query)],
    )
    service = lambda: running[0]  # noqa: E731 (one word for what exists only once the loop runs)
    app.state.service = service
    app.add_middleware(Gate, service=service, token=token, any_host=any_host, crowded=crowded)
    _handle_errors(app)
    _add_pages(app, service)
    _add_images(app, service)
    _add_classes(app, service)
    _add_gallery(app, service)
    return app


# ---- routes


def _add_pages(app: FastAPI, service: Callable[[], Service]) -> None:
    for path, (name, kind) in PAGE.items():
        content = resources.files("plsc.serve").joinpath("page", name).read_bytes()

        def page(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=f"{kind}; charset=utf-8", headers={"Cache-Control": "no-cache"})

        app.add_api_route(path, _bare(page), methods=["GET"], include_in_schema=False)

    @app.get("/healthz", summary="Whether the service answers")
    async def health() -> Health:
        return Health(status="ok", model_digest=service().bundle.manifest.model_digest)

    @app.get("/metrics", summary="Counts, for Prometheus", response_class=PlainTextResponse, responses=errors(401))
    async def metrics() -> Response:
        return Response(exposition(service().metrics()), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/model", summary="What the model is, and what a request may ask for", responses=errors(401, 429))
    async def model() -> ModelInfo:
        return ModelInfo(**describe(service()))


def _add_images(app: FastAPI, service: Callable[[], Service]) -> None:
    problems = errors(401, 403, 408, 409, 413, 415, 422, 429, 504)

    async def inputs(request: Request) -> Inputs:
        running = service()
        return await read_inputs(request, running.settings.limits, dim=running.bundle.manifest.embedding_size)

    @app.post("/v1/embed", summary="Embeddings of images", responses=problems, openapi_extra=body(json=False))
    async def embed(request: Request) -> Embedded:
        given = await inputs(request)
        if given.embeddings is not None:
            raise HTTPException(415, "content type: got application/json, expected images")
        rows, norms, _ = await _within(service(), service().embeddings(given))
        digest = service().bundle.manifest.model_digest
        return Embedded(model_digest=digest, embeddings=rows.tolist(), norms=norms.tolist())

    @app.post("/v1/search", summary="The nearest classes or gallery entries", responses=problems, openapi_extra=body())
    async def search(
        request: Request,
        k: Annotated[int, Query(ge=1, le=MAX_K)] = 5,
        among: Annotated[str, Query(pattern="^(classes|gallery)$")] = "classes",
    ) -> SearchResult:
        running, given = service(), await inputs(request)

        async def answer() -> list[list[Found]]:
            rows, _, _ = await running.embeddings(given)
            return await (running.nearest_classes(rows, k) if among == "classes" else running.nearest_entries(rows, k))

        found = await _within(running, answer())
        shown = [[_near(running, one, among) for one in each] for each in found]
        return SearchResult(among=among, results=shown)

    @app.post("/v1/verify", summary="Whether two images are of one", responses=problems, openapi_extra=body())
    async def verify(request: Request, far: Annotated[float | None, Query(gt=0, le=1)] = None) -> Verified:
        running, given = service(), await inputs(request)
        if len(given) != 2:
            raise HTTPException(422, f"got {len(given)} images or embeddings, expected two")
        chosen = running.bundle.manifest.threshold_at(far)
        rows, _, _ = await _within(running, running.embeddings(given))
        score = float(np.dot(*rows.astype(np.float64)))
        if chosen is None:
            return Verified(score=score, threshold=None, far=None, same=None)
        return Verified(score=score, threshold=chosen.threshold, far=chosen.far, same=score >= chosen.threshold)

    @app.post(
        "/v1/gallery",
        summary="Add images to the gallery",
        status_code=201,
        responses={**problems, **errors(507)},
        openapi_extra=body(),
    )
    async def add(
        request: Request,
        name: Annotated[str, Query(min_length=1, max_length=256)],
        id: Annotated[str | None, Query(pattern=IDS)] = None,
    ) -> Added:
        check_name(name)
        running, given = service(), await inputs(request)
        running.check_add(given, id=id or "")
        rows, _, pixels = await _within(running, running.embeddings(given))
        # Not within a time limit: what is being written may not be given up half-way.
        entries = await running.add(rows, pixels, name=name, id=id or "")
        return Added(entries=[_listed(entry, pictured=pixels is not None) for entry in entries])


def _add_classes(app: FastAPI, service: Callable[[], Service]) -> None:
    problems = errors(401, 404, 422, 429)

    def known(number: int) -> int:
        if number >= (count := service().bundle.manifest.num_classes):
            raise HTTPException(404, f"class {number} is unknown; there are 0 to {count - 1}")
        return number

    @app.get("/v1/classes/{number}", summary="One class", responses=problems)
    async def one(number: Annotated[int, Path(ge=0, le=2**62)]) -> ClassInfo:
        bundle = service().bundle
        found = bundle.class_name(known(number))
        return ClassInfo(id=number, name=found, thumbnail=_class_picture(service(), str(number)))

    @app.get(
        "/v1/classes/{number}/thumbnail", summary="Its picture", responses={**problems, **JPEG}, response_class=Response
    )
    async def picture(number: Annotated[int, Path(ge=0, le=2**62)]) -> Response:
        return _jpeg(service().bundle.thumbnail(known(number)))


def _add_gallery(app: FastAPI, service: Callable[[], Service]) -> None:
    problems = errors(401, 403, 404, 409, 422, 429)

    @app.get("/v1/gallery", summary="The gallery's entries", responses=problems)
    async def entries(
        offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 60,
        text: Annotated[str, Query(max_length=256)] = "",
    ) -> GalleryPage:
        def read(gallery: Gallery) -> GalleryPage:
            total, found = gallery.entries(offset=offset, limit=limit, text=text)
            listed = [_listed(one, pictured=_has_picture(gallery, one.id)) for one in found]
            return GalleryPage(total=total, writable=gallery.writable, entries=listed)

        return await service().look(read)

    @app.delete(
        "/v1/gallery/{id}",
        summary="Remove an entry",
        status_code=204,
        responses={**problems, **errors(507)},
        response_class=Response,
    )
    async def remove(id: Annotated[str, Path(pattern=IDS)]) -> Response:
        await service().remove(id)
        return Response(status_code=204)

    @app.get(
        "/v1/gallery/{id}/thumbnail", summary="Its picture", responses={**problems, **JPEG}, response_class=Response
    )
    async def picture(id: Annotated[str, Path(pattern=IDS)]) -> Response:
        return _jpeg(await service().look(lambda gallery: gallery.thumbnail(id)))


# ---- what they share


async def _check_query(request: Request) -> None:
    """Raises ValueError (422) for a parameter that is unknown, given twice, or no text: none is guessed or left out."""
    route, path = request.scope["route"], request.scope["path"]
    if not path.startswith("/v1/"):
        return
    known = sorted(field.alias for field in route.dependant.query_params)
    try:
        pairs = parse_qsl(request.scope["query_string"].decode(), keep_blank_values=True, errors="strict")
    except ValueError:
        raise ValueError("query: got bytes that are no UTF-8, expected text in UTF-8, escaped with %") from None
    for name, count in Counter(name for name, _ in pairs).items():
        if name not in known:
            wanted = f"only {', '.join(known)}" if known else "no parameter"
            raise ValueError(f"query: got {name[:40]!r}, expected {wanted}")
        if count > 1:
            raise ValueError(f"{name}: got {count} of them, expected one")


def _handle_errors(app: FastAPI) -> None:
    """Every error in one form: {"detail": words, "request_id": string}."""
    statuses: list[tuple[type[Exception], int]] = [
        (UnknownEntry, 404),
        (Taken, 409),
        (ReadOnly, 409),
        (ValueError, 422),
    ]

    async def known(request: Request, error: Exception) -> Response:
        status = next(status for kind, status in statuses if isinstance(error, kind))
        return _problem(request, status, str(error))

    async def raised(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        return _problem(request, error.status_code, str(error.detail), error.headers)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _problem(request, 422, "; ".join(map(_wrong, error.errors())))

    async def disk(request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        return _problem(request, 507, f"the gallery cannot be written: {error.strerror or error}")

    for kind, _ in statuses:
        app.add_exception_handler(kind, known)
    app.add_exception_handler(StarletteHTTPException, raised)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(OSError, disk)


def _wrong(found: Any) -> str:
    """What is wrong with a parameter, in the words of all errors."""
    name = ".".join(map(str, found["loc"][1:]))
    if found["type"] == "missing":
        return f"{name}: got none, expected one"
    subject, should, rule = found["msg"].partition(" should ")
    return f"{name}: got {str(found['input'])[:80]!r}, expected " + (f"it to {rule}" if should else subject)


def _problem(request: Request, status: int, words: str, headers: Any = None) -> Response:
    return JSONResponse(problem(words, request.scope["state"]["request_id"]), status, headers=headers)


async def _within(service: Service, work: Any) -> Any:
    """The result of work, or 504 after the time that a request may take."""
    seconds = service.settings.limits.seconds
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise HTTPException(504, f"no answer within {seconds:g} s; the service has too much to do") from None


def _near(service: Service, found: Found, among: str) -> Near:
    if among == "classes":
        picture = _class_picture(service, found.id)
    else:
        known = service.gallery is not None and _has_picture(service.gallery, found.id)
        picture = f"/v1/gallery/{found.id}/thumbnail" if known else None
    return Near(score=found.score, id=found.id, name=found.name, thumbnail=picture)


def _has_picture(gallery: Gallery, id: str) -> bool:
    try:
        return gallery.thumbnail(id) is not None
    except UnknownEntry:  # removed since it was found
        return False


def _class_picture(service: Service, id: str) -> str | None:
    return f"/v1/classes/{id}/thumbnail" if service.bundle.thumbnail(int(id)) else None


def _listed(entry: Entry, *, pictured: bool) -> Listed:
    return Listed(id=entry.id, name=entry.name, thumbnail=f"/v1/gallery/{entry.id}/thumbnail" if pictured else None)


def _jpeg(data: bytes | None) -> Response:
    if not data:
        raise HTTPException(404, "there is no picture of it")
    return Response(data, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


def _bare(page: Callable[[], Response]) -> Callable[[], Any]:
    """Without the defaults, which FastAPI would take for query parameters."""

    async def route() -> Response:
        return page()

    return route
