"""Two small networks: one that learns glyphs on a CPU in minutes, one without batch statistics for tests."""

from torch import Tensor, nn

from plsc.models.checks import check_images, check_sizes

__all__ = ["PlainNet", "SmallConv", "plainnet", "smallconv"]


class Stage(nn.Module):
    """A convolution that halves the resolution, then a residual one."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(in_width, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:  # [B, in_width, H, W] -> [B, width, H / 2, W / 2]
        x = self.bn1(self.down(x)).relu()
        return (x + self.bn2(self.conv(x))).relu()


class SmallConv(nn.Module):
    """Images to embeddings through three stages of width, 2 width and 4 width channels, and a batch norm at the end."""

    def __init__(self, embedding_size: int, *, image_size: int, in_channels: int, width: int) -> None:
        super().__init__()
        check_sizes(embedding_size, image_size, in_channels)
        self.embedding_size, self.image_size, self.in_channels = embedding_size, image_size, in_channels
        self.stages = nn.Sequential(Stage(in_channels, width), Stage(width, 2 * width), Stage(2 * width, 4 * width))
        self.fc = nn.Linear(4 * width * (image_size // 8) ** 2, embedding_size, bias=False)
        self.features = nn.BatchNorm1d(embedding_size)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, S, S] -> [B, D]
        check_images(images, self.image_size, self.in_channels)
        return self.features(self.fc(self.stages(images).flatten(1)))

    def recompute_blocks(self) -> list[nn.Module]:
        """The three stages."""
        return list(self.stages)


class PlainNet(nn.Module):
    """Images to embeddings by two strided convolutions and a linear layer; every sample is treated alone.

    Nothing in it depends on the rest of the batch, so any split of a batch over ranks gives the same result.
    """

    def __init__(self, embedding_size: int, *, image_size: int, in_channels: int) -> None:
        super().__init__()
        check_sizes(embedding_size, image_size, in_channels)
        self.embedding_size, self.image_size, self.in_channels = embedding_size, image_size, in_channels
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Conv2d(in_channels, 8, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 16, 3, stride=4, padding=1), nn.ReLU()),
        )
        self.fc = nn.Linear(16 * (image_size // 8) ** 2, embedding_size)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, S, S] -> [B, D]
        check_images(images, self.image_size, self.in_channels)
        return self.fc(self.blocks(images).flatten(1))

    def recompute_blocks(self) -> list[nn.Module]:
        """The two convolutions, each with its activation."""
        return list(self.blocks)


def smallconv(embedding_size: int, *, image_size: int = 48, in_channels: int = 1, width: int = 32) -> SmallConv:
    """0.29 million parameters and the embedding layer."""
    return SmallConv(embedding_size, image_size=image_size, in_channels=in_channels, width=width)


def plainnet(embedding_size: int, *, image_size: int = 48, in_channels: int = 1) -> PlainNet:
    """A thousand parameters and the embedding layer."""
    return PlainNet(embedding_size, image_size=image_size, in_channels=in_channels)
