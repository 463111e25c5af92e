"""Batches: everybody gets the answer to their own image, never more than fit, nothing for those who left."""

import asyncio
import threading

import numpy as np
import pytest

from plsc.serve.batching import Batcher, QueueFull


def image(number: int) -> np.ndarray:
    return np.full((1, 2, 2, 1), number, np.uint8)


class Network:
    """Answers an image by its number; holds each call until told to go on, where asked to."""

    def __init__(self, *, held: bool = False) -> None:
        self.calls: list[list[int]] = []
        self.may_go = threading.Event()
        if not held:
            self.may_go.set()

    def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.may_go.wait(30)
        numbers = pixels[:, 0, 0, 0].astype(np.float32)
        self.calls.append(numbers.astype(int).tolist())
        if 66 in self.calls[-1]:
            raise RuntimeError("a bad batch")
        return np.stack([numbers, -numbers], 1), numbers * 2


def test_answers_go_to_who_asked() -> None:
    network = Network()

    async def body() -> None:
        batcher = Batcher(network, max_batch=4, delay=0.01)
        found = await asyncio.gather(*(batcher.embed(image(i)) for i in range(30)))
        for i, (rows, norms) in enumerate(found):
            assert rows.tolist() == [[i, -i]] and norms.tolist() == [2 * i]
        rows, _ = await batcher.embed(np.concatenate([image(i) for i in (5, 6, 7, 8, 9, 10)]))  # more than a batch
        assert rows[:, 0].tolist() == [5, 6, 7, 8, 9, 10]
        await batcher.close()

    asyncio.run(body())
    assert max(map(len, network.calls)) == 4 and len(network.calls) < 30


def test_full_is_said_at_once() -> None:
    network = Network(held=True)

    async def body() -> None:
        batcher = Batcher(network, max_batch=2, delay=0, capacity=3)
        first = asyncio.create_task(batcher.embed(np.concatenate([image(1), image(2)])))
        while batcher.waiting or not batcher._thread._threads:  # the network has taken them
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(batcher.embed(image(i))) for i in (3, 4, 5)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="3 images wait already"):
            await batcher.embed(image(6))
        network.may_go.set()
        await asyncio.gather(first, *waiting)
        await batcher.embed(image(7))
        await batcher.close()
        with pytest.raises(QueueFull, match="shutting down"):
            await batcher.embed(image(8))

    asyncio.run(body())
    assert sorted(i for call in network.calls for i in call) == [1, 2, 3, 4, 5, 7]


def test_those_who_left_cost_nothing() -> None:
    network = Network(held=True)

    async def body() -> None:
        batcher = Batcher(network, max_batch=1, delay=0)
        tasks = [asyncio.create_task(batcher.embed(image(i))) for i in range(1, 5)]
        while batcher.waiting != 3:
            await asyncio.sleep(0.001)
        tasks[2].cancel()
        await asyncio.sleep(0)
        network.may_go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await batcher.close()

    asyncio.run(body())
    assert [i for call in network.calls for i in call] == [1, 2, 4]


def test_closing_answers_what_waits_at_once() -> None:
    network = Network()

    async def body() -> None:
        batcher = Batcher(network, max_batch=9, delay=3600)
        asked = asyncio.create_task(batcher.embed(image(3)))
        while not batcher.waiting:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await batcher.close()
        assert (await asked)[1].tolist() == [6]

    asyncio.run(body())


def test_an_error_is_told_to_its_batch_only() -> None:
    network = Network()

    async def body() -> None:
        batcher = Batcher(network, max_batch=1)
        with pytest.raises(RuntimeError, match="a bad batch"):
            await batcher.embed(image(66))
        assert (await batcher.embed(image(1)))[1].tolist() == [2]
        await batcher.close()

    asyncio.run(body())
