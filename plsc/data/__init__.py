"""Data sets and the loader that deals them to ranks; imports nothing else of plsc."""

from plsc.data.glyphs import Glyphs
from plsc.data.images import ImageFolder, ImageList
from plsc.data.loader import Dataset, Loader, batches
from plsc.data.pairs import Pairs, make_pairs, read_pairs
from plsc.data.recordio import RecordIO
from plsc.data.records import RecordWriter
from plsc.data.synthetic import Synthetic
from plsc.data.transforms import Augment
from plsc.data.verification import VerificationSet

__all__ = [
    "Augment",
    "Dataset",
    "Glyphs",
    "ImageFolder",
    "ImageList",
    "Loader",
    "Pairs",
    "RecordIO",
    "RecordWriter",
    "Synthetic",
    "VerificationSet",
    "batches",
    "make_pairs",
    "read_pairs",
]
