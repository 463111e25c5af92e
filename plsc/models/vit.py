"""Vision transformers for face crops: patches of 8 px, so that 112 px give the 14 x 14 tokens of ViT/16 at 224 px.

Plain pre-norm blocks with learnt positions, no class token; the tokens' mean goes through one linear layer.
InsightFace's own ViT is another design (patch 9, all tokens flattened into the embedding).
Sources: Dosovitskiy et al. 2021, An Image is Worth 16x16 Words; Beyer et al. 2022, Better plain ViT baselines (mean).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plsc.models.checks import check_images, check_sizes

__all__ = ["ViT", "vit_base", "vit_large", "vit_small", "vit_tiny"]


class Attention(nn.Module):
    """Self-attention over the tokens of an image."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width] -> [B, T, width]
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # [B, heads, 3, T, width / heads]
        q, k, v = qkv.unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block: attention, then a perceptron four times as wide, each normalised first and added."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads=heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width] -> [B, T, width]
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images to embeddings through `depth` transformer blocks of `width` channels."""

    def __init__(
        self,
        embedding_size: int,
        *,
        width: int,
        depth: int,
        heads: int,
        image_size: int = 112,
        in_channels: int = 3,
        patch_size: int = 8,
    ) -> None:
        super().__init__()
        check_sizes(embedding_size, image_size, in_channels)
        if image_size % patch_size != 0:
            raise ValueError(f"image_size is {image_size}, expected a multiple of patch_size {patch_size}")
        self.embedding_size, self.image_size, self.in_channels = embedding_size, image_size, in_channels
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty(1, (image_size // patch_size) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads=heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.embedding = nn.Linear(width, embedding_size)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, S, S] -> [B, D]
        check_images(images, self.image_size, self.in_channels)
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # [B, T, width]
        return self.embedding(self.norm(self.blocks(x)).mean(1))

    def recompute_blocks(self) -> list[nn.Module]:
        """The transformer blocks, in the order they run."""
        return list(self.blocks)


def vit_tiny(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> ViT:
    """5.4 million parameters and the embedding layer."""
    return ViT(embedding_size, width=192, depth=12, heads=3, image_size=image_size, in_channels=in_channels)


def vit_small(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> ViT:
    """21.4 million parameters and the embedding layer."""
    return ViT(embedding_size, width=384, depth=12, heads=6, image_size=image_size, in_channels=in_channels)


def vit_base(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> ViT:
    """85.4 million parameters and the embedding layer."""
    return ViT(embedding_size, width=768, depth=12, heads=12, image_size=image_size, in_channels=in_channels)


def vit_large(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> ViT:
    """302.7 million parameters and the embedding layer."""
    return ViT(embedding_size, width=1024, depth=24, heads=16, image_size=image_size, in_channels=in_channels)
