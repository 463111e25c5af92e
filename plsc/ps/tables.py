"""Several tables by name that are saved and loaded as one, and an embedding layer whose slots differ in dimension."""

import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc.ps.embedding import SparseEmbedding
from plsc.ps.files import locked_folder
from plsc.ps.store import Store
from plsc.ps.table import Table

FORMAT = 1
INDEX = "tables.json"
PARTIAL = ".tables.json.partial"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{32}\.table")


class Tables(Mapping[str, Table]):
    """Tables of any dimensions and rules under names, in this process: `tables["user"]` is a Table like any other."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        if not tables:
            raise ValueError("Tables: got none, expected at least one table under a name")
        for name, table in tables.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(f"Tables: got name {name!r}, expected letters, digits, '_' and '-', at most 64")
            if not isinstance(table, Table):
                raise ValueError(f"Tables: {name!r} is a {type(table).__name__}, expected a plsc.ps.Table")
        self._tables = dict(tables)

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def save(self, folder: str | PathLike[str]) -> int:
        """Writes all tables into `folder`; rows in all. What it held stays valid until all are on the disk, then goes.

        The tables are written one after the other: for a cut at one moment let no thread push meanwhile. Who saves into
        a folder that another is saving into waits for his turn.
        """
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        with locked_folder(where):
            return self._save(where)

    def _save(self, where: Path) -> int:
        save = uuid.uuid4().hex
        files = {name: f"{name}.{save}.table" for name in self}
        made = [where / PARTIAL]
        try:
            rows = 0
            for name, file in files.items():
                made.append(where / file)
                rows += self[name].save(where / file, tag=save)
            _write(where / INDEX, json.dumps({"format": FORMAT, "save": save, "tables": files}, indent=1))
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise
        for path in where.iterdir():
            if _FILE.fullmatch(path.name) and path.name not in files.values():
                path.unlink(missing_ok=True)
        return rows

    @classmethod
    def load(cls, folder: str | PathLike[str], *, options: Mapping[str, Mapping[str, Any]] | None = None) -> "Tables":
        """What `save` wrote. options: for each table what Table.load takes beside the file, such as arena and rule."""
        where, options = Path(folder), options or {}
        while True:
            files = _files(where)
            if strangers := [name for name in options if name not in files]:
                raise ValueError(f"options: got {', '.join(strangers)}, {where} has {', '.join(files)}")
            try:
                return cls({name: Table.load(where / file, **options.get(name, {})) for name, file in files.items()})
            except FileNotFoundError:
                if _files(where) == files:
                    raise
                # Another save has taken the place of this one meanwhile.

    def __repr__(self) -> str:
        return f"Tables({self._tables!r})"


def _files(where: Path) -> dict[str, str]:
    """The file of each table in the save that a folder holds."""
    try:
        told = json.loads((where / INDEX).read_text(encoding="utf-8"))
        files = {str(name): str(file) for name, file in told["tables"].items()}
    except FileNotFoundError:
        raise ValueError(f"{where} has no {INDEX}; expected a folder that Tables.save wrote") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{where / INDEX} is not what Tables.save writes ({error}); take another copy") from None
    if told.get("format") != FORMAT:
        raise ValueError(f"{where / INDEX} has format {told.get('format')}, expected {FORMAT}")
    if bad := [file for file in files.values() if not _FILE.fullmatch(file)]:
        raise ValueError(f"{where / INDEX} names {bad[0]!r}, expected a file of Tables.save in this folder")
    return files


def _write(path: Path, text: str) -> None:
    """The whole text, or what was there before."""
    partial = path.with_name(PARTIAL)
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class SlotEmbedding(nn.Module):
    """Slots (feature fields) by name, each with the store its rows are in: forward({slot: ids}) -> [B, sum of dims].

    ids of a slot: [B] one id a sample, [B, L], or a list of B tensors of any length; each sample's rows are pooled,
    and the slots stand side by side in the order of `slots`. Slots that name one store are pulled together, and equal
    ids in them share a row; keys made by `plsc.ps.slot_keys` keep them apart.
    """

    def __init__(self, slots: Mapping[str, Store], *, pooling: str = "sum", padding_key: int | None = None) -> None:
        super().__init__()
        if not slots:
            raise ValueError("slots: got none, expected a store for each slot by name")
        if pooling == "none":
            raise ValueError("pooling: got 'none', expected sum or mean: slots stand side by side, a vector a sample")
        stores = list({id(store): store for store in slots.values()}.values())
        self.layers = nn.ModuleList(SparseEmbedding(x, pooling=pooling, padding_key=padding_key) for x in stores)
        self.slots = {name: next(i for i, x in enumerate(stores) if x is store) for name, store in slots.items()}

    @property
    def embedding_dim(self) -> int:
        return sum(self._layer(number).embedding_dim for number in self.slots.values())

    @property
    def grad_scale(self) -> float:
        """As that of SparseEmbedding."""
        return self._layer(0).grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: float) -> None:
        for number in range(len(self.layers)):
            self._layer(number).grad_scale = scale

    def _layer(self, number: int) -> SparseEmbedding:
        layer = self.layers[number]
        assert isinstance(layer, SparseEmbedding)
        return layer

    def forward(self, ids: Mapping[str, Tensor | Sequence[Tensor]]) -> Tensor:
        if set(ids) != set(self.slots):
            raise ValueError(f"ids: got slots {', '.join(ids)}, expected {', '.join(self.slots)}")
        batches = {len(bags) for bags in ids.values()}
        if len(batches) != 1:
            said = ", ".join(f"{name} {len(bags)}" for name, bags in ids.items())
            raise ValueError(f"ids: slots have different numbers of samples ({said}); an empty bag is an empty tensor")
        found: dict[str, Tensor] = {}
        for number in range(len(self.layers)):
            names = [name for name, at in self.slots.items() if at == number]
            flat, lengths = zip(*(_bags(name, ids[name]) for name in names), strict=True)
            ends = torch.cat(lengths).cumsum(0)
            offsets = torch.cat([ends.new_zeros(1), ends[:-1]]) if len(ends) else ends
            pooled = self.layers[number](torch.cat(flat), offsets)  # [slots * B, dim]
            found |= dict(zip(names, pooled.view(len(names), *batches, -1).unbind(0), strict=True))
        return torch.cat([found[name] for name in self.slots], dim=1)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: layer {number}" for name, number in self.slots.items())


def _bags(name: str, ids: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All ids of a slot in one dimension, and how many each sample has."""
    if isinstance(ids, Tensor):
        if not 1 <= ids.ndim <= 2:
            raise ValueError(f"slot {name!r}: got ids {tuple(ids.shape)}, expected [B], [B, L] or a list of B tensors")
        length = 1 if ids.ndim == 1 else ids.shape[1]
        return ids.reshape(-1), torch.full((len(ids),), length, device=ids.device)
    if not ids or any(bag.ndim != 1 for bag in ids):
        raise ValueError(f"slot {name!r}: got a list, expected one tensor in one dimension for each sample")
    return torch.cat(list(ids)), torch.tensor([len(bag) for bag in ids], device=ids[0].device)
