"""The native parts of reading, where they were built."""

import importlib
from typing import Any


def _load() -> Any:
    try:
        return importlib.import_module("plsc.data._native")
    except ImportError:  # not built
        return None


kernels = _load()
