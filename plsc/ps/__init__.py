"""The sparse table: rows of floats under 64-bit keys, made at first sight and trained where they are."""

from plsc.ps.embedding import SparseEmbedding
from plsc.ps.keys import hash_strings, slot_keys
from plsc.ps.rules import FTRL, RULES, SGD, Adagrad, Adam, Momentum, PythonRule, RowAdagrad, Rule
from plsc.ps.serving import Served, export
from plsc.ps.table import Table

__all__ = [
    "FTRL",
    "RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "PythonRule",
    "RowAdagrad",
    "Rule",
    "Served",
    "SparseEmbedding",
    "Table",
    "export",
    "hash_strings",
    "slot_keys",
]
