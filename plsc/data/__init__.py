"""Data sets and the loader that deals them to ranks; imports nothing else of plsc."""

from plsc.data.clicks import CRITEO, Clicks, Columns, LibSVM, MultiSlot, Parquet
from plsc.data.convert import convert, open_images, split
from plsc.data.glyphs import Glyphs
from plsc.data.images import ImageFolder, ImageList
from plsc.data.keyvalue import LMDBImages
from plsc.data.loader import Loader, batches
from plsc.data.pairs import Pairs, make_pairs, read_pairs, write_pairs
from plsc.data.parquet import ParquetImages
from plsc.data.reading import Dataset
from plsc.data.recordio import RecordIO
from plsc.data.records import RecordWriter
from plsc.data.relabel import Relabelled
from plsc.data.samples import Samples
from plsc.data.synthetic import Synthetic
from plsc.data.tar import TarShards
from plsc.data.text import Text, Vocabulary
from plsc.data.transforms import AUGMENTS, Augment
from plsc.data.vectors import WordVectors
from plsc.data.verification import VerificationSet
from plsc.data.workers import ReadingProcessDied

__all__ = [
    "AUGMENTS",
    "CRITEO",
    "Augment",
    "Clicks",
    "Columns",
    "Dataset",
    "Glyphs",
    "ImageFolder",
    "ImageList",
    "LMDBImages",
    "LibSVM",
    "Loader",
    "MultiSlot",
    "Pairs",
    "Parquet",
    "ParquetImages",
    "ReadingProcessDied",
    "RecordIO",
    "RecordWriter",
    "Relabelled",
    "Samples",
    "Synthetic",
    "TarShards",
    "Text",
    "VerificationSet",
    "Vocabulary",
    "WordVectors",
    "batches",
    "convert",
    "make_pairs",
    "open_images",
    "read_pairs",
    "split",
    "write_pairs",
]
