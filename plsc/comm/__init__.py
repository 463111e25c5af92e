"""Bytes between ranks: communicators, the world they span, and how a dimension is cut among them."""

from plsc.comm.agreement import FailedTogether, together
from plsc.comm.communicator import CommError, Communicator, Work
from plsc.comm.local import LocalCommunicator, ThreadCommunicator, run_ranks
from plsc.comm.shard import Shard, mark, shard_of
from plsc.comm.topologies import Auto, Grid2D, Hierarchical, Ring, Topology, check_topology, route
from plsc.comm.topology import Checked, Counting
from plsc.comm.torch_distributed import GlooCommunicator, NcclCommunicator
from plsc.comm.world import BACKENDS, connect, connected, world

__all__ = [
    "BACKENDS",
    "Auto",
    "Checked",
    "CommError",
    "Communicator",
    "Counting",
    "FailedTogether",
    "GlooCommunicator",
    "Grid2D",
    "Hierarchical",
    "LocalCommunicator",
    "NcclCommunicator",
    "Ring",
    "Shard",
    "ThreadCommunicator",
    "Topology",
    "Work",
    "check_topology",
    "connect",
    "connected",
    "mark",
    "route",
    "run_ranks",
    "shard_of",
    "together",
    "world",
]
