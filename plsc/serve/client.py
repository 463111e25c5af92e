"""A client of the service that needs nothing but the standard library and numpy."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import selectors
import socket
import ssl
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
from numpy.typing import ArrayLike, NDArray

Image = bytes | str | os.PathLike[str]  # encoded, or the path of a file


class ServiceError(RuntimeError):
    """The service's answer to a request it did not fulfil."""

    def __init__(self, status: int, detail: str, request_id: str) -> None:
        super().__init__(f"{status}: {detail}" + (f" (request {request_id})" if request_id else ""))
        self.status, self.detail, self.request_id = status, detail, request_id


class Client:
    """Talks to a plsc-serve. One thread uses one client, which keeps its connection; use it as a context or close() it.

    url: such as http://127.0.0.1:8000. tls: a context for a certificate that this machine does not know by itself.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        token: str | None = None,
        timeout: float = 60.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"url: got {url!r}, expected such as http://127.0.0.1:8000, without a path")
        if parts.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout, context=tls
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
            raise ValueError(
                "token: got an empty one, a line break, a space at an end or none of ASCII; expected one line"
            )
        self._url = url
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def model(self) -> dict[str, Any]:
        """What the model is: embedding_size, num_classes, thresholds, limits."""
        found: dict[str, Any] = self._json("GET", "/v1/model")
        return found

    def embed(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """Unit embeddings [B, D] of encoded images or files."""
        answer = self._json("POST", "/v1/embed", **_form(images))
        return np.array(answer["embeddings"], np.float32)

    def search(
        self, images: Sequence[Image] = (), *, embeddings: ArrayLike | None = None, k: int = 5, among: str = "classes"
    ) -> list[list[dict[str, Any]]]:
        """For each image or embedding the k nearest, best first: score, id, name, thumbnail. among: or "gallery"."""
        query = urlencode({"k": k, "among": among})
        found: list[list[dict[str, Any]]] = self._json("POST", f"/v1/search?{query}", **_given(images, embeddings))[
            "results"
        ]
        return found

    def verify(
        self, images: Sequence[Image] = (), *, embeddings: ArrayLike | None = None, far: float | None = None
    ) -> dict[str, Any]:
        """Score of two images or embeddings, the threshold measured for that false accept rate, and `same`."""
        query = "" if far is None else f"?far={_number(far, 'far')!r}"
        found: dict[str, Any] = self._json("POST", f"/v1/verify{query}", **_given(images, embeddings))
        return found

    def add(
        self, name: str, images: Sequence[Image] = (), *, embeddings: ArrayLike | None = None, id: str | None = None
    ) -> list[str]:
        """Adds images or embeddings of one name to the gallery; their ids, once they are on the service's disk."""
        if id == "":
            raise ValueError("id: got an empty one, expected one, or None for one that is made up")
        query = urlencode({"name": name} | ({} if id is None else {"id": id}))
        answer = self._json("POST", f"/v1/gallery?{query}", **_given(images, embeddings))
        return [entry["id"] for entry in answer["entries"]]

    def remove(self, id: str) -> None:
        """Removes an entry of the gallery."""
        if not id:
            raise ValueError("id: got an empty one, expected that of an entry")
        self._json("DELETE", f"/v1/gallery/{quote(id, safe='')}")

    def gallery(self, *, offset: int = 0, limit: int = 60, text: str = "") -> dict[str, Any]:
        """A page of the gallery: total, writable, entries. text: only names that contain it."""
        query = urlencode({"offset": offset, "limit": limit, "text": text})
        found: dict[str, Any] = self._json("GET", f"/v1/gallery?{query}")
        return found

    def _json(self, method: str, path: str, *, body: bytes | None = None, kind: str | None = None) -> Any:
        headers = dict(self._headers) | ({} if kind is None else {"Content-Type": kind})
        self._drop_if_ended()
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self._connection.close()
            if method not in ("GET", "DELETE") and not path.startswith(("/v1/embed", "/v1/search", "/v1/verify")):
                raise  # it may have been done already
            self._connection.request(method, path, body, headers)  # an idle connection that the service has closed
            answer = self._connection.getresponse()
        except (ConnectionRefusedError, socket.gaierror) as error:
            self._connection.close()
            words = f"{self._url}: nobody answers there ({error.strerror}); is plsc-serve running?"
            raise type(error)(error.errno, words) from error
        except Exception:
            self._connection.close()
            raise
        content = answer.read()
        if 300 <= answer.status < 400:
            where = answer.headers.get("Location", "elsewhere")
            raise ServiceError(answer.status, f"got sent on to {where[:200]}, expected an answer of plsc-serve", "")
        if answer.status >= 400:
            try:
                found = json.loads(content)
                raise ServiceError(answer.status, str(found["detail"]), str(found.get("request_id", "")))
            except (ValueError, KeyError, TypeError):
                raise ServiceError(answer.status, content[:200].decode(errors="replace"), "") from None
        return json.loads(content) if content else None

    def _drop_if_ended(self) -> None:
        """Lets go of a connection that the service has closed for being idle: only then has it something to read."""
        if self._connection.sock is None:
            return
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._connection.sock, selectors.EVENT_READ)
            if waiting.select(timeout=0):
                self._connection.close()


def _given(images: Sequence[Image], embeddings: ArrayLike | None) -> dict[str, Any]:
    _check_list(images)
    if (embeddings is None) == (len(images) == 0):
        raise ValueError("got both or none of images and embeddings, expected one of them")
    if embeddings is None:
        return _form(images)
    rows = np.asarray(embeddings)
    if rows.dtype.kind not in "iuf" or rows.ndim != 2:
        raise ValueError(f"embeddings: got {rows.dtype} {list(rows.shape)}, expected real numbers [B, D]")
    return {"body": json.dumps({"embeddings": rows.astype(np.float64).tolist()}).encode(), "kind": "application/json"}


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what}: got {value!r}, expected a number") from None


def _check_list(images: Sequence[Image]) -> None:
    if isinstance(images, bytes | str | os.PathLike):
        raise ValueError("images: got one, expected a list of them")
    if not isinstance(images, Collection):
        raise ValueError(f"images: got {type(images).__name__}, expected a list of files or of their bytes")


def _form(images: Sequence[Image]) -> dict[str, Any]:
    _check_list(images)
    border = secrets.token_hex(16)
    parts = []
    for image in images:
        if not isinstance(image, bytes | str | os.PathLike):
            raise ValueError(
                f"images: got {type(image).__name__}, expected the bytes of an image file, or its path; a picture in "
                "memory is saved first: image.save(file, 'PNG') of Pillow"
            )
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        head = f'--{border}\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n'
        parts += [head.encode(), data, b"\r\n"]
    body = b"".join([*parts, f"--{border}--\r\n".encode()])
    return {"body": body, "kind": f"multipart/form-data; boundary={border}"}
