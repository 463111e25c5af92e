"""How training is spread: averaging of gradients, mixed precision, recomputation, optimizers, batch norm over ranks."""

from plsc.strategies.dgc import DGC, DGCOptions
from plsc.strategies.local_sgd import LocalSGD, LocalSGDOptions
from plsc.strategies.optimizers import LARS, Schedule, build_optimizer, param_groups, set_lr
from plsc.strategies.precision import (
    LossScaler,
    any_nonfinite,
    autocast,
    clip_grad_norm_,
    first_nonfinite,
    grad_norm,
    nonfinite_names,
)
from plsc.strategies.recompute import parse_recompute, recompute
from plsc.strategies.reducer import Reducer, broadcast_parameters
from plsc.strategies.reduction import (
    Accumulated,
    Bf16,
    Fp16,
    Full,
    Plain,
    Reduction,
    as_ddp_hook,
    make_reduction,
)
from plsc.strategies.strategy import Strategy
from plsc.strategies.sync_bn import SyncBatchNorm, convert_sync_bn

__all__ = [
    "DGC",
    "LARS",
    "Accumulated",
    "Bf16",
    "DGCOptions",
    "Fp16",
    "Full",
    "LocalSGD",
    "LocalSGDOptions",
    "LossScaler",
    "Plain",
    "Reducer",
    "Reduction",
    "Schedule",
    "Strategy",
    "SyncBatchNorm",
    "any_nonfinite",
    "as_ddp_hook",
    "autocast",
    "broadcast_parameters",
    "build_optimizer",
    "clip_grad_norm_",
    "convert_sync_bn",
    "first_nonfinite",
    "grad_norm",
    "make_reduction",
    "nonfinite_names",
    "param_groups",
    "parse_recompute",
    "recompute",
    "set_lr",
]
