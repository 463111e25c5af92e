"""Where the servers of a run are, told through torch's TCPStore or etcd: for addresses that nobody knows beforehand."""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

logger = logging.getLogger(__name__)

TCPSTORE, ETCD = "tcpstore://", "etcd://"
SCHEMES = (TCPSTORE, ETCD)
TELL = 10.0  # seconds between two looks at whether a TCPStore still has what it was told
LEASE = 30  # seconds after which etcd forgets a server that has stopped saying it is there


def publish(endpoint: str, *, run: str, index: int, count: int, address: str) -> Any:
    """Says that server `index` of `count` is at `address`; hold what is returned for as long as that is so.

    endpoint: host:port of a TCPStore, torchrun's or another; where there is none yet, server 0 makes it. Or
    "etcd://host:port", where an address is gone LEASE seconds after its server.
    """
    told = {f"plsc_ps/{run}/count": str(count), f"plsc_ps/{run}/{index}": address}
    if endpoint.startswith(ETCD):
        return _Lease(endpoint, told)
    return _Told(*_split(endpoint, TCPSTORE), told, master=index == 0)


def lookup(endpoint: str, *, run: str, seconds: float) -> list[str]:
    """Addresses of all servers of the run, which are waited for."""
    try:
        logger.info("asking %s for the servers of run %r", endpoint, run)
        get = _etcd_getter(endpoint, seconds) if endpoint.startswith(ETCD) else _tcp_getter(endpoint, seconds)
        count = int(get(f"plsc_ps/{run}/count"))
        return [get(f"plsc_ps/{run}/{index}").decode() for index in range(count)]
    except (DistNetworkError, DistStoreError, TimeoutError) as error:
        bare = endpoint.removeprefix(TCPSTORE)
        raise ValueError(
            f"servers: {endpoint} did not name all servers of run {run!r} within {seconds:g} s "
            f"({str(error).splitlines()[0]}); start them with --rendezvous {bare}"
        ) from None


def _tcp_getter(endpoint: str, seconds: float) -> Callable[[str], bytes]:
    host, port = _split(endpoint, TCPSTORE)
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds)).get


def _etcd_getter(endpoint: str, seconds: float) -> Callable[[str], bytes]:
    client, until = _etcd(endpoint), time.monotonic() + seconds

    def get(key: str) -> bytes:
        why = f"no {key}"
        while True:
            try:
                if found := client.get(key):
                    return bytes(found[0])
            except OSError as error:
                why = str(error)
            if time.monotonic() > until:
                raise TimeoutError(why)
            time.sleep(0.2)

    return get


class _Told:
    """Keys in a TCPStore; told again where another has taken its place, as when the server that made it died."""

    def __init__(self, host: str, port: int, told: dict[str, str], *, master: bool) -> None:
        self._at, self._told = (host, port), told
        try:
            self._store = self._connect(300, master=master)
        except (DistNetworkError, RuntimeError):
            if not master:
                raise
            self._store = self._connect(300)  # somebody else's is there
        self._say()
        threading.Thread(target=_tell_again, args=(weakref.ref(self),), daemon=True).start()

    def _connect(self, seconds: float, *, master: bool = False) -> TCPStore:
        host, port = self._at
        return TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=seconds))

    def _say(self) -> None:
        for key, value in self._told.items():
            self._store.set(key, value)

    def look(self) -> None:
        try:
            if not self._store.check(list(self._told)):
                self._say()
        except (DistNetworkError, DistStoreError, RuntimeError):
            try:
                self._store = self._connect(TELL)
                self._say()
            except (DistNetworkError, DistStoreError, RuntimeError) as error:
                logger.warning("%s:%d was not reached, trying again: %s", *self._at, str(error).splitlines()[0])


def _tell_again(ref: "weakref.ref[_Told]") -> None:
    while True:
        time.sleep(TELL)
        told = ref()
        if told is None:
            return
        told.look()
        del told


class _Lease:
    """Keys in etcd for as long as this object and its process live; made again where etcd has lost them."""

    def __init__(self, endpoint: str, told: dict[str, str]) -> None:
        self._client, self._told = _etcd(endpoint), told
        self._stop = threading.Event()
        try:
            self._make()
        except OSError as error:
            raise ValueError(f"{endpoint} was not reached ({error}); is etcd there, with its JSON gateway?") from None
        threading.Thread(target=self._keep, args=(endpoint,), daemon=True).start()

    def _make(self) -> None:
        self._lease = self._client.lease(LEASE)
        for key, value in self._told.items():
            self._client.put(key, value, lease=self._lease)

    def _keep(self, endpoint: str) -> None:
        while not self._stop.wait(LEASE / 3):
            try:
                if self._lease.refresh() <= 0:
                    self._make()
            except OSError as error:
                logger.warning("%s was not reached, trying again: %s", endpoint, error)

    def close(self) -> None:
        """The address is forgotten at once."""
        self._stop.set()
        self._lease.revoke()


def _etcd(endpoint: str) -> Any:
    """A client whose every failure is an OSError."""
    host, port = _split(endpoint, ETCD)
    try:
        from etcd3gw import Etcd3Client
        from etcd3gw.exceptions import Etcd3Exception
    except ImportError as error:
        raise ImportError(f"{endpoint} needs etcd3gw, which is missing ({error}); pip install etcd3gw") from None

    class Client(Etcd3Client):  # type: ignore[misc]
        def post(self, *args: Any, **options: Any) -> Any:
            try:
                return super().post(*args, **options)
            except Etcd3Exception as error:
                raise ConnectionError(str(error) or type(error).__name__) from None

    return Client(host=host, port=port, timeout=5, api_path="/v3/")  # etcd 3.4 and later


def _split(endpoint: str, scheme: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix(scheme).rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"got {endpoint!r}, expected host:port, tcpstore://host:port or etcd://host:port")
    return host, int(port)
