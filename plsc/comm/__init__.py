"""Bytes between ranks: communicators, the world they span, and how a dimension is cut among them."""

from plsc.comm.communicator import CommError, Communicator, Work
from plsc.comm.local import LocalCommunicator, ThreadCommunicator, run_ranks
from plsc.comm.shard import Shard, mark, shard_of
from plsc.comm.topology import Checked, Counting
from plsc.comm.torch_distributed import GlooCommunicator, NcclCommunicator
from plsc.comm.world import BACKENDS, connect, world

__all__ = [
    "BACKENDS",
    "Checked",
    "CommError",
    "Communicator",
    "Counting",
    "GlooCommunicator",
    "LocalCommunicator",
    "NcclCommunicator",
    "Shard",
    "ThreadCommunicator",
    "Work",
    "connect",
    "mark",
    "run_ranks",
    "shard_of",
    "world",
]
