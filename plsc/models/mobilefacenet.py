"""MobileFaceNet: a face network of a million parameters, for phones and for CPUs.

Source: Chen et al. 2018, MobileFaceNets, table 1.
"""

from torch import Tensor, nn

from plsc.models.checks import check_images, check_sizes

__all__ = ["MobileFaceNet", "mobilefacenet"]

# expansion, width, repeats, stride of the first: the bottleneck rows of the paper's table
BOTTLENECKS = ((2, 64, 5, 2), (4, 128, 1, 2), (2, 128, 6, 1), (4, 128, 1, 2), (2, 128, 2, 1))


class Bottleneck(nn.Module):
    """Widen by a 1x1 convolution, filter each channel by 3x3, narrow linearly; with a shortcut where shapes allow."""

    def __init__(self, in_width: int, width: int, *, expansion: int, stride: int) -> None:
        super().__init__()
        wide = expansion * in_width
        self.shortcut = stride == 1 and in_width == width
        self.body = nn.Sequential(
            *_conv(in_width, wide, kernel=1),
            *_conv(wide, wide, kernel=3, stride=stride, padding=1, groups=wide),
            *_conv(wide, width, kernel=1, linear=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.shortcut else y


class MobileFaceNet(nn.Module):
    """Images to embeddings; the last map is gathered by a global depthwise convolution, which knows where a face is."""

    def __init__(self, embedding_size: int, *, image_size: int, in_channels: int) -> None:
        super().__init__()
        check_sizes(embedding_size, image_size, in_channels)
        self.embedding_size, self.image_size, self.in_channels = embedding_size, image_size, in_channels
        self.stem = nn.Sequential(
            *_conv(in_channels, 64, kernel=3, stride=2, padding=1),
            *_conv(64, 64, kernel=3, padding=1, groups=64),
        )
        blocks: list[Bottleneck] = []
        in_width = 64
        for expansion, width, repeats, stride in BOTTLENECKS:
            for i in range(repeats):
                blocks.append(Bottleneck(in_width, width, expansion=expansion, stride=stride if i == 0 else 1))
                in_width = width
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(*_conv(128, 512, kernel=1))
        self.gather = nn.Sequential(*_conv(512, 512, kernel=image_size // 16, groups=512, linear=True))
        self.embedding = nn.Sequential(
            nn.Flatten(), nn.Linear(512, embedding_size, bias=False), nn.BatchNorm1d(embedding_size)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:  # [B, C, S, S] -> [B, D]
        check_images(images, self.image_size, self.in_channels)
        x = self.last(self.blocks(self.stem(images)))  # [B, 512, S / 16, S / 16]
        return self.embedding(self.gather(x))

    def recompute_blocks(self) -> list[nn.Module]:
        """The bottlenecks, in the order they run."""
        return list(self.blocks)


def _conv(
    in_width: int,
    width: int,
    *,
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    linear: bool = False,
) -> list[nn.Module]:
    """Convolution and batch norm, and a PReLU unless linear."""
    conv = nn.Conv2d(in_width, width, kernel, stride=stride, padding=padding, groups=groups, bias=False)
    layers: list[nn.Module] = [conv, nn.BatchNorm2d(width)]
    return layers if linear else [*layers, nn.PReLU(width)]


def mobilefacenet(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> MobileFaceNet:
    """The paper's network: 1.00 million parameters at its 128-d (it says 0.99), 1.20 million at 512-d.

    InsightFace's "mbf" is about twice as large.
    """
    return MobileFaceNet(embedding_size, image_size=image_size, in_channels=in_channels)
