"""The script for GPUs: its lines survive a failure, and on a CPU every path of it runs."""

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from plsc.ops import kernels, twins

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check(shim: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location("plsc_gpu_check", ROOT / "tools" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOY = """
import importlib.util, os, signal, subprocess, sys, time
spec = importlib.util.spec_from_file_location("plsc_gpu_check", {path!r})
sys.modules[spec.name] = check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what started the tests may have had them ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

def breaks(run):
    run.add("first", "1")
    raise RuntimeError("no such thing\\nsecond line")

def child():
    words = ["sh", "-c", "sleep 600 & echo $!; wait"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True).stdout.readline().strip()

def leaves(run):
    run.add("left", child())

def hangs(run):
    run.add("pids", f"{{os.getpid()}} {{child()}}")
    time.sleep(600)

def dies(run):
    run.add("before", "3")
    os.kill(os.getpid(), signal.SIGSEGV)

check.SECTIONS = {{"breaks": breaks, "dies": dies, "leaves": leaves, "hangs": hangs}}
check.SECTIONS["last"] = lambda run: run.add("after", "4", ok=True)
check.LIMITS = {{"hangs": {limit}}}
check.main()
"""


def start(tmp_path: Path, limit: float, *options: str) -> subprocess.Popen[str]:
    """The script with sections that go wrong, in a process."""
    script = tmp_path / "toy.py"
    script.write_text(TOY.format(path=str(ROOT / "tools" / "gpu_check.py"), limit=limit))
    command = [sys.executable, str(script), "--device", "cpu", "--out", str(tmp_path / "out"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(tmp_path: Path) -> list[tuple[str, str, str, bool | None]]:
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    return [(line["section"], line["what"], line["value"], line["ok"]) for line in found["results"]]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


def wait_for_the_end_of(pids: list[str]) -> None:
    """Whoever killed them need not have waited until they were gone."""
    deadline = time.monotonic() + 30
    while any(alive(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids and not [pid for pid in pids if alive(int(pid))]


@pytest.mark.slow
def test_a_section_ends_alone(tmp_path: Path) -> None:
    """One that fails, crashes or hangs is a line, what came before it stays, the next runs; nobody's child stays."""
    process = start(tmp_path, 2.0)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1, text
    found = lines_of(tmp_path)
    (left,) = (value for _, what, value, _ in found if what == "left")
    (pids,) = (value for _, what, value, _ in found if what == "pids")
    assert found == [
        ("breaks", "first", "1", None),
        ("breaks", "section", "RuntimeError: no such thing", False),
        ("dies", "before", "3", None),
        ("dies", "section", "its process ended with -11", False),
        ("leaves", "left", left, None),
        ("hangs", "pids", pids, None),
        ("hangs", "section", "stopped after 8 s", False),
        ("last", "after", "4", True),
    ]
    wait_for_the_end_of([left, *pids.split()])
    table = (tmp_path / "out" / "gpu_check.md").read_text().splitlines()
    assert len(table) == 2 + len(found) and table[3] == "| breaks | section | RuntimeError: no such thing |  | **no** |"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, "the time"])
def test_a_stop_leaves_what_was_found_and_no_process(tmp_path: Path, how: Any) -> None:
    process = start(tmp_path, 600.0, "--only", "breaks", "hangs", "last", *(["--seconds", "12"] * (how == "the time")))
    pids, deadline = [], time.monotonic() + 120
    while not pids and time.monotonic() < deadline:
        time.sleep(0.05)
        if (tmp_path / "out" / "gpu_check.json").exists():
            pids = next((value.split() for _, what, value, _ in lines_of(tmp_path) if what == "pids"), [])
    assert len(pids) == 2
    if how != "the time":
        process.send_signal(how)
    process.communicate(timeout=60)
    known = {signal.SIGTERM: 143, signal.SIGINT: -2, signal.SIGHUP: -1, signal.SIGKILL: -9}
    assert process.returncode == known.get(how, 1)
    wait_for_the_end_of(pids)
    found = lines_of(tmp_path)
    assert [line[0] for line in found[:3]] == ["breaks", "breaks", "hangs"]
    table = (tmp_path / "out" / "gpu_check.md").read_text()
    if how == "the time":
        assert found[-1] == ("last", "section", "left out: time is up", None) and "stopped after" in found[-2][2]
    else:
        assert "| hangs | still running when this was written |" in table


def test_files_are_whole_at_every_moment(check: ModuleType, tmp_path: Path) -> None:
    """A reader that comes while they are written, as after a kill there."""
    run = check.Run(torch.device("cpu"), tmp_path, 60.0)
    run.section = "one"
    run.add("n", "0")
    writer = threading.Thread(target=lambda: [run.add("n", str(i) * 200) for i in range(200)])
    writer.start()
    while writer.is_alive():
        assert json.loads((tmp_path / "gpu_check.json").read_text())["running"] == "one"
        assert (tmp_path / "gpu_check.md").read_text().endswith("|\n")
    writer.join()
    run.read()
    assert len(run.results) == 201


def test_tensors_are_carried_to_a_launcher(check: ModuleType, shim: Any, library: Path, monkeypatch: Any) -> None:
    """What takes the tests of kernels to a GPU, here to another place on the CPU; a result may lie on its input."""
    monkeypatch.setenv("PLSC_TEST_LAUNCHER", "carried")
    launcher = shim.Carried(shim.ShimLauncher(library, order=3), torch.device("cpu"), threads=64)
    monkeypatch.setattr(kernels, "launcher_for", lambda device: launcher)
    x, place = torch.rand(5, 70), torch.tensor([-1, 3, 0, 69, 5])
    expected = torch.empty(5, 70)
    sums = twins.exp_rows(x, torch.zeros(5), place, out=expected)
    got = kernels.exp_rows(x, torch.zeros(5), place, out=x)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(got, sums)
    assert launcher.launched == ["softmax.exp_rows_float_float"]


@pytest.mark.parametrize("by", ["twins", "kernels"])
def test_head_of_kernels_is_right(check: ModuleType, launch: Any, by: str) -> None:
    """The step that is timed computes loss, gradient and weight step of plain autograd in float64."""
    module = check.load(ROOT / "benchmarks" / "gpu_head.py")
    launcher = launch(order=4) if by == "kernels" else None
    assert module.check(torch.device("cpu"), form="fp32") < 1e-5
    assert module.check(torch.device("cpu"), form="split") < 1e-2  # the products' operands are bfloat16
    assert module.check(torch.device("cpu"), what="head", form="fp32") < 1e-5
    assert 1e-5 < module.check(torch.device("cpu"), what="head", form="split") < 1e-2
    assert launcher is None or "update.sgd_split_bf16" in launcher.launched


def test_what_is_no_number_is_no_match(check: ModuleType) -> None:
    """Against a relative error by hand; NaN, infinity, shapes and types on one side only are infinitely wrong."""
    one, nan, inf = torch.tensor([3.0, 4.0]), torch.tensor([3.0, math.nan]), torch.tensor([3.0, math.inf])
    assert check.difference(torch.tensor([3.0, 4.5]), one) == 0.5 / 5.0
    for same in (one, nan, inf, torch.tensor(math.nan), torch.empty(0), torch.tensor([1, 2])):
        assert check.difference(same.clone(), same) == 0.0
    wrong = [(nan, one), (one, nan), (inf, one), (one, inf), (-inf, inf), (inf, nan), (nan * math.nan, nan)]
    wrong += [(one[:1], one), (one[None], one), (one.bfloat16(), one), (torch.tensor([1, 2]), torch.tensor([1, 3]))]
    wrong += [(torch.tensor(math.nan), torch.tensor(0.0)), (torch.ones(1), torch.ones(4))]
    for got, expected in wrong:
        assert check.difference(got, expected) == math.inf
    for errors in ([0.1, math.nan], [math.nan, 0.1], [math.inf], [0.0, -math.inf]):
        assert check.worst(errors) == math.inf
    assert check.worst([0.1, 0.3, 0.2]) == 0.3 and check.worst([]) == 0.0


@pytest.mark.parametrize("name", ["exp_rows", "online_rows", "sgd_rows", "merge_topk", "largest_magnitude"])
def test_a_kernel_that_gives_nan_is_seen(
    check: ModuleType, launch: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it returns or writes is NaN: each of its lines says no, those of others do not."""
    launch(order=3)
    right = getattr(kernels, name)

    def spoiled(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        written = [options["out"]] if "out" in options else args[:1] if name == "sgd_rows" else []
        for x in [*written, *(found if isinstance(found, tuple) else [found])]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.fill_(math.nan)
        return found

    monkeypatch.setattr(kernels, name, spoiled)
    monkeypatch.setattr(check, "KERNEL_TESTS", ())
    monkeypatch.setattr(check, "behind_the_shim", lambda: None)
    run = check.Run(torch.device("cpu"), tmp_path, 60.0)
    check.kernel_checks(run)
    assert {line.what for line in run.results if line.ok is not True} == {
        line.what for line in run.results if line.what.startswith(name)
    }
    assert any(line.ok is False for line in run.results)


@pytest.mark.parametrize("at", [0, 30, 120, 199])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_seen(
    check: ModuleType, tmp_path: Path, at: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(device: torch.device, steps: int, **options: Any) -> list[float]:
        found = [1.0] * 200
        if device.type == "meta" and options:
            found[at] = value
        return found

    monkeypatch.setattr(check, "losses", losses)
    run = check.Run(torch.device("meta"), tmp_path, 60.0)
    check.training(run)
    assert all(line.ok for line in run.results[:2]) and not all(line.ok for line in run.results[2:])


def test_a_head_that_gives_nan_is_seen(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = check.load(ROOT / "benchmarks" / "gpu_head.py")
    right = module.kernels.sgd_rows
    monkeypatch.setattr(module.kernels, "sgd_rows", lambda w, g, v, **o: (right(w, g, v, **o), v.fill_(math.nan)))
    assert module.check(torch.device("cpu")) == math.inf


def test_both_heads_are_judged(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of kernels alone and plsc.ClassParallelHead: time, classes and a loss that falls, each on its own."""
    module, cpu = check.load(ROOT / "benchmarks" / "gpu_head.py"), torch.device("cpu")
    options = ["--device", "cpu", "--quick"]
    rows = [*module.compare(module.parse(options), cpu)]
    assert {(row.what, row.note.split()[0]) for row in rows if row.judged} == {("kernels", "split"), ("head", "split")}
    took = {"kernels": (1.0, 3.0, 2.0), "head": (1.0, 3.0, 3.0)}
    monkeypatch.setattr(module, "fit_one", lambda what, *rest: took[what])
    rows = [row for row in module.fit(module.parse(options), cpu) if row.judged]
    assert [(row.what, row.note.split(":")[0], row.falls) for row in rows] == [
        ("kernels", "bf16", True),
        ("head", "bf16", False),
    ]

    def no_room(*rest: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("none left")

    monkeypatch.setattr(module, "fit_one", no_room)
    assert [(row.classes, row.falls) for row in module.fit(module.parse(options), cpu)] == [(0, False)] * 6


def test_fp32_is_no_tf32(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's switches while each way is timed: cuDNN's is on unless it is turned off."""
    seen = []

    def seconds_of(*_: Any, **__: Any) -> float:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return 1.0

    monkeypatch.setattr(check, "seconds_of", seconds_of)
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    try:
        for way in check.WAYS:
            check.train_rate(torch.nn.Linear(2, 2), torch.zeros(3, 2), torch.device("cpu"), way=way)
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value
    assert check.WAYS == ("fp32", "tf32", "bf16") and seen == [(False, False), (True, True), (True, True)]


def test_a_cell_stays_a_cell(check: ModuleType, tmp_path: Path) -> None:
    """Whatever an error says: a line of the table has five cells, and the JSON has the words as they are."""
    run = check.Run(torch.device("cpu"), tmp_path, 60.0)
    run.section, words = "one", "RuntimeError: x | y\nz || \ttab"
    run.add("a | b", words, ok=False, wanted="|")
    table = (tmp_path / "gpu_check.md").read_text().splitlines()
    assert len(table) == 4 and all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in table)
    assert table[2] == r"| one | a \| b | RuntimeError: x \| y z \|\| tab | \| | **no** |"
    assert json.loads((tmp_path / "gpu_check.json").read_text())["results"][0]["value"] == words


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_logs_of_libraries_are_no_verdict(check: ModuleType, stream: str) -> None:
    """Lines before and after the one that counts, on either stream; the exit status counts as well."""
    program = "import sys; print('noise', file=sys.{0}); print('kept', flush=True); print('[I] bye', file=sys.{0})"
    command = [sys.executable, "-c", program.format(stream)]
    assert check.say(command, line="^kept$", seconds=30) == (0, "kept")
    command[-1] += "; sys.exit(3)"
    assert check.say(command, line="^kept$", seconds=30) == (3, "kept")
    assert check.say([sys.executable, "-c", "print('not kept')"], line="^kept$", seconds=30) == (0, "not kept")
    slow = "import subprocess; subprocess.run(['sleep', '3'])"  # whose child keeps the streams open
    begin = time.monotonic()
    assert check.say([sys.executable, "-c", slow], line="", seconds=0.5) == (None, "stopped after 0.5 s")
    assert time.monotonic() - begin < 2.9


@pytest.mark.parametrize(("text", "ok"), [("1 == 1", True), ("1 == 2", False), ("pytest.skip('why')", False)])
def test_a_file_of_tests_as_a_line(check: ModuleType, tmp_path: Path, text: str, ok: bool) -> None:
    """Failed, or nothing but skipped, is a no; what the machine asks of pytest changes nothing."""
    path = tmp_path / "test_one.py"
    path.write_text(f"import pytest, warnings\n\ndef test_one():\n    warnings.warn('x')\n    assert {text}\n")
    run = check.Run(torch.device("cpu"), tmp_path, 60.0)
    run.section = "one"
    check.run_tests(run, path, PYTEST_PLUGINS="")
    (line,) = run.results
    assert line.ok is ok and re.search(r"1 (passed|failed|skipped).* in ", line.value)


def test_no_gpu_is_said_in_one_sentence(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"^found no GPU; --device cpu runs every path small$"):
        check.main()
    assert not (tmp_path / "out").exists()


PRESENT = ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "pytest", "pillow", "safetensors")  # as docs/gpu.md says
ABSENT = """
import sys
from importlib.machinery import PathFinder

class Present:
    def find_spec(name, path=None, target=None):
        if path is None and name in {names!r}:
            path = [folder for folder in sys.path if "site-packages" not in folder]
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Present
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of_others() -> set[str]:
    """Installed modules that neither PRESENT, nor what they need, nor plsc brings."""
    present, found = {"plsc"}, list(PRESENT)
    while found:
        if (name := canonical(found.pop())) not in present:
            try:
                needs = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            present.add(name)
            found += [re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need]
    brought = importlib.metadata.packages_distributions().items()
    return {module for module, names in brought if present.isdisjoint(map(canonical, names))} - {"numpy"}


@pytest.mark.slow
def test_every_path_runs_on_a_cpu_that_has_no_more_than_it_needs(check: ModuleType, tmp_path: Path) -> None:
    """Every section, all files of tests; whatever docs/gpu.md does not list is hidden from all processes."""
    others = modules_of_others()
    assert {"hypothesis", "tomli_w", "tyro"} <= others and "torch" not in others
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(ABSENT.format(names=others))
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path)]
    noise = {"TORCH_CPP_LOG_LEVEL": "INFO", "PYTHONPATH": str(tmp_path / "hidden")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=1900, env={**os.environ, **noise})
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    lines = json.loads((tmp_path / "gpu_check.json").read_text())["results"]
    assert {line["section"] for line in lines} == set(check.SECTIONS)
    passed = {line["what"] for line in lines if line["ok"] is True}
    files = {*(f"test_{name}.py" for name in check.KERNEL_TESTS), "test_cupy_nccl.py", "test_quiet_steps.py", "gloo"}
    assert files <= passed and len(passed) >= 30
    assert {"classes that fit, kernels", "classes that fit, head"} <= {line["what"] for line in lines}
