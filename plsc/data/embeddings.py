"""Files of embeddings and class centres: safetensors written block by block, read whole or by memory map."""

import json
import math
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from plsc.data.writing import name_full_disk

FORMATS = ("plsc-embeddings", "plsc-centres")
SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "int64": "I64", "uint8": "U8"}
MAX_HEADER_BYTES = 2**20

Array = NDArray[Any]
Tensors = Sequence[tuple[str, str, tuple[int, ...], Iterable[Array]]]  # name, type, shape, blocks of rows


@dataclass(frozen=True)
class EmbeddingFile:
    """The contents of a file written by plsc.train.export or plsc.serve.bundle."""

    embeddings: Array  # [N, D] float32; centres of sub-centre heads [C, K, D]; or float16, or int8 times `scales`
    labels: NDArray[np.int64]  # [N]
    ids: NDArray[np.int64]  # [N] sample numbers, or class numbers
    names: Sequence[str] | None
    norms: NDArray[np.float32]  # [N] or [C, K]: lengths before normalisation
    normalized: bool
    digest: str  # model_digest of the backbone
    metadata: Mapping[str, str]  # all there is, the above included
    scales: NDArray[np.float32] | None = None  # [N] or [C, K] with int8: what a row's numbers are to be multiplied by


class Names(Sequence[str]):
    """Strings as one run of bytes and offsets [N + 1], decoded when asked for: millions of them stay on disk."""

    def __init__(self, blob: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self.blob, self.offsets = blob, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"got name {index}, expected below {len(self)}")
        at = index % len(self)
        return self.blob[self.offsets[at] : self.offsets[at + 1]].tobytes().decode()


def read_embeddings(path: str | Path) -> EmbeddingFile:
    """Reads a file of embeddings or centres into memory."""
    found = open_embeddings(path)
    return replace(
        found,
        embeddings=np.array(found.embeddings),
        labels=np.array(found.labels),
        ids=np.array(found.ids),
        names=None if found.names is None else tuple(found.names),
        norms=np.array(found.norms),
        scales=None if found.scales is None else np.array(found.scales),
    )


def open_embeddings(path: str | Path) -> EmbeddingFile:
    """The same by memory map: nothing is read before it is used, so files larger than memory open too."""
    tensors, metadata = map_safetensors(path)
    if metadata.get("format") not in FORMATS:
        raise ValueError(f"{path}: got format {metadata.get('format')!r}, expected embeddings or centres of plsc")
    try:
        return EmbeddingFile(
            embeddings=tensors["embeddings"],
            labels=tensors["labels"],
            ids=tensors["ids"],
            names=Names(tensors["names"], tensors["name_offsets"]) if "names" in tensors else None,
            norms=tensors["norms"],
            normalized=metadata["normalized"] == "true",
            digest=metadata["model_digest"],
            metadata=metadata,
            scales=tensors.get("scales"),
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing, expected a whole file of embeddings; write it again") from error


def map_safetensors(path: str | Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors of a safetensors file by memory map, and its metadata. Raises ValueError for any other file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path}: got no header of safetensors; expected a file of embeddings; write it again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            metadata = dict(header.pop("__metadata__", {}))
            entries = [
                (name, about["dtype"], tuple(about["shape"]), *about["data_offsets"]) for name, about in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: the header is broken ({error}); write the file again") from error
    types = {code: np.dtype(name) for name, code in SAFETENSORS_TYPES.items()}
    found: dict[str, Array] = {}
    for name, code, shape, start, end in entries:
        if code not in types:
            raise ValueError(f"{path}: tensor {name} is of type {code}, expected one of {', '.join(types)}")
        if end - start != math.prod(shape) * types[code].itemsize or not 0 <= start <= end <= size - 8 - length:
            raise ValueError(f"{path}: tensor {name} does not fit into the file, which is cut short; write it again")
        if end == start:
            found[name] = np.empty(shape, types[code])
        else:  # private pages: writing to them is allowed, as torch demands, and never reaches the file
            found[name] = np.memmap(path, types[code], "c", offset=8 + length + start, shape=shape)
    return found, metadata


def write_safetensors(path: str | Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Writes named tensors (name, type, shape, blocks of rows) one block at a time; whole, or not at all.

    The format: length of the header (8 bytes, little endian), the header in JSON, the tensors' bytes in its order.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, _ in tensors:
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": SAFETENSORS_TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, dtype, shape, blocks in tensors:
            rows = 0
            for block in blocks:
                if block.shape[1:] != shape[1:]:
                    raise ValueError(f"{name}: got a block of shape {block.shape}, expected rows of {shape[1:]}")
                file.write(np.ascontiguousarray(block, dtype=np.dtype(dtype).newbyteorder("<")).data)
                rows += len(block)
            if rows != shape[0]:
                raise ValueError(f"{name}: got {rows} rows, expected {shape[0]}")


def name_tensors(names: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Names as `name_offsets` [N + 1] and the bytes `names` of a file."""
    words = [name.encode("utf-8", "backslashreplace") for name in names]
    offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    return offsets, np.frombuffer(b"".join(words), dtype=np.uint8)


@contextmanager
def atomic_file(path: str | Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when it is whole and on the disk; an error leaves what was there.

    private: nobody but its owner may read it, whatever the umask.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(scratch, "xb", opener=_open_private if private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except OSError as error:
        name_full_disk(error, os.fspath(path))
        raise
    finally:
        scratch.unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    number = os.open(path, flags, 0o600)
    os.fchmod(number, 0o600)  # a umask may have taken rights from the owner, too
    return number
