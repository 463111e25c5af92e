"""How training is spread: averaging of gradients, mixed precision, recomputation, optimizers, batch norm over ranks."""

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
from plsc.strategies.recompute import recompute
from plsc.strategies.reducer import Reducer, broadcast_parameters
from plsc.strategies.sync_bn import SyncBatchNorm, convert_sync_bn

__all__ = [
    "LARS",
    "LossScaler",
    "Reducer",
    "Schedule",
    "SyncBatchNorm",
    "any_nonfinite",
    "autocast",
    "broadcast_parameters",
    "build_optimizer",
    "clip_grad_norm_",
    "convert_sync_bn",
    "first_nonfinite",
    "grad_norm",
    "nonfinite_names",
    "param_groups",
    "recompute",
    "set_lr",
]
