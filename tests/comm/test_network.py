"""The smallest case of benchmarks/network.py between network namespaces: bytes on the wire are as the formulas say."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def lab() -> Any:
    spec = importlib.util.spec_from_file_location("lab", BENCHMARKS / "lab.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (why := module.missing()) is not None:
        pytest.skip(why)
    return module


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_bytes_on_the_wire(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "network.py"), "--json", str(tmp_path / "all.json")]
    command += ["--tables", "hosts", "topologies", "head", "--rounds", "1", "--width", "512", "--classes", "500"]
    done = subprocess.run([*command, "--mbit", "1000"], env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    parameters = 256 * 512 + 512 + 512 * 512 + 512 + 512 * 1000 + 1000
    rows = found["hosts"]
    dense = 2 * 3 / 4 * 4 * parameters
    for name, share in (("DDP", 1.0), ("Reducer fp32", 1.0), ("Reducer bf16", 0.5), ("Reducer fp16", 0.5)):
        assert rows[name]["sent"] == pytest.approx(share * dense, rel=0.05), name
    for name, share in (("local SGD 8", 0.125), ("local SGD 8, bf16", 0.0625)):
        assert rows[name]["sent"] == pytest.approx(share * dense, rel=0.1), name
    assert rows["DGC 0.1 %"]["sent"] < 0.02 * rows["DDP"]["sent"]
    for name, row in rows.items():
        if name not in ("DDP", "no communication"):
            assert row["sent"] == pytest.approx(row["counted"], rel=0.05, abs=12_000), name
    ways = {name: row["sent"] for name, row in found["topologies"].items()}
    assert ways["by hosts"] < 0.7 * ways["flat"] and ways["by hosts"] < 0.35 * ways["flat, hosts alternate"]
    for hosts in ("2", "4"):
        few, many = found["head"][hosts].values()
        assert few["counted"] == many["counted"] > 0


def test_nothing_is_left_of_a_lab_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "holds.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from lab import Lab\n"
        "with Lab(2, mbit=100) as lab:\n"
        "    lab.start(1, ['sleep', '1234.5'], {})\n"
        "    print('up', *[holder.pid for holder in lab._holders], flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    up, *holders = process.stdout.readline().split()
    assert up == "up" and len(holders) == 3
    spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in holders}
    process.send_signal(signal.SIGKILL)
    process.wait()

    def inhabited() -> bool:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/net") in spaces:
                    return True
            except OSError:
                continue
        return False

    deadline = time.monotonic() + 30
    while inhabited():
        assert time.monotonic() < deadline
        time.sleep(0.1)
