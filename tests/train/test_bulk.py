"""Embeddings of a whole data set: the same to the bit on any number of ranks and after any interruption."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plsc.comm import Communicator, LocalCommunicator, run_ranks
from plsc.data.embeddings import read_embeddings
from plsc.train import bulk
from plsc.train.bulk import embed_to_file
from plsc.train.export import export_centres, model_digest

N, SIZE = 53, 6


class Numbered:
    """Sample i is a noise picture of its own."""

    num_classes = 5

    def __init__(self, broken: int = -1) -> None:
        self.labels, self.broken, self.read = np.arange(N) % 5 - 1, broken, 0

    def __len__(self) -> int:
        return N

    def name(self, i: int) -> str:
        return f"é/{i}.jpg"

    def encoded(self, i: int) -> bytes:
        return b""

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i == self.broken:
            raise OSError("disk on fire")
        self.read += 1
        return np.random.default_rng(i).integers(0, 256, (4, 4, 3), np.uint8), int(self.labels[i])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(48, SIZE)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.flatten(1))


def embed(
    target: Path,
    comm: Communicator | None = None,
    data: Numbered | None = None,
    net: nn.Module | None = None,
    **options: bool,
) -> None:
    embed_to_file(
        net or Net(),
        data or Numbered(),
        target,
        source="numbers",
        comm=comm or LocalCommunicator(),
        batch_size=4,
        piece_rows=10,
        **options,
    )


def test_rows_norms_ids_and_digest(tmp_path: Path) -> None:
    embed(tmp_path / "a.safetensors")
    found, data, net = read_embeddings(tmp_path / "a.safetensors"), Numbered(), Net().double()
    images = torch.stack([torch.from_numpy(data[i][0]) for i in range(N)]).permute(0, 3, 1, 2)
    images = (images.double() - 127.5) / 127.5
    with torch.no_grad():
        wanted = (net(images) + net(images.flip(-1))).numpy()
    norms = np.linalg.norm(wanted, axis=1)
    assert np.allclose(found.embeddings, wanted / norms[:, None], atol=1e-5)
    assert np.allclose(found.norms, norms, rtol=1e-5)
    assert abs(np.linalg.norm(found.embeddings.astype(np.float64), axis=1) - 1).max() < 2e-4
    assert found.ids.tolist() == list(range(N)) and found.labels.tolist() == data.labels.tolist()
    assert found.normalized and found.digest == model_digest(Net()) and found.names is not None
    assert found.names[7] == "é/7.jpg" and not (tmp_path / "a.safetensors.parts").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".parquet"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_any_number_of_ranks_writes_the_same_bytes(tmp_path: Path, suffix: str, ranks: int) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    embed(tmp_path / f"one{suffix}")
    net = Net()  # one for all: threads that seed and draw at once would get other weights
    run_ranks(ranks, lambda comm: embed(tmp_path / f"many{suffix}", comm, net=net))
    assert (tmp_path / f"many{suffix}").read_bytes() == (tmp_path / f"one{suffix}").read_bytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path: Path, ranks: int) -> None:
    embed(tmp_path / "whole.safetensors")
    target = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=r"sample 37 \(é/37.jpg\) cannot be read: OSError: disk on fire"):
        embed(target, data=Numbered(broken=37))
    done = sorted(path.name for path in Path(f"{target}.parts").glob("*.npy"))
    assert done == ["000000.npy", "000001.npy", "000002.npy"] and not target.exists()
    data, net = Numbered(), Net()
    run_ranks(ranks, lambda comm: embed(target, comm, data, net))
    assert target.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert data.read <= N - 30 + ranks  # only what was missing, and the probe for the size of images
    assert not Path(f"{target}.parts").exists()


def test_pieces_of_another_model_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target, other = tmp_path / "a.safetensors", Net()
    with pytest.raises(ValueError, match="sample 37"):
        embed(target, data=Numbered(broken=37))
    with torch.no_grad():
        other.fc.weight.mul_(-1)
    embed(target, net=other)
    assert "pieces of another digest are thrown away" in caplog.text
    embed(tmp_path / "b.safetensors", net=other)
    assert target.read_bytes() == (tmp_path / "b.safetensors").read_bytes()


class Changed(Numbered):
    """Some images are others, by their bytes and their pixels; the names and labels stay."""

    def __init__(self, *changed: int) -> None:
        super().__init__()
        self.changed = changed

    def encoded(self, i: int) -> bytes:
        return b"other" if i in self.changed else b""

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        pixels, label = super().__getitem__(i)
        return (255 - pixels if i in self.changed else pixels), label


@pytest.mark.parametrize("ranks", [1, 3])
def test_pieces_of_images_that_have_changed_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Also where the changed ones are none of those by which data sets are told apart."""
    monkeypatch.setattr(bulk, "COMPARED", 2)
    data, net, target = Changed(3, 27, 45), Net(), tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="sample 37"):
        embed(target, data=Numbered(broken=37))
    assert bulk.data_digest(data) == bulk.data_digest(Numbered())
    run_ranks(ranks, lambda comm: embed(target, comm, data, net))
    assert "2 pieces are of images that have changed since" in caplog.text and data.read <= N - 10 + ranks
    embed(tmp_path / "whole.safetensors", data=Changed(3, 27, 45), net=net)
    assert target.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


class Others(Numbered):
    """The same labels and names, other images."""

    def encoded(self, i: int) -> bytes:
        return b"%d" % i


@pytest.mark.parametrize("suffix", [".safetensors", ".parquet"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_file_is_kept_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, ranks: int
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    target, net, other, data = tmp_path / f"a{suffix}", Net(), Net(), Numbered()
    with torch.no_grad():
        other.fc.weight.mul_(-1)

    def again(data: Numbered, net: nn.Module = net, **options: bool) -> None:
        run_ranks(ranks, lambda comm: embed(target, comm, data, net, **options))

    again(Numbered())
    content = target.read_bytes()
    with caplog.at_level("INFO"):
        again(data)
    assert "complete already: " in caplog.text and data.read == 0 and target.read_bytes() == content
    relabelled = Numbered()
    relabelled.labels = relabelled.labels + 1
    for given, words in (
        ((data, other), "embeddings of another model, expected"),
        ((Others(),), "embeddings of other data, expected"),
        ((relabelled,), "embeddings of other data, expected"),
        ((Others(), other), "embeddings of another model, of other data, expected"),
    ):
        with pytest.raises(ValueError, match=rf"a{suffix}: got {words}.* --out, or --overwrite"):
            again(*given)
    with pytest.raises(ValueError, match="with flip true, expected"):
        again(data, flip=False)
    assert target.read_bytes() == content and not Path(f"{target}.parts").exists()
    again(data, other, overwrite=True)
    embed(tmp_path / f"b{suffix}", net=other)
    assert target.read_bytes() == (tmp_path / f"b{suffix}").read_bytes() != content


@pytest.mark.parametrize("name", ["a.safetensors", "a.parquet"])
def test_files_of_others_are_not_written_over(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    for write in (lambda: target.write_bytes(b"x"), lambda: embed_centres(target)):
        write()
        content = target.read_bytes()
        with pytest.raises(ValueError, match=rf"{name}: got a file that plsc-embed has not written, expected none"):
            embed(target)
        assert target.read_bytes() == content


def embed_centres(target: Path) -> None:
    export_centres(target, np.eye(3), digest="0" * 64)


def test_a_half_written_piece_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embed(tmp_path / "whole.safetensors")
    save, calls = np.save, []

    def fail(file: object, rows: np.ndarray, **options: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            file.write(b"half")  # type: ignore[attr-defined]
            raise OSError("the disk is full")
        save(file, rows, **options)

    monkeypatch.setattr(bulk.np, "save", fail)
    with pytest.raises(Exception, match="the disk is full"):
        embed(tmp_path / "a.safetensors")
    monkeypatch.undo()
    embed(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_no_direction_is_refused_by_name(tmp_path: Path) -> None:
    net = Net()
    with torch.no_grad():
        net.fc.weight.zero_()
        net.fc.bias.zero_()
    with pytest.raises(ValueError, match=r"sample 0 \(é/0.jpg\): its embedding is zero or not finite"):
        embed(tmp_path / "a.safetensors", net=net)


def test_parquet_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    embed(tmp_path / "a.parquet")
    embed(tmp_path / "a.safetensors")
    table, found = parquet.read_table(tmp_path / "a.parquet"), read_embeddings(tmp_path / "a.safetensors")
    assert table.schema.metadata[b"model_digest"].decode() == found.digest
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), found.embeddings)
    assert np.array_equal(table["norm"].to_numpy(), found.norms) and table["id"].to_pylist() == list(range(N))
    assert table["label"].to_pylist() == found.labels.tolist() and table["name"].to_pylist() == list(found.names or ())
