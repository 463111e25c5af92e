"""Strategy: what a run asks of the ways of training together, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_origin, get_type_hints

from plsc.comm import check_topology
from plsc.ps.choose import check_mode
from plsc.strategies.dgc import DGCOptions
from plsc.strategies.local_sgd import LocalSGDOptions
from plsc.strategies.recompute import parse_recompute
from plsc.strategies.reduction import make_reduction

AMP = ("fp32", "bf16", "fp16")
T = TypeVar("T")


@dataclass(frozen=True)
class Strategy:
    """How a run is spread and in which precision; every field works alone and together with the others.

    Attributes:
        amp: "fp32" | "bf16" | "fp16" (with a dynamic loss scale).
        reduce_dtype: what gradients travel in, "fp32" | "bf16" | "fp16" (scaled to its range, bucket by bucket).
        reduce_accumulate: where half types are added up: "native" (as the transport does) | "fp32" (rounded once).
        bucket_mb: gradients are fused into buckets of this many MiB; 0: as many as a measurement at the start says,
            kept in the checkpoint. A fixed number gives the same bits in every run.
        lanes: communicators that buckets take in turn.
        topology: the way of their sums, "flat" | "ring" | "hierarchical" | "grid" | "auto" | "module:Class"; see
            plsc.comm.route.
        compress: "none" | "dgc": each rank sends the few largest entries; SGD only. compress_args: as DGCOptions.
        local_sgd: the ranks average their weights every so many steps, and no gradients; 0 is off. local_sgd_args: as
            LocalSGDOptions.
        accumulate: micro-batches an optimizer step; the global batch stays the same, memory shrinks.
        clip_norm: largest norm of the whole gradient, cut weights counted once; 0 is off.
        recompute: "none" | "full" | "selective" | "every:k" | "blocks:0-3,7": blocks that run again in the backward, to
            keep less; the last two also with "selective", as "blocks:0-10 selective:2"; see plsc.strategies.recompute.
        sync_bn: batch statistics over all ranks.
        ps: how rows of sparse tables are trained, "none" | "direct" | "async" | "half_async" | "sync" | "geo". servers:
            host:port of each server; none: a table of this process. ps_args: the mode's settings; see docs/ps.md.
    """

    amp: str = "fp32"
    reduce_dtype: str = "fp32"
    reduce_accumulate: str = "native"
    bucket_mb: float = 25.0
    lanes: int = 1
    topology: str = "flat"
    compress: str = "none"
    compress_args: dict[str, Any] = field(default_factory=dict)
    local_sgd: int = 0
    local_sgd_args: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clip_norm: float = 0.0
    recompute: str = "none"
    sync_bn: bool = False
    ps: str = "none"
    servers: tuple[str, ...] = ()
    ps_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "servers", tuple(self.servers) if isinstance(self.servers, list) else self.servers)
        for name, kind in get_type_hints(Strategy).items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), get_origin(kind) or kind, "strategy"))
        if self.amp not in AMP:
            raise ValueError(f"strategy: got amp {self.amp!r}, expected one of {', '.join(AMP)}")
        try:
            make_reduction(self.reduce_dtype, accumulate=self.reduce_accumulate)
            check_topology(self.topology)
            parse_recompute(self.recompute)
        except ValueError as error:
            raise ValueError(f"strategy: {error}") from error
        if self.accumulate < 1 or not self.clip_norm >= 0.0 or not self.bucket_mb >= 0.0 or self.lanes < 1:
            raise ValueError(
                f"strategy: got accumulate={self.accumulate}, clip_norm={self.clip_norm}, bucket_mb={self.bucket_mb}, "
                f"lanes={self.lanes}; expected accumulate and lanes >= 1, clip_norm >= 0 (0 is off), bucket_mb >= 0 "
                "(0 is measured)"
            )
        if self.compress not in ("none", "dgc") or self.local_sgd < 0:
            raise ValueError(
                f"strategy: got compress {self.compress!r}, local_sgd {self.local_sgd}; expected none or dgc, and a "
                "number of steps or 0"
            )
        self.dgc_options()
        self.local_sgd_options()
        if self.ps != "none":
            check_mode(self.ps, self.ps_args)
        elif self.servers or self.ps_args:
            raise ValueError("strategy: got servers or ps_args but ps is 'none'; give a mode, such as ps='async'")
        for pair, why in self._conflicts():
            raise ValueError(f"strategy: {pair} do not go together: {why}")

    def dgc_options(self) -> DGCOptions | None:
        """What compress_args say; None where nothing is compressed."""
        if self.compress == "none":
            if self.compress_args:
                raise ValueError(f"strategy: got compress_args {self.compress_args} but compress is 'none'")
            return None
        return _options(DGCOptions, self.compress_args, "compress_args")

    def local_sgd_options(self) -> LocalSGDOptions | None:
        """What local_sgd and local_sgd_args say; None where gradients are averaged."""
        if not self.local_sgd:
            if self.local_sgd_args:
                raise ValueError(f"strategy: got local_sgd_args {self.local_sgd_args} but local_sgd is 0")
            return None
        if "every" in self.local_sgd_args:
            raise ValueError(f"strategy: got every in local_sgd_args {self.local_sgd_args}; give it as local_sgd")
        return _options(LocalSGDOptions, {"every": self.local_sgd, **self.local_sgd_args}, "local_sgd_args")

    def _conflicts(self) -> list[tuple[str, str]]:
        """Settings that are refused together, and why."""
        dgc, local = self.compress == "dgc", self.local_sgd > 0
        half = f"reduce_dtype={self.reduce_dtype!r}"
        found = [
            (dgc and local, "compress='dgc' and local_sgd", "DGC sends gradients in every step, local SGD sends none"),
            (
                dgc and self.reduce_dtype == "fp16",
                f"compress='dgc' and {half}",
                "DGC keeps exactly what it has not sent, scaled halves would round what it sends; bf16 is possible and "
                "rounds only what DGC leaves dense",
            ),
            (
                local and self.sync_bn,
                "local_sgd and sync_bn",
                "replicas differ between two meetings, and so do their batch statistics; local SGD averages those too",
            ),
            (
                self.reduce_accumulate == "fp32" and self.topology != "flat",
                f"reduce_accumulate='fp32' and topology={self.topology!r}",
                "adding up in fp32 is a way of its own (all_to_all, all_gather)",
            ),
        ]
        return [(pair, why) for wrong, pair, why in found if wrong]


def _options(kind: type[T], args: dict[str, Any], where: str) -> T:
    """An options dataclass from a table; unknown names and wrong types are errors that name them."""
    types, made = get_type_hints(kind), {}
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name, value in args.items():
        if name not in names:
            raise ValueError(f"strategy.{where}: unknown {name!r}; expected {', '.join(names)}")
        made[name] = _typed(name, value, types[name], f"strategy.{where}")
    return kind(**made)


def _typed(name: str, value: Any, wanted: type, where: str) -> Any:
    """The value, a whole number as a float where that is wanted; ValueError if it is of another type."""
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ValueError(f"{where}: {name} is {value!r}, expected {wanted.__name__}")
    return value
