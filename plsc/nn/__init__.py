"""Modules whose weights are cut by class, and the margins they use."""

from plsc.nn.head import ClassParallelHead
from plsc.nn.linear import ClassParallelLinear
from plsc.nn.margins import (
    MARGINS,
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    MagFace,
    Margin,
    NormFace,
    SphereFace,
)
from plsc.nn.stored import StoredHead

__all__ = [
    "MARGINS",
    "AdaFace",
    "ArcFace",
    "ClassParallelHead",
    "ClassParallelLinear",
    "CombinedMargin",
    "CosFace",
    "CurricularFace",
    "MagFace",
    "Margin",
    "NormFace",
    "SphereFace",
    "StoredHead",
]
