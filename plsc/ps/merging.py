"""Repeated keys of a batch brought together: one row to pull, one step to push."""

from typing import Any

import numpy as np
import torch

from plsc.ps.arrays import Array, as_floats, as_keys, as_numpy

try:
    from plsc.ps import _core
except ImportError:  # not built: whoever talks to servers needs no table here
    _core: Any = None  # type: ignore[no-redef]


def merge(keys: Array, *parts: Array) -> tuple[Array, ...]:
    """The different ones of keys [K], and for each of `parts` [K, ...] float32 the sum of a key's entries, in order.

    Pushed so, a key takes one step with the sum of its gradients, as under torch's sparse optimizers; a push of
    repeated keys takes a step for each. Keys come in no order. Returns arrays of the kind of `keys`.
    """
    array = as_keys(keys)
    unique, at = unique_keys(array)
    parts = tuple(as_numpy(part, "parts") for part in parts)
    sums = [_sums(at, as_floats(part, (len(array), *part.shape[1:]), "parts"), len(unique)) for part in parts]
    if isinstance(keys, torch.Tensor):
        return torch.from_numpy(unique.view(np.int64)).view(keys.dtype), *map(torch.from_numpy, sums)
    return unique.view(keys.dtype), *sums


def unique_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ones of keys [K] uint64, in no order, and which of them each is: int64 [K]."""
    if _core is None:
        unique, at = torch.unique(torch.from_numpy(keys.view(np.int64)), return_inverse=True)
        return unique.numpy().view(np.uint64), at.numpy()
    unique, at = np.empty_like(keys), np.empty(len(keys), np.int64)
    return unique[: _core.unique_keys(keys, unique, at)], at


def _sums(at: np.ndarray, part: np.ndarray, count: int) -> np.ndarray:
    if _core is None:
        sums = torch.zeros((count, *part.shape[1:]))
        return sums.index_add_(0, torch.from_numpy(at), torch.from_numpy(part)).numpy()
    found = np.empty((count, *part.shape[1:]), np.float32)
    _core.sum_rows(at, part, part[:1].size, found)
    return found
