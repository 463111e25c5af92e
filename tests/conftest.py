"""Fixtures every test may use: the optional real data beside the repository, one thread a process."""

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Ranks run as threads in most tests: one compute thread each keeps them from fighting over cores."""
    torch.set_num_threads(1)


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
