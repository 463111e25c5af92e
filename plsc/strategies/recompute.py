"""Trades compute for memory: chosen blocks keep only their inputs and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from plsc.comm import Communicator

CONTAINERS = (nn.Sequential, nn.ModuleList)


def recompute(module: nn.Module, policy: str, *, allow_collectives: bool = False) -> nn.Module:
    """Sets which blocks of the module run again in the backward; changes it in place and returns it.

    Gradients stay the same bit for bit, dropout included, and buffers such as running statistics are updated once.
    state_dict keys and deep copies are not affected. Hooks on submodules of a block fire twice.

    Args:
        policy: "none" (also takes an earlier choice back), "full" (every block), "every:k" (blocks 0, k, 2k, ...).
            Blocks are what module.recompute_blocks() lists, else the children of the module's top-level
            nn.Sequential and nn.ModuleList containers, or of the module itself if it is one.
        allow_collectives: a block that communicates in its forward does so again in the backward. That is right only
            where every rank recomputes the same blocks in the same order, so it must be asked for.
    """
    step = _parse(policy)
    for child in module.modules():
        if isinstance(vars(child).get("forward"), _Recomputed):
            del child.forward
    if step == 0:
        return module
    blocks = list(dict.fromkeys(_blocks(module)))[::step]
    if not blocks:
        raise ValueError(
            f"recompute: found no blocks in {type(module).__name__}, expected a method recompute_blocks() or top-level "
            'nn.Sequential or nn.ModuleList containers with children; use policy "none"'
        )
    names = {child: name for name, child in module.named_modules()}
    for block in blocks:
        if "forward" in vars(block):
            raise ValueError(
                f"recompute: block {names.get(block)!r} has a forward set on the instance, expected its class's; "
                "call recompute before whatever sets it"
            )
        talkers = [] if allow_collectives else [names.get(m) for m in block.modules() if _communicates(m)]
        if talkers:
            raise ValueError(
                f"recompute: block {names.get(block)!r} communicates in its forward ({', '.join(map(str, talkers))}); "
                "leave it out, or pass allow_collectives=True where all ranks recompute the same blocks"
            )
    for block in blocks:
        block.forward = _Recomputed(block)
    return module


class _Recomputed:
    """Stands in for one block's forward. An object that holds the block, so that a deep copy holds the copied block."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        if not is_grad_enabled():
            return type(block).forward(block, *args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _buffers_kept(block)

        return checkpoint(type(block).forward, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Inside, the block works on copies of its buffers: the first run has updated running statistics already."""
    kept = [(module, *named) for module in block.modules() for named in module.named_buffers(recurse=False)]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)


def _blocks(module: nn.Module) -> list[nn.Module]:
    listed = getattr(module, "recompute_blocks", None)
    if callable(listed):
        return list(listed())
    candidates = [module] if isinstance(module, CONTAINERS) else module.children()
    containers = [candidate for candidate in candidates if isinstance(candidate, CONTAINERS)]
    return [block for container in containers for block in container.children()]


def _communicates(module: nn.Module) -> bool:
    return isinstance(module, nn.SyncBatchNorm) or any(isinstance(x, Communicator) for x in vars(module).values())


def _parse(policy: str) -> int:
    """Every how many blocks one is recomputed; 0 for none."""
    if policy in ("none", "full"):
        return 0 if policy == "none" else 1
    kind, _, count = policy.partition(":")
    if kind == "every" and count.isdecimal() and int(count) > 0:
        return int(count)
    raise ValueError(f'recompute: got {policy!r}, expected "none", "full" or "every:k" with k >= 1')
