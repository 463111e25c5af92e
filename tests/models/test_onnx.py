"""Backbones leave for ONNX: any batch size, the same embeddings, and first nodes that InsightFace does not misread."""

from pathlib import Path

import pytest
import torch

from plsc.models import build

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "vit_tiny", "resnet50", "smallconv", "plainnet"])
def test_export(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = build(name, 32, image_size=48)
    with torch.no_grad():
        for _ in range(20):  # batch statistics like those of a trained network
            model(torch.randn(8, 3, 48, 48))
    model.eval()
    path = str(tmp_path / "model.onnx")
    batch = torch.export.Dim("batch", min=1)
    torch.onnx.export(
        model, (torch.randn(2, 3, 48, 48),), path, dynamo=True, external_data=False, dynamic_shapes=({0: batch},)
    )
    graph = onnx.load(path).graph
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert graph.node[0].op_type == "Conv"
    # a "Sub" and a "Mul" among the first eight nodes would be taken for a normalisation inside the model
    assert not any(node.op_type in ("Sub", "Mul", "Div") for node in graph.node[:8])
    for size in (1, 5):
        images = torch.randn(size, 3, 48, 48)
        (embedding,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(embedding), model(images), rtol=1e-3, atol=1e-4)
