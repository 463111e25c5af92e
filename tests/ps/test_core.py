"""The core's own C++ test under the compiler's thread, address and undefined-behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / "plsc" / "ps" / "core"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_core_is_clean_under(sanitizers: str, tmp_path: Path) -> None:
    sources = [HERE / "core_test.cc", *(path for path in sorted(CORE.glob("*.cc")) if "module" not in path.name)]
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CORE}"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    program = tmp_path / "core_test"
    built = subprocess.run(["g++", *flags, *sources, "-o", program], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout == "all true\n", run.stdout + run.stderr
