"""Compiles cuda/*.cu behind the shim and launches kernels on the CPU, with the arguments that CuPy would get."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plsc.ops.launching import KINDS, Launcher, arguments, source_folder

SHIM = Path(__file__).resolve().parent
ORDERS = 6  # schedules of shim.h
_FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-pthread"]
# Compilers' calls at every access to memory go to races.h, not to the library that they are made for.
RACES = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
RACES += ["-nodefaultlibs", "-lstdc++", "-lm", "-lgcc_s", "-lc"]
SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def sources() -> dict[str, str]:
    """Text of each file of cuda/ by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(source_folder().glob("*.cu*"))}


def compile_kernels(texts: dict[str, str], *, flags: Sequence[str] = ()) -> Path:
    """A library of all kernels, made anew only where sources, shim or flags have changed."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"no C++ compiler {compiler!r}; install g++ or set CXX")
    parts = [*texts.items(), *((path.name, path.read_text(encoding="utf-8")) for path in sorted(SHIM.glob("*.h")))]
    digest = hashlib.sha256(repr((parts, _FLAGS, list(flags), compiler)).encode()).hexdigest()[:20]
    library = Path(tempfile.gettempdir()) / f"plsc-shim-{os.getuid()}-{digest}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        # One unit, a namespace a file: the standard library's headers are what takes long.
        unit = '#include "common.cuh"\n'
        unit += "".join(
            f'namespace {name[:-3]}_cu {{\n#include "{name}"\n}}\n' for name in texts if name.endswith(".cu")
        )
        (Path(folder) / "unit.cpp").write_text(unit, encoding="utf-8")
        out = Path(folder) / "kernels.so"
        command = [compiler, *_FLAGS, "-include", "shim.h", f"-I{SHIM}", "-o", str(out), f"{folder}/unit.cpp", *flags]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"the kernels do not compile behind the shim:\n{run.stderr[:4000]}")
        beside = library.with_suffix(f".{os.getpid()}")
        shutil.copy(out, beside)
        beside.replace(library)
    return library


class ShimLauncher:
    """A plsc.ops.launching.Launcher whose GPU is this CPU. order: the schedule; workers: OS threads, 1 or 2."""

    def __init__(self, library: Path, *, threads: int = 64, order: int = 0, workers: int = 1) -> None:
        self.library = ctypes.CDLL(str(library))
        self.threads, self.order, self.workers = threads, order, workers
        self.launched: list[str] = []

    def launch(
        self, file: str, kernel: str, *, grid: Sequence[int], args: Sequence[object], threads: int | None = None
    ) -> None:
        assert all(0 <= size < 2**31 for size in grid) and all(size < 2**16 for size in grid[1:]), grid
        self.launched.append(f"{file}.{kernel}")
        if 0 in grid:
            return
        scalars = arguments(args)
        boxes = [np.array(scalar) for scalar in scalars]
        kinds = "".join(KINDS[scalar.dtype.name] for scalar in scalars)
        pointers = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
        function = getattr(self.library, f"shim_{kernel}")
        function.restype = ctypes.c_char_p
        sizes = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
        wrong = function(kinds.encode(), pointers, sizes, threads or self.threads, self.order, self.workers)
        if wrong is not None:
            raise RuntimeError(f"{kernel}: {wrong.decode()}")


class Carried:
    """A launcher for tensors that lie elsewhere: takes each to its device, and brings back what kernels wrote."""

    def __init__(self, inner: Launcher, device: torch.device, *, threads: int = 256) -> None:
        self.inner, self.device, self.threads = inner, device, threads
        self.launched: list[str] = []

    def launch(
        self, file: str, kernel: str, *, grid: Sequence[int], args: Sequence[object], threads: int | None = None
    ) -> None:
        self.launched.append(f"{file}.{kernel}")
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        there = {_memory(x): x.to(self.device, copy=True) for x in tensors}  # a result may lie where an input does
        moved = [there[_memory(arg)] if isinstance(arg, Tensor) else arg for arg in args]
        self.inner.launch(file, kernel, grid=grid, args=moved, threads=threads or self.threads)
        for x in tensors:
            x.copy_(there[_memory(x)])


def _memory(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.shape, x.dtype
