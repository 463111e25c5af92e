"""Fixtures every test may use: the optional real data beside the repository, a small recipe, one thread a process."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli_runs import PARTS, RECIPE

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Ranks run as threads in most tests: one compute thread each keeps them from fighting over cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def signals_as_at_a_terminal() -> None:
    """What started the tests, as nohup does, may ignore one that tests send to commands, which then leave it so."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A model that a test draws is the same in each run: a tolerance then holds always or never."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout; tests that need it skip where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the real data folder {SHARED.name}/ beside the checkout")
    return SHARED


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe and the user's module it names, in a folder of their own."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "parts.py").write_text(PARTS)
    (folder / "tiny.toml").write_text(RECIPE)
    return folder / "tiny.toml"


@pytest.fixture
def here(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The recipe, from its own folder and in this process, reading without workers."""
    monkeypatch.chdir(recipe.parent)
    path = list(sys.path)
    yield recipe
    sys.path[:] = path
    sys.modules.pop("parts", None)
