"""Functions with gradients over a communicator."""

from plsc.ops.collective import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, scale_grad
from plsc.ops.optim import LARS, SGD, AdamW, RowOptimizer
from plsc.ops.sampling import sample_classes
from plsc.ops.topk import block_topk, class_topk, split_topk
from plsc.ops.updates import deferred_updates, merge_updates

__all__ = [
    "LARS",
    "SGD",
    "AdamW",
    "RowOptimizer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "block_topk",
    "broadcast",
    "class_topk",
    "deferred_updates",
    "merge_updates",
    "reduce_scatter",
    "sample_classes",
    "scale_grad",
    "split_topk",
]
