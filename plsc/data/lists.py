"""Lists of images in text files: `path label`, and the tables that im2rec and the InsightFace project write."""

from array import array
from collections.abc import Callable, Iterator

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")

_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)

Fields = Callable[[bytes], list[bytes]]  # of a line: path and label


def scan_list(path: str, labels: "array[int]", blanks: "array[int]") -> Iterator[bytes]:
    """Yields the paths of a list; fills `labels` and the line numbers of lines without a sample on the way."""
    fields_of: Fields = _plain
    expected = "path label"
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
                fields_of, expected = _kind(path, line)
            fields = fields_of(line)
            if not fields or (number == 1 and fields[-1] == b"label" and fields_of is not _plain):
                blanks.append(number)
                continue
            label = fields[-1]
            if b"\r" in fields[0] or b"\0" in fields[0]:
                what = "carriage return" if b"\r" in fields[0] else "byte of value 0"
                raise ValueError(f"{path}, line {number}: got a {what} within it, expected lines that end in \\n")
            if len(fields) != 2 or not fields[0] or not ((label.isdigit() and len(label) < 19) or label == b"-1"):
                got = line.strip()[:200].decode(errors="replace")
                shown = (
                    repr(got) if got.replace("\t", " ").isprintable() else f"bytes that are no text ({got[:10]!r} ...)"
                )
                raise ValueError(
                    f"{path}, line {number}: got {shown}, expected `{expected}` with a whole number from 0 as label "
                    "(or -1: ignore)"
                )
            labels.append(int(label))
            yield fields[0]


def _kind(path: str, first: bytes) -> tuple[Fields, str]:
    """How the lines of a file are to be read, by its name and first line; and that in words."""
    fields = first.rstrip(b"\r\n").split(b"\t")
    if len(fields) == 4 and [field.isdigit() for field in fields] == [False, True, True, True]:
        raise ValueError(
            f"{path}, line 1: got a name and three numbers, as TFace's lists of TFRecord shards have them, which are "
            "not read; expected `path label`: write the images into a folder, .tar or .rec first"
        )
    if not path.lower().endswith((".lst", ".tsv")) or len(fields) < 3:
        return _plain, "path label"
    if fields[1].lower().endswith(_SUFFIXES) or fields[2].strip() == b"label":
        return _number_path_label, "number TAB path TAB label"
    return _number_label_path, "number TAB label TAB path"


def _plain(line: bytes) -> list[bytes]:
    fields = line.rsplit(None, 1)
    return [fields[0].lstrip(), *fields[1:]] if fields else []


def _number_path_label(line: bytes) -> list[bytes]:
    """Columns behind the label (landmarks) are left out."""
    return [field.strip() for field in line.split(b"\t")[1:3]] or line.split()


def _number_label_path(line: bytes) -> list[bytes]:
    """A label may be written as a float, 12.000000; further labels are left out."""
    fields = [field.strip() for field in line.split(b"\t")]
    if len(fields) < 3:
        return line.split()
    whole, _, rest = fields[1].partition(b".")
    return [fields[-1], fields[1] if rest.strip(b"0") else whole]
