"""Launching the kernels of cuda/: their sources, their arguments, and CuPy, which compiles them at first use."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}  # in kernels' names
# No contraction of a * b + c: bits then do not depend on the compiler, and these kernels wait for memory anyway.
OPTIONS = ("-std=c++17", "--fmad=false")
KINDS = {"uint64": "p", "float32": "f", "float64": "d", "int32": "i", "uint32": "u", "int64": "l"}  # of parameters


class Launcher(Protocol):
    """What runs kernels: CuPy on a GPU. Arguments are tensors (their memory) and None, or numpy scalars."""

    threads: int  # of a block, where a kernel does not say otherwise

    def launch(
        self, file: str, kernel: str, *, grid: Sequence[int], args: Sequence[object], threads: int | None = None
    ) -> None:
        """Queues a kernel of cuda/FILE.cu on the current stream; a grid with a 0 is nothing to do."""


def source_folder() -> Path:
    """Where the kernels' sources lie: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_cuda", package.parent / "cuda"):
        if (folder / "common.cuh").is_file():
            return folder
    raise FileNotFoundError(f"the CUDA sources are neither in {package / '_cuda'} nor in {package.parent / 'cuda'}")


def launcher_for(device: torch.device) -> Launcher | None:
    """What runs kernels on a device, or None where the twins in plain torch do the work.

    Kernels need a GPU and CuPy. PLSC_KERNELS=0 forces the twins, PLSC_KERNELS=1 makes missing kernels an error.
    """
    wish = os.environ.get("PLSC_KERNELS", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"PLSC_KERNELS: got {wish!r}, expected 0 (plain torch), 1 (kernels or an error) or nothing")
    if wish == "0" or device.type != "cuda":
        return None
    if not _cupy_installed():
        if wish == "1":
            raise ValueError(
                "PLSC_KERNELS=1 needs CuPy, which is not installed; pip install cupy-cuda13x (or -cuda12x)"
            )
        return None
    return _cupy_launcher(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cupy_installed() -> bool:
    found = importlib.util.find_spec("cupy") is not None
    if not found:
        log.info("CuPy is not installed: the head computes with plain torch operations; pip install cupy-cuda13x")
    return found


@functools.cache
def _cupy_launcher(index: int) -> CupyLauncher:
    return CupyLauncher(index)


def arguments(args: Sequence[object]) -> list[np.generic]:
    """Arguments as numpy scalars: a tensor as the address of its memory, None as a null pointer."""
    out: list[np.generic] = []
    for arg in args:
        if isinstance(arg, Tensor):
            if not arg.is_contiguous():
                raise ValueError(
                    f"kernel: got {tuple(arg.shape)} with strides {arg.stride()}, expected no gaps; call .contiguous()"
                )
            out.append(np.uint64(arg.data_ptr()))
        elif arg is None:
            out.append(np.uint64(0))
        else:
            assert isinstance(arg, np.generic) and arg.dtype.name in KINDS, f"{arg!r} is no scalar of a known type"
            out.append(arg)
    return out


def fits(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Kernels get addresses: a tensor of another type, shape or device, or with gaps, would be memory read wrongly."""
    for name, tensor in tensors.items():
        if tensor is None or (
            (tensor.device, tensor.dtype, tensor.shape) == (device, dtype, shape) and tensor.is_contiguous()
        ):
            continue
        gaps = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
        raise ValueError(
            f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}{gaps}, expected {dtype} {shape} on "
            f"{device}, contiguous; convert it with .to() or .contiguous()"
        )


def f32(x: float) -> np.float32:
    """A kernel's float."""
    return np.float32(x)


def i64(x: int) -> np.int64:
    """A kernel's long long."""
    return np.int64(x)


def flag(x: bool) -> np.int32:
    """A kernel's int that is a yes or no."""
    return np.int32(x)


def aligned(row: int, *tensors: Tensor | None) -> np.int32:
    """Whether rows of that length can be read four elements at a time."""
    even = all(t is None or t.data_ptr() % (4 * t.element_size()) == 0 for t in tensors)
    return np.int32(row % 4 == 0 and even)


def machine_code(nvrtc: Any, file: str, capability: str) -> bytes:
    """cuda/FILE.cu for GPUs of a compute capability ("90"), by CuPy's module nvrtc; from disk where it is kept already.

    Needs no GPU. CuPy's own RawModule is not asked: it adds -ftz=true, and numbers below 2**-126 would count as zero.
    """
    folder = source_folder()
    code, header = ((folder / name).read_text(encoding="utf-8") for name in (f"{file}.cu", "common.cuh"))
    code = code.replace('#include "common.cuh"', header.replace("#pragma once", ""))
    known = nvrtc.getSupportedArchs()
    exact = int(capability) in known  # else text for the newest that NVRTC knows, which the driver translates
    options = (*OPTIONS, f"-arch=sm_{capability}" if exact else f"-arch=compute_{max(known)}")
    digest = hashlib.sha256(repr((code, options, nvrtc.getVersion())).encode()).hexdigest()
    cache = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache") / f"plsc-{digest}"
    if cache.is_file():
        return cache.read_bytes()
    program = nvrtc.createProgram(code, f"{file}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        binary: bytes = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
    except RuntimeError as error:  # NVRTCError is one
        raise RuntimeError(f"cuda/{file}.cu, {' '.join(options)}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    with contextlib.suppress(OSError):  # a folder that cannot be written to: compiled again by each process
        cache.parent.mkdir(parents=True, exist_ok=True)
        begun = cache.with_name(f"{cache.name}.{os.getpid()}")
        begun.write_bytes(binary)
        begun.replace(cache)
    return binary


class CupyLauncher:
    """Kernels on one GPU through CuPy: a file is compiled when its first kernel is asked for, and kept on disk."""

    threads = 256

    def __init__(self, index: int) -> None:
        import cupy  # after torch, always: both then use the libraries that torch has loaded

        self._cupy, self._index = cupy, index
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}
        self._streams: dict[int, Any] = {}

    def launch(
        self, file: str, kernel: str, *, grid: Sequence[int], args: Sequence[object], threads: int | None = None
    ) -> None:
        if 0 in grid:
            return
        function = self._kernels.get(kernel) or self._load(file, kernel)
        with self._cupy.cuda.Device(self._index), self._stream():
            function(tuple(grid), (threads or self.threads,), tuple(arguments(args)))

    def _load(self, file: str, kernel: str) -> Any:
        device = self._cupy.cuda.Device(self._index)
        with device:
            if file not in self._modules:
                module = self._cupy.cuda.function.Module()
                module.load(machine_code(self._cupy.cuda.nvrtc, file, device.compute_capability))
                self._modules[file] = module
            self._kernels[kernel] = self._modules[file].get_function(kernel)
        return self._kernels[kernel]

    def _stream(self) -> Any:
        """Torch's current stream, as CuPy knows it."""
        handle = torch.cuda.current_stream(self._index).cuda_stream
        if handle == 0:
            return self._cupy.cuda.Stream.null
        if handle not in self._streams:
            streams = self._cupy.cuda
            known = hasattr(streams.Stream, "from_external")  # CuPy 14; ExternalStream is deprecated there
            self._streams[handle] = (
                streams.Stream.from_external(_Handle(handle)) if known else streams.ExternalStream(handle, self._index)
            )
        return self._streams[handle]


class _Handle:
    """A CUDA stream by its address, in the protocol that CuPy reads."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address
