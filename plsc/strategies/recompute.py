"""Trades compute for memory: chosen blocks keep only their inputs and run again in the backward pass."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import is_grad_enabled, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from plsc.comm import Communicator

CONTAINERS = (nn.Sequential, nn.ModuleList)
NUMBERS = r"\d+(-\d+)?(,\d+(-\d+)?)*"
EXPECTED = (
    'expected "none", or "full", "every:k" with k >= 1 or "blocks:0-3,7", alone or followed by "selective" or '
    '"selective:0,2"'
)
# What "selective" keeps, for it costs most to run again: products and convolutions; attention, by its dropout's place.
KEPT_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
)
KEPT_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
}


@dataclass(frozen=True)
class _Policy:
    """Which blocks run again (every so many, or those listed), and which of their products are kept."""

    every: int = 0
    listed: tuple[int, ...] = ()
    selective: bool = False
    products: tuple[int, ...] = ()  # of each block; none listed: all


def recompute(module: nn.Module, policy: str, *, allow_collectives: bool = False) -> nn.Module:
    """Sets which blocks of the module run again in the backward; changes it in place and returns it.

    Gradients stay the same bit for bit, dropout included, and buffers such as running statistics are updated once.
    state_dict keys and deep copies are not affected. Hooks on submodules of a block fire twice.

    Args:
        policy: "none" (also takes an earlier choice back), "full" (every block), "every:k" (blocks 0, k, 2k, ...),
            "blocks:0-3,7" (those), or "selective": every block, but the results of its matrix products, convolutions
            and attention are kept, so that little has to be computed again (under autocast a weight that a block uses
            twice is then cast twice, and its gradient adds up in another order). "selective:0,2" keeps the first and
            the third of these only; "blocks:0-10 selective:2" does so in those blocks and leaves the others alone.
            Blocks are what module.recompute_blocks() lists, else the children of the module's top-level nn.Sequential
            and nn.ModuleList containers, or of the module itself if it is one.
        allow_collectives: a block that communicates in its forward does so again in the backward. That is right only
            where every rank recomputes the same blocks in the same order, so it must be asked for.
    """
    asked = parse_recompute(policy)
    for child in module.modules():
        if isinstance(vars(child).get("forward"), _Recomputed):
            del child.forward
    if asked == _Policy():
        return module
    found = list(dict.fromkeys(_blocks(module)))
    if asked.listed and asked.listed[-1] >= len(found) > 0:
        raise ValueError(f"recompute: got {policy!r} for {len(found)} blocks, expected numbers below that")
    blocks = [found[at] for at in asked.listed if found] if asked.listed else found[:: asked.every]
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
        block.forward = _Recomputed(block, asked)
    return module


class _Recomputed:
    """Stands in for one block's forward. An object that holds the block, so that a deep copy holds the copied block."""

    def __init__(self, block: nn.Module, asked: _Policy) -> None:
        self.block, self.asked = block, asked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        if not is_grad_enabled():
            return type(block).forward(block, *args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            random = _Random(args)
            if not self.asked.selective:
                return nullcontext(), _Anew(lambda: _as_before(block, random, None))
            first, again = create_selective_checkpoint_contexts(_keeps(self.asked.products))
            return first, _Anew(lambda: _as_before(block, random, again))

        own: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        with _without_cast_cache() if self.asked.selective else nullcontext():
            return checkpoint(type(block).forward, block, *args, **own, **kwargs)


class _Anew(AbstractContextManager[None]):
    """A context made at each entry: a graph that is kept runs its blocks again in each backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._now = self._make()
        self._now.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._now.__exit__(*error)


class _Random:
    """The states of the random generators as a block's first run finds them.

    In place of torch's own `preserve_rng_state`: reading the CPU's state locks it, and may collect garbage meanwhile,
    which lets another thread run; one that reads the state then waits for that lock, and holds what the first waits
    for. Ranks that are threads stood still for ever.
    """

    _one_at_a_time = threading.Lock()

    def __init__(self, args: tuple[Any, ...] = (), devices: list[int] | None = None) -> None:
        with self._one_at_a_time:
            self.host = torch.get_rng_state()
        if devices is not None:
            self.devices, self.states = devices, [torch.cuda.get_rng_state(device) for device in devices]
        else:
            self.devices, self.states = get_device_states(*args) if torch.cuda.is_initialized() else ([], [])

    def put_back(self) -> None:
        """The generators are in these states again."""
        with self._one_at_a_time:
            torch.set_rng_state(self.host)
        set_device_states(self.devices, self.states)


def _keeps(products: tuple[int, ...]) -> Callable[..., CheckpointPolicy]:
    """What one run of a block keeps: the products of these numbers, counted in both runs alike; of no numbers, all."""
    seen = {False: 0, True: 0}  # so far in the first run, and in the repetition

    def keeps(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not _is_product(op, *args, **kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = seen[context.is_recompute]
        seen[context.is_recompute] += 1
        kept = not products or number in products
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return keeps


def _is_product(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Attention that draws random numbers is none: kept, it would shift those of whatever comes after it."""
    where = KEPT_ATTENTION.get(op)
    dropout = 0.0 if where is None else kwargs.get("dropout_p", args[where] if len(args) > where else 0.0)
    return op in KEPT_PRODUCTS or (where is not None and not dropout)


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    """A weight that autocast has cast before would not be cast by a block's second call, but by its repetition."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _as_before(block: nn.Module, random: _Random, around: AbstractContextManager[Any] | None) -> Iterator[None]:
    """Inside, random numbers are those of the first run, and the block works on copies of its buffers: the first run
    has updated running statistics already."""
    kept = [(module, *named) for module in block.modules() for named in module.named_buffers(recurse=False)]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    drawn = _Random(devices=random.devices)
    random.put_back()
    try:
        with around or nullcontext():
            yield
    finally:
        drawn.put_back()
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


def parse_recompute(policy: str) -> _Policy:
    """What a policy asks for; ValueError where it is none."""
    if policy == "none":
        return _Policy()
    asked: dict[str, Any] = {}
    for clause in policy.split(" "):
        kind, _, detail = clause.partition(":")
        listed = _numbers(detail) if re.fullmatch(NUMBERS, detail) else ()
        if clause == "full":
            made: dict[str, Any] = {"every": 1}
        elif kind == "every" and detail.isdecimal() and int(detail) > 0:
            made = {"every": int(detail)}
        elif kind == "blocks" and listed:
            made = {"listed": listed}
        elif clause == "selective" or (kind == "selective" and listed):
            made = {"selective": True, "products": listed}
        else:
            raise ValueError(f"recompute: got {policy!r}, {EXPECTED}")
        if "selective" in asked or ("selective" not in made and asked):
            raise ValueError(f"recompute: got {policy!r}, {EXPECTED}")
        asked |= made
    return _Policy(**({"every": 1} | asked if "listed" not in asked else asked))


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as "0-3,7", in order."""
    ends = [part.partition("-") for part in text.split(",")]
    return tuple(sorted({at for low, _, high in ends for at in range(int(low), int(high or low) + 1)}))
