"""What a GPU must show, in one command of less than eight minutes: right first, then fast.

    python tools/gpu_check.py                    # on a GPU machine with torch, CuPy and pytest; no network
    python tools/gpu_check.py --device cpu       # every path, small, on a CPU; kernels run behind the tests' shim
    python tools/gpu_check.py --only kernels     # some sections

Each result is printed and written (OUT/gpu_check.json, OUT/gpu_check.md) as soon as it is known: stop it when you like.
Each section has a process and a limit of seconds of its own, so that one that fails, crashes or hangs is a line of the
table, and the next one runs. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
if importlib.util.find_spec("tomli_w") is None:  # what plsc imports to write recipes, and nothing here calls
    stand_in = tempfile.mkdtemp()
    (Path(stand_in) / "tomli_w.py").touch()
    sys.path.append(stand_in)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), stand_in])

import torch  # noqa: E402
from sections import Run, difference, run_tests, say, worst  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import plsc  # noqa: E402
from plsc.comm import LocalCommunicator, Shard  # noqa: E402
from plsc.ops import kernels, sampling, twins  # noqa: E402


def load(path: Path) -> ModuleType:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def seconds_of(fn: Callable[[], object], device: torch.device, *, rounds: int = 5, repeat: int = 1) -> float:
    """Median time of fn, by CUDA events, or by this process's processor time on a CPU."""
    times = []
    for turn in range(rounds + 1):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeat):
                fn()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
        else:
            start = time.process_time()
            for _ in range(repeat):
                fn()
            took = time.process_time() - start
        if turn:
            times.append(took / repeat)
    return statistics.median(times)


# ---- sections, each a generator of nothing that adds results


def environment(run: Run) -> None:
    run.add("date", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    run.add("python, torch, plsc", f"{platform.python_version()}, {torch.__version__}, {plsc.__version__}")
    if run.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(run.device)
        name, count = torch.cuda.get_device_name(run.device), torch.cuda.device_count()
        run.add("GPU", f"{count} x {name}, {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
        run.add("CUDA, NCCL of torch", f"{torch.version.cuda}, {'.'.join(map(str, torch.cuda.nccl.version()))}")
    found = importlib.util.find_spec("cupy")
    if found is None:
        run.add("CuPy", "not installed", ok=None if run.small else False, wanted="14.2 or newer")
        return
    import cupy

    run.add("CuPy", cupy.__version__)


def kernel_cases(device: torch.device, size: int) -> Iterator[tuple[str, Any, Any, float]]:
    """(name, what the kernel gives, what the twin gives, allowed relative error)."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    n, d = 67, 512 if size > 4 else 132
    for c in (size * 1024 + 3, size * 1024):  # by one element at a time, and by four
        dots, inverse = draw(n, c) * 0.1, torch.rand(c, generator=generator).to(device) + 0.5
        place, shift = torch.randint(-1, c, (n,), generator=generator).to(device), torch.full((n,), 8.0, device=device)
        factors = {"coefficient": draw(n), "own_value": draw(n)}
        for out in (torch.float32, torch.bfloat16, torch.float16):
            close = 1e-2 if out != torch.float32 else 3e-5
            for name, extra in (("exp_rows", {}), ("grad_rows", factors)):
                pair = [torch.empty(n, c, dtype=out, device=device) for _ in range(2)]
                options = {**extra, "scale": 64.0, "inverse": inverse, "weigh": True}
                sums = [
                    getattr(module, name)(dots, shift, place, out=one, **options)
                    for module, one in zip((kernels, twins), pair, strict=True)
                ]
                yield f"{name} to {out}, {c} classes", [sums[0], pair[0]], [sums[1], pair[1]], close
        ends = [m.online_rows(dots, place, scale=300.0, inverse=inverse) for m in (kernels, twins)]
        yield f"online_rows, {c} classes", *ends, 1e-4
    forms = [("fp32", torch.float32), ("bf16", torch.bfloat16), ("split", torch.bfloat16), ("split", torch.int8)]
    for form, state in forms:
        yield f"sgd_rows {form}, {state}", *update_pair(form, state, draw(size * 200 + 1, d)), 1e-2
    labels = torch.randint(0, size * 5000, (513,), generator=generator).to(device)
    shard = Shard.of(size * 5000, LocalCommunicator())
    draws = [m.sample_classes(labels, shard, rate=0.1, seed=3, step=9) for m in (kernels, sampling)]
    yield "sample_classes", *draws, 0.0
    empty = draw(n, 0)
    tops = [m.merge_topk(empty, empty.long(), dots, k=10) for m in (kernels, twins)]
    yield "merge_topk", *tops, 0.0
    flat = draw(size * 50_000 + 1)
    kept = [[m.largest_entries(flat, len(flat) // 100)] for m in (kernels, twins)]
    yield "largest_entries", *kept, 0.0
    largest = twins.largest_magnitude(flat)
    casts = [
        [m.largest_magnitude(flat), m.cast_scaled(flat, torch.float16, largest=largest, divisor=3.0)]
        for m in (kernels, twins)
    ]
    yield "largest_magnitude and cast_scaled", *casts, 0.0


def update_pair(form: str, state: torch.dtype, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """One SGD step of a format by kernel and twin, as floats."""
    from plsc.ops.formats import join, split

    found: list[list[Tensor]] = []
    for module in (kernels, twins):
        low = None
        kept = weight.clone() if form == "fp32" else weight.bfloat16()
        if form == "split":
            kept, low = split(weight)
        velocity = torch.zeros_like(weight, dtype=state)
        scales = torch.zeros(len(weight), device=weight.device) if state == torch.int8 else None
        options: dict[str, Any] = {
            "lr": 0.1,
            "momentum": 0.9,
            "low": low,
            "scales": scales,
            "normalize": True,
            "key": 5,
        }
        module.sgd_rows(kept, weight.roll(1, 0), velocity, **options)
        values = velocity.float() if scales is None else velocity.float() * scales[:, None]
        found.append([kept.float() if low is None else join(kept, low), values])
    return found[0], found[1]


KERNEL_TESTS = ("softmax", "update", "choosing", "fused")


def behind_the_shim() -> None:
    """From here on this process launches kernels on the CPU."""
    shim = load(ROOT / "tests" / "cuda" / "shim" / "launcher.py")
    launcher = shim.ShimLauncher(shim.compile_kernels(shim.sources()), order=3)
    kernels.launcher_for = lambda device: launcher  # type: ignore[assignment]


def kernel_checks(run: Run) -> None:
    """Kernels against their twins on the device, by the tests and at size; on a CPU behind the shim."""
    if run.small:
        behind_the_shim()
    else:
        os.environ["PLSC_KERNELS"] = "1"  # a kernel that is missing is an error
    for name, got, expected, allowed in kernel_cases(run.device, 1 if run.small else 64):
        error = worst(difference(a, b) for a, b in zip(got, expected, strict=True))
        run.add(name, f"error {error:.1e}", ok=error <= allowed, wanted=f"<= {allowed:g}")
    launchers = {"PLSC_TEST_LAUNCHER": "carried" if run.small else "cupy", "PLSC_KERNELS": ""}
    for name in KERNEL_TESTS:
        run_tests(run, ROOT / "tests" / "cuda" / f"test_{name}.py", **launchers)


def contracts(run: Run) -> None:
    """The contract of the communicators with one rank; on a CPU over gloo, and cupy_nccl over a stand-in for CuPy."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    path = ROOT / "tests" / "comm" / "test_cupy_nccl.py"
    for backend in ("gloo",) if run.small else ("nccl", "cupy_nccl"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [sys.executable, str(path), backend]
        status, words = say(command, line="^kept$", seconds=120, MASTER_PORT=port, **place)
        kept = status == 0 and words == "kept"
        run.add(backend, "contract kept" if kept else words, ok=kept)
    for name in sorted(path.parent.glob("test_cupy_nccl*.py")) if run.small else ():
        run_tests(run, name)


def losses(device: torch.device, steps: int, **options: Any) -> list[float]:
    """A small network and head on separable data, the same on every device."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    centers = torch.randn(50, 48, generator=generator)
    net = nn.Sequential(nn.Linear(48, 64), nn.PReLU(), nn.Linear(64, 32)).to(device)
    optimizer = plsc.SGD(0.05, momentum=0.9, weight_decay=1e-4)
    margin = plsc.ArcFace(16.0, 0.2)
    comm = LocalCommunicator()
    head = plsc.ClassParallelHead(32, 50, margin=margin, comm=comm, head_optimizer=optimizer, block=16, **options)
    head = head.to(device)
    backbone = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    found = []
    for _ in range(steps):
        labels = torch.randint(0, 50, (64,), generator=generator)
        x = centers[labels] + 0.5 * torch.randn(64, 48, generator=generator)
        loss = head(net(x.to(device)), labels.to(device))
        backbone.zero_grad()
        loss.backward()
        backbone.step()
        found.append(loss.detach())
    return torch.stack(found).cpu().tolist()


def training(run: Run) -> None:
    """The same training on the device and on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    steps = 20 if run.small else 200
    for name, options in (("full softmax", {}), ("sampled 0.3", {"sample_rate": 0.3})):
        here, there = losses(run.device, steps, **options), losses(torch.device("cpu"), steps, **options)
        first = worst(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(here[:50], there[:50], strict=True))
        run.add(f"{steps} steps, {name}: first 50 losses", f"apart by {first:.1e}", ok=first < 2e-3, wanted="< 2e-3")
        ends = [statistics.mean(each[-10:]) for each in (here, there)]
        strange = sum(not math.isfinite(loss) for loss in here)
        close = abs(ends[0] - ends[1]) / ends[1] < 0.05 and not strange
        value = f"{ends[0]:.4f}, on the CPU {ends[1]:.4f} (from {there[0]:.2f}); {strange} losses are not finite"
        run.add(f"{steps} steps, {name}: mean of the last ten", value, ok=close, wanted="within 5 %, all finite")


def quiet_steps(run: Run) -> None:
    """Torch's own sync debugging over a warm step: whatever stops the host is named; on a CPU meta tensors tell."""
    if run.small:
        run_tests(run, ROOT / "tests" / "cuda" / "test_quiet_steps.py")
        return
    fused: dict[str, Any] = {"head_optimizer": plsc.SGD(0.1, momentum=0.9)}
    sampled = {**fused, "sample_rate": 0.1}
    halves = {**fused, "weight_dtype": "split"}  # whose products are bf16
    cases = {"fused": (fused, 0), "separate": ({}, 0), "adaface": ({**fused, "margin": plsc.AdaFace()}, 0)}
    cases["split"] = halves, 0
    for name, (options, allowed) in {**cases, "sampled 0.1": (sampled, 1)}.items():
        head = plsc.ClassParallelHead(64, 5000, comm=LocalCommunicator(), **options).to(run.device)
        x = torch.randn(32, 64, device=run.device, requires_grad=True)
        labels = torch.randint(0, 5000, (32,), device=run.device)
        head(x, labels).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            head(x, labels).backward()
        torch.cuda.set_sync_debug_mode("default")
        found = [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchronizing" in str(w.message)]
        what, ok = f"host syncs of a step, {name}", len(found) <= allowed
        run.add(what, ", ".join(found) or "none", ok=ok, wanted=f"<= {allowed}")


ROWS = ("exp_rows", "grad_rows", "online_rows", "sgd_rows", "adam_rows")


def bandwidth(run: Run) -> None:
    """Bytes a second of the elementwise kernels against a copy of the same size."""
    if run.small:
        behind_the_shim()
    device, size = run.device, 1 if run.small else 64
    repeat = 1 if run.small else 10  # launches queue up: their own time does not count
    source = torch.empty(size << (14 if run.small else 22), device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / seconds_of(lambda: target.copy_(source), device, repeat=repeat)
    run.add("copy", f"{copied / 1e9:.1f} GB/s")
    n, c, d = (16, 2048, 64) if run.small else (1024, 65536, 512)
    dots, e = torch.randn(n, c, device=device), torch.empty(n, c, dtype=torch.bfloat16, device=device)
    inverse, place = torch.ones(c, device=device), torch.arange(n, device=device)
    shift = torch.zeros(n, device=device)
    weights = {"coefficient": torch.ones(n, device=device), "own_value": torch.ones(n, device=device)}
    rows = 256 if run.small else 1 << 19
    weight, velocity, square = (torch.zeros(rows, d, dtype=torch.bfloat16, device=device) for _ in range(3))
    weight.normal_()
    low, grad = torch.zeros(rows, d, dtype=torch.int16, device=device), torch.randn(rows, d, device=device)
    full, momentum, squares = torch.randn(rows, d, device=device), *torch.zeros(2, rows, d, device=device)
    bytes_, scales, steps = torch.zeros_like(weight, dtype=torch.int8), *torch.zeros(2, rows, device=device)
    labels = torch.arange(1024, device=device)
    shard = Shard.of(20_000 if run.small else 10_000_000, LocalCommunicator())
    adam: dict[str, Any] = {"lr": 0.1, "normalize": True, "weighed": True}
    sgd: dict[str, Any] = {**adam, "momentum": 0.9}
    int8 = {**sgd, "scales": scales}
    exp, grads, online, sgd_rows, adam_rows = (getattr(kernels, name) for name in ROWS)
    cases: list[tuple[str, int, Callable[[], object]]] = [  # what is read and written, in bytes
        ("exp_rows fp32 -> bf16", 6 * n * c, lambda: exp(dots, shift, place, out=e, inverse=inverse)),
        ("grad_rows fp32 -> bf16", 6 * n * c, lambda: grads(dots, shift, place, out=e, inverse=inverse, **weights)),
        ("online_rows", 4 * n * c, lambda: online(dots, place, inverse=inverse)),
        ("exp_rows fp32 in place", 8 * n * c, lambda: exp(dots, shift, place, out=dots, inverse=inverse)),
        ("sgd_rows split, bf16", (4 + 8 + 4) * rows * d, lambda: sgd_rows(weight, grad, velocity, low=low, **sgd)),
        ("sgd_rows bf16, bf16", (4 + 4 + 4) * rows * d, lambda: sgd_rows(weight, grad, velocity, **sgd)),
        ("sgd_rows bf16, int8", (4 + 4 + 2) * rows * d, lambda: sgd_rows(weight, grad, bytes_, **int8)),
        ("sgd_rows fp32, fp32", (4 + 8 + 8) * rows * d, lambda: sgd_rows(full, grad, momentum, **sgd)),
        (
            "adam_rows split, bf16",
            (4 + 8 + 8) * rows * d,
            lambda: adam_rows(weight, grad, velocity, square, steps, low=low, **adam),
        ),
        (
            "adam_rows fp32, fp32",
            (4 + 8 + 16) * rows * d,
            lambda: adam_rows(full, grad, momentum, squares, steps, **adam),
        ),
        ("largest_magnitude", 4 * source.numel(), lambda: kernels.largest_magnitude(source)),
        ("cast_scaled to fp16", 6 * source.numel(), lambda: kernels.cast_scaled(source, torch.float16)),
    ]
    for name, moved, fn in cases:
        rate = moved / seconds_of(fn, device, repeat=repeat)
        share = rate / copied
        ok = None if run.small else share >= 0.85
        run.add(name, f"{rate / 1e9:.1f} GB/s, {share:.2f} of the copy", ok=ok, wanted=">= 0.85")
    source.normal_()
    took = seconds_of(lambda: kernels.largest_entries(source, source.numel() // 1000), device)
    run.add("largest_entries, 0.1 %", f"{took * 1e3:.2f} ms of {source.numel():,} entries")
    took = seconds_of(lambda: kernels.sample_classes(labels, shard, rate=0.1, seed=0, step=1), device)
    run.add("sample_classes, 10 %", f"{took * 1e3:.2f} ms of {shard.total:,} classes")


def head_step(run: Run) -> None:
    """benchmarks/gpu_head.py: a step against its products, and the classes that fit."""
    module = load(ROOT / "benchmarks" / "gpu_head.py")
    args = module.parse(["--device", run.device.type, *(["--quick"] if run.small else ["--rounds", "3"])])
    torch.backends.cuda.matmul.allow_tf32 = True
    for form, allowed in (("fp32", 1e-2 if run.device.type == "cuda" else 1e-5), ("split", 2e-2)):
        for what in ("kernels", "head"):
            error = module.check(run.device, what=what, form=form)
            name = f"step of the {form} weight, {what}"
            run.add(name, f"error {error:.1e}", ok=error < allowed, wanted=f"< {allowed:g}")
    for row in module.compare(args, run.device):
        judged = not run.small and row.judged and (row.classes, row.batch) == (1_000_000, 1024)
        value = f"{row.milliseconds:.2f} ms, {row.ratio:.2f} of the products, {row.gigabytes:.1f} GB; {row.note}"
        ok = row.ratio <= 1.15 if judged else None
        run.add(f"{row.what} C={row.classes:,} B={row.batch}", value, ok=ok, wanted="<= 1.15" if judged else "")
    for row in module.fit(args, run.device):
        judged = not run.small and row.judged
        enough = row.classes >= 50_000_000 and row.falls
        value = f"{row.classes:,} classes, {row.milliseconds:.0f} ms a step, {row.note}"
        wanted = ">= 50 M in 141 GB, a loss that falls" if judged else ""
        run.add(f"classes that fit, {row.what}", value, ok=enough if judged else None, wanted=wanted)


WAYS = ("fp32", "tf32", "bf16")  # of products and convolutions


def train_rate(net: nn.Module, x: Tensor, device: torch.device, *, way: str) -> float:
    """Images a second of forward, backward and step."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = way != "fp32"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=way == "bf16"):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return len(x) / seconds_of(step, device, rounds=1 if device.type == "cpu" else 3)


def largest_batch(run: Run, make: Callable[[], nn.Module], size: int, *, way: str) -> tuple[int, float]:
    """The largest batch by powers of two that trains, and its images a second."""
    best, rate = 0, 0.0
    for batch in (2, 4) if run.small else (256 << i for i in range(6)):
        if run.left < 40:
            break
        clear(run.device)
        try:
            x = torch.zeros(batch, 3, size, size, device=run.device).to(memory_format=torch.channels_last)
            best, rate = batch, train_rate(make(), x, run.device, way=way)
        except torch.cuda.OutOfMemoryError:
            break
    return best, rate


def backbones(run: Run) -> None:
    """AMP against fp32 and TF32 at one batch and at each one's largest, and what recomputation gives back."""
    models = [("iresnet50", plsc.models.iresnet50, 112), ("resnet50", plsc.models.resnet50, 224)]
    if run.small:
        models = [("iresnet18", plsc.models.iresnet18, 32)]
    for name, make, size in models:

        def build(policy: str = "none", make: Any = make, size: int = size) -> nn.Module:
            net = plsc.strategies.recompute(make(512, image_size=size), policy)
            return net.to(run.device, memory_format=torch.channels_last)

        batch = 4 if run.small else 256
        x = torch.zeros(batch, 3, size, size, device=run.device).to(memory_format=torch.channels_last)
        rates = {way: train_rate(build(), x, run.device, way=way) for way in WAYS}
        value = ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())
        times = f"bf16 {rates['bf16'] / rates['fp32']:.2f} times fp32, {rates['bf16'] / rates['tf32']:.2f} times tf32"
        run.add(f"{name}, batch {batch}", f"{value} images/s; {times}")
        for what, policy, way in (
            ("fp32", "none", "fp32"),
            ("bf16", "none", "bf16"),
            ("bf16, recompute", "full", "bf16"),
        ):
            most, rate = largest_batch(run, lambda policy=policy: build(policy), size, way=way)
            run.add(f"{name}, largest batch in {what} (powers of two)", f"{most}, {rate:.0f} images/s")


def loading(run: Run) -> None:
    """Images a second from memory to the device, through worker processes."""
    from plsc.data import Loader, Synthetic

    count = 64 if run.small else 20_000
    loader = Loader(
        Synthetic(count, 10, image_size=112),
        32 if run.small else 256,
        workers=0 if run.small else 12,
        device=run.device,
    )
    start, seen = time.monotonic(), 0
    for images, _ in loader.epochs(1):
        seen += len(images)
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    run.add("synthetic images of 112 x 112", f"{seen / (time.monotonic() - start):.0f} images/s of wall time")
    loader.close()


SECTIONS: dict[str, Callable[[Run], None]] = {
    "environment": environment,
    "kernels": kernel_checks,
    "contracts": contracts,
    "training": training,
    "syncs": quiet_steps,
    "bandwidth": bandwidth,
    "head": head_step,
    "backbones": backbones,
    "loader": loading,
}


LIMITS = {"kernels": 200.0, "contracts": 250.0, "head": 180.0, "backbones": 180.0}  # seconds; 60 for the others
CPU_TIMES = 4  # as long on a CPU, which others may use as well


def gpu_found() -> bool:
    """Whether there is a GPU, asked by another process: CUDA works in no child of one that has begun to use it."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(not torch.cuda.is_available()))
    child.start()
    child.join()
    return child.exitcode == 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="checks and measures plsc on a GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="these sections, in this order")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--seconds", type=float, help="what still runs then is stopped; 460, on a CPU 1840")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.device == "cuda" and not gpu_found():
        raise SystemExit("found no GPU; --device cpu runs every path small")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device, times = (torch.device("cuda", 0), 1) if args.device == "cuda" else (torch.device("cpu"), CPU_TIMES)
    run = Run(device, args.out, args.seconds or 460.0 * times)
    for name in args.only or SECTIONS:
        run.apart(name, SECTIONS[name], LIMITS.get(name, 60.0) * times)
    run.section = ""
    run.write()
    failed = [result for result in run.results if result.ok is False]
    print(f"{len(failed)} of {sum(result.ok is not None for result in run.results)} checks failed; {run.out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
