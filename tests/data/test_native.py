"""The native parts of reading and their twins: mirroring, normalising, indices in text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data import native, pixels, record_index


@pytest.fixture(params=["built", "twin"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "twin":
        monkeypatch.setattr(native, "kernels", None)
    elif native.kernels is None:
        pytest.skip("plsc.data._native is not built")


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


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**18 + 5), st.integers(0, 10**19)), max_size=6), st.data())
def test_lines_of_an_index_in_c_and_in_numpy(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """The native parser and its twin: the same numbers, and the same texts left to the slow way."""
    if native.kernels is None:
        pytest.skip("plsc.data._native is not built")
    text = b"".join(b"%d\t%d\n" % row for row in rows)
    if data.draw(st.booleans()) and text:
        place = data.draw(st.integers(0, len(text) - 1))
        text = (
            text[:place]
            + data.draw(st.sampled_from([b"", b"\t", b"\n", b" ", b"-", b"7", b"\x00", b"\xff"]))
            + text[place + 1 :]
        )
    got = record_index.parse_plain(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "kernels", None)
        expected = record_index.parse_plain(text) if text else np.empty((0, 2), np.int64)
    assert (got is None) == (expected is None)
    assert got is None or np.array_equal(got, expected)
