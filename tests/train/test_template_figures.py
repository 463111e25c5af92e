"""plsc-data templates on a small made protocol, against the protocol's words in plain numpy."""

import json
from pathlib import Path

import numpy as np
import pytest

from plsc import cli
from plsc.data.embeddings import name_tensors, write_safetensors

IMAGES, SUBJECTS, SIZE = 400, 40, 16
METADATA = {"format": "plsc-embeddings", "normalized": "true", "model_digest": "d"}


class Protocol:
    """Four templates a subject of some images each, in frames of media; half of the subjects in each gallery."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(3)
        self.folder = folder
        self.template = np.sort(rng.integers(0, 4 * SUBJECTS, IMAGES))
        self.template[: 4 * SUBJECTS] = np.arange(4 * SUBJECTS)  # none is without images
        self.medium = rng.integers(0, 3, IMAGES)
        centres = rng.normal(size=(SUBJECTS, SIZE))
        raw = centres[self.template // 4] + 0.9 * rng.normal(size=(IMAGES, SIZE))
        self.norms = np.linalg.norm(raw, axis=1) * rng.uniform(0.5, 2, IMAGES)
        self.units = (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)
        self.scores = rng.uniform(0.1, 1, IMAGES)
        order = rng.permutation(IMAGES)  # the file's rows stand in another order than the protocol's
        names = [f"crop/{i + 1}.jpg" for i in order]
        self.names = names
        offsets, blob = name_tensors(names)
        ids = np.arange(IMAGES)
        write_safetensors(
            folder / "e.safetensors",
            [
                ("embeddings", "float32", (IMAGES, SIZE), [self.units[order]]),
                ("labels", "int64", (IMAGES,), [np.zeros(IMAGES, np.int64)]),
                ("ids", "int64", (IMAGES,), [ids]),
                ("norms", "float32", (IMAGES,), [self.norms[order].astype(np.float32)]),
                ("name_offsets", "int64", offsets.shape, [offsets]),
                ("names", "uint8", blob.shape, [blob]),
            ],
            METADATA,
        )
        self.order = order
        rows = zip(range(1, IMAGES + 1), self.template, self.medium, strict=True)
        (folder / "tid_mid.txt").write_text("".join(f"{i}.jpg {t} {m}\n" for i, t, m in rows))
        points = " ".join(["1"] * 10)
        (folder / "points.txt").write_text(
            "".join(f"{i + 1}.jpg {points} {s!r}\n" for i, s in enumerate(self.scores.tolist()))
        )
        self.pairs = rng.integers(0, 4 * SUBJECTS, (3000, 2))
        self.pairs[:800, 1] = self.pairs[:800, 0] // 4 * 4 + rng.integers(0, 4, 800)
        self.same = self.pairs[:, 0] // 4 == self.pairs[:, 1] // 4
        lines = zip(self.pairs, self.same.astype(int), strict=True)
        (folder / "pairs.txt").write_text("".join(f"{a} {b} {s}\n" for (a, b), s in lines))
        self.galleries = [np.arange(0, 4 * SUBJECTS, 4)[:25], np.arange(0, 4 * SUBJECTS, 4)[15:]]
        self.probes = np.setdiff1d(np.arange(4 * SUBJECTS), np.arange(0, 4 * SUBJECTS, 4))
        for name, chosen in (("g1.csv", self.galleries[0]), ("g2.csv", self.galleries[1]), ("probes.csv", self.probes)):
            text = "TEMPLATE_ID,SUBJECT_ID,FILENAME\n" + "".join(f"{t},{t // 4},x.jpg\n" for t in chosen)
            (folder / name).write_text(text)

    def vectors(self, weights: np.ndarray) -> np.ndarray:
        """[T, D] by the words: mean over a medium's frames, sum over media, unit length."""
        rows, out = self.units.astype(np.float64) * weights[:, None], []
        for t in range(4 * SUBJECTS):
            mine = [rows[(self.template == t) & (self.medium == m)] for m in range(3)]
            total = sum(part.mean(axis=0) for part in mine if len(part))
            out.append(total / np.linalg.norm(total))
        return np.array(out)


@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Protocol:
    return Protocol(tmp_path_factory.mktemp("ijb"))


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_figures_are_those_of_the_words(
    protocol: Protocol, tmp_path: Path, capsys: pytest.CaptureFixture[str], scored: bool, kind: str
) -> None:
    place, file = protocol.folder, protocol.folder / "e.safetensors"
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        from plsc.data.parquet import EmbeddingWriter

        file, order = tmp_path / "e.parquet", protocol.order
        with EmbeddingWriter(file, SIZE, digest="d") as writer:
            norms = protocol.norms[order].astype(np.float32)
            writer.write(np.arange(IMAGES), protocol.units[order], norms, np.zeros(IMAGES, np.int64), protocol.names)
    out = tmp_path / "figures.json"
    args = ["templates", str(file), str(place / "tid_mid.txt"), "--pairs", str(place / "pairs.txt"), "--gallery"]
    args += [str(place / "g1.csv"), str(place / "g2.csv"), "--probes", str(place / "probes.csv"), "--out", str(out)]
    assert cli.data(args + (["--landmarks", str(place / "points.txt")] if scored else [])) == 0
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    vectors = protocol.vectors(protocol.norms * (protocol.scores if scored else 1))

    scores = (vectors[protocol.pairs[:, 0]] * vectors[protocol.pairs[:, 1]]).sum(axis=1)
    impostors = np.sort(scores[~protocol.same])[::-1]
    for point in found["verification"]["tar"]:
        allowed = int(point["far"] * len(impostors) + 1e-9)
        if allowed == 0:
            assert point["tar"] is None
        else:  # all above the first impostor that may not be accepted
            assert point["tar"] == pytest.approx((scores[protocol.same] > impostors[allowed]).mean(), abs=1e-12)
    assert "TAR at FAR 1e-06: too few pairs to tell" in printed and "3000 pairs" in printed

    shares, hits = [], []
    for gallery in protocol.galleries:
        cosines = vectors[protocol.probes] @ vectors[gallery].T  # [P, G]
        mine = protocol.probes[:, None] // 4 == gallery[None] // 4
        enrolled = mine.any(axis=1)
        mate = np.where(mine, cosines, -2).max(axis=1)
        rank = 1 + (np.where(mine, -2, cosines) >= mate[:, None]).sum(axis=1)
        shares.append([(rank[enrolled] <= k).mean() for k in (1, 5, 10)])
        strangers = np.sort(cosines[~enrolled].max(axis=1))[::-1]
        thresholds = [strangers[max(int(len(strangers) * rate) - 1, 0)] for rate in (0.01, 0.1)]
        hits.append([((rank == 1) & (mate > t))[enrolled].mean() for t in thresholds])
    assert [found["identification"]["rank"][k] for k in ("1", "5", "10")] == pytest.approx(
        np.mean(shares, axis=0).tolist()
    )
    tpirs = [point["tpir"] for point in found["identification"]["open_set"]]
    assert tpirs == pytest.approx(np.mean(hits, axis=0).tolist()) and 0 < tpirs[0] < 1
    assert f"rank-1: {100 * np.mean(shares, axis=0)[0]:.2f} %" in printed


def test_what_does_not_fit_is_told(protocol: Protocol, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = protocol.folder
    media = tmp_path / "media.txt"
    media.write_text("9999.jpg 1 1\n")
    base, lists = ["templates", str(place / "e.safetensors")], ["--pairs", str(place / "pairs.txt")]
    for args, words in (
        ([*base, str(media), *lists], "lacks 1 of the 1 images of"),
        ([*base, str(place / "tid_mid.txt")], "neither pairs nor galleries"),
        ([*base, str(place / "tid_mid.txt"), "--probes", "x"], "neither pairs nor galleries"),
        ([*base, str(place / "tid_mid.txt"), *lists, "--probes", "x"], "galleries or probes alone"),
        ([*base, str(place / "tid_mid.txt"), *lists, "--out", str(media)], "exists already"),
        (["templates", str(media), str(place / "tid_mid.txt"), *lists], "no header of safetensors"),
        (["templates", str(tmp_path / "gone"), str(place / "tid_mid.txt"), *lists], "no such file"),
    ):
        assert cli.data(args) != 0
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err
