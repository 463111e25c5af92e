"""plsc: very large scale classification with class-parallel heads, and the training techniques around them."""

from plsc import data, models, ps
from plsc.comm import Communicator, connect, world
from plsc.fleet import Fleet
from plsc.nn import (
    AdaFace,
    ArcFace,
    ClassParallelHead,
    ClassParallelLinear,
    CombinedMargin,
    CosFace,
    CurricularFace,
    MagFace,
    Margin,
    NormFace,
    SphereFace,
)
from plsc.ops import LARS, SGD, AdamW
from plsc.strategies import Strategy
from plsc.train.checkpoint import load, save

__version__ = "0.1.0"

__all__ = [
    "LARS",
    "SGD",
    "AdaFace",
    "AdamW",
    "ArcFace",
    "ClassParallelHead",
    "ClassParallelLinear",
    "CombinedMargin",
    "Communicator",
    "CosFace",
    "CurricularFace",
    "Fleet",
    "MagFace",
    "Margin",
    "NormFace",
    "SphereFace",
    "Strategy",
    "connect",
    "data",
    "load",
    "models",
    "ps",
    "save",
    "world",
]
