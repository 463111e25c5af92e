"""Exports: an ONNX file that face programs take, the digest of a model, and files of embeddings and centres."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from plsc.comm import CommError, Communicator, Shard, mark, run_ranks
from plsc.train import export, export_model
from plsc.train.export import (
    export_centres,
    export_embeddings,
    export_head_centres,
    export_onnx,
    gather_centres,
    model_digest,
    read_embeddings,
)

DIGEST = hashlib.sha256(b"a model").hexdigest()


class FaceNet(nn.Module):
    """What face backbones are made of, and products and differences early on that must not be taken for a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.PReLU(8))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.BatchNorm2d(8), nn.PReLU(8))
        self.dropout = nn.Dropout(0.5)
        self.features = nn.Sequential(nn.Linear(8 * 28 * 28, 16), nn.BatchNorm1d(16))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem((images - 0.25) * 1.5)
        x = x * torch.sigmoid(self.body(x).mean((2, 3), keepdim=True)) - 0.5
        found: Tensor = self.features(self.dropout(self.body(x)).flatten(1))
        return found


@pytest.fixture(scope="module")
def backbone() -> nn.Module:
    torch.manual_seed(0)
    net = FaceNet()
    with torch.no_grad():
        net(torch.randn(8, 3, 112, 112))  # statistics other than 0 and 1
    return net.train()


@pytest.fixture(scope="module")
def exported(backbone: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_onnx(backbone, tmp_path_factory.mktemp("onnx") / "deep" / "model.onnx", image_size=112)


def insightface_takes(path: Path) -> tuple[str | None, float, float]:
    """The rules by which InsightFace's model zoo picks a class for a file, and the mean and std it then applies."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), session.get_outputs()
    _, _, height, width = inputs[0].shape
    kind = None
    if len(outputs) >= 5:
        kind = "detector"
    elif (height, width) == (192, 192):
        kind = "landmarks"
    elif (height, width) == (96, 96):
        kind = "attributes"
    elif len(inputs) == 2 and (height, width) == (128, 128):
        kind = "swapper"
    elif height == width and isinstance(height, int) and height >= 112 and height % 16 == 0:
        kind = "recognition"
    names = [node.name for node in onnx.load(path).graph.node[:8]]
    find_sub = any(name.startswith(("Sub", "_minus")) for name in names)
    find_mul = any(name.startswith(("Mul", "_mul", "Div")) for name in names)
    return kind, *((0.0, 1.0) if find_sub and find_mul else (127.5, 127.5))


def test_the_file_is_one_that_face_programs_take(exported: Path) -> None:
    assert [entry.name for entry in exported.parent.iterdir()] == ["model.onnx"]  # no side file, nothing half-written
    assert insightface_takes(exported) == ("recognition", 127.5, 127.5)
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type) == ("data", "tensor(float)")
    assert isinstance(given.shape[0], str) and given.shape[1:] == [3, 112, 112]
    assert made.name == "embedding" and made.shape[1:] == [16]
    model = onnx.load(exported)
    assert not [node.name for node in model.graph.node if node.name.lower().startswith(("sub", "mul", "div", "_"))]
    widths = [onnx.numpy_helper.to_array(weight).dtype.itemsize for weight in model.graph.initializer]
    assert min(widths) >= 4 and len(model.graph.node) >= 8
    export.check_contract(model, image_size=112)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_onnx_gives_the_embeddings_of_torch(backbone: nn.Module, exported: Path, batch: int) -> None:
    images = torch.rand(batch, 3, 112, 112, generator=torch.Generator().manual_seed(batch)) * 2 - 1
    assert backbone.training  # still in the mode it was in
    with torch.no_grad():
        expected = copy.deepcopy(backbone).eval()(images).numpy()
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"data": images.numpy()})
    assert np.linalg.norm(found - expected, axis=1).max() < 1e-5 * np.linalg.norm(expected, axis=1).min()
    assert abs(np.linalg.norm(found, axis=1) - 1).min() > 1e-2  # not normalised


def test_the_file_says_what_it_is_and_not_where_it_was_made(backbone: nn.Module, exported: Path) -> None:
    model = onnx.load(exported)
    notes = {entry.key: entry.value for entry in model.metadata_props}
    assert notes["model_digest"] == model_digest(backbone)
    assert (notes["input_mean"], notes["input_std"], notes["color_order"]) == ("127.5", "127.5", "RGB")
    assert (notes["image_size"], notes["embedding_size"], notes["embedding_normalized"]) == ("112", "16", "false")
    assert notes["plsc_version"]
    content = exported.read_bytes()
    for trace in (str(Path(__file__).parent).encode(), b"site-packages", b"stack_trace", b"test_export"):
        assert trace not in content


def test_misleading_names_of_nodes_are_changed(exported: Path) -> None:
    model = onnx.load(exported)
    wanted = ["Sub_3", "Mul", "_mulscalar0", "_minusscalar0", "Div_1", "div", "node_Mul", "kept"]
    for node, name in zip(model.graph.node, wanted, strict=False):
        node.name = name
    with pytest.raises(ValueError, match=r"got nodes named \['Sub_3', 'Mul'"):
        export.check_contract(model, image_size=112)
    export_model._clean(model)
    export.check_contract(model, image_size=112)
    names = [node.name for node in model.graph.node]
    assert names[6:8] == ["node_Mul", "kept"] and len(set(names)) == len(names)
    assert len(model.metadata_props) == 0 and onnxruntime.InferenceSession(model.SerializeToString()) is not None


@pytest.mark.slow
def test_what_cannot_be_exported_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")

    class Branching(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1) if images.sum() > 0 else -images.flatten(1)

    with pytest.raises(ValueError, match="torch cannot export it as ONNX"):
        export_onnx(Branching(), path, image_size=112)
    with pytest.raises(ValueError, match="output dimensions"):
        export_onnx(nn.Conv2d(3, 4, 3), path, image_size=112)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_other_sizes_and_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "plsc")
    net = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.Flatten(), nn.Linear(4 * 15 * 15, 8)).to(torch.bfloat16)
    path = export_onnx(net, tmp_path / "small.onnx", image_size=32, in_channels=1, input_name="pixels")
    (said,) = [record for record in caplog.records if "InsightFace" in record.message]
    assert said.levelname == "INFO" and said.message.startswith("small.onnx takes 32 px images; ")
    assert net[0].weight.dtype == torch.bfloat16  # a copy was exported
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert session.run(None, {"pixels": np.zeros((3, 1, 32, 32), np.float32)})[0].shape == (3, 8)


# ---- the digest


def digest_of(change: Callable[[nn.Module], Any]) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    change(net)
    return model_digest(net)


def test_digest_is_that_of_the_content() -> None:
    base = digest_of(lambda net: None)
    assert base == digest_of(lambda net: net.eval()) and len(base) == 64
    assert base == model_digest(nn.DataParallel(_digested()))
    changed = {
        digest_of(lambda net: net[0].weight.data[0, 0].add_(1e-6)),
        digest_of(lambda net: net[1].running_mean.add_(1)),
        digest_of(lambda net: net.double()),
        digest_of(lambda net: net.bfloat16()),
        digest_of(lambda net: setattr(net[0].weight, "data", net[0].weight.data.reshape(3, 2))),
        digest_of(lambda net: net.insert(0, nn.Identity())),
    }
    assert len(changed) == 6 and base not in changed


def _digested() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_digest_is_as_documented() -> None:
    """Anyone can recompute it: for each name in order a length, a description in JSON and the bytes."""
    net = nn.Linear(2, 1)
    expected = hashlib.sha256()
    for name, value in (("bias", net.bias), ("weight", net.weight)):
        head = f'["{name}", "torch.float32", {list(value.shape)}]'.encode()
        expected.update(len(head).to_bytes(8, "little") + head + value.detach().numpy().tobytes())
    assert model_digest(net) == expected.hexdigest()


# ---- embeddings and centres


def test_embeddings_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BLOCK_ROWS", 4)
    rows = np.random.default_rng(0).normal(scale=20, size=(10, 6)).astype(np.float32)
    names = [f"{'é' * i}.jpg" for i in range(10)]
    path = export_embeddings(tmp_path / "e.safetensors", rows, labels=range(10, 20), names=names, digest=DIGEST)
    found = read_embeddings(path)
    lengths = np.linalg.norm(rows, axis=1)
    assert found.embeddings.dtype == np.float32 and found.normalized
    np.testing.assert_allclose(np.linalg.norm(found.embeddings.astype(np.float64), axis=1), 1, atol=2e-4)
    np.testing.assert_allclose(found.embeddings, rows / lengths[:, None], rtol=1e-5)
    np.testing.assert_allclose(found.norms, lengths, rtol=1e-6)
    assert (found.labels.dtype, found.labels.tolist()) == (np.dtype(np.int64), list(range(10, 20)))
    assert found.ids.tolist() == list(range(10)) and found.names == tuple(names)
    assert found.digest == DIGEST and found.metadata["embedding_size"] == "6"
    assert load_file(path)["embeddings"].shape == (10, 6)  # any reader of safetensors takes it
    assert list(tmp_path.iterdir()) == [path]


def test_embeddings_as_they_are(tmp_path: Path) -> None:
    rows = np.array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32)
    path = export_embeddings(tmp_path / "e", rows, labels=[1, 2], ids=[7, 9], digest=DIGEST, normalize=False)
    found = read_embeddings(path)
    assert not found.normalized and found.names is None
    assert (
        found.embeddings.tolist() == rows.tolist() and found.norms.tolist() == [5, 0] and found.ids.tolist() == [7, 9]
    )
    empty = export_embeddings(tmp_path / "none", np.empty((0, 4)), labels=np.empty(0, int), names=[], digest=DIGEST)
    assert read_embeddings(empty).embeddings.shape == (0, 4) and read_embeddings(empty).names == ()


@pytest.mark.parametrize("centers", [None, 3])
@pytest.mark.parametrize(("ranks", "classes"), [(1, 5), (3, 11), (4, 5)])
def test_centres_of_a_head_over_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, classes: int, centers: int | None
) -> None:
    """The file is the same, byte for byte, as that of the whole weight; 5 classes on 4 ranks leave one rank none."""
    monkeypatch.setattr(export, "BLOCK_ROWS", 2)
    weight = torch.randn(classes, *([centers] if centers else []), 4, generator=torch.Generator().manual_seed(0))
    names = [f"person {i}" for i in range(classes)]
    whole = export_centres(tmp_path / "whole", weight, class_names=names, digest=DIGEST)

    def body(comm: Communicator) -> Path:
        return export_head_centres(tmp_path / "cut", Head(weight, comm), class_names=names, digest=DIGEST)

    assert run_ranks(ranks, body) == [tmp_path / "cut"] * ranks
    assert (tmp_path / "cut").read_bytes() == whole.read_bytes()
    found = read_embeddings(whole)
    unit = torch.nn.functional.normalize(weight, dim=-1).numpy()
    np.testing.assert_allclose(found.embeddings, unit, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.norms, weight.norm(dim=-1).numpy(), rtol=1e-6)
    assert found.labels.tolist() == list(range(classes)) and found.names == tuple(names)
    assert found.metadata["format"] == "plsc-centres" and found.metadata["sub_centers"] == str(centers or 1)


class Head:
    """A rank's rows of a weight, as the class-parallel heads hold them."""

    def __init__(self, whole: Tensor, comm: Communicator) -> None:
        self.comm, self.shard = comm, Shard.of(len(whole), comm)
        self.weight: Tensor = mark(nn.Parameter(whole[self.shard.start : self.shard.stop].clone()), self.shard)


def test_only_the_writer_gets_the_rows() -> None:
    weight = torch.arange(14.0).reshape(7, 2)

    def body(comm: Communicator) -> list[np.ndarray]:
        return list(gather_centres(Head(weight.half(), comm), block=2))

    first, *others = run_ranks(3, body)
    assert np.concatenate(first).tolist() == weight.tolist() and first[0].dtype == np.float32
    assert max(len(block) for block in first) == 2
    assert all(len(block) == 0 for blocks in others for block in blocks)


@pytest.mark.parametrize("bad", ["row", "names"])
def test_an_error_of_the_writer_is_raised_on_all_ranks(tmp_path: Path, bad: str) -> None:
    weight = torch.ones(6, 2)
    if bad == "row":
        weight[5] = 0
    heard: dict[int, str] = {}

    def body(comm: Communicator) -> None:
        try:
            names = ["a"] if bad == "names" else None
            export_head_centres(tmp_path / "cut", Head(weight, comm), class_names=names, digest=DIGEST)
        except (ValueError, CommError) as error:
            heard[comm.rank] = str(error)

    run_ranks(3, body)
    expected = "row 5 is zero" if bad == "row" else "names: got 1, expected 6"
    assert len(heard) == 3 and all(expected in message for message in heard.values())
    assert list(tmp_path.iterdir()) == []


def test_centres_of_the_class_parallel_head(tmp_path: Path) -> None:
    nn_package = pytest.importorskip("plsc.nn")

    def body(comm: Communicator) -> Tensor:
        head = nn_package.ClassParallelHead(4, 7, comm=comm, sub_centers=2)
        export_head_centres(tmp_path / "cut", head, digest=DIGEST)
        rows: Tensor = head.weight.detach().clone()
        return rows

    whole = torch.cat(run_ranks(2, body))
    unit = torch.nn.functional.normalize(whole, dim=-1).numpy()
    np.testing.assert_allclose(read_embeddings(tmp_path / "cut").embeddings, unit, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"digest": "model.pt"}, "64 hex digits"),
        ({"labels": [1, 2]}, r"labels: got int64 of shape \(2,\), expected integers \[3\]"),
        ({"labels": [0.5, 1, 2]}, "labels: got float64"),
        ({"names": ["a"]}, "names: got 1, expected 3"),
        ({"embeddings": np.ones(3)}, r"expected \[N, D\]"),
        ({"embeddings": np.array([[1.0], [0.0], [1.0]])}, "row 1 is zero"),
        ({"embeddings": np.array([[1.0], [1.0], [np.nan]])}, "row 2 is zero or not finite"),
    ],
)
def test_errors_leave_no_file(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"embeddings": np.ones((3, 2)), "labels": [0, 1, 2], "digest": DIGEST, **arguments}
    with pytest.raises(ValueError, match=message):
        export_embeddings(tmp_path / "e", given.pop("embeddings"), **given)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"embeddings": np.ones((1, 1), np.float32)}, tmp_path / "other")
    with pytest.raises(ValueError, match="got format None"):
        read_embeddings(tmp_path / "other")
