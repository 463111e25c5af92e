"""Checkpoint files without pickle: torch.distributed.checkpoint's storage on safetensors and JSON, and cut tensors.

A checkpoint is a directory: `rank_00000.safetensors`, ... hold tensors, `metadata.json`, written last, says where each
piece lies. A directory without `metadata.json` is no checkpoint. docs/checkpoint.md describes the format.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

FORMAT = "plsc.checkpoint"
FORMAT_VERSION = 1
METADATA_NAME = "metadata.json"
BLOCK_BYTES = 64 << 20  # a tensor passes through host memory in pieces of this size

# The names that the safetensors format has for element types.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


# ---- cut tensors


class RowShard(torch.Tensor):
    """Stands for a tensor of `total` rows of which this rank holds [start, start + len(local)), maybe none.

    Its shape is that of the whole; it has no data but `local` and does no arithmetic. It answers the questions
    torch.distributed.checkpoint asks, so `dcp.save` and `dcp.load` cut and join rows between any layouts.
    """

    local: Tensor  # [rows, ...]
    start: int

    @staticmethod
    def __new__(cls, local: Tensor, *, start: int, total: int) -> RowShard:
        if local.dim() == 0 or start < 0 or start + local.shape[0] > total:
            raise ValueError(
                f"RowShard: got shape {list(local.shape)} at row {start}, expected rows within [0, {total})"
            )
        whole: RowShard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (total, *local.shape[1:]), dtype=local.dtype, device=local.device
        )
        whole.local, whole.start = local.detach(), start
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stop = self.start + self.local.shape[0]
        return f"RowShard(rows {self.start}:{stop} of {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (shard,) = args
            return RowShard(shard.local, start=shard.start, total=shard.shape[0])
        raise NotImplementedError(f"a RowShard only carries rows to and from checkpoints; {func} is not for it")

    def _chunk(self) -> ChunkStorageMetadata:
        offsets = (self.start,) + (0,) * (self.local.dim() - 1)
        return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=self.local.shape)

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        if self.local.shape[0] == 0:
            return []
        chunk = self._chunk()
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape)
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.local.shape[0] else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


# ---- files


class TornCheckpointError(ValueError):
    """The directory holds no whole checkpoint: never finished, cut short or damaged."""


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Writes a new file and waits until the disk has it; its size in bytes. An existing file is an error."""
    size = 0
    with open(path, "xb") as file:
        for piece in pieces:
            size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return size


def sync_directory(path: Path) -> None:
    """Waits until the disk has the names in a directory: without it, a rename may be lost in a power cut."""
    if os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Makes a directory and the ones above it, durably."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            sync_directory(folder.parent)


def replace_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes a file beside its place and renames it: readers see the old content or the new, never a part."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)
    write_durably(temporary, pieces)
    os.replace(temporary, path)
    sync_directory(path.parent)


# ---- torch.distributed.checkpoint's storage interface


@dataclass(frozen=True)
class Stored:
    """Where the writer put a piece: the file in the checkpoint's directory, and that file's size in bytes."""

    file: str
    file_bytes: int


def chunk_key(name: str, offsets: Sequence[int]) -> str:
    """The key of a piece in its safetensors file: `head/weight@250,0` begins at row 250, column 0."""
    return f"{name}@{','.join(map(str, offsets))}"


def _check_cover(name: str, saved: TensorStorageMetadata) -> None:
    have, want = sum(math.prod(chunk.sizes) for chunk in saved.chunks), math.prod(saved.size)
    if have != want:
        raise ValueError(f"{name}: got pieces of {have} elements, expected {want} (shape {list(saved.size)})")


class SafetensorsWriter(StorageWriter):
    """Writes one safetensors file a rank, then `metadata.json`; also for plain `dcp.save(state, storage_writer=...)`.

    Every file is on the disk when `finish` returns. A directory is written once: a second checkpoint in it is refused.
    """

    def __init__(self, path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None) -> None:
        """about: any JSON that shall stand in `metadata.json` beside the tensors."""
        self.path = Path(path)
        self.about = dict(about or {})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        if (self.path / METADATA_NAME).exists():
            raise ValueError(f"{self.path} holds a checkpoint already; write each one to a directory of its own")
        make_directories(self.path.absolute())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.tensor_data is None:
                raise ValueError(f"{item.index.fqn} is no tensor; this storage holds no pickles: pass it in `about`")
            dtype = item.tensor_data.properties.dtype
            if dtype not in DTYPES:
                raise ValueError(f"{item.index.fqn}: got {dtype}, which safetensors cannot hold; convert it")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives every rank the name of its file; a function of the plans only."""
        return [replace(plan, storage_data=f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        sizes = {item.index: _size(item) for item in plan.items}  # bytes
        # Wide elements first: every tensor then begins at a multiple of its element size, as mmap wants it.
        items = sorted(plan.items, key=lambda item: (-_width(item), chunk_key(item.index.fqn, _offsets(item))))
        pieces = _safetensors(items, sizes, planner.resolve_data)
        total = write_durably(self.path / plan.storage_data, pieces)
        sync_directory(self.path)
        stored = Stored(plan.storage_data, total)
        done.set_result([WriteResult(item.index, sizes[item.index], stored) for item in items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored: dict[MetadataIndex, Stored] = {item.index: item.storage_data for part in results for item in part}
        tensors = {}
        for name, saved in metadata.state_dict_metadata.items():
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"{name} is no tensor; this storage holds no pickles")
            _check_cover(name, saved)
            chunks = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": stored[MetadataIndex(name, chunk.offsets)].file,
                }
                for chunk in saved.chunks
            ]
            dtype = str(saved.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(saved.size), "chunks": chunks}
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "about": self.about,
            "files": {one.file: one.file_bytes for one in stored.values()},
            "paths": metadata.planner_data or {},  # where plain dcp.save found each tensor in a nested state
            "tensors": tensors,
        }
        replace_durably(self.path / METADATA_NAME, [json.dumps(content, indent=1).encode()])


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "prepare_local_plan lets tensors through only"
    return item.tensor_data


def _offsets(item: WriteItem) -> torch.Size:
    return _data(item).chunk.offsets


def _width(item: WriteItem) -> int:
    return _data(item).properties.dtype.itemsize


def _size(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes) * _width(item)


def _safetensors(
    items: Sequence[WriteItem], sizes: Mapping[MetadataIndex, int], resolve: Callable[[WriteItem], Any]
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: length of the header, header (JSON), then the tensors, one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        begin, end = end, end + sizes[item.index]
        header[chunk_key(item.index.fqn, _offsets(item))] = {
            "dtype": DTYPES[_data(item).properties.dtype],
            "shape": list(_data(item).chunk.sizes),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for item in items:
        tensor = resolve(item).detach()
        expected = (_data(item).properties.dtype, _data(item).chunk.sizes)
        assert (tensor.dtype, tensor.shape) == expected, f"{item.index.fqn} changed while it was saved"
        if tensor.numel():
            for block in tensor.reshape(-1).split(max(1, BLOCK_BYTES // tensor.element_size())):
                yield memoryview(block.cpu().contiguous().view(torch.uint8).numpy())


class SafetensorsReader(StorageReader):
    """Reads what SafetensorsWriter wrote; of each piece only the rows that are asked for.

    A target of another dtype than the saved tensor is an error, where torch's own reader rounds without a word.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.about: dict[str, Any] = {}
        self._files: dict[MetadataIndex, str] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def read_json(self) -> dict[str, Any]:
        """`metadata.json`, checked: our format, a version we know, and every file there with the size it was given."""
        path = self.path / METADATA_NAME
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            message = f"{self.path} is no checkpoint: it has no {METADATA_NAME}, which is written last"
            raise TornCheckpointError(message) from None
        except ValueError as error:
            raise TornCheckpointError(f"{path} is damaged: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not of a plsc checkpoint: it does not say format {FORMAT!r}")
        if content["format_version"] > FORMAT_VERSION:
            raise ValueError(
                f"{self.path} has checkpoint format {content['format_version']}, this plsc reads up to "
                f"{FORMAT_VERSION}: a newer plsc wrote it; upgrade"
            )
        for name, size in content["files"].items():
            file = self.path / name
            have = file.stat().st_size if file.is_file() else 0
            if have != size:
                raise TornCheckpointError(f"{file} has {have} bytes, expected {size}: the checkpoint is damaged")
        return content

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        content = self.read_json()
        self.about, self._files = content["about"], {}
        tensors: dict[str, Any] = {}
        for name, entry in content["tensors"].items():
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(chunk["offsets"]), sizes=torch.Size(chunk["sizes"]))
                for chunk in entry["chunks"]
            ]
            properties = TensorProperties(dtype=_BY_NAME[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
            _check_cover(name, tensors[name])
            for chunk in entry["chunks"]:
                self._files[MetadataIndex(name, chunk["offsets"])] = chunk["file"]
        paths = {name: tuple(path) for name, path in content["paths"].items()}
        return Metadata(tensors, planner_data=paths or None)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # type: ignore[override]
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._files[item.storage_index]].append(item)
        for file, items in sorted(by_file.items()):
            try:
                with safe_open(self.path / file, framework="pt") as opened:
                    for item in items:
                        _read_one(opened, item, planner)
            except SafetensorError as error:
                raise ValueError(f"{self.path / file} is damaged: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_one(opened: Any, item: ReadItem, planner: LoadPlanner) -> None:
    """Copies the asked-for rows of one piece to their place, whatever device that is on."""
    offset = item.storage_index.offset
    assert offset is not None, "tensors are read by offset"
    key = chunk_key(item.storage_index.fqn, offset)
    if item.lengths:
        wanted = tuple(
            slice(begin, begin + length) for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
        )
        piece = opened.get_slice(key)[wanted]
    else:
        piece = opened.get_tensor(key)
    target = planner.resolve_tensor(item).detach()
    if target.dtype != piece.dtype:
        raise ValueError(f"{item.dest_index.fqn}: the checkpoint has {piece.dtype}, the target is {target.dtype}")
    target.copy_(piece)
    planner.commit_tensor(item, target)
