"""Threads that touch one address in no order: the kernels have none, and those that are put in are found."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plsc.comm import LocalCommunicator, Shard
from plsc.ops import kernels

PROBES = """
#include "common.cuh"
extern "C" __global__ void lost_update(u32* out) { out[0] += 1u; }
EXPORT_KERNEL(lost_update)
extern "C" __global__ void lost_between_blocks(u32* out) {
  if (threadIdx.x == 0) out[0] += 1u;
}
EXPORT_KERNEL(lost_between_blocks)
extern "C" __global__ void atomic_beside_plain(u32* out) {
  if (threadIdx.x) atomicAdd(out, 1u);
  else out[0] = 0u;
}
EXPORT_KERNEL(atomic_beside_plain)
extern "C" __global__ void read_before_write(u32* out) {
  u32 next = out[(threadIdx.x + 1) % 64];
  out[threadIdx.x] = next;
}
EXPORT_KERNEL(read_before_write)
extern "C" __global__ void ordered(u32* out) {
  SHARED_ARRAY(u32, area, 64);
  area[threadIdx.x] = threadIdx.x;
  __syncwarp();
  u32 near = area[threadIdx.x ^ 1];
  __syncthreads();
  area[threadIdx.x] = near + area[threadIdx.x ^ 1] * 0u;
  __syncthreads();
  atomicAdd(out, area[63 - threadIdx.x]);
}
EXPORT_KERNEL(ordered)
extern "C" __global__ void repeated(float* out) {
  float x = 1.0f;
  for (int turn = 0; turn < 2; ++turn) x = block_sum(x);
  for (int turn = 0; turn < 2; ++turn) x = block_max(x);
  out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
EXPORT_KERNEL(repeated)
"""
RACES = ("lost_update", "lost_between_blocks", "atomic_beside_plain", "read_before_write")


def softmax(generator: torch.Generator) -> None:
    product, place = torch.randn(5, 600, generator=generator), torch.arange(5)
    by_sample = torch.zeros(3, 5).unbind()
    kernels.exp_rows(product, by_sample[0], place, out=torch.empty(5, 600), inverse=torch.ones(600))
    kernels.grad_rows(product, by_sample[0], place, *by_sample[1:], out=product)
    kernels.online_rows(product, place)


def update(generator: torch.Generator) -> None:
    weight, grad = torch.randn(5, 40, generator=generator), torch.randn(3, 40, generator=generator)
    options: dict[str, Any] = {"lr": 0.1, "normalize": True, "inverse": torch.zeros(3), "start": 1}
    velocity, scales = torch.zeros(5, 40, dtype=torch.int8), torch.zeros(5)
    kernels.sgd_rows(weight.bfloat16(), grad, velocity, momentum=0.9, scales=scales, **options)
    kernels.sgd_rows(weight.bfloat16(), grad, weight, low=torch.zeros(5, 40, dtype=torch.int16), **options)
    kernels.adam_rows(weight, grad, torch.zeros(5, 40), torch.zeros(5, 40), torch.zeros(5), **options)


def sample(generator: torch.Generator) -> None:
    labels = torch.randint(0, 2500, (70,), generator=generator)
    kernels.sample_classes(labels, Shard.of(2500, LocalCommunicator()), rate=0.4, seed=1, step=2)


def topk(generator: torch.Generator) -> None:
    found = torch.rand(3, 300, generator=generator)
    kernels.merge_topk(found[:, :4], torch.arange(4).expand(3, 4), found, k=9, first=4)


def select(generator: torch.Generator) -> None:
    kernels.largest_entries(torch.randn(300, generator=generator), 30)


def half(generator: torch.Generator) -> None:
    x = torch.randn(900, generator=generator)
    kernels.cast_scaled(x, torch.float16, largest=kernels.largest_magnitude(x))


RUNS: dict[str, Callable[[torch.Generator], None]] = {
    "softmax": softmax,
    "update": update,
    "sample": sample,
    "topk": topk,
    "select": select,
    "half": half,
}


@pytest.fixture
def races(shim: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """races(name, texts, orders): runs the kernels of a file, and raises what the shim says of them."""

    def run(name: str, texts: dict[str, str], orders: Any = (0, 4)) -> None:
        library = shim.compile_kernels(texts, flags=shim.RACES)
        monkeypatch.setattr(kernels, "_WAVE", 2)
        for order in orders:
            launcher = shim.ShimLauncher(library, order=order)
            monkeypatch.setattr(kernels, "launcher_for", lambda device, launcher=launcher: launcher)
            RUNS[name](torch.Generator().manual_seed(1))
            assert {call.split(".")[0] for call in launcher.launched} == {name}

    return run


@pytest.mark.parametrize("name", RUNS)
def test_kernels_have_none(shim: Any, races: Callable[..., None], name: str) -> None:
    races(name, shim.sources())


def test_what_is_said_of_a_race(shim: Any) -> None:
    texts = {"common.cuh": shim.sources()["common.cuh"], "probes.cu": PROBES}
    library: Path = shim.compile_kernels(texts, flags=shim.RACES)
    for order in range(shim.ORDERS):
        launcher = shim.ShimLauncher(library, order=order)
        for kernel in RACES:
            with pytest.raises(RuntimeError, match=rf"{kernel}: race: thread \d+ of block \d+ and thread \d+ of block"):
                launcher.launch("probes", kernel, grid=(3,), args=[torch.zeros(64, dtype=torch.int32)])
        out = torch.zeros(64, dtype=torch.int32)
        launcher.launch("probes", "ordered", grid=(3,), args=[out])
        assert out[0] == 3 * sum(range(64))
        sums = torch.zeros(3 * 64)
        launcher.launch("probes", "repeated", grid=(3,), args=[sums])
        assert (sums == 64 * 64).all()


PLAIN = """#include "common.cuh"
DEVICE void plainAdd(u32* at, u32 x) { *at += x; }
DEVICE void plainOr(u32* at, u32 x) { *at |= x; }
DEVICE void plainMax(u32* at, u32 x) { *at = *at > x ? *at : x; }
"""


@pytest.mark.slow
def test_every_atomic_and_lane_barrier_is_needed(shim: Any, races: Callable[..., None]) -> None:
    """Each as a plain update, or taken out, in its file alone."""
    texts, count = shim.sources(), 0
    for name in RUNS:
        text = texts[f"{name}.cu"]
        for site in re.finditer(r"atomic(?=(Add|Or|Max)\()|__syncwarp\(\);", text):
            other = "" if site[0].startswith("__") else "plain"
            broken = (text[: site.start()] + other + text[site.end() :]).replace('#include "common.cuh"', PLAIN)
            with pytest.raises(RuntimeError, match="race: "):
                races(name, {"common.cuh": texts["common.cuh"], f"{name}.cu": broken}, range(shim.ORDERS))
            count += 1
    assert count >= 9
