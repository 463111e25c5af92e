"""The loss of a margin head as textbooks have it: the truth of the tests of heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plsc import nn


def reference_losses(
    margin: nn.Margin, x: Tensor, y: Tensor, w: Tensor, *, rows: Tensor | None = None, threshold: float | None = None
) -> Tensor:
    """Loss of each sample by the textbook: the whole matrix, log_softmax, autograd. rows: classes that take part."""
    norms = x.norm(dim=1)
    return losses_of(margin, x / norms[:, None], norms, y, w, rows=rows, threshold=threshold)


def losses_of(
    margin: nn.Margin,
    unit: Tensor,
    norms: Tensor,
    y: Tensor,
    w: Tensor,
    *,
    rows: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    """The same from embeddings that are taken to have length 1, and their former lengths."""
    cos = torch.einsum("bd,c...d->bc...", unit, F.normalize(w, dim=-1))
    cos = cos.amax(2) if cos.dim() == 3 else cos
    valid = y >= 0
    index = y.clamp_min(0)[:, None]
    own = cos.gather(1, index)
    margin.update(own.detach()[valid, 0], norms.detach()[valid])
    target = margin.target(own[:, 0], norms) if margin.needs_norms else margin.target(own[:, 0])
    if threshold is not None:
        cos = torch.where(cos > threshold, 0.0, cos)
    logits = margin.others(cos, own.detach()).scatter(1, index, target[:, None]) * margin.scale
    if rows is not None:
        absent = torch.ones(len(w), dtype=torch.bool)
        absent[rows] = False
        logits = logits.masked_fill(absent, -math.inf)
    rest = torch.logsumexp(
        logits.scatter(1, index, -math.inf), 1
    )  # log_softmax - 1 would cancel where the own class wins
    excess = rest - margin.scale * target
    losses = torch.logaddexp(excess, torch.zeros_like(excess))  # softplus is cut to x above 20
    extra = margin.regularizer(norms)
    return torch.where(valid, losses if extra is None else losses + extra, 0.0)
