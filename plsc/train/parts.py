"""What the parts of a checkpoint hold (modules, optimizers, stateful objects), and whether a saved one fits them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from plsc.comm import Communicator, Shard, shard_of
from plsc.train.settings import differences, settings_of
from plsc.train.storage import RowShard

# Options of torch's optimizers that choose an implementation, not a result: they stay what the running program chose.
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


# ---- states that are not tensors


def to_json(value: object, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON form of a state; tensors in it go to `tensors` under their path and leave a reference behind.

    Tuples and dicts with other keys than strings come back as they were; a dict of another class comes back as a dict.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise ValueError(f"{name}: two tensors of this name; rename one of them")
        tensors[name] = value
        return {"$tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [to_json(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(item, f"{name}/{key}", tensors) for key, item in value.items()}
        pairs = [[to_json(key, name, {}), to_json(item, f"{name}/{key}", tensors)] for key, item in value.items()]
        return {"$items": pairs}
    raise ValueError(
        f"{name}: got {type(value).__name__}, expected a tensor, None, bool, int, float, str, list, tuple or dict; "
        "checkpoints hold no pickles: turn it into one of those"
    )


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `to_json` was given, with tensors taken from `tensors`."""
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(from_json(value["$tuple"], tensors))
    if "$items" in value:
        return {from_json(key, tensors): from_json(item, tensors) for key, item in value["$items"]}
    return {key: from_json(item, tensors) for key, item in value.items()}


def tensor_names(value: Any) -> list[str]:
    """The names of the tensors that a JSON form made by `to_json` refers to."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    return [value["$tensor"]] if "$tensor" in value else tensor_names(list(value.values()))


# ---- what a live part holds


@dataclass(frozen=True)
class Cell:
    """A live tensor: this rank's rows of a cut one, or a whole one."""

    tensor: Tensor
    shard: Shard | None = None
    zero_new: bool = False  # rows of classes that the checkpoint does not have: zero, or left as they are

    def __post_init__(self) -> None:
        assert self.shard is None or self.tensor.shape[0] == self.shard.size, "a cut tensor has the rows of its shard"

    @property
    def shape(self) -> list[int]:
        """Of the whole tensor."""
        return list(self.tensor.shape) if self.shard is None else [self.shard.total, *self.tensor.shape[1:]]

    def stored(self) -> Tensor:
        if self.shard is None:
            return self.tensor.detach()
        return RowShard(self.tensor, start=self.shard.start, total=self.shard.total)


@dataclass
class Part:
    """One named part as it is now: its tensors by name, and the rest of its state as JSON that refers to them."""

    name: str
    live: Any
    kind: str  # "module", "optimizer" or "stateful"
    json: Any = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    lent: list[str] = field(default_factory=list)  # tensors of sharded_state(), which load fills in place
    may_lack: list[str] = field(default_factory=list)  # prefixes of tensors a rank without rows need not have
    params: dict[str, tuple[Tensor, dict[str, Any]]] = field(default_factory=dict)  # of an optimizer, with their group

    def digest(self) -> str:
        """What must be the same on every rank (the state of an optimizer may be absent where there are no rows)."""
        shared = self.json["groups"] if self.kind == "optimizer" else self.json
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()

    def description(self) -> dict[str, Any]:
        about = {"kind": self.kind, "type": type(self.live).__name__, "state": self.json, "lent": self.lent}
        return about | ({"settings": settings_of(self.live)} if self.kind == "module" else {})


def collect(parts: Mapping[str, object]) -> dict[str, Part]:
    """The state of every part. Nothing is copied: tensors are the live ones."""
    owners: dict[int, str] = {}  # id of a parameter -> "head/weight"
    bare = {name: _unwrap(part) for name, part in parts.items()}
    for name, part in bare.items():
        if isinstance(part, nn.Module):
            for key, param in part.named_parameters():
                owners.setdefault(id(param), f"{name}/{key}")
    collected = {}
    for name, part in bare.items():
        if isinstance(part, nn.Module):
            collected[name] = _collect_module(name, part)
        elif isinstance(part, Optimizer):
            collected[name] = _collect_optimizer(name, part, owners)
        else:
            collected[name] = _collect_stateful(name, part)
        for path, cell in collected[name].cells.items():
            if cell.tensor.layout is not torch.strided or cell.tensor.is_meta:
                raise ValueError(f"{path}: got a sparse or meta tensor; only dense tensors with data can be saved")
    return collected


def _unwrap(part: object) -> object:
    """The module inside DistributedDataParallel or torch.compile: names then do not depend on the wrapper."""
    while isinstance(part, nn.Module):
        inner = part.module if isinstance(part, DistributedDataParallel) else getattr(part, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        part = inner
    return part


def _collect_module(name: str, module: nn.Module) -> Part:
    found: dict[str, Tensor] = {}
    part = Part(name, module, "module", to_json(dict(module.state_dict(keep_vars=True)), name, found))
    live: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    live.update(module.named_buffers(remove_duplicate=False))
    for path, tensor in found.items():
        part.cells[path] = Cell(tensor.detach(), shard_of(live.get(path[len(name) + 1 :], tensor)))
    for prefix, child in module.named_modules():
        _borrow(part, child, f"{name}/{prefix}." if prefix else f"{name}/")
    return part


def _collect_stateful(name: str, live: Any) -> Part:
    has_state = all(callable(getattr(live, verb, None)) for verb in ("state_dict", "load_state_dict"))
    if not has_state and not callable(getattr(live, "sharded_state", None)):
        raise ValueError(
            f"{name}: got {type(live).__name__}, expected a module, an optimizer, or an object with state_dict() and "
            "load_state_dict()"
        )
    found: dict[str, Tensor] = {}
    part = Part(name, live, "stateful", to_json(live.state_dict() if has_state else {}, name, found))
    part.cells = {path: Cell(tensor.detach(), shard_of(tensor), zero_new=True) for path, tensor in found.items()}
    _borrow(part, live, f"{name}/")
    return part


def _borrow(part: Part, owner: object, prefix: str) -> None:
    """Adds the cut tensors an object offers by sharded_state() -> {name: (local rows, shard)}."""
    offer = getattr(owner, "sharded_state", None)
    for key, (tensor, shard) in offer().items() if callable(offer) else ():
        path = prefix + key
        if tensor.dim() == 0 or tensor.shape[0] != shard.size:
            raise ValueError(f"{path}: got shape {list(tensor.shape)}, expected {shard.size} rows for {shard}")
        if path not in part.cells:
            part.lent.append(path)
            part.cells[path] = Cell(tensor.detach(), shard, zero_new=True)
        else:  # part of the state_dict as well: only the cut is news
            part.cells[path] = Cell(part.cells[path].tensor, shard, zero_new=part.cells[path].zero_new)


def _collect_optimizer(name: str, optimizer: Optimizer, owners: Mapping[int, str]) -> Part:
    part = Part(name, optimizer, "optimizer", {"groups": [], "state": {}})
    for index, group in enumerate(optimizer.param_groups):
        for number, param in enumerate(group["params"]):
            if id(param) not in owners:
                raise ValueError(
                    f"{name}: parameter {number} of group {index}, shape {list(param.shape)}, is of no module given "
                    "here; pass its module as a part too (state is kept by parameter name)"
                )
            part.params[owners[id(param)]] = (param, group)
            _collect_parameter(part, owners[id(param)], param)
        found: dict[str, Tensor] = {}
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        options = to_json(options, f"{name}/groups/{index}", found)
        if found:
            raise ValueError(f"{next(iter(found))}: got a tensor, expected a number; only scalar options can be saved")
        part.json["groups"].append({"params": [owners[id(param)] for param in group["params"]], "options": options})
    return part


def _collect_parameter(part: Part, owner: str, param: Tensor) -> None:
    shard = shard_of(param)
    if shard is not None and shard.size == 0:
        part.may_lack.append(f"{part.name}/{owner}/")
    state = part.live.state.get(param)
    if not state:
        return
    found: dict[str, Tensor] = {}
    part.json["state"][owner] = to_json(dict(state), f"{part.name}/{owner}", found)
    for path, tensor in found.items():
        by_row = shard is not None and tensor.dim() > 0 and tensor.shape[0] == shard.size
        part.cells[path] = Cell(tensor.detach(), shard if by_row else None, zero_new=True)


def _plain(value: object) -> object:
    """A learning rate kept as a tensor is saved as a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# ---- does a saved part fit the live one


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says it holds, and how it shall be loaded."""

    tensors: Mapping[str, TensorStorageMetadata]
    cut: frozenset[str]
    parts: Mapping[str, Any]
    comm: Communicator
    extend_classes: bool
    same_torch: bool  # the words in which torch's modules say their settings are those of its version


@dataclass
class Restore:
    """What loading one part will do, found out before anything live is changed."""

    part: Part
    targets: dict[str, Cell] = field(default_factory=dict)  # where the saved tensors go
    problems: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # in what tensors do not say: that may be meant
    apply: Callable[[], None] = lambda: None  # to be called once the targets are filled

    @property
    def is_plain(self) -> bool:
        """Without tensors: can be loaded first, and undone."""
        return self.part.kind == "stateful" and not self.targets

    def fit(self, path: str, cell: Cell, *, saved: Saved, owner: str) -> None:
        """Takes a live tensor as the target of a saved one, or notes why it does not fit."""
        self.targets[path] = cell
        meta = saved.tensors[path]
        have, want = list(meta.size), cell.shape
        if have != want and (cell.shard is None or len(have) != len(want) or have[1:] != want[1:]):
            self.problems.append(f"{path}: the checkpoint has shape {have}, the live tensor {want}")
        elif have != want and have[0] > want[0]:
            self.problems.append(
                f"the checkpoint has {have[0]} classes, the {owner} has {want[0]}; classes are never dropped: "
                f"build it with {have[0]} or more"
            )
        elif have != want and not saved.extend_classes:
            self.problems.append(
                f"the checkpoint has {have[0]} classes, the {owner} has {want[0]}; pass extend_classes / "
                f"--head.extend-classes to keep the first {have[0]} and initialise the rest"
            )
        if meta.properties.dtype != cell.tensor.dtype:
            self.problems.append(
                f"{path}: the checkpoint has {meta.properties.dtype}, the live tensor {cell.tensor.dtype}; nothing is "
                "converted on loading: make the types the same"
            )

    def compare_names(self, saved: Iterable[str], live: Iterable[str]) -> None:
        missing, unexpected = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
        if missing or unexpected:
            lists = [("not in the checkpoint", missing), ("only in the checkpoint", unexpected)]
            text = "; ".join(f"{what}: {_few(names)}" for what, names in lists if names)
            self.problems.append(f"{self.part.name} is not what was saved ({text})")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def restore(part: Part, saved: Saved) -> Restore:
    """Compares a live part with the saved one and prepares to load it; changes nothing."""
    result = Restore(part)
    entry = saved.parts.get(part.name)
    if entry is None:
        result.problems.append(f"the checkpoint has no part {part.name!r}; it has {', '.join(saved.parts)}")
    elif entry["kind"] != part.kind:
        result.problems.append(f"{part.name}: the checkpoint has a part of kind {entry['kind']}, got {part.kind}")
    elif part.kind == "module":
        _restore_module(result, entry, saved)
    elif part.kind == "optimizer":
        _restore_optimizer(result, entry, saved)
    else:
        _restore_stateful(result, entry, saved)
    return result


def _restore_module(result: Restore, entry: Mapping[str, Any], saved: Saved) -> None:
    part = result.part
    tensors = {*tensor_names(entry["state"]), *entry["lent"]}
    keys = [{f"{part.name}/{key}" for key in state} for state in (entry["state"], part.json)]
    result.compare_names(keys[0] | tensors, keys[1] | set(part.cells))
    for path in sorted(tensors & part.cells.keys()):
        result.fit(path, part.cells[path], saved=saved, owner=part.name)
    if "settings" in entry:  # older checkpoints do not have them
        found = differences(entry["settings"], settings_of(part.live), words=saved.same_torch)
        result.differs = [
            f"{part.name}{f'/{path}' if path else ''}: got {new}, saved {old}" for path, (old, new) in found.items()
        ]

    def apply() -> None:
        part.live.load_state_dict(from_json(entry["state"], {path: cell.tensor for path, cell in part.cells.items()}))

    result.apply = apply


def _restore_stateful(result: Restore, entry: Mapping[str, Any], saved: Saved) -> None:
    """Tensors of its state_dict come fresh, for load_state_dict to take; those of sharded_state are filled in place."""
    part = result.part
    tensors = tensor_names(entry["state"])
    own = [path for path in part.cells if path not in part.lent]
    if own:  # an object that has none yet makes them from what it is given
        result.compare_names(tensors, own)
    result.compare_names(entry["lent"], part.lent)
    for path in tensors:
        live = part.cells.get(path)
        size = list(saved.tensors[path].size)
        shard = live.shard if live else Shard.of(size[0], saved.comm) if path in saved.cut else None
        dtype = saved.tensors[path].properties.dtype
        fresh = torch.zeros_like(live.tensor) if live else _zeros(size, shard, dtype, torch.device("cpu"))
        result.fit(path, Cell(fresh, shard, zero_new=True), saved=saved, owner=part.name)
    for path in part.lent:
        if path in saved.tensors:
            result.fit(path, part.cells[path], saved=saved, owner=part.name)

    def apply() -> None:
        if hasattr(part.live, "load_state_dict"):
            filled = {path: cell.tensor for path, cell in result.targets.items()}
            part.live.load_state_dict(from_json(entry["state"], filled))

    result.apply = apply


def _zeros(size: list[int], shard: Shard | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size if shard is None else [shard.size, *size[1:]], dtype=dtype, device=device)


def _restore_optimizer(result: Restore, entry: Mapping[str, Any], saved: Saved) -> None:
    part, optimizer = result.part, result.part.live
    groups, states = entry["state"]["groups"], entry["state"]["state"]
    if entry["type"] != type(optimizer).__name__:
        result.problems.append(
            f"{part.name}: the checkpoint has the state of {entry['type']}, got {type(optimizer).__name__}; "
            "use the same optimizer, or leave it out of the parts to start it afresh"
        )
        return
    if len(groups) != len(part.json["groups"]):
        result.problems.append(
            f"{part.name}: the checkpoint has {len(groups)} parameter groups, got {len(part.json['groups'])}"
        )
        return
    for old, new in zip(groups, part.json["groups"], strict=True):
        result.compare_names(old["params"], new["params"])
    if result.problems:
        return
    for owner, state in states.items():
        for path in tensor_names(state):
            cell = _optimizer_cell(part, path, owner, saved)
            result.fit(path, cell, saved=saved, owner=owner.split("/")[0])

    def apply() -> None:
        filled = {path: cell.tensor for path, cell in result.targets.items()}
        for group, old in zip(optimizer.param_groups, groups, strict=True):
            for key, value in from_json(old["options"], {}).items():
                if key in IMPLEMENTATION_OPTIONS and key in group:
                    continue
                if isinstance(group.get(key), Tensor):  # a compiled step holds on to this very tensor
                    group[key].fill_(value)
                else:
                    group[key] = value
        for owner, (param, _) in part.params.items():
            optimizer.state.pop(param, None)
            if owner in states:
                optimizer.state[param] = from_json(states[owner], filled)

    result.apply = apply


def _optimizer_cell(part: Part, path: str, owner: str, saved: Saved) -> Cell:
    """Where a saved optimizer tensor goes: the live one, else a new one (before the first step there is none)."""
    param, group = part.params[owner]
    meta, shard = saved.tensors[path], shard_of(param)
    size = list(meta.size)
    if shard is not None and path not in saved.cut and size != [shard.total, *param.shape[1:]]:
        shard = None
    live = part.cells.get(path)
    if live is not None and live.shard == shard:
        return live
    # As torch has it: Adam's step counts live on the host unless a fused kernel reads them.
    on_host = path.endswith("/step") and not (group.get("fused") or group.get("capturable"))
    device = torch.device("cpu") if on_host else param.device
    return Cell(_zeros(size, shard, meta.properties.dtype, device), shard, zero_new=True)
