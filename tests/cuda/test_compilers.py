"""What compiles and launches the kernels on GPUs: nvcc without spills, NVRTC, and what CuPy is asked for."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plsc.ops import launching
from plsc.ops.launching import OPTIONS, CupyLauncher, source_folder

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "cuda").glob("*.cu"))


@pytest.fixture(scope="module")
def cubin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plsc_cubin", ROOT / "tools" / "cubin.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_report_of_ptxas_is_read(cubin: ModuleType) -> None:
    text = """ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes stack, 128 bytes smem
ptxas info    : Compile time = 5.000 ms
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 0 barriers
"""
    one, two = cubin.read_report(text)
    assert (one.name, one.registers, one.shared, one.spilled, one.stack) == ("one", 255, 128, 28, 8)
    assert (two.name, two.registers, two.shared, two.spilled, two.stack) == ("two", 22, 0, 0, 0)


def test_sources_are_found_and_options_agree(cubin: ModuleType) -> None:
    assert source_folder() == ROOT / "cuda"
    assert list(OPTIONS) == cubin.OPTIONS
    assert {"softmax", "update", "sample", "topk", "select", "half"} == set(FILES)


@pytest.mark.parametrize("script", ["tools/cubin.py", "tools/gpu_check.py", "benchmarks/gpu_head.py"])
def test_commands_of_a_docstring_are_understood(script: str) -> None:
    """By the script's own parser; here it is only loaded, and nothing runs."""
    spec = importlib.util.spec_from_file_location(f"plsc_{Path(script).stem}_commands", ROOT / script)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = [line.partition("#")[0].split() for line in (module.__doc__ or "").splitlines()]
    commands = [words[2:] for words in lines if words[:2] == ["python", script]]
    assert len(commands) > 1
    for words in commands:
        module.parse(words)


def test_cubin_takes_files_and_gpus(cubin: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    args = cubin.parse(["--arch", "90", "softmax", "--arch", "75"])
    assert args.files == ["softmax"] and args.arch == [90, 75]
    args = cubin.parse([])
    assert args.files == FILES and args.arch == list(cubin.ARCHITECTURES)
    with pytest.raises(SystemExit):
        cubin.parse(["softmaxx"])
    assert "got softmaxx, expected some of half, sample" in capsys.readouterr().err


@pytest.mark.slow
def test_nvcc_takes_all_without_a_spill() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, of the CUDA toolkit 13.0 or newer")
    run = subprocess.run([sys.executable, "tools/cubin.py"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith(tuple(f"| {name} |" for name in FILES))]
    assert len(rows) == 4 * len(FILES) and not run.stderr
    page = (ROOT / "docs/gpu.md").read_text()
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if (named := re.search(r"\(nvcc ([\d.]+);", page)) and f"V{named[1]}" in version:
        found = [line for line in run.stdout.splitlines() if line.startswith("| `")]
        assert [line for line in found if line not in page] == [] and len(found) == len(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_nvrtc_takes_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very function that makes machine code on a GPU machine, which NVRTC itself needs not be; kept on disk."""
    nvrtc = pytest.importorskip("cupy", reason="needs CuPy and NVRTC").cuda.nvrtc
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    for arch in ("75", "90"):
        binary = launching.machine_code(nvrtc, name, arch)
        assert binary.startswith(b"\x7fELF") and len(binary) > 1000
        kept = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert kept.read_bytes() == binary


def test_nvrtc_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cupy", reason="needs CuPy and NVRTC").cuda.nvrtc
    (tmp_path / "common.cuh").write_text("#pragma once\n")
    (tmp_path / "bad.cu").write_text('#include "common.cuh"\nextern "C" __global__ void f() { nothing(); }\n')
    monkeypatch.setattr(launching, "source_folder", lambda: tmp_path)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=r'cuda/bad\.cu, -std=c\+\+17 --fmad=false -arch=sm_90: .*\n.*"nothing"'):
        launching.machine_code(nvrtc, "bad", "90")
    assert not (tmp_path / "cache").exists()


class Nvrtc:
    """CuPy's module nvrtc, without a compiler."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 75, 90, 120

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, code: str, name: str, headers: tuple[()], includes: tuple[()]) -> str:
        return code

    def compileProgram(self, program: str, options: tuple[str, ...]) -> None:
        self.compiled.append((program, options))

    def getCUBIN(self, program: str) -> bytes:
        return b"cubin"

    def getPTX(self, program: str) -> bytes:
        return b"ptx"

    def destroyProgram(self, program: str) -> None:
        pass


def test_machine_code_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is in the text, no denormal is flushed, a GPU newer than NVRTC gets text, no folder is no failure."""
    nvrtc = Nvrtc()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    assert [launching.machine_code(nvrtc, "half", "90") for _ in range(2)] == [b"cubin"] * 2
    assert launching.machine_code(nvrtc, "half", "130") == b"ptx"
    assert [options for _, options in nvrtc.compiled] == [(*OPTIONS, "-arch=sm_90"), (*OPTIONS, "-arch=compute_120")]
    code = nvrtc.compiled[0][0]
    assert "#include" not in code and "DEVICE u32 mix(u32 h)" in code and not any("ftz" in word for word in OPTIONS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    assert launching.machine_code(nvrtc, "half", "90") == b"cubin" and len(nvrtc.compiled) == 3


class Recorder:
    """As much of CuPy as a launch needs; writes down what is asked of it. It is not CuPy."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.cuda = SimpleNamespace(Device=self.entered("device"), Stream=self.entered("stream"), nvrtc=Nvrtc())
        self.cuda.function = SimpleNamespace(Module=self.module)
        self.cuda.Stream.null = self.entered("stream")(0)
        self.cuda.Stream.from_external = lambda outer: self.entered("stream")(outer.__cuda_stream__())

    def entered(self, what: str) -> Any:
        calls = self.calls

        class Entered:
            compute_capability = "90"

            def __init__(self, which: object) -> None:
                self.which = which

            def __enter__(self) -> None:
                calls.append((what, self.which))

            def __exit__(self, *_: object) -> None:
                calls.append(("end of", what))

        return Entered

    def module(self) -> Any:
        def get_function(name: str) -> Any:
            return lambda grid, block, args: self.calls.append((name, grid, block, args))

        return SimpleNamespace(load=lambda code: self.calls.append(("load", code)), get_function=get_function)


def test_a_launch_as_cupy_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, device, stream, arguments as numpy scalars; a file is loaded once."""
    recorder = Recorder()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", recorder)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    launcher = CupyLauncher(1)
    x = torch.zeros(4)
    args = [x, None, np.int64(3), np.float32(0.5), np.int32(1)]
    launcher.launch("half", "one", grid=(2, 3), args=args)
    stream.cuda_stream = 4711
    launcher.launch("half", "one", grid=(5,), args=args, threads=32)
    launcher.launch("half", "one", grid=(5, 0), args=args)  # nothing to do
    assert [call for call in recorder.calls if call[0] == "load"] == [("load", b"cubin")]
    assert recorder.calls[:2] == [("device", 1), ("load", b"cubin")]  # into the context of that GPU
    runs = [call for call in recorder.calls if call[0] == "one"]
    assert [run[1:3] for run in runs] == [((2, 3), (256,)), ((5,), (32,))]
    passed = runs[0][3]
    assert [value.dtype.name for value in passed] == ["uint64", "uint64", "int64", "float32", "int32"]
    assert passed[0] == x.data_ptr() and passed[1] == 0 and passed[2:] == (3, 0.5, 1)
    assert [call[1] for call in recorder.calls if call[0] == "stream"] == [0, (0, 4711)]
    assert {call[1] for call in recorder.calls if call[0] == "device"} == {1}


def test_who_runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody on a CPU; on a GPU CuPy, unless the environment forbids it; without CuPy nobody, or an error if asked."""
    gpu, recorder = torch.device("cuda", 0), Recorder()
    monkeypatch.setitem(sys.modules, "cupy", recorder)
    monkeypatch.delenv("PLSC_KERNELS", raising=False)
    for cached in (launching._cupy_installed, launching._cupy_launcher):
        cached.cache_clear()
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object() if name == "cupy" else None)
    assert launching.launcher_for(torch.device("cpu")) is None
    assert isinstance(launching.launcher_for(gpu), CupyLauncher)
    assert launching.launcher_for(gpu) is launching.launcher_for(gpu)
    monkeypatch.setenv("PLSC_KERNELS", "0")
    assert launching.launcher_for(gpu) is None
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: None)
    launching._cupy_installed.cache_clear()
    monkeypatch.setenv("PLSC_KERNELS", "1")
    with pytest.raises(ValueError, match="PLSC_KERNELS=1 needs CuPy"):
        launching.launcher_for(gpu)
    monkeypatch.delenv("PLSC_KERNELS")
    assert launching.launcher_for(gpu) is None
    monkeypatch.setenv("PLSC_KERNELS", "yes")
    with pytest.raises(ValueError, match="got 'yes', expected 0"):
        launching.launcher_for(gpu)
    for cached in (launching._cupy_installed, launching._cupy_launcher):
        cached.cache_clear()
