"""What the tensors of a module do not say: the kinds and settings of its parts, and where two modules differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from plsc.nn import ClassParallelHead, Margin
from plsc.nn.class_parallel import ClassParallelModule
from plsc.ops.optim import RowOptimizer


def settings_of(module: nn.Module) -> dict[str, list[str]]:
    """The kind and the settings, in words, of the module ("") and of all in it by path; the same on every rank.

    Of modules that are neither torch's nor ours the kind alone: what else they hold may change from step to step.
    """
    return {path: [_kind(part), _words(part)] for path, part in module.named_modules()}


def differences(saved: Mapping[str, list[str]], live: Mapping[str, list[str]], *, words: bool) -> dict[str, list[str]]:
    """Path -> what is saved and what is live, where they are of different kinds or, if `words`, settings."""
    found = {}
    for path in dict.fromkeys([*live, *saved]):
        old, new = saved.get(path), live.get(path)
        if old is None or new is None or old[0] != new[0] or (words and old[1] != new[1]):
            found[path] = ["nothing" if one is None else f"{one[0]}({one[1]})" for one in (old, new)]
    return found


def _kind(part: nn.Module) -> str:
    """Batch statistics over all ranks or over one are the same module, trained in two ways."""
    return "BatchNorm" if isinstance(part, _BatchNorm) else type(part).__name__


def _words(part: nn.Module) -> str:
    if isinstance(part, ClassParallelModule):
        return _head_words(part)
    known = isinstance(part, Margin | _BatchNorm) or type(part).__module__.startswith("torch.")
    return part.extra_repr() if known else ""


def _head_words(head: ClassParallelModule) -> str:
    """Sizes and types are left out: there other ones are an error."""
    words = [f"sample_rate={head.sample_rate}"]
    if head.sample_rate < 1.0:
        words.append(f"seed={head.seed}")
    if isinstance(head, ClassParallelHead):
        words.append(f"filter_threshold={head.filter_threshold}")
    if head.head_optimizer is not None:
        words.append(f"head_optimizer={_optimizer_words(head.head_optimizer)}")
    return ", ".join(words)


def _optimizer_words(optimizer: RowOptimizer) -> str:
    """Without the rate, which a schedule moves."""
    names = [each.name for each in fields(optimizer) if each.name not in ("lr", "initial_lr")]
    return f"{type(optimizer).__name__}({', '.join(f'{name}={getattr(optimizer, name)!r}' for name in names)})"
