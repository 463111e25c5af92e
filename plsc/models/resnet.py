"""ResNet-50 for photographs of 224 px: the reference network of image classification.

Parameters bear torchvision's names, so its checkpoints load (their `fc` is the 1000 classes of ImageNet).
Sources: He et al. 2016, Deep Residual Learning, with the stride in the 3x3 convolution (Goyal et al. 2017).
"""

from collections.abc import Sequence

from torch import Tensor, nn

from plsc.models.checks import check_images, check_sizes

__all__ = ["ResNet", "resnet50"]


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions beside a shortcut; the output has 4 * width channels."""

    def __init__(self, in_width: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_width != 4 * width:
            shortcut = nn.Conv2d(in_width, 4 * width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:  # [B, in_width, H, W] -> [B, 4 * width, H / stride, W / stride]
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Images to embeddings through four stages of bottlenecks and the mean of the last map.

    depths: blocks in each stage. `image_size` is the size it is meant for; the mean makes other sizes work too.
    """

    def __init__(self, depths: Sequence[int], embedding_size: int, *, image_size: int, in_channels: int) -> None:
        super().__init__()
        check_sizes(embedding_size, image_size, in_channels)
        self.embedding_size, self.image_size, self.in_channels = embedding_size, image_size, in_channels
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, depth=depths[0], stride=1)
        self.layer2 = _stage(256, 128, depth=depths[1], stride=2)
        self.layer3 = _stage(512, 256, depth=depths[2], stride=2)
        self.layer4 = _stage(1024, 512, depth=depths[3], stride=2)
        self.fc = nn.Linear(2048, embedding_size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:  # [B, C, S, S] -> [B, D]
        check_images(images, images.shape[-1], self.in_channels)
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))  # [B, 64, S / 4, S / 4]
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # [B, 2048, S / 32, S / 32]
        return self.fc(x.mean((2, 3)))

    def recompute_blocks(self) -> list[nn.Module]:
        """The bottlenecks, in the order they run."""
        return [module for module in self.modules() if isinstance(module, Bottleneck)]


def _stage(in_width: int, width: int, *, depth: int, stride: int) -> nn.Sequential:
    first = Bottleneck(in_width, width, stride=stride)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, stride=1) for _ in range(depth - 1)))


def resnet50(embedding_size: int, *, image_size: int = 224, in_channels: int = 3) -> ResNet:
    """23.5 million parameters and the last layer; 25,557,032 with 1000 outputs."""
    return ResNet((3, 4, 6, 3), embedding_size, image_size=image_size, in_channels=in_channels)
