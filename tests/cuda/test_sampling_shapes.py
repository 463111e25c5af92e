"""Sampling by the kernels against plain torch, in shapes that hypothesis draws."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plsc.comm import Shard
from plsc.ops import kernels, sampling


class Ranks:
    """As much of a communicator as Shard.of asks for."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 4000), st.integers(1, 4), st.floats(0.0, 1.0), st.integers(-(2**63), 2**63 - 1), st.data())
def test_sampling_of_any_shape(launch: Any, total: int, world_size: int, rate: float, seed: int, data: Any) -> None:
    launch(order=data.draw(st.integers(0, 5)))
    labels = torch.tensor(data.draw(st.lists(st.integers(-1, total - 1), max_size=9)), dtype=torch.int64)
    shard = Shard.of(total, Ranks(data.draw(st.integers(0, world_size - 1)), world_size))  # type: ignore[arg-type]
    got = kernels.sample_classes(labels, shard, rate=rate, seed=seed, step=3)
    expected = sampling.sample_classes(labels, shard, rate=rate, seed=seed, step=3)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
