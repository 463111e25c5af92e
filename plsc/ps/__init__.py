"""The sparse table: rows of floats under 64-bit keys, trained where they are, in this process or on servers."""

from typing import TYPE_CHECKING, Any

from plsc.ps.embedding import SparseEmbedding
from plsc.ps.geo import Geo
from plsc.ps.host import Host, Seat
from plsc.ps.keys import hash_strings, slot_keys
from plsc.ps.merging import merge
from plsc.ps.modes import Async, Communicator, Direct, HalfAsync, Sync
from plsc.ps.native_rule import NativeRule
from plsc.ps.rules import FTRL, RULES, SGD, Adagrad, Adam, AdamW, Momentum, PythonRule, RowAdagrad, Rule
from plsc.ps.serving import Served, export
from plsc.ps.store import ServerLost, SharedStore, Store, WorkerMissing
from plsc.ps.table import Table
from plsc.ps.tables import SlotEmbedding, Tables
from plsc.ps.words import WordLoop

if TYPE_CHECKING:
    from plsc.ps.link import Refused
    from plsc.ps.remote import RemoteStore, connect
    from plsc.ps.server import Server

# These import pyarrow, which tables in this process do without.
_NETWORK = {"Refused": "link", "RemoteStore": "remote", "Server": "server", "connect": "remote"}

__all__ = [
    "FTRL",
    "RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Async",
    "Communicator",
    "Direct",
    "Geo",
    "HalfAsync",
    "Host",
    "Momentum",
    "NativeRule",
    "PythonRule",
    "Refused",
    "RemoteStore",
    "RowAdagrad",
    "Rule",
    "Seat",
    "Served",
    "Server",
    "ServerLost",
    "SharedStore",
    "SlotEmbedding",
    "SparseEmbedding",
    "Store",
    "Sync",
    "Table",
    "Tables",
    "WordLoop",
    "WorkerMissing",
    "connect",
    "export",
    "hash_strings",
    "merge",
    "slot_keys",
]


def __getattr__(name: str) -> Any:
    if name not in _NETWORK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"plsc.ps.{_NETWORK[name]}"), name)
