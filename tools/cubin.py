"""Compiles the CUDA kernels with nvcc for several GPUs and tells registers and shared memory; a spill is an error.

python tools/cubin.py                          # every file, for four GPUs; needs nvcc and no GPU
python tools/cubin.py --arch 90 softmax        # one file for one GPU; --arch may come again
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

CUDA = Path(__file__).resolve().parents[1] / "cuda"
ARCHITECTURES = (75, 80, 90, 100)  # the oldest that nvcc 13 knows, A100, H100 and H200, B200
OPTIONS = ["-std=c++17", "--fmad=false"]  # those of plsc.ops.launching
_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


class Kernel:
    """What ptxas says of one kernel."""

    def __init__(self, name: str) -> None:
        self.name, self.registers, self.shared, self.spilled, self.stack = name, 0, 0, 0, 0


def compile_file(path: Path, arch: int) -> list[Kernel]:
    """The kernels of a file, compiled for sm_ARCH; raises SystemExit with nvcc's words where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-cubin", f"-arch=sm_{arch}", *OPTIONS, "-Xptxas", "-v", "-Werror", "all-warnings"]
        run = subprocess.run([*command, "-o", f"{folder}/out.cubin", str(path)], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{path.name} for sm_{arch}:\n{run.stderr}")
    return read_report(run.stderr)


def read_report(text: str) -> list[Kernel]:
    """The kernels in what `ptxas -v` wrote."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if found := _KERNEL.search(line):
            kernels.append(Kernel(found[1]))
        elif found := _STACK.search(line):
            kernels[-1].stack, kernels[-1].spilled = int(found[1]), int(found[2]) + int(found[3])
        elif found := _USED.search(line):
            kernels[-1].registers, kernels[-1].shared = int(found[1]), int(found[2] or 0)
    return kernels


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="compile cuda/*.cu and report registers and spills")
    known = sorted(path.stem for path in CUDA.glob("*.cu"))
    parser.add_argument("files", nargs="*", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--arch", type=int, action="append", help="of a GPU, as 90; may come again; default: four")
    args = parser.parse_args(argv)
    if strangers := sorted(set(args.files) - set(known)):
        parser.error(f"files: got {', '.join(strangers)}, expected some of {', '.join(known)}")
    args.files, args.arch = args.files or known, args.arch or list(ARCHITECTURES)
    return args


def row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    args = parse()
    if shutil.which("nvcc") is None:
        raise SystemExit("nvcc is not on the path; it comes with the CUDA toolkit, 13.0 or newer")
    spills, rows = 0, []
    print("| file | GPU | kernels | registers | shared bytes | spilled bytes | stack bytes |")
    print("|---|---|---|---|---|---|---|")
    for name in args.files:
        ranges, total = [], 0
        for arch in args.arch:
            kernels = compile_file(CUDA / f"{name}.cu", arch)
            registers = [kernel.registers for kernel in kernels]
            spilled = sum(kernel.spilled for kernel in kernels)
            ranges.append(f"{min(registers)}-{max(registers)}")
            total += spilled
            shared, stack = max(kernel.shared for kernel in kernels), max(kernel.stack for kernel in kernels)
            cells = (name, f"sm_{arch}", len(kernels), ranges[-1], shared, spilled, stack)
            print(row(cells), flush=True)
            for kernel in kernels:
                if kernel.spilled:
                    print(f"{kernel.name} spills {kernel.spilled} bytes on sm_{arch}", file=sys.stderr)
        spills += total
        rows.append((f"`{name}.cu`", len(kernels), *ranges, total))
    print("\nregisters by GPU, as docs/gpu.md has them:\n", *map(row, rows), sep="\n")
    if spills:
        raise SystemExit(f"{spills} bytes of registers spilled; give a kernel less to hold")


if __name__ == "__main__":
    main()
