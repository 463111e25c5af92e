"""Many small requests as few larger batches: a bounded queue before one thread that runs the network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Embedded = tuple[NDArray[np.float32], NDArray[np.float32]]  # [B, D] and lengths [B]


class QueueFull(Exception):
    """More images wait than may."""


@dataclass(eq=False)
class _Waiting:
    pixels: Pixels  # [S, S, C]
    answer: asyncio.Future[tuple[NDArray[np.float32], np.float32]]


class Batcher:
    """Embeds images together that arrive together; belongs to the event loop that makes it.

    run: images [B, S, S, C] -> embeddings and lengths, called in one thread. max_batch: images a call. delay: seconds
    that an image waits for company while the thread is idle. capacity: images that may wait; more is QueueFull.
    """

    def __init__(
        self,
        run: Callable[[Pixels], Embedded],
        *,
        max_batch: int = 16,
        delay: float = 0.005,
        capacity: int = 256,
        observe: Callable[[int], None] | None = None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        self._run, self._max_batch, self._delay, self._capacity = run, max_batch, delay, capacity
        self._observe = observe
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plsc-model")
        self._worker = asyncio.create_task(self._work())
        self._closing = self._running = False

    @property
    def waiting(self) -> int:
        """Images in the queue, not those the network is at work on."""
        return len(self._waiting)

    async def embed(self, images: Pixels) -> Embedded:
        """Embeddings [B, D] and lengths [B] of images [B, S, S, C]; a caller that gives up costs nothing more."""
        if self._closing:
            raise QueueFull("the service is shutting down")
        if len(self._waiting) + len(images) > self._capacity:
            raise QueueFull(f"{len(self._waiting)} images wait already, at most {self._capacity} may")
        loop = asyncio.get_running_loop()
        items = [_Waiting(pixels, loop.create_future()) for pixels in images]
        self._waiting.extend(items)
        self._arrived.set()
        if len(self._waiting) >= self._max_batch:
            self._full.set()
        try:
            found = await asyncio.gather(*(item.answer for item in items))
        except BaseException:
            for item in items:
                item.answer.cancel()
            raise
        return np.stack([row for row, _ in found]), np.array([norm for _, norm in found], np.float32)

    async def close(self) -> None:
        """Answers what waits, then ends."""
        self._closing = True
        self._full.set()  # nobody else will come
        while self._waiting or self._running:
            await asyncio.sleep(0.005)
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            if len(self._waiting) < self._max_batch and not self._closing:
                self._full.clear()
                try:  # closing wakes it too
                    async with asyncio.timeout(self._delay):
                        await self._full.wait()
                except TimeoutError:
                    pass
            batch = self._take()
            if not batch:
                continue
            if self._observe is not None:
                self._observe(len(batch))
            self._running = True
            try:
                stacked = np.stack([item.pixels for item in batch])
                rows, norms = await loop.run_in_executor(self._thread, self._run, stacked)
            except Exception as error:  # each of those who wait hears of it
                for item in batch:
                    if not item.answer.done():
                        item.answer.set_exception(error)
                continue
            finally:
                self._running = False
            for item, row, norm in zip(batch, rows, norms, strict=True):
                if not item.answer.done():
                    item.answer.set_result((row, norm))

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch:
            item = self._waiting.popleft()
            if not item.answer.done():  # its caller is still there
                batch.append(item)
        if not self._waiting:
            self._arrived.clear()
        return batch
