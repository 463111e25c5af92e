"""A table for serving: values alone, sorted by key in one file that any number of processes map and share."""

import json
import os
import zlib
from os import PathLike, fspath
from typing import BinaryIO

import numpy as np

from plsc.ps.arrays import Array, as_keys, empty_like_kind
from plsc.ps.files import atomic_path
from plsc.ps.table import LARGEST, Table

DTYPES: dict[str, tuple[str, np.dtype]] = {
    "fp32": ("F32", np.dtype("<f4")),
    "fp16": ("F16", np.dtype("<f2")),
    "int8": ("I8", np.dtype("i1")),
}
CHUNK = 65_536
NO_SUM, SUM_FIELD = "00000000", b'"crc32": "'  # replaced by the checksum of the file with NO_SUM


def export(table: Table, path: str | PathLike[str], *, dtype: str = "fp32") -> int:
    """Write keys and values, without optimizer state, as a safetensors file; how many rows.

    dtype fp16 halves it and stays within +-65504; int8 stores round(value / scale) with a scale for each row,
    its largest magnitude / 127.
    Keys are held in memory while it runs, rows are not. The file appears whole or not at all.
    """
    if not isinstance(table, Table):
        raise ValueError(f"table: got {type(table).__name__}, expected a plsc.ps.Table of this process")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    keys = np.sort(np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in table.items())]))
    count, stored = len(keys), DTYPES[dtype][1]
    shapes: dict[str, tuple[int, ...]] = {"keys": (count,), "values": (count, table.dim)}
    dtypes = {"keys": np.dtype("<u8"), "values": stored}
    if dtype == "int8":
        shapes["scales"], dtypes["scales"] = (count,), np.dtype("<f4")
    names = {"keys": "U64", "values": DTYPES[dtype][0], "scales": "F32"}
    header, starts, end = {}, {}, 0
    for name, shape in shapes.items():
        starts[name], end = end, end + int(np.prod(shape)) * dtypes[name].itemsize
        header[name] = {"dtype": names[name], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps({**header, "__metadata__": {"crc32": NO_SUM, "table": json.dumps(table.birth())}}).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as partial, open(partial, "wb") as file:
        total = 0

        def write(data: bytes) -> None:
            nonlocal total
            total = zlib.crc32(data, total)
            file.write(data)

        write(len(text).to_bytes(8, "little") + text)
        base = file.tell()
        for start in range(0, count, CHUNK):
            write(keys[start : start + CHUNK].astype("<u8", copy=False).tobytes())
        scales = []
        for start in range(0, count, CHUNK):
            values = table.pull(keys[start : start + CHUNK], create=False)
            if dtype == "fp16":
                values = values.clip(-LARGEST["fp16"], LARGEST["fp16"])
            elif dtype == "int8":
                scale = np.abs(values).max(1) / np.float32(127)
                scales.append(scale)
                # Scales near the smallest float are rounded themselves, and what they scale may lie beyond 127.
                values = np.rint(values / np.where(scale == 0, 1, scale)[:, None]).clip(-127, 127)
            write(values.astype(stored).tobytes())
        write(b"".join(scale.astype("<f4").tobytes() for scale in scales))
        assert file.tell() == base + end
        file.seek(8 + text.index(SUM_FIELD) + len(SUM_FIELD))
        file.write(f"{total:08x}".encode())
        file.flush()
        os.fsync(file.fileno())
    return count


class Served:
    """Rows of an exported table, read where they lie in the file: processes that map it share one copy in memory.

    A key without a row is answered as an untrained table would. Keys are found by bisection.
    The file's checksum is compared at the start, which reads it once; verify=False spares that.
    """

    def __init__(self, path: str | PathLike[str], *, verify: bool = True) -> None:
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > 1 << 24:
                    raise ValueError("its header is too long")
                header = json.loads(file.read(size))
                if verify:
                    _check_sum(file, size)
            data = np.memmap(path, np.uint8, mode="r", offset=0)
            birth = json.loads(header["__metadata__"]["table"])
            parts = {name: header[name] for name in ("keys", "values", *(("scales",) if "scales" in header else ()))}
            if 8 + size + max(part["data_offsets"][1] for part in parts.values()) != len(data):
                raise ValueError("its length is not what its header says")
            kinds: dict[str, np.dtype] = {"U64": np.dtype("<u8"), **dict(DTYPES.values())}
            arrays = {
                name: data[8 + size + part["data_offsets"][0] : 8 + size + part["data_offsets"][1]]
                .view(kinds[part["dtype"]])
                .reshape(part["shape"])
                for name, part in parts.items()
            }
            self._newborn = Table(**birth, stripes=1)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"{fspath(path)} is not an exported table ({error}); write one with plsc.ps.export"
            ) from None
        self._keys, self._values = arrays["keys"], arrays["values"]
        self._scales = arrays.get("scales")
        self.dim = self._newborn.dim

    def __len__(self) -> int:
        return len(self._keys)

    def pull(self, keys: Array, *, create: bool = False) -> Array:
        """Rows [K, dim] float32 of keys [K], in the kind that came in; `create` is for who calls it as a Table."""
        if create:
            raise ValueError("got create=True, but an exported table is read only; call the layer in eval()")
        wanted = as_keys(keys)
        out, memory = empty_like_kind(keys, (len(wanted), self.dim))
        at = np.searchsorted(self._keys, wanted)
        at[at == len(self._keys)] = 0
        known = self._keys[at] == wanted if len(self._keys) else np.zeros(len(wanted), bool)
        there = at[known]
        rows = self._values[there].astype(np.float32)
        memory[known] = rows if self._scales is None else rows * self._scales[there][:, None]
        memory[~known] = self._newborn.pull(wanted[~known], create=False)
        return out


def _check_sum(file: BinaryIO, size: int) -> None:
    """ValueError unless the checksum in the header, of `size` bytes, is that of the file without it."""
    file.seek(0)
    head = file.read(8 + size)
    before, field, rest = head.partition(SUM_FIELD)
    told = rest[: len(NO_SUM)]
    total = zlib.crc32(before + field + NO_SUM.encode() + rest[len(NO_SUM) :])
    while block := file.read(1 << 22):
        total = zlib.crc32(block, total)
    if told != f"{total:08x}".encode():
        raise ValueError("its checksum is another: it is damaged, or of an older version")
