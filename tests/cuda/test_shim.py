"""The shim finds what it is for: wrong barriers, lanes that never meet, stale shared memory, wrong arguments."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plsc.comm import Shard
from plsc.ops import kernels, sampling, twins

BARRIER = re.compile(r"^ *__syncthreads\(\);.*\n", re.MULTILINE)
PROBES = """
#include "common.cuh"
extern "C" __global__ void lost_lane(float* out) {
  if (threadIdx.x != 40) out[threadIdx.x] = __shfl_sync(ALL_LANES, 1.0f, 0);
}
EXPORT_KERNEL(lost_lane)
extern "C" __global__ void two_barriers(float* out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1.0f;
}
EXPORT_KERNEL(two_barriers)
extern "C" __global__ void two_collectives(float* out) {
  if (threadIdx.x % 2)
    out[threadIdx.x] = __shfl_sync(ALL_LANES, 1.0f, 0);
  else
    out[threadIdx.x] = __shfl_sync(ALL_LANES, 2.0f, 0);
}
EXPORT_KERNEL(two_collectives)
extern "C" __global__ void fresh_shared(u32* out) {
  SHARED_ARRAY(u32, area, 64);
  out[blockIdx.x * blockDim.x + threadIdx.x] = area[threadIdx.x];
  area[threadIdx.x] = 7u;
}
EXPORT_KERNEL(fresh_shared)
extern "C" __global__ void early_exit(float* out) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  out[threadIdx.x] = 3.0f;
}
EXPORT_KERNEL(early_exit)
extern "C" __global__ void part_of_a_warp(float* out) { out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0); }
EXPORT_KERNEL(part_of_a_warp)
extern "C" __global__ void count(u32* out, i64 each) {
  for (i64 i = 0; i < each; ++i) atomicAdd(out, 1u);
  atomicMax(out + 1, blockIdx.x * blockDim.x + threadIdx.x);
}
EXPORT_KERNEL(count)
extern "C" __global__ void maxima(const float* x, float* out) {
  for (i64 i = 0; i < 4; ++i) {
    float top = block_max(x[i * blockDim.x + threadIdx.x]);
    out[i * blockDim.x + threadIdx.x] = top;
  }
}
EXPORT_KERNEL(maxima)
"""


@pytest.fixture(scope="module")
def probes(shim: Any) -> Path:
    path: Path = shim.compile_kernels({"common.cuh": shim.sources()["common.cuh"], "probes.cu": PROBES})
    return path


@pytest.mark.parametrize("order", range(6))
def test_what_cannot_go_on_is_said(shim: Any, probes: Path, order: int) -> None:
    launcher, out = shim.ShimLauncher(probes, threads=64, order=order), torch.zeros(64)
    with pytest.raises(RuntimeError, match=r"lost_lane: lanes wait at line \d+ for lanes that never come"):
        launcher.launch("probes", "lost_lane", grid=(1,), args=[out])
    with pytest.raises(RuntimeError, match="wait at the barriers of lines"):
        launcher.launch("probes", "two_barriers", grid=(1,), args=[out])
    with pytest.raises(RuntimeError, match="lanes of a warp meet at lines"):
        launcher.launch("probes", "two_collectives", grid=(1,), args=[out])
    with pytest.raises(RuntimeError, match="whole warps only"):
        launcher.launch("probes", "part_of_a_warp", grid=(1,), args=[out])
    with pytest.raises(RuntimeError, match="parameters are pl, got pi"):
        launcher.launch("probes", "count", grid=(1,), args=[out, np.int32(1)])
    with pytest.raises(RuntimeError, match="32 to 1024 threads"):
        launcher.launch("probes", "early_exit", grid=(1,), args=[out], threads=33)
    out.zero_()
    launcher.launch("probes", "early_exit", grid=(1,), args=[out])  # threads that have ended keep nobody waiting
    assert out.tolist() == [3.0] * 32 + [0.0] * 32


def test_shared_memory_is_fresh_and_atomics_are_real(shim: Any, probes: Path) -> None:
    for order in range(6):
        launcher = shim.ShimLauncher(probes, threads=64, order=order, workers=2)
        out = torch.zeros(5 * 64, dtype=torch.int32)
        launcher.launch("probes", "fresh_shared", grid=(5,), args=[out])
        assert (out == -1).all()
        count = torch.zeros(2, dtype=torch.int32)
        launcher.launch("probes", "count", grid=(8, 3), args=[count, np.int64(50)])
        assert count.tolist() == [8 * 3 * 64 * 50, 8 * 64 - 1]


# ---- a barrier taken out of a kernel


def softmax_is_right(generator: torch.Generator) -> bool:
    product, place = torch.rand(9, 1100, generator=generator), torch.full((9,), -1)
    shift, out = torch.zeros(9), torch.empty(9, 1100)
    sums = kernels.exp_rows(product, shift, place, out=out)
    top, online = kernels.online_rows(product * torch.arange(1, 10)[:, None], place)
    m, s = twins.online_rows(product * torch.arange(1, 10)[:, None], place)
    expected = twins.exp_rows(product, shift, place, out=out)
    return all(torch.allclose(a, b) for a, b in ((sums, expected), (top, m), (online, s)))


def maxima_are_right(generator: torch.Generator) -> bool:
    x, out = torch.randn(4, 256, generator=generator), torch.empty(4, 256)
    launcher = kernels.launcher_for(x.device)
    assert launcher is not None
    launcher.launch("probes", "maxima", grid=(1,), args=[x, out])
    return torch.equal(out, x.amax(1, keepdim=True).expand(4, 256))


def sampling_is_right(generator: torch.Generator) -> bool:
    labels = torch.randint(0, 3000, (20,), generator=generator)
    shard = Shard.of(3000, type("Alone", (), {"rank": 0, "world_size": 1})())
    got = kernels.sample_classes(labels, shard, rate=0.4, seed=1, step=2)
    expected = sampling.sample_classes(labels, shard, rate=0.4, seed=1, step=2)
    return torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def topk_is_right(generator: torch.Generator) -> bool:
    found = torch.rand(5, 700, generator=generator)
    empty = torch.empty(5, 0)
    got = kernels.merge_topk(empty, empty.long(), found, k=9)
    return torch.equal(got[1], found.topk(9).indices)


def select_is_right(generator: torch.Generator) -> bool:
    x = torch.randn(3000, generator=generator)
    return torch.equal(kernels.largest_entries(x, 300), twins.largest_entries(x, 300))


RIGHT: dict[str, list[Callable[[torch.Generator], bool]]] = {
    "common.cuh": [softmax_is_right, maxima_are_right],
    "sample.cu": [sampling_is_right],
    "topk.cu": [topk_is_right],
    "select.cu": [select_is_right],
}


def caught(shim: Any, library: Path, checks: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The schedules under which a library's kernels fail a check."""
    wrong = []
    for order in range(shim.ORDERS):
        launcher = shim.ShimLauncher(library, threads=256, order=order)
        monkeypatch.setattr(kernels, "launcher_for", lambda device, launcher=launcher: launcher)
        try:
            if not all(check(torch.Generator().manual_seed(1)) for check in checks):
                wrong.append(order)
        except (RuntimeError, IndexError):
            wrong.append(order)
    return wrong


def without_barrier(texts: dict[str, str], name: str, number: int) -> dict[str, str]:
    at = list(BARRIER.finditer(texts[name]))[number]
    return {**texts, name: texts[name][: at.start()] + "\n" + texts[name][at.end() :]}


def test_a_missing_barrier_is_caught(shim: Any, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first barrier of block_sum a fast warp overwrites what a slow one still reads."""
    assert caught(shim, library, [softmax_is_right], monkeypatch) == []
    texts = {name: text for name, text in shim.sources().items() if name in ("common.cuh", "softmax.cu")}
    broken = shim.compile_kernels(without_barrier(texts, "common.cuh", 0))
    assert "BARRIER" in BARRIER.findall(texts["common.cuh"])[0]
    assert set(caught(shim, broken, [softmax_is_right], monkeypatch)) & {3, 4, 5}


@pytest.mark.slow
def test_every_barrier_is_needed_and_missed(shim: Any) -> None:
    """In a process of its own each: what reads stale shared memory may write anywhere, or never end."""
    texts, missed = {**shim.sources(), "probes.cu": PROBES}, []
    for name in RIGHT:
        users = ("softmax.cu", "probes.cu") if name == "common.cuh" else (name,)
        some = {file: texts[file] for file in ("common.cuh", *users)}
        for number in range(len(BARRIER.findall(texts[name]))):
            library = shim.compile_kernels(without_barrier(some, name, number))
            command = [sys.executable, __file__, str(library), name]
            try:
                run = subprocess.run(command, capture_output=True, text=True, timeout=30)
            except subprocess.TimeoutExpired:
                continue  # lost in a loop: noticed, too
            if run.returncode == 0 and run.stdout.strip() == "[]":
                missed.append((name, number))
    assert missed == []


@pytest.mark.slow
def test_under_sanitizers(shim: Any, tmp_path: Path) -> None:
    """All tests of kernels again, with addresses and undefined behaviour watched; and a read out of bounds is seen."""
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("this g++ has no AddressSanitizer")
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{found} {found.replace('libasan', 'libubsan')}",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PLSC_SHIM_SANITIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    folder = Path(__file__).parent
    files = [str(folder / f"test_{name}.py") for name in ("softmax", "update", "choosing")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder.parents[1])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    short = tmp_path / "short.py"
    short.write_text(SHORT.format(folder=str(folder / "shim")), encoding="utf-8")
    run = subprocess.run([sys.executable, str(short)], env=environment, capture_output=True, text=True)
    assert run.returncode != 0 and "heap-buffer-overflow" in run.stderr, run.stderr[-3000:]


SHORT = """
import sys
sys.path.insert(0, {folder!r})
import launcher, torch
from plsc.ops.launching import flag, i64
library = launcher.compile_kernels(launcher.sources(), flags=launcher.SANITIZE)
x = torch.zeros(4095)
args = [x, torch.zeros(()), i64(4096), flag(False)]  # one more than there are
launcher.ShimLauncher(library).launch("half", "largest_float", grid=(16,), args=args)
"""


if __name__ == "__main__":  # the schedules under which a library fails, or a crash
    spec = importlib.util.spec_from_file_location("launcher", Path(__file__).parent / "shim" / "launcher.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    with pytest.MonkeyPatch.context() as patch:
        print(caught(module, Path(sys.argv[1]), RIGHT[sys.argv[2]], patch))
