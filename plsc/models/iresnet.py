"""IResNet: the residual networks of face recognition, with the resolution kept high and the embedding batch-normalised.

Parameters bear the names InsightFace's arcface_torch gives them, so its checkpoints load.
Sources: Deng et al. 2019, ArcFace (the "BN-Conv-BN-PReLU-Conv-BN" unit); Duta et al. 2020, Improved Residual Networks.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from plsc.models.checks import check_images, check_sizes

__all__ = ["IResNet", "iresnet18", "iresnet34", "iresnet50", "iresnet100", "iresnet200"]


class IBlock(nn.Module):
    """BN-conv-BN-PReLU-conv-BN beside a shortcut; the second convolution has the stride."""

    def __init__(self, in_width: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_width)
        self.conv1 = nn.Conv2d(in_width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.prelu = nn.PReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_width != width:
            shortcut = nn.Conv2d(in_width, width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:  # [B, in_width, H, W] -> [B, width, H / stride, W / stride]
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        return self.bn3(self.conv2(y)) + self.downsample(x)


class IResNet(nn.Module):
    """Images to embeddings through four stages of blocks, each of which halves the resolution.

    depths: blocks in each stage. The embedding is a linear layer over the whole last map and a batch norm whose gain
    stays at 1 (its bias is learnt), so its scale is known and its direction carries the identity.
    """

    def __init__(self, depths: Sequence[int], embedding_size: int, *, image_size: int, in_channels: int) -> None:
        super().__init__()
        check_sizes(embedding_size, image_size, in_channels)
        self.embedding_size, self.image_size, self.in_channels = embedding_size, image_size, in_channels
        self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.prelu = nn.PReLU(64)
        self.layer1 = _stage(64, 64, depth=depths[0])
        self.layer2 = _stage(64, 128, depth=depths[1])
        self.layer3 = _stage(128, 256, depth=depths[2])
        self.layer4 = _stage(256, 512, depth=depths[3])
        self.bn2 = nn.BatchNorm2d(512)
        self.fc = nn.Linear(512 * (image_size // 16) ** 2, embedding_size)
        self.features = nn.BatchNorm1d(embedding_size)
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, S, S] -> [B, D]
        check_images(images, self.image_size, self.in_channels)
        x = self.prelu(self.bn1(self.conv1(images)))  # [B, 64, S, S]
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # [B, 512, S / 16, S / 16]
        return self.features(self.fc(self.bn2(x).flatten(1)))

    def recompute_blocks(self) -> list[nn.Module]:
        """The residual blocks, in the order they run."""
        return [module for module in self.modules() if isinstance(module, IBlock)]


def _stage(in_width: int, width: int, *, depth: int) -> nn.Sequential:
    first = IBlock(in_width, width, stride=2)
    return nn.Sequential(first, *(IBlock(width, width, stride=1) for _ in range(depth - 1)))


def iresnet18(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> IResNet:
    """24.0 million parameters at 512-d, 112 px."""
    return IResNet((2, 2, 2, 2), embedding_size, image_size=image_size, in_channels=in_channels)


def iresnet34(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> IResNet:
    """34.1 million parameters at 512-d, 112 px."""
    return IResNet((3, 4, 6, 3), embedding_size, image_size=image_size, in_channels=in_channels)


def iresnet50(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> IResNet:
    """43.6 million parameters at 512-d, 112 px."""
    return IResNet((3, 4, 14, 3), embedding_size, image_size=image_size, in_channels=in_channels)


def iresnet100(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> IResNet:
    """65.2 million parameters at 512-d, 112 px."""
    return IResNet((3, 13, 30, 3), embedding_size, image_size=image_size, in_channels=in_channels)


def iresnet200(embedding_size: int, *, image_size: int = 112, in_channels: int = 3) -> IResNet:
    """118.8 million parameters at 512-d, 112 px."""
    return IResNet((6, 26, 60, 6), embedding_size, image_size=image_size, in_channels=in_channels)
