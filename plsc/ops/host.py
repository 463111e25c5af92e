"""Where the host may look at a tensor: not on a GPU, where it would wait until everything queued before is done."""

from torch import Tensor


def reads_freely(x: Tensor) -> bool:
    """Whether the host reads the numbers of x, or how many of them fulfil something, without waiting for a device."""
    return x.device.type == "cpu"
