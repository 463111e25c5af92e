"""What the service does, without HTTP: decode, embed in batches, search among classes and the gallery, compare."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import HTTPException
from numpy.typing import NDArray
from PIL import Image

from plsc.data.align import Detector
from plsc.data.decoding import decode_image, read_pixels
from plsc.serve.batching import Batcher, QueueFull
from plsc.serve.bodies import Inputs, Limits, check_size
from plsc.serve.bundle import Bundle
from plsc.serve.counters import SECONDS, SIZES, Counter, Gauge, Histogram, Metric, process_metrics
from plsc.serve.detect import crop_face
from plsc.serve.gallery import Entry, Gallery, NewEntry
from plsc.serve.index import Searcher

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How a service shares the machine; what a request may ask for is in `limits`."""

    limits: Limits = field(default_factory=Limits)
    max_batch: int = 16  # images a run of the network
    delay: float = 0.005  # seconds an image waits for others
    queue: int = 256  # images that may wait; more is answered 429
    max_requests: int = 128  # at once; more is answered 429
    decoders: int = 0  # threads; 0: by the number of cores


@dataclass(frozen=True)
class Found:
    """A near class or gallery entry."""

    score: float
    id: str
    name: str | None


class Service:
    """A bundle at work. Made and closed inside a running event loop."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        settings: Settings | None = None,
        gallery: Gallery | None = None,
        classes: Searcher | None = None,
        detector: Detector | None = None,
    ) -> None:
        self.bundle, self.settings, self.gallery = bundle, settings or Settings(), gallery
        self.classes: Searcher = classes or bundle.index
        self._detector = detector
        self.images = Counter("plsc_images_total", "Images embedded.")
        self.model_seconds = Counter("plsc_model_seconds_total", "Seconds the network was at work.")
        self.batches = Histogram("plsc_batch_images", "Images a run of the network.", SIZES)
        self._batcher = Batcher(
            self._run,
            max_batch=self.settings.max_batch,
            delay=self.settings.delay,
            capacity=self.settings.queue,
            observe=self.batches.observe,
        )
        cores = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self.settings.decoders or min(cores, 8), thread_name_prefix="plsc-decode")
        self._searches = ThreadPoolExecutor(1, thread_name_prefix="plsc-search")  # each takes all cores by itself
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="plsc-gallery")
        self.requests = Counter("plsc_requests_total", "Requests answered.")
        self.seconds = Histogram(
            "plsc_request_seconds", "From a request's first line to the end of its answer.", SECONDS
        )
        self.in_flight = 0
        self.started = time.time()

    def metrics(self) -> list[Metric]:
        gallery = self.gallery
        return [
            self.requests,
            self.seconds,
            self.images,
            self.model_seconds,
            self.batches,
            Gauge("plsc_queue_images", "Images that wait for the network.", lambda: self._batcher.waiting),
            Gauge("plsc_requests_in_flight", "Requests being answered.", lambda: self.in_flight),
            Gauge("plsc_gallery_entries", "Entries of the gallery.", lambda: 0 if gallery is None else len(gallery)),
            Gauge("plsc_classes", "Classes of the bundle.", lambda: len(self.classes)),
            Gauge("plsc_start_time_seconds", "When the service started.", lambda: self.started),
            *process_metrics(),
        ]

    async def close(self) -> None:
        """Answers what has come, then lets go of threads and the gallery.

        An image that is still being decoded has nobody left who waits for it, and is not waited for.
        """
        await self._batcher.close()
        for pool in (self._pool, self._searches):
            pool.shutdown(wait=False, cancel_futures=True)
        self._disk.shutdown()
        if self.gallery is not None:
            self.gallery.close()

    async def embeddings(
        self, inputs: Inputs
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8] | None]:
        """Unit embeddings [B, D], lengths [B] before, and the pixels they are of (none for embeddings that came so)."""
        if inputs.embeddings is not None:
            rows = inputs.embeddings
            return rows, np.ones(len(rows), np.float32), None
        pixels = await self._decode_all(inputs.images)
        try:
            rows, norms = await self._batcher.embed(pixels)
        except QueueFull as error:
            raise HTTPException(429, str(error), headers={"Retry-After": "1"}) from None
        directed = np.isfinite(norms) & (norms > 0)
        if not directed.all():
            raise HTTPException(422, f"image {int(np.argmin(directed))}: the network gives no direction for it")
        self.images.add(len(pixels))
        return rows, norms, pixels

    async def nearest_classes(self, rows: NDArray[np.float32], k: int) -> list[list[Found]]:
        scores, found = await self._in(self._searches, lambda: self.classes.search(rows, min(k, len(self.classes))))
        return [
            [Found(float(s), str(c), self.bundle.class_name(int(c))) for s, c in zip(*one, strict=True) if c >= 0]
            for one in zip(scores, found, strict=True)
        ]

    async def nearest_entries(self, rows: NDArray[np.float32], k: int) -> list[list[Found]]:
        gallery = self._gallery()
        scores, _, entries = await self._in(self._searches, lambda: gallery.search(rows, k))
        return [
            [Found(float(s), entry.id, entry.name) for s, entry in zip(*one, strict=True)]
            for one in zip(scores, entries, strict=True)
        ]

    def check_add(self, inputs: Inputs, *, id: str = "") -> None:
        """HTTPException for what `add` would refuse, before any work is done for it."""
        self._gallery()
        if id and len(inputs) > 1:
            raise HTTPException(422, f"id: got one for {len(inputs)} images, expected one image, or no id")

    async def add(
        self, rows: NDArray[np.float32], pixels: NDArray[np.uint8] | None, *, name: str, id: str = ""
    ) -> list[Entry]:
        """Entries of unit embeddings [B, D] and their pixels, if any, under one name, on the disk when this returns."""
        gallery = self._gallery()
        small = [b""] * len(rows) if pixels is None else [thumbnail(one) for one in pixels]
        new = [NewEntry(name, row, id=id, thumbnail=image) for row, image in zip(rows, small, strict=True)]
        return await self._in(self._disk, lambda: gallery.add(new))

    async def remove(self, id: str) -> None:
        gallery = self._gallery()
        await self._in(self._disk, lambda: gallery.remove([id]))

    async def look(self, read: Callable[[Gallery], T]) -> T:
        """What `read` finds in the gallery, in a thread: it may go through many names."""
        gallery = self._gallery()
        return await self._in(self._searches, lambda: read(gallery))

    # ---- inside

    async def _decode_all(self, images: Sequence[bytes]) -> NDArray[np.uint8]:
        jobs = [self._in(self._pool, partial(self._decode, data, f"image {i}")) for i, data in enumerate(images)]
        decoded = []
        for found in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(found, ValueError):
                raise HTTPException(422, str(found))
            if isinstance(found, BaseException):
                raise found
            decoded.append(found)
        return np.stack(decoded)

    def _gallery(self) -> Gallery:
        if self.gallery is None:
            raise HTTPException(409, "no gallery: the service was started without --gallery")
        return self.gallery

    def _run(self, pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        start = time.perf_counter()
        try:
            return self.bundle.model.embed(pixels)
        finally:
            self.model_seconds.add(time.perf_counter() - start)

    def _decode(self, data: bytes, name: str) -> NDArray[np.uint8]:
        check_size(data, self.settings.limits, name=name)
        about = self.bundle.manifest
        if self._detector is None:
            return decode_image(data, about.image_size, about.channels, name=name)
        crop = crop_face(read_pixels(data, name=name)[0], self._detector, about.image_size, name=name)
        return crop if about.channels == 3 else np.asarray(Image.fromarray(crop).convert("L"))[:, :, None]

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def thumbnail(pixels: NDArray[np.uint8], *, most: int = 112) -> bytes:
    """A small JPEG of decoded pixels [S, S, C]."""
    image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    image.thumbnail((most, most))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return out.getvalue()


def describe(service: Service) -> dict[str, Any]:
    """What a client should know of the model and the service."""
    about, limits = service.bundle.manifest, service.settings.limits
    best = about.threshold_at()
    return {
        "name": about.name,
        "model_digest": about.model_digest,
        "image_size": about.image_size,
        "channels": about.channels,
        "embedding_size": about.embedding_size,
        "flip": about.flip,
        "metric": about.metric,
        "num_classes": about.num_classes,
        "storage": about.storage,
        "named": about.named,
        "thresholds": [{"far": one.far, "threshold": one.threshold, "tar": one.tar} for one in about.thresholds],
        "default_far": None if best is None else best.far,
        "gallery": None
        if service.gallery is None
        else {"entries": len(service.gallery), "writable": service.gallery.writable},
        "max_images": limits.max_images,
        "max_bytes": limits.max_bytes,
        "max_pixels": limits.max_pixels,
        "plsc_version": about.plsc_version,
    }
