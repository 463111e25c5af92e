"""Numpy or torch, as callers hand it to a sparse table, as numpy on the same memory; and answers in their kind."""

from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = Any  # numpy.ndarray or torch.Tensor; what comes out is the kind that went in


def as_numpy(x: Array, what: str) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        if x.device.type != "cpu":
            raise ValueError(f"{what}: got a tensor on {x.device}, expected one on the CPU; call .cpu() first")
        if x.layout != torch.strided or x.is_quantized:
            raise ValueError(f"{what}: got a tensor of layout {x.layout}, expected a dense one; call .to_dense() first")
        if x.dtype == torch.bfloat16:  # numpy has none
            raise ValueError(f"{what}: got dtype {x.dtype}, expected float32; call .float() first")
        return x.detach().resolve_neg().numpy()
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise ValueError(
            f"{what}: got {type(x).__name__}, expected a numpy array (a masked one: .compressed()) or a torch tensor"
        )
    return x


def as_keys(keys: Array) -> np.ndarray:
    """uint64 [K]. int64 is taken bit for bit: -1 is key 2^64 - 1."""
    array = as_numpy(keys, "keys")
    if array.dtype not in (np.uint64, np.int64):
        raise ValueError(
            f"keys: got dtype {array.dtype}, expected uint64 or int64; convert them with .astype(np.uint64)"
        )
    if array.ndim != 1:
        raise ValueError(f"keys: got shape {array.shape}, expected one dimension [K]; call .reshape(-1) first")
    return np.ascontiguousarray(array).view(np.uint64)


def as_floats(x: Array, shape: tuple[int, ...], what: str) -> np.ndarray:
    array = as_numpy(x, what)
    if array.dtype != np.float32:
        raise ValueError(f"{what}: got dtype {array.dtype}, expected float32; convert first")
    if array.shape != shape:
        raise ValueError(f"{what}: got shape {array.shape}, expected {shape}: a row for every key")
    return np.ascontiguousarray(array)


def empty_like_kind(kind: Array, shape: tuple[int, ...]) -> tuple[Array, np.ndarray]:
    """An uninitialised float32 array of the kind of `kind`, and its memory as numpy."""
    if isinstance(kind, torch.Tensor):
        tensor = torch.empty(shape, dtype=torch.float32)
        return tensor, tensor.numpy()
    array = np.empty(shape, np.float32)
    return array, array


def as_output(out: Array, shape: tuple[int, ...]) -> np.ndarray:
    array = as_numpy(out, "out")
    if array.dtype != np.float32 or array.shape != shape:
        raise ValueError(f"out: got {array.dtype} {array.shape}, expected float32 {shape}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(
            "out: got an array that is not contiguous or not writable, expected numpy.empty or torch.empty"
        )
    return array
