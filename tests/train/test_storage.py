"""The checkpoint storage with plain torch.distributed.checkpoint: nested tensors, rows of a tensor, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from plsc.train import storage
from plsc.train.checkpoint import load
from plsc.train.storage import RowShard, SafetensorsReader, SafetensorsWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def write(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=SafetensorsWriter(path), no_dist=True)


def read(path: Path, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=SafetensorsReader(path), no_dist=True)


def test_nested_tensors(tmp_path: Path) -> None:
    weight, half = numbers(5, 3), numbers(4).bfloat16()
    write(tmp_path / "a", {"model": {"w": weight, "h": half, "list": [torch.tensor(3), torch.tensor(True)]}})
    w, h, number, flag = torch.zeros(5, 3), torch.zeros(4).bfloat16(), torch.tensor(0), torch.tensor(False)
    read(tmp_path / "a", {"model": {"w": w, "h": h, "list": [number, flag]}})
    assert torch.equal(w, weight) and torch.equal(h, half) and int(number) == 3 and bool(flag)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["metadata.json", "rank_00000.safetensors"]


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Wide elements come first, so that each tensor is aligned for mmap; safetensors itself reads the file."""
    state = {"flag": torch.tensor([True]), "a.half": numbers(3).half(), "double": numbers(2, 2).double()}
    write(tmp_path / "a", state)
    file = tmp_path / "a" / "rank_00000.safetensors"
    found = load_file(file)
    assert {key: value.dtype for key, value in found.items()} == {
        "double@0,0": torch.float64, "a.half@0": torch.float16, "flag@0": torch.bool,
    }  # fmt: skip
    assert torch.equal(found["double@0,0"], state["double"])
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert length % 8 == 0 and header["double@0,0"]["data_offsets"][0] == 0


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BLOCK_BYTES", 20)
    state = {"w": numbers(7, 3).t(), "n": torch.tensor(4)}
    write(tmp_path / "a", state)
    target = {"w": torch.zeros(3, 7), "n": torch.tensor(0)}
    read(tmp_path / "a", target)
    assert torch.equal(target["w"], state["w"]) and int(target["n"]) == 4


def test_only_the_rows_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(10, 4)
    write(tmp_path / "a", {"w": weight})
    counts: list[int] = []
    inner = storage.safe_open

    class Recording:
        """safe_open that notes how many rows are taken out of it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = inner(*args, **kwargs)

        def __enter__(self) -> Recording:
            self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def get_slice(self, key: str) -> Recording:
            self.piece = self.file.get_slice(key)
            return self

        def __getitem__(self, index: Any) -> Tensor:
            rows: Tensor = self.piece[index]
            counts.append(rows.shape[0])
            return rows

    monkeypatch.setattr(storage, "safe_open", Recording)
    rows = torch.zeros(3, 4)
    shard = RowShard(rows, start=4, total=10)
    read(tmp_path / "a", {"w": shard})
    assert counts == [3] and torch.equal(rows, weight[4:7])
    assert repr(shard) == "RowShard(rows 4:7 of [10, 4], torch.float32)"
    read(tmp_path / "a", {"w": RowShard(torch.zeros(0, 4), start=10, total=10)})
    assert counts == [3]


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, {"w": numbers(5, 3)})
    with pytest.raises(CheckpointException, match="holds a checkpoint already"):
        write(path, {"w": numbers(5, 3)})
    with pytest.raises(CheckpointException, match="step is no tensor"):
        write(tmp_path / "b", {"step": 3})
    with pytest.raises(CheckpointException, match=r"z: got torch.complex64, which safetensors cannot hold"):
        write(tmp_path / "b", {"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(CheckpointException, match="pieces of 6 elements, expected 10"):
        write(tmp_path / "c", {"w": RowShard(torch.zeros(3, 2), start=0, total=5)})
    with pytest.raises(CheckpointException, match=r"the checkpoint has torch.float32, the target is torch.float16"):
        read(path, {"w": torch.zeros(5, 3).half()})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        read(path, {"w": torch.zeros(4, 3)})
    with pytest.raises(ValueError, match="holds plain tensors"):
        load(path, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"got shape \[3, 2\] at row 3, expected rows within \[0, 5\)"):
        RowShard(torch.zeros(3, 2), start=3, total=5)
    with pytest.raises(NotImplementedError, match="only carries rows"):
        RowShard(torch.zeros(3, 2), start=0, total=5) + 1
