"""Where the servers of a run are, told through torch's TCPStore: for addresses that nobody knows beforehand."""

from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

SCHEME = "tcpstore://"


def publish(endpoint: str, *, run: str, index: int, count: int, address: str) -> TCPStore:
    """Says that server `index` of `count` is at `address`; hold what is returned for as long as that is so.

    endpoint: host:port of a TCPStore, torchrun's or another; where there is none yet, server 0 makes it.
    """
    host, port = _split(endpoint)
    try:
        store = TCPStore(host, port, is_master=index == 0, wait_for_workers=False, timeout=timedelta(seconds=300))
    except (DistNetworkError, RuntimeError):
        if index:
            raise
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=300))  # somebody else's is there
    store.set(f"plsc_ps/{run}/count", str(count))
    store.set(f"plsc_ps/{run}/{index}", address)
    return store


def lookup(endpoint: str, *, run: str, seconds: float) -> list[str]:
    """Addresses of all servers of the run, which are waited for."""
    host, port = _split(endpoint)
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
        count = int(store.get(f"plsc_ps/{run}/count"))
        return [store.get(f"plsc_ps/{run}/{index}").decode() for index in range(count)]
    except (DistNetworkError, DistStoreError) as error:
        raise ValueError(
            f"servers: {SCHEME}{endpoint} did not name all servers of run {run!r} within {seconds:g} s "
            f"({str(error).splitlines()[0]}); start them with --rendezvous {endpoint}"
        ) from None


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix(SCHEME).rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"got {endpoint!r}, expected host:port of a TCPStore")
    return host, int(port)
