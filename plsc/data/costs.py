"""Images that take far more work to decode than their pixels account for: told from their bytes, before decoding."""

import re

MOST_SCANS = 100  # of a JPEG; encoders write 10, the best searches for a smaller file about 20
_SCAN = b"\xff\xda"
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length: TEM, restarts, start of image
_END, _START_OF_SCAN = 0xD9, 0xDA
_BMP_RUNS = (1, 2)  # compression of a BMP: runs of 8 or 4 bits, which Pillow unpacks in Python


def costly(data: bytes) -> str:
    """What makes the image costly to decode; "" for one that takes what its pixels take.

    Each scan of a progressive JPEG goes over the whole picture again, and takes 31 bytes: a file of 100 KB can ask for
    minutes. A BMP of runs takes a hundred times as long as a plain one. Time in PNG and WebP is bounded by pixels.
    """
    many = data[:2] == b"\xff\xd8" and data.count(_SCAN[1:]) > MOST_SCANS  # told in a microsecond of a small file
    if many and (scans := count_scans(data)) > MOST_SCANS:
        return f"a JPEG of {scans} scans, more than {MOST_SCANS}"
    if data[:2] == b"BM" and int.from_bytes(data[30:34], "little") in _BMP_RUNS:
        return "a BMP of runs (RLE), which is slow to decode"
    return ""


def count_scans(data: bytes) -> int:
    """Scans of a JPEG as a decoder goes through its markers; a mark inside of a comment or EXIF data is none."""
    if data.count(_SCAN) <= MOST_SCANS:  # a hundred times as fast, and never too few
        return data.count(_SCAN)
    scans, at = 0, 2
    while found := _MARKER.search(data, at):
        at, kind = found.end(), found[1][0]
        if kind == _END:
            break
        scans += kind == _START_OF_SCAN
        if kind not in _BARE:
            at += int.from_bytes(data[at : at + 2], "big")
    return scans
