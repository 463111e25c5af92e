"""Mirroring and normalising: C++ and its twin against numpy's own words, every byte and odd sizes."""

import numpy as np
import pytest
import torch

from plsc.data import pixels


@pytest.fixture(params=["built", "twin"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "twin":
        monkeypatch.setattr(pixels, "_native", None)
    elif pixels._native is None:
        pytest.skip("plsc.data._pixels is not built")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [1, 2, 5, 6, 7, 10, 11, 12, 13, 112])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("height", [1, 2, 9])
def test_mirror(height: int, width: int, channels: int) -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 256, (height, width + 3, channels), np.uint8)
    for image in (
        np.ascontiguousarray(wide[:, :width]),
        wide[:, 2 : 2 + width],
        wide[::-1, :width],
        wide[:, :width][:, ::-1],
    ):
        around = np.full((3, *image.shape), 7, np.uint8)
        pixels.mirror(image, around[1])
        assert np.array_equal(around[1], image[:, ::-1])
        assert (around[[0, 2]] == 7).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("channels", [1, 3])
def test_normalise_is_the_rounded_quotient(channels: int) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(channels * 3).view(-1, 8, 3, channels)
    out = torch.full((len(every) + 1, 8, 3, channels), torch.nan)
    pixels.normalise(every, out[:-1])
    exact = ((every.double() - 127.5) / 127.5).float()
    assert torch.equal(out[:-1], exact) and out[-1].isnan().all()
    strided = every.transpose(1, 2)
    assert torch.equal(pixels.normalise(strided, torch.empty(strided.shape)), exact.transpose(1, 2))
