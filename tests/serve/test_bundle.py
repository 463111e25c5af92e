"""Bundles: what is written opens and gives torch's embeddings; what was exchanged or damaged does not open."""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from plsc.data.embeddings import map_safetensors, open_embeddings, write_safetensors
from plsc.serve import bundle as bundle_module
from plsc.serve.bundle import Bundle, Threshold, write_bundle
from plsc.serve.checks import check_shapes
from plsc.serve.index import recall
from plsc.serve.model import EmbeddingModel
from plsc.train.export import export_centres, model_digest, read_embeddings

from .conftest import CLASSES, DIGEST, DIM, NAMES, SIZE, draw


def test_a_bundle_opens_and_knows_its_classes(bundle: Bundle) -> None:
    about = bundle.manifest
    assert (about.image_size, about.channels, about.color_order, about.embedding_size) == (SIZE, 3, "RGB", DIM)
    assert (about.mean, about.std, about.metric, about.flip, about.storage) == (127.5, 127.5, "cosine", True, "fp32")
    assert (about.num_classes, about.named, about.thumbnails) == (CLASSES, True, True)
    assert [bundle.class_name(i) for i in range(CLASSES)] == NAMES
    assert bundle.thumbnail(3) is not None and bundle.thumbnail(3) != bundle.thumbnail(4)
    rows, _ = bundle.model.embed(np.stack([draw(i) for i in range(CLASSES)]))
    scores, found = bundle.index.search(rows, 1)
    assert found[:, 0].tolist() == list(range(CLASSES))
    np.testing.assert_allclose(scores[:, 0], 1, atol=1e-5)


def test_embeddings_are_those_of_torch(bundle: Bundle, backbone: nn.Module) -> None:
    images = np.stack([draw(100 + i) for i in range(5)])
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float().sub(127.5).div(127.5)
    with torch.no_grad():
        wanted = (backbone(x) + backbone(x.flip(-1))).double().numpy()
    rows, norms = bundle.model.embed(images)
    np.testing.assert_allclose(norms, np.linalg.norm(wanted, axis=1), rtol=1e-5)
    np.testing.assert_allclose(rows, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1, atol=2e-4)


@pytest.mark.skipif(importlib.util.find_spec("insightface") is None, reason="needs the insightface package")
def test_insightface_takes_the_onnx(bundle_path: Path, backbone: nn.Module) -> None:
    """Its own model zoo takes it for recognition, normalises as in training, and finds torch's embedding."""
    from insightface.model_zoo import get_model  # type: ignore[import-not-found]

    model = get_model(str(bundle_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert model.taskname == "recognition" and (model.input_mean, model.input_std) == (127.5, 127.5)
    pixels = draw(7)
    found = model.get_feat(pixels[:, :, ::-1])[0]  # BGR, as OpenCV reads
    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float().sub(127.5).div(127.5)
    with torch.no_grad():
        wanted = backbone(x)[0].numpy()
    assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_insightfaces_rules_hold(bundle_path: Path) -> None:
    """Those of its router and its ArcFaceONNX, for where the package is not installed."""
    session = onnxruntime.InferenceSession(str(bundle_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (given,), outputs = session.get_inputs(), session.get_outputs()
    assert len(outputs) == 1 and isinstance(given.shape[0], str)
    assert given.shape[2] == given.shape[3] == SIZE and SIZE >= 112 and SIZE % 16 == 0 and SIZE not in (96, 192)


@pytest.mark.parametrize(("storage", "dtype"), [("fp16", np.float16), ("int8", np.int8)])
def test_smaller_centres(
    make_bundle: Callable[..., Path], bundle: Bundle, tmp_path: Path, storage: str, dtype: type
) -> None:
    small = Bundle.open(make_bundle(tmp_path / "b", storage=storage), threads=1)
    assert small.manifest.storage == storage and small.index._rows.dtype == dtype
    assert small.class_names is not None and list(small.class_names) == NAMES
    queries = bundle.model.embed(np.stack([draw(i) for i in range(CLASSES)]))[0]
    assert recall(small.index.search(queries, 3)[1], bundle.index.search(queries, 3)[1]) > 0.9
    np.testing.assert_allclose(small.index.search(queries, 1)[0], 1, atol=0.01)
    file = read_embeddings(tmp_path / "b" / "centres.safetensors")
    assert (file.scales is None) == (storage == "fp16") and file.metadata["storage"] == storage


@pytest.mark.parametrize("name", ["model.onnx", "centres.safetensors", "thumbnails.safetensors"])
@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_wrong_digests_are_refused(make_bundle: Callable[..., Path], tmp_path: Path, name: str, damage: str) -> None:
    path = make_bundle(tmp_path / "b") / name
    data = bytearray(path.read_bytes())
    path.unlink()  # it may be linked to the export's file
    if damage == "bit":
        data[len(data) // 2] ^= 1
    if damage != "gone":
        path.write_bytes(data if damage == "bit" else data[:-1])
    words = {"bit": "damaged or exchanged", "cut": "the manifest says", "gone": "no such file"}[damage]
    with pytest.raises(ValueError, match=words):
        Bundle.open(tmp_path / "b")


def test_centres_of_another_model_are_refused(exported: Path, tmp_path: Path) -> None:
    other = export_centres(tmp_path / "c.safetensors", torch.ones(3, DIM), digest=DIGEST)
    with pytest.raises(ValueError, match="are of different models"):
        write_bundle(
            tmp_path / "b", onnx=exported / "model.onnx", centres=other, name="x", plsc_version="0", flip=False
        )
    assert not (tmp_path / "b").exists() and [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def reseal(folder: Path) -> None:
    """Digests as if the bundle had been written so: of its files, where they were changed, and of its manifest."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    for name, about in content["files"].items() if isinstance(content["files"], dict) else ():
        file = folder / name
        if isinstance(about, dict) and name in bundle_module.FILES and len(about["sha256"]) == 64:
            data = file.read_bytes()
            about["sha256"] = hashlib.sha256(data).hexdigest()
            about["bytes"] = len(data) if isinstance(about["bytes"], int) else about["bytes"]
    content.pop("manifest_sha256", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}))


def test_manifests_that_lie(make_bundle: Callable[..., Path], tmp_path: Path, backbone: nn.Module) -> None:
    folder = make_bundle(tmp_path / "b")
    path = folder / "manifest.json"
    good = json.loads(path.read_text())
    assert good["model_digest"] == model_digest(backbone)
    rate = good["thresholds"][0]
    for change, words in (
        ({"format_version": 3}, "version 3, expected 'plsc-bundle', 2"),
        ({"format_version": 2.0}, "version 2.0, expected"),
        ({"format_version": True}, "version True, expected"),
        ({"format": "zip"}, "format 'zip', version 2"),
        ({"model_digest": DIGEST}, "the model are of digest"),
        ({"embedding_size": 7}, "the manifest says 7"),
        ({"files": {**good["files"], "../../etc/passwd": {"sha256": "", "bytes": 1}}}, "files \\["),
        ({"files": {}}, "expected model.onnx"),
        ({"surprise": 1}, "surprise"),
        ({"num_classes": 500}, "have num_classes 30, the manifest says 500"),
        ({"num_classes": 3}, "have num_classes 30"),
        ({"num_classes": "30"}, "num_classes '30', expected int"),
        ({"num_classes": True}, "num_classes True"),
        ({"image_size": 96}, "have image_size 112"),
        ({"image_size": 0}, "at least 1"),
        ({"channels": 1, "color_order": "grey"}, "have channels 3"),
        ({"color_order": "BGR"}, "order 'BGR'"),
        ({"mean": 0}, "have mean 127.5"),
        ({"std": 0}, "std above 0"),
        ({"std": float("nan")}, "std above 0"),
        ({"flip": "yes"}, "flip 'yes', expected bool"),
        ({"name": None}, "name None, expected str"),
        ({"metric": "l2"}, "expected 'cosine'"),
        ({"storage": "int4"}, "expected one of fp32"),
        ({"storage": "int8"}, "have storage fp32"),
        ({"named": False}, "have named True"),
        ({"thumbnails": False}, "files \\["),
        ({"thresholds": [{**rate, "threshold": "high"}]}, "threshold 'high' among"),
        ({"thresholds": [{**rate, "threshold": float("nan")}]}, "threshold nan among"),
        ({"thresholds": [{**rate, "threshold": 7}]}, "expected a cosine"),
        ({"thresholds": [{**rate, "far": 0}]}, "far 0 among"),
        ({"thresholds": [{**rate, "tar": 2}]}, "tar 2"),
        ({"thresholds": [{**rate, "measured_far": 0.5}]}, "measured_far 0.5 and tar 0.99 at far 0.01, expected"),
        ({"thresholds": [rate, rate]}, "expected falling rates"),
        ({"thresholds": good["thresholds"][::-1]}, "expected falling rates"),
        ({"thresholds": [rate, {**good["thresholds"][1], "threshold": 0.4}]}, "each at a threshold no lower"),
        ({"thresholds": [rate, {**good["thresholds"][1], "tar": 1}]}, "a tar no higher"),
        ({"probe": "?"}, "a probe that cannot be read"),
        ({"probe": ""}, "no probe"),
        ({"probe": base64.b64encode(np.ones(DIM, "<f2").tobytes() * 2).decode()}, "weights were exchanged"),
        ({"thresholds": [3]}, "argument after"),
        ({"thresholds": None}, "NoneType"),
        ({"files": {name: {"sha256": "x", "bytes": 1} for name in good["files"]}}, "sha256 'x'"),
        ({"files": {name: {**about, "bytes": "1"} for name, about in good["files"].items()}}, "bytes '1'"),
        ({"files": {name: 1 for name in good["files"]}}, "export the bundle again"),
    ):
        path.write_text(json.dumps({**good, **change}))
        reseal(folder)
        with pytest.raises(ValueError, match=words):
            Bundle.open(folder)
    for text, words in (("{", "Expecting"), ("[]", "a list, expected an object"), ("3", "a int, expected an object")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"got .*{words}.*export the bundle again"):
            Bundle.open(folder)
    with pytest.raises(ValueError, match="is not a bundle"):
        Bundle.open(tmp_path)


def test_writing_replaces_a_bundle_and_nothing_else(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    make_bundle(tmp_path / "b")
    make_bundle(tmp_path / "b", storage="int8", thumbnails=None)
    assert Bundle.open(tmp_path / "b").manifest.storage == "int8" and [p.name for p in tmp_path.iterdir()] == ["b"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("x")
    with pytest.raises(ValueError, match="is not a bundle; expected a new folder"):
        make_bundle(tmp_path / "home")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match="is not a bundle; expected a new folder"):
            make_bundle(tmp_path / name)
    with pytest.raises(ValueError, match="expected one of fp32, fp16, int8"):
        make_bundle(tmp_path / "b", storage="int4")
    assert Bundle.open(tmp_path / "b").manifest.storage == "int8"


def test_an_edited_manifest_is_noticed(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """Edits that no other check can see; another layout of the same values is none."""
    path = make_bundle(tmp_path / "b") / "manifest.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(good.items()))))
    assert Bundle.open(tmp_path / "b").manifest.name == "small"
    lower = [{**one, "threshold": one["threshold"] - 0.2} for one in good["thresholds"]]
    for change in ({"name": "other"}, {"flip": False}, {"thresholds": lower}, {"manifest_sha256": "0" * 64}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match="it was edited; export the bundle again"):
            Bundle.open(tmp_path / "b")


def test_the_digest_of_a_manifest_cannot_be_taken_off(
    make_bundle: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bundle of today without it does not open, nor one with null; one of the version before does, with a warning."""
    path = make_bundle(tmp_path / "b") / "manifest.json"
    good = json.loads(path.read_text())
    bare = {name: value for name, value in good.items() if name != "manifest_sha256"}
    for content, words in (
        (bare, "got no 'manifest_sha256'"),
        ({**good, "manifest_sha256": None}, "manifest_sha256 None"),
        ({**bare, "format_version": 1, "manifest_sha256": None}, "manifest_sha256 None"),
        ({**good, "format_version": 1}, "it was edited"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=words):
            Bundle.open(tmp_path / "b")
    assert not caplog.text
    old = {name: value for name, value in bare.items() if name != "probe"}
    path.write_text(json.dumps({**old, "format_version": 1}))
    assert Bundle.open(tmp_path / "b").manifest.num_classes == CLASSES
    assert "of an older version, without a digest of itself" in caplog.text


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], Any]) -> None:
    """A file of tensors with something in it changed."""
    found, metadata = map_safetensors(path)
    tensors = {name: np.array(value) for name, value in found.items()}
    change(tensors, metadata)
    path.unlink()
    write_safetensors(path, [(n, str(t.dtype), t.shape, [t]) for n, t in tensors.items()], metadata)


def put(name: str, at: Any, value: Any) -> Callable[[dict[str, np.ndarray], dict[str, str]], Any]:
    return lambda tensors, _: tensors[name].__setitem__(at, value)


CENTRES_THAT_LIE: list[tuple[Callable[[dict[str, np.ndarray], dict[str, str]], Any], str]] = [
    (put("embeddings", ..., np.nan), "row 0 has length nan, expected 1"),
    (put("embeddings", (5, 3), np.nan), "row 5 has length nan"),
    (put("embeddings", 29, 0), "row 29 has length 0, expected 1"),
    (lambda t, _: t.update(embeddings=t["embeddings"] * 3), "row 0 has length 3"),
    (lambda t, _: t.update(embeddings=t["embeddings"] * np.float32(1.01)), r"row 0 has length 1\.01"),
    (lambda _, m: m.update(normalized="false"), "rows that are not of unit length"),
    (lambda _, m: m.update(format="plsc-embeddings"), "got plsc-embeddings, expected plsc-centres"),
    (put("labels", 0, 7), "got label 7 in row 0, expected 0"),
    (put("ids", 20, 21), "got class number 21 in row 20, expected 20"),
    (lambda t, _: t.update(labels=t["labels"][:-1]), r"got labels int64 \[29\], expected int64 \[30\]"),
    (lambda t, _: t.update(names=t["names"][:-1]), "the offsets of its names go from 0 to"),
    (put("name_offsets", 5, 10**9), "or back, expected 0 to"),
    (put("name_offsets", 5, -3), "or back, expected 0 to"),
    (put("name_offsets", -1, 10**9), "the offsets of its names go from 0 to 1000000000"),
    (lambda t, _: t.update(name_offsets=t["name_offsets"][:-2]), r"int64 \[31\]"),
    (put("names", 0, 0xFF), "a name that is no UTF-8"),
]


@pytest.mark.parametrize(("change", "words"), CENTRES_THAT_LIE, ids=[words for _, words in CENTRES_THAT_LIE])
def test_centres_that_lie(make_bundle: Callable[..., Path], tmp_path: Path, change: Any, words: str) -> None:
    """Whoever wrote them, and with all digests right."""
    folder = make_bundle(tmp_path / "b")
    edit_tensors(folder / "centres.safetensors", change)
    reseal(folder)
    with pytest.raises(ValueError, match=words):
        Bundle.open(folder, threads=1)


def test_a_name_that_begins_inside_a_letter(exported: Path, tmp_path: Path) -> None:
    """Names that are UTF-8 together and not one by one."""
    path = tmp_path / "c.safetensors"
    export_centres(path, np.eye(3), digest=DIGEST, class_names=["\u00e9", "b", "c"])
    check_shapes(open_embeddings(path), path)
    edit_tensors(path, put("name_offsets", 1, 1))
    with pytest.raises(ValueError, match="begins inside of a letter"):
        check_shapes(open_embeddings(path), path)


@pytest.mark.parametrize("storage", ["fp16", "int8"])
def test_smaller_centres_that_lie(make_bundle: Callable[..., Path], tmp_path: Path, storage: str) -> None:
    folder = make_bundle(tmp_path / "b", storage=storage)
    name = "scales" if storage == "int8" else "embeddings"
    edit_tensors(
        folder / "centres.safetensors",
        lambda t, _: t[name][7].__imul__(2) if storage == "fp16" else put(name, 7, 2)(t, _),
    )
    reseal(folder)
    with pytest.raises(ValueError, match="row 7 has length"):
        Bundle.open(folder, threads=1)
    Bundle.open(folder, threads=1, verify=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("offsets", 1, -50), "the offsets of its thumbnails go from 0 to .*or back"),
        (put("offsets", -1, 10**9), "the offsets of its thumbnails go from 0 to 1000000000"),
        (lambda t, _: t.pop("images"), "expected images and offsets"),
        (lambda _, m: m.update(format="zip"), "got no thumbnails of plsc"),
        (lambda t, _: t.update(offsets=t["offsets"].astype(np.float32)), "with offsets float32"),
        (lambda t, _: t.update(offsets=t["offsets"][:-1]), "thumbnails of 29 classes, expected 30"),
    ],
)
def test_thumbnails_that_lie(make_bundle: Callable[..., Path], tmp_path: Path, change: Any, words: str) -> None:
    folder = make_bundle(tmp_path / "b")
    edit_tensors(folder / "thumbnails.safetensors", change)
    reseal(folder)
    with pytest.raises(ValueError, match=words):
        Bundle.open(folder, threads=1)


def _note(key: str, value: str) -> Callable[[Any], Any]:
    return lambda model: setattr(next(one for one in model.metadata_props if one.key == key), "value", value)


def _weights(model: Any) -> None:
    onnx = importlib.import_module("onnx")
    for one in model.graph.initializer:
        values = onnx.numpy_helper.to_array(one)
        if values.ndim > 1 and values.dtype == np.float32:
            one.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(values[::-1]), one.name))


def _dim(at: int, value: int | str) -> Callable[[Any], Any]:
    name = "dim_value" if isinstance(value, int) else "dim_param"
    return lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[at], name, value)


def _second_input(model: Any) -> None:
    model.graph.input.add().CopyFrom(model.graph.input[0])
    model.graph.input[1].name = "two"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_note("color_order", "BGR"), "in order BGR"),
        (_note("input_std", "nan"), "have std nan"),
        (_weights, "weights were exchanged"),
        (_dim(0, 1), "expected one input, a free batch"),
        (_dim(1, "c"), "expected one input, a free batch"),
        (_second_input, "expected one input, a free batch"),
        (lambda model: model.metadata_props.__delitem__(slice(None)), "no metadata of plsc"),
    ],
    ids=["BGR", "nan", "weights", "batch of 1", "free channels", "two inputs", "no metadata"],
)
def test_networks_that_lie(make_bundle: Callable[..., Path], tmp_path: Path, change: Any, words: str) -> None:
    onnx = pytest.importorskip("onnx")
    folder = make_bundle(tmp_path / "b")
    path = folder / "model.onnx"
    model = onnx.load(path)
    change(model)
    path.unlink()
    onnx.save(model, path)
    reseal(folder)
    with pytest.raises(ValueError, match=words):
        Bundle.open(folder, threads=1)


def test_nothing_is_written_that_would_not_open(
    make_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = [Threshold(0.5, 1e-2, 0.009, 0.99), Threshold(0.4, 1e-3, 0.001, 0.9)]
    with pytest.raises(ValueError, match="each at a threshold no lower"):
        make_bundle(tmp_path / "b", thresholds=low)
    for value in (0, np.nan):
        monkeypatch.setattr(EmbeddingModel, "_run", lambda _, x, v=value: np.full((len(x), DIM), v, np.float32))
        with pytest.raises(ValueError, match="no direction to a picture of noise"):
            make_bundle(tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_a_bundles_are_never_deleted(
    make_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gallery inside an old bundle stays, be it there before or come while the new one was written."""
    target = make_bundle(tmp_path / "b")
    kept = target / "people" / "journal"
    kept.parent.mkdir()
    kept.write_bytes(b"Ada")
    with pytest.raises(ValueError, match="got people beside a bundle's files"):
        make_bundle(target, storage="int8")
    assert kept.read_bytes() == b"Ada" and Bundle.open(target).manifest.storage == "fp32"
    (tmp_path / "aside").mkdir()
    kept.parent.rename(tmp_path / "aside" / "people")
    put = bundle_module._put_in_place

    def late(draft: Path, folder: Path) -> None:
        (tmp_path / "aside" / "people").rename(folder / "people")
        put(draft, folder)

    monkeypatch.setattr(bundle_module, "_put_in_place", late)
    assert Bundle.open(make_bundle(target, storage="int8")).manifest.storage == "int8"
    (found,) = tmp_path.rglob("journal")
    assert found.read_bytes() == b"Ada" and found.is_relative_to(tmp_path)


def test_thresholds_by_rate(bundle: Bundle) -> None:
    about = bundle.manifest
    assert about.threshold_at() == Threshold(0.7, 1e-3, 0.001, 0.9) == about.threshold_at(0.001)
    assert [one.far for one in about.thresholds] == [1e-2, 1e-3]
    with pytest.raises(ValueError, match=r"expected a rate that was measured: 0\.01, 0\.001"):
        about.threshold_at(0.5)
