"""Kernels of cuda/ on the CPU: the shim's launcher, and plsc.ops.kernels made to use it."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from plsc.ops import kernels
from plsc.ops.launching import CupyLauncher


def load_shim() -> ModuleType:
    """tests/cuda/shim/launcher.py, which is no package."""
    path = Path(__file__).parent / "shim" / "launcher.py"
    spec = importlib.util.spec_from_file_location("plsc_shim_launcher", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def shim() -> ModuleType:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler; found no {compiler}")
    return load_shim()


@pytest.fixture(scope="session")
def library(shim: ModuleType) -> Path:
    """All kernels as they are, compiled for this CPU; once for all sessions with the same sources."""
    flags = shim.SANITIZE if "PLSC_SHIM_SANITIZE" in os.environ else []
    path: Path = shim.compile_kernels(shim.sources(), flags=flags)
    return path


@pytest.fixture
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """launch(threads=, order=, workers=): from then on plsc.ops.kernels launches kernels on the CPU that way.

    PLSC_TEST_LAUNCHER=cupy launches them on GPU 0 instead (where no order can be asked for); "carried" takes the way of
    the tensors there and back, and stays on the CPU.
    """
    where = os.environ.get("PLSC_TEST_LAUNCHER", "")

    def use(**how: int) -> Any:
        launcher: Any
        if where == "cupy":
            module, inner = load_shim(), CupyLauncher(0)
            launcher = module.Carried(inner, torch.device("cuda", 0), threads=how.get("threads", inner.threads))
        else:
            shim, library = request.getfixturevalue("shim"), request.getfixturevalue("library")
            launcher = shim.ShimLauncher(library, **how)
            if where == "carried":
                launcher = shim.Carried(launcher, torch.device("cpu"), threads=launcher.threads)
        monkeypatch.setattr(kernels, "launcher_for", lambda device: launcher)
        return launcher

    return use


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture
def elsewhere() -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy of a tensor at an address that is a multiple of one element only."""

    def move(x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(x.numel() + 1, dtype=x.dtype)
        return memory[1:].view(x.shape).copy_(x)

    return move


class Recorder:
    """A launcher that keeps what it is asked and runs nothing: for shapes that no memory holds."""

    threads = 256

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def launch(self, file: str, kernel: str, *, grid: Any, args: Any, threads: int | None = None) -> None:
        self.grids.append(tuple(grid))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(kernels, "launcher_for", lambda device: recorder)
    return recorder
