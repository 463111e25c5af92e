"""Turns the archives of Omniglot into a data set of characters: one class a character of an alphabet.

    python datasets/omniglot/prepare.py images_background.zip omniglot.tar
    python datasets/omniglot/prepare.py images_background_small1.zip images_background_small2.zip train.rec \\
        --test test.tar --held-out Sanskrit Tagalog 'Japanese_(katakana)'

Names say what is written: a folder, list (.txt), .rec, .tar or .parquet; image bytes are kept. A character that stands
in several archives is taken from the first. --held-out: alphabets that go to --test only.
"""

import argparse
import zipfile
from collections.abc import Callable
from pathlib import PurePosixPath

import numpy as np

from plsc.data import convert
from plsc.data.decoding import decode_image


class Characters:
    """The images ALPHABET/characterNN/*.png of archives, by alphabet and character."""

    def __init__(self, paths: list[str], chosen: Callable[[str], bool]) -> None:
        """chosen: which alphabets to take, by name."""
        found: dict[tuple[str, str], tuple[str, str]] = {}  # (class, file) -> (archive, member)
        self._archives = {path: zipfile.ZipFile(path) for path in paths}
        for path, archive in self._archives.items():
            for member in archive.namelist():
                parts = PurePosixPath(member).parts
                is_drawing = len(parts) >= 3 and parts[-2].startswith("character") and member.endswith(".png")
                if is_drawing and chosen(parts[-3]):
                    found.setdefault((f"{parts[-3]}_{parts[-2]}", parts[-1]), (path, member))
        if not found:
            raise SystemExit(
                f"no ALPHABET/characterNN/*.png of the alphabets asked for in {', '.join(paths)}; see "
                "datasets/omniglot/README.md"
            )
        self._keys = sorted(found)
        self._places = [found[key] for key in self._keys]
        classes = {name: k for k, name in enumerate(sorted({name for name, _ in self._keys}))}
        self.labels = np.array([classes[name] for name, _ in self._keys], np.int64)
        self.num_classes = len(classes)

    def __len__(self) -> int:
        return len(self._keys)

    def name(self, i: int) -> str:
        return "/".join(self._keys[i])

    def encoded(self, i: int) -> bytes:
        path, member = self._places[i]
        return self._archives[path].read(member)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return decode_image(self.encoded(i), 112, name=self.name(i)), int(self.labels[i])


def main() -> None:
    parser = argparse.ArgumentParser(description="Omniglot's archives as one data set")
    parser.add_argument("archives", nargs="+")
    parser.add_argument("target", help="folder, .txt, .rec, .tar or .parquet")
    parser.add_argument("--test", help="folder, .txt, .rec, .tar or .parquet of the held-out alphabets")
    parser.add_argument("--held-out", nargs="+", default=[], metavar="ALPHABET")
    args = parser.parse_args()
    if (args.test is None) != (not args.held_out):
        parser.error("--test and --held-out go together")
    targets = [(args.target, lambda name: name not in args.held_out)]
    if args.test:
        targets.append((args.test, lambda name: name in args.held_out))
    for target, chosen in targets:
        data = Characters(args.archives, chosen)
        convert(data, target)
        print(f"{target}: {len(data)} drawings of {data.num_classes} characters")


if __name__ == "__main__":
    main()
