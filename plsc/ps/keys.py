"""Keys from what data has: strings, and ids that are counted anew in every slot (field)."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def hash_strings(strings: Iterable[str]) -> np.ndarray:
    """A uint64 key for every string, the same on every machine and in every version (8 bytes of BLAKE2b).

    n different strings collide somewhere with probability about n^2 / 2^65: 3 in a million for 10 million strings.
    """
    if isinstance(strings, str | bytes):
        raise ValueError(f"strings: got one, {strings!r:.40}, expected a list of them; call hash_strings([text])")
    strings = list(strings)
    if others := [text for text in strings if not isinstance(text, str)]:
        raise ValueError(f"strings: got {others[0]!r:.40} among them, expected str; decode or format it first")
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in strings)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def slot_keys(ids: Tensor) -> Tensor:
    """Keys [B, S] for ids [B, S] where column s is slot s and id 7 of one slot is not id 7 of another.

    Each slot maps all 64-bit ids one to one onto keys; keys of two slots meet as seldom as random ones do.
    """
    if ids.ndim != 2 or ids.dtype != torch.int64:
        raise ValueError(f"ids: got {ids.dtype} {tuple(ids.shape)}, expected int64 [B, S]")
    slots = torch.arange(1, ids.shape[1] + 1, dtype=torch.int64, device=ids.device)
    x = ids ^ (slots * _signed(0x9E3779B97F4A7C15))
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)  # integer overflow wraps: the splitmix64 finaliser
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
