"""The shape of the tree: what is installed, what a module may be called, what importing plsc may cost."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "plsc"
MODULES = sorted(PACKAGE.rglob("*.py"))
RECIPES = sorted(PACKAGE.glob("recipes/*.toml"))
NOT_INSTALLED = ["cuda", "datasets", "tools", "benchmarks", "tests", "docs"]
# Imported where they are used, with a clear error when missing; not dependencies. Each with its file count's limit.
FEW_IMPORTERS = {"cupy": 2, "tyro": 1, "pyarrow": 2, "simplejpeg": 1, "lmdb": 1, "uvicorn": 1, "faiss": 1}
OPTIONAL = {"cupy", "etcd3gw"}
# Importing plsc in somebody's own training script must not cost these.
HEAVY = [
    "tyro",
    "pyarrow",
    "simplejpeg",
    "lmdb",
    "cupy",
    "matplotlib",
    "fontTools",
    "tensorboard",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "fastapi",
    "uvicorn",
    "faiss",
]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree: an old build/ beside setup.py would slip its files in."""
    tree = tmp_path_factory.mktemp("source") / "tree"
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info", "*.so")
    shutil.copytree(ROOT, tree, ignore=leave_out)
    out = tree / "dist"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def packed(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def test_wheel_installs_only_plsc(wheel: Path, packed: list[str]) -> None:
    tops = {name.split("/")[0] for name in packed}
    info = {top for top in tops if re.fullmatch(r"plsc_torch-[^/]+\.dist-info", top)}
    assert len(info) == 1
    assert tops - info == {"plsc"}


def test_wheel_holds_every_module_and_recipe(packed: list[str]) -> None:
    """A folder without __init__.py would be left out without a word."""
    wanted = {relative(path) for path in [*MODULES, *RECIPES, PACKAGE / "py.typed"]}
    native = ["plsc/data/_native", "plsc/ps/_core", "plsc/ops/_kernels"]  # compiled; their sources stay out
    wanted.update(f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in native)
    wanted.add("plsc/ps/core/plsc_rule.h")  # but for what users compile their own rules against
    wanted.update(f"plsc/serve/page/{name}" for name in ("index.html", "app.js", "style.css"))
    wanted.update(f"plsc/_cuda/{path.name}" for path in ROOT.glob("cuda/*.cu*"))
    assert wanted - set(packed) == set()
    assert {name for name in packed if name.startswith("plsc/")} == wanted


def test_wheel_carries_licence_version_and_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
        scripts = ConfigParser()
        scripts.read_string(archive.read(entry_points).decode())
        head = archive.read(metadata).decode()
    assert dict(scripts["console_scripts"]) == project()["scripts"]
    version = re.search(r'^__version__(?:: str)? = "([^"]+)"', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    assert version and f"\nVersion: {version[1]}\n" in head
    assert "\nName: plsc-torch\n" in head and "\nLicense-Expression: Apache-2.0\n" in head


def test_commands_name_functions() -> None:
    """Each entry point is a function that its module defines or imports by name."""
    for command, target in project()["scripts"].items():
        module, function = target.split(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, command


@pytest.mark.parametrize("folder", NOT_INSTALLED)
def test_folders_that_are_not_packages(folder: str) -> None:
    """From the root, cuda/__init__.py breaks `import cupy`, datasets/__init__.py hides Hugging Face's datasets."""
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_packages_have_init() -> None:
    """Without it setuptools and the import contract overlook the folder."""
    folders = {path.parent for path in MODULES}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_first_line_says_what_the_file_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert text.startswith('"""') and docstring and docstring.splitlines()[0].strip()


def test_no_module_bears_another_name() -> None:
    """A plsc/comm/torch.py shadows torch as soon as its folder is on the path; `utils` is where rooms end."""
    libraries = set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names) | {"utils", "util"}
    libraries -= {"plsc", "__init__"}
    names = {path: path.parent.name if path.name == "__init__.py" else path.stem for path in MODULES}
    assert [relative(path) for path, name in names.items() if name in libraries] == []


def canonical(name: str) -> str:
    """A distribution's name as installers compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_imports_are_declared() -> None:
    """Every import is of the standard library, plsc or a declared dependency; never of tools/ or datasets/.

    A room may also import what the extra of its name brings.
    """
    always = {canonical(re.split(r"[^\w.-]", line)[0]) for line in project()["dependencies"]}
    extras = project()["optional-dependencies"]
    providers = importlib.metadata.packages_distributions()
    for path in MODULES:
        declared = always | {canonical(name) for name in extras.get(path.parent.name, [])}
        tops = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - OPTIONAL - {"plsc"}
        strangers = {top for top in tops if declared.isdisjoint(map(canonical, providers.get(top, [])))}
        assert not strangers, f"{relative(path)} imports {strangers}; declare in pyproject.toml, docs/dependencies.md"


def test_dependencies_have_a_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    lines = [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]
    names = [re.split(r"[^\w.-]", line)[0] for line in lines]
    assert [name for name in names if f"\n| {name} |" not in page] == []
    extras = {line for name, lines in project()["optional-dependencies"].items() if name != "dev" for line in lines}
    assert [name for name in sorted(extras) if f"**{name}**" not in page] == []


@pytest.mark.parametrize(("library", "limit"), FEW_IMPORTERS.items())
def test_few_files_import(library: str, limit: int) -> None:
    importers = [relative(path) for path in MODULES if any(name.split(".")[0] == library for name in imported(path))]
    assert len(importers) <= limit, importers


@pytest.mark.parametrize("path", RECIPES, ids=relative)
def test_recipe_is_toml_with_a_head(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tomllib.loads(text)
    assert text.startswith("# "), "a recipe opens with its command, hardware and expected result"


def test_import_has_no_effects() -> None:
    program = (
        "import sys, plsc, torch.distributed as dist\n"
        "assert not (dist.is_available() and dist.is_initialized())\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "" and run.stderr == ""
