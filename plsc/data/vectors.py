"""Word vectors as files: the text and the binary format of word2vec, written and read."""

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

import numpy as np

from plsc.data.embeddings import atomic_file


class WordVectors:
    """Words and their vectors float32 [V, D], the most frequent first; `index` tells a word's row."""

    def __init__(self, words: Sequence[str], vectors: np.ndarray) -> None:
        if vectors.ndim != 2 or len(words) != len(vectors):
            raise ValueError(f"got {len(words)} words and vectors {vectors.shape}, expected a row for every word")
        self.words = list(words)
        self.vectors = np.ascontiguousarray(vectors, np.float32)
        self.index = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, word: str) -> np.ndarray:
        return self.vectors[self.index[word]]

    def nearest(self, word: str, *, count: int = 10) -> list[tuple[str, float]]:
        """The words with the highest cosines to this one, and those."""
        unit = self.vectors / np.maximum(np.linalg.norm(self.vectors, axis=1, keepdims=True), 1e-12)
        cosines = unit @ unit[self.index[word]]
        best = [i for i in np.argsort(-cosines)[: count + 1] if i != self.index[word]]
        return [(self.words[i], float(cosines[i])) for i in best[:count]]

    def save(self, path: str | PathLike[str]) -> None:
        """Text where the name ends in .txt or .vec, else binary; the file appears whole or not at all."""
        if bad := [word for word in self.words if not word or any(letter.isspace() for letter in word)]:
            raise ValueError(f"word {bad[0]!r} is empty or has white space in it, which the format cannot hold")
        with atomic_file(fspath(path)) as file:
            file.write(f"{len(self)} {self.vectors.shape[1]}\n".encode())
            for word, vector in zip(self.words, self.vectors, strict=True):
                if _is_text(path):
                    numbers = " ".join(np.format_float_positional(x, trim="-") for x in vector)
                    file.write(f"{word} {numbers}\n".encode())
                else:
                    file.write(word.encode() + b" " + vector.astype("<f4").tobytes() + b"\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "WordVectors":
        """What `save`, word2vec, gensim and fastText write: text where the name ends in .txt or .vec, else binary."""
        data = Path(path).read_bytes()
        head, _, body = data.partition(b"\n")
        counts = head.split()
        if len(counts) != 2 or not all(count.isdigit() for count in counts):
            raise ValueError(
                f"{fspath(path)} begins with {head[:40]!r}, expected the number of words and of components"
            )
        num_words, dim = (int(count) for count in counts)
        try:
            words, vectors = (_read_text if _is_text(path) else _read_binary)(body, num_words, dim)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{fspath(path)} is not {num_words} words of {dim} components as its first line says ({error}); "
                "take another copy, and mind that .txt and .vec are read as text, other names as binary"
            ) from None
        return cls(words, vectors)


def _is_text(path: str | PathLike[str]) -> bool:
    return fspath(path).endswith((".txt", ".vec"))


def _read_text(body: bytes, num_words: int, dim: int) -> tuple[list[str], np.ndarray]:
    lines = body.decode().split("\n")
    if len(lines) - 1 < num_words or any(line.strip() for line in lines[num_words:]):
        raise ValueError("another number of lines")
    parts = [line.rstrip().split(" ") for line in lines[:num_words]]
    if any(len(part) != dim + 1 for part in parts):
        raise ValueError("a line with another number of components")
    vectors = np.array([part[1:] for part in parts], np.float32).reshape(num_words, dim)
    return [part[0] for part in parts], vectors


def _read_binary(body: bytes, num_words: int, dim: int) -> tuple[list[str], np.ndarray]:
    size = 4 * dim
    if len(body) < num_words * (size + 2):  # before memory is taken for what a damaged line asks for
        raise ValueError("the file is too short")
    words, vectors, at = [], np.empty((num_words, dim), np.float32), 0
    for i in range(num_words):
        end = body.index(b" ", at)
        words.append(body[at:end].lstrip(b"\n").decode())  # some writers put no line end after a vector
        at = end + 1 + size
        if at > len(body):
            raise ValueError("the last vector is cut off")
        vectors[i] = np.frombuffer(body, "<f4", dim, end + 1)
    if body[at:].strip(b"\n"):
        raise ValueError("there is more after the last vector")
    return words, vectors
