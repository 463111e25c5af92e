"""Text as numbers: words, vocabulary, malformed lines, several readers; and files of word vectors."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest

from plsc.data.synthetic_text import NUM_ITEMS, name, write_text
from plsc.data.text import LONGEST, Encoded, Text, Vocabulary
from plsc.data.vectors import WordVectors

LINES = ["The cat, the dog; THE end.", "", "a cat sat", "on a dog's mat_2", "", "naïve Ÿ cat", "42"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def sentences(encoded: Encoded, vocabulary: Vocabulary) -> list[str]:
    starts = encoded.starts
    return [
        " ".join(vocabulary.words[i] for i in encoded.tokens[starts[s] : starts[s + 1]]) for s in range(len(starts) - 1)
    ]


def test_words_and_their_counts(corpus: Path) -> None:
    counts = Text(corpus).count()
    assert counts["the"] == 3 and counts["cat"] == 3 and counts["s"] == 1 and counts["mat"] == 1
    assert counts["naïve"] == 1 and counts["ÿ"] == 1 and "42" not in counts and "2" not in counts
    assert Text(corpus, tokens="spaces", lower=False).count()["The"] == 1
    assert Text(corpus, tokens="spaces").count()["mat_2"] == 1


def test_vocabulary_is_in_order_and_comes_back(tmp_path: Path) -> None:
    vocabulary = Vocabulary({"b": 2, "a": 2, "rare": 1, "c": 9}, min_count=2)
    assert vocabulary.words == ["c", "a", "b"] and vocabulary.counts.tolist() == [9, 2, 2]
    assert Vocabulary({"b": 2, "a": 2, "c": 9}, max_words=2).words == ["c", "a"]
    vocabulary.save(tmp_path / "vocab.txt")
    again = Vocabulary.load(tmp_path / "vocab.txt")
    assert again.words == vocabulary.words and again.index == {"c": 0, "a": 1, "b": 2}
    with pytest.raises(ValueError, match="0 of 1 words come 2 times"):
        Vocabulary({"a": 1}, min_count=2)
    for text in ("a 3\nb\n", "a 3\na 4\n", "a x\n"):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(ValueError, match="expected a new word and its count"):
            Vocabulary.load(tmp_path / "bad.txt")


def test_share_that_stays() -> None:
    vocabulary = Vocabulary({"common": 900, "rare": 100})
    keep = vocabulary.keep(0.05)
    f = np.array([0.9, 0.1])
    np.testing.assert_allclose(keep, np.minimum(1, (np.sqrt(f / 0.05) + 1) * 0.05 / f))
    assert keep[0] < keep[1] <= 1 and vocabulary.keep(0).tolist() == [1, 1]
    with pytest.raises(ValueError, match="sample"):
        vocabulary.keep(-1)


def test_text_as_numbers(corpus: Path, tmp_path: Path) -> None:
    vocabulary = Vocabulary(Text(corpus).count(), min_count=2)
    assert vocabulary.words == ["cat", "the", "a", "dog"]
    by_line = Text(corpus).encode(vocabulary, tmp_path / "lines")
    assert sentences(by_line, vocabulary) == ["the cat the dog the", "a cat", "a dog"]
    by_paragraph = Text(corpus, sentence="paragraph").encode(vocabulary, tmp_path / "paragraphs")
    assert sentences(by_paragraph, vocabulary) == ["the cat the dog the", "a cat a dog"]
    stamp = (tmp_path / "lines" / "tokens.i32").stat().st_mtime_ns
    Text(corpus).encode(vocabulary, tmp_path / "lines")
    assert (tmp_path / "lines" / "tokens.i32").stat().st_mtime_ns == stamp
    other = Vocabulary({"cat": 2, "a": 1})
    assert sentences(Text(corpus).encode(other, tmp_path / "lines"), other) == ["a cat"]
    with pytest.raises(ValueError, match="no sentence of"):
        Text(corpus).encode(Vocabulary({"no": 1, "such": 1}), tmp_path / "none")


def test_batches_are_whole_sentences_and_shares_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join("a b " * n + "\n" for n in range(1, 60)) + "a " * (2 * LONGEST + 7), encoding="utf-8")
    vocabulary = Vocabulary({"a": 2, "b": 1})
    encoded = Text(path).encode(vocabulary, tmp_path / "e")
    assert np.diff(encoded.starts).max() == LONGEST and np.diff(encoded.starts)[-1] == 7
    batches = list(encoded.batches(words=100))
    assert np.concatenate([batch.tokens for batch in batches]).tolist() == encoded.tokens.tolist()
    assert [batch.number for batch in batches] == list(range(len(encoded.bounds(100)) - 1))
    for batch in batches:
        begin = encoded.starts[batch.first]
        np.testing.assert_array_equal(batch.starts, encoded.starts[batch.first :][: len(batch.starts)] - begin)
        assert len(batch.tokens) == batch.starts[-1] and batch.tokens.dtype == np.int32
    shares = [[batch.number for batch in encoded.batches(words=100, rank=r, world_size=3)] for r in range(3)]
    assert sorted(number for share in shares for number in share) == [batch.number for batch in batches] and shares[1][
        :2
    ] == [1, 4]


def test_lines_that_are_not_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mixed.txt"
    path.write_bytes(b"good line\n" * 300 + b"caf\xe9 line\n" + b"good line\n" * 300)
    text = Text(path)
    with caplog.at_level(logging.WARNING):
        assert text.count() == {"good": 600, "line": 600}
    assert text.malformed == 1 and text.lines == 601 and "the line at byte 3000 is malformed" in caplog.text
    path.write_bytes(b"good line\n" * 90 + b"caf\xe9\n")
    with pytest.raises(ValueError, match="1 of 91 lines are not UTF-8"):
        Text(path).count()


def test_compressed_and_several_files(corpus: Path, tmp_path: Path) -> None:
    packed = tmp_path / "corpus.txt.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    once = Text(corpus).count()
    assert Text(packed).count() == once
    assert Text([corpus, packed]).count() == {word: 2 * count for word, count in once.items()}


@pytest.mark.parametrize("readers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ordered", [True, False])
def test_pieces_and_readers(readers: int, ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end with lines, so a text is the same however it is cut, but for the order where that is given up."""
    path = tmp_path / "many.txt"
    path.write_text("".join(f"{'ab' * (i % 30)} x y {'z' * (i % 7)}\n" for i in range(2000)), encoding="utf-8")
    whole = Text(path)
    vocabulary = Vocabulary(whole.count())
    wanted = sentences(whole.encode(vocabulary, tmp_path / "whole"), vocabulary)
    monkeypatch.setattr("plsc.data.text.PIECE", 3000)
    cut = Text(path, readers=readers, ordered=ordered)
    assert len(list(cut._pieces())) > 10 and cut.count() == whole.count() and cut.lines == 2000
    got = sentences(cut.encode(vocabulary, tmp_path / "cut"), vocabulary)
    assert got == wanted if ordered or readers == 1 else sorted(got) == sorted(wanted)


def test_bad_settings(corpus: Path) -> None:
    for options, word in [
        ({"tokens": "words"}, "letters"),
        ({"sentence": "page"}, "paragraph"),
        ({"readers": 0}, "readers"),
    ]:
        with pytest.raises(ValueError, match=word):
            Text(corpus, **options)
    with pytest.raises(ValueError, match="no-such-file"):
        Text(["no-such-file"])
    with pytest.raises(ValueError, match="no paths"):
        Text([])


def test_made_up_text(tmp_path: Path) -> None:
    first = write_text(tmp_path / "a", num_sentences=50)
    assert [path.read_bytes() for path in sorted(first.iterdir())] == [
        path.read_bytes() for path in sorted(write_text(tmp_path / "b", num_sentences=50).iterdir())
    ]
    stamp = (first / "text.txt").stat().st_mtime_ns
    write_text(first, num_sentences=50)
    assert (first / "text.txt").stat().st_mtime_ns == stamp
    assert (write_text(first, num_sentences=51) / "text.txt").stat().st_mtime_ns != stamp
    names = [name(kind, i, k) for kind in ("with", "common") for i in range(NUM_ITEMS) for k in range(6)]
    assert len(set(names)) == len(names) and all(word.isalpha() for word in names)


def test_vectors_come_back(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal((5, 7)).astype(np.float32)
    values[0, :3] = [0.0, 1e-30, -3e20]
    values[1].view(np.uint8)[:] = 32  # a vector that looks like spaces, in binary
    values[2].view(np.uint8)[:] = 10  # and one like line ends
    vectors = WordVectors(["the", "naïve", "a", "b", "c"], values)
    for file in ("v.bin", "v.txt", "v.vec"):
        vectors.save(tmp_path / file)
        again = WordVectors.load(tmp_path / file)
        assert again.words == vectors.words and again.index["c"] == 4
        np.testing.assert_array_equal(again.vectors, values)
    assert (tmp_path / "v.txt").read_text(encoding="utf-8").startswith("5 7\nthe 0 ")
    near = WordVectors(["x", "y", "z"], np.array([[1, 0], [1, 1], [-1, 0]], np.float32)).nearest("x")
    assert [word for word, _ in near] == ["y", "z"] and near[0][1] == pytest.approx(0.5**0.5)


def test_formats_of_others(tmp_path: Path) -> None:
    """word2vec ends a vector with a line end in binary, some writers do not; text lines may end with a space."""
    two = np.array([[1, 2], [3, 4]], "<f4")
    for end in (b"\n", b""):
        (tmp_path / "o.bin").write_bytes(b"2 2\na " + two[0].tobytes() + end + b"b " + two[1].tobytes() + end)
        np.testing.assert_array_equal(WordVectors.load(tmp_path / "o.bin").vectors, two)
    (tmp_path / "o.txt").write_text("2 2\na 1.0 2 \nb 3 4e0\n")
    np.testing.assert_array_equal(WordVectors.load(tmp_path / "o.txt").vectors, two)


def test_bad_vectors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="white space"):
        WordVectors(["a b"], np.zeros((1, 2))).save(tmp_path / "v.txt")
    with pytest.raises(ValueError, match="a row for every word"):
        WordVectors(["a"], np.zeros((2, 2)))
    good = b"2 2\na " + bytes(8) + b"\nb " + bytes(8) + b"\n"
    for file, data, word in [
        ("v.bin", b"", "begins with"),
        ("v.bin", b"a 1 2\n", "begins with"),
        ("v.bin", good.replace(b"a ", b"a-long-one ")[:-3], "cut off"),
        ("v.bin", good[:12], "too short"),
        ("v.bin", b"999999999999 300\n" + good[4:], "too short"),
        ("v.bin", good + b"more", "there is more"),
        ("v.bin", good.replace(b"a ", b"\xff "), "utf-8"),
        ("v.txt", b"2 2\na 1 2\n", "number of lines"),
        ("v.txt", b"2 2\na 1 2\nb 3 4 5\n", "number of components"),
        ("v.txt", b"2 2\na 1 2\nb 3 x\n", "could not convert"),
    ]:
        (tmp_path / file).write_bytes(data)
        with pytest.raises(ValueError, match=word):
            WordVectors.load(tmp_path / file)
