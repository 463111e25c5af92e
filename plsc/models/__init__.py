"""Plain modules: backbones that take images [B, C, S, S] to embeddings [B, D], and models of clicks."""

from plsc.models.clicks import DCN, DeepFM, LogisticRegression, WideDeep
from plsc.models.iresnet import IResNet, iresnet18, iresnet34, iresnet50, iresnet100, iresnet200
from plsc.models.matching import SkipGram, TwoTower
from plsc.models.mobilefacenet import MobileFaceNet, mobilefacenet
from plsc.models.resnet import ResNet, resnet50
from plsc.models.small import PlainNet, SmallConv, plainnet, smallconv
from plsc.models.vit import ViT, vit_base, vit_large, vit_small, vit_tiny
from plsc.models.zoo import MODELS, build

__all__ = [
    "DCN",
    "MODELS",
    "DeepFM",
    "IResNet",
    "LogisticRegression",
    "MobileFaceNet",
    "PlainNet",
    "ResNet",
    "SkipGram",
    "SmallConv",
    "TwoTower",
    "ViT",
    "WideDeep",
    "build",
    "iresnet18",
    "iresnet34",
    "iresnet50",
    "iresnet100",
    "iresnet200",
    "mobilefacenet",
    "plainnet",
    "resnet50",
    "smallconv",
    "vit_base",
    "vit_large",
    "vit_small",
    "vit_tiny",
]
