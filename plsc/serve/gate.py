"""What every request passes first: who may ask, how many at once, its number, its count and its answer on failure."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from http import HTTPMethod
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plsc.serve.service import Service

logger = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/", "/healthz", "/page/app.js", "/page/style.css")  # nobody's secrets; the page asks for the token
ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Gate:
    """ASGI middleware around the service's routes.

    token: what `Authorization: Bearer` must bring, on all but OPEN_PATHS. Without one the service is for this machine:
    a Host that is not loopback is refused (a page that had its name resolved to 127.0.0.1), and so is any request that
    changes something or costs work from another origin's page.

    crowded: whether there are more connections than may be: then whoever asks is told so, and let go.

    HEAD is answered as GET, without the body; OPTIONS with the methods that a path takes. What is counted bears its
    route, refused or not; all paths and methods that nobody knows are one, "other".
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        service: Callable[[], Service],
        token: str | None,
        any_host: bool,
        crowded: Callable[[], bool],
    ) -> None:
        self._app, self._service, self._any_host, self._crowded = app, service, any_host, crowded
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, service, start = Headers(scope=scope), self._service(), time.perf_counter()
        asked = headers.get("x-request-id", "")
        number = asked if _REQUEST_ID.fullmatch(asked) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = number
        path, methods = _route(scope)
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["X-Request-ID"] = number
                for name, value in ALWAYS.items():
                    out.setdefault(name, value)
                out.setdefault("Cache-Control", "no-store")
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        service.in_flight += 1
        try:
            refused = self._refusal(scope, headers, service, methods)
            if refused is not None:
                await _say(answer, *refused, number=number)
            elif methods and scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=_allow(methods))(scope, receive, answer)
            else:
                asked_as = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self._app({**scope, "method": asked_as}, receive, answer)
        except asyncio.CancelledError:  # the server has waited long enough for an orderly end
            logger.warning("request %s: %s %s was given up: the service stops", number, scope["method"], scope["path"])
            if status == 0:
                await _say(answer, 503, "the service stops; ask again when it is back", {}, number=number)
        except Exception:
            logger.exception("request %s: %s %s failed", number, scope["method"], scope["path"])
            if status == 0:
                await _say(answer, 500, "the service failed; its log has the reason", {}, number=number)
        finally:
            service.in_flight -= 1
            method = scope["method"] if methods and scope["method"] in HTTPMethod.__members__ else "other"
            service.requests.add(path=path, method=method, status=str(status or 499))
            service.seconds.observe(time.perf_counter() - start, path=path)
            logger.debug("request %s: %s %s %d", number, scope["method"], scope["path"], status)

    def _refusal(
        self, scope: Scope, headers: Headers, service: Service, methods: list[str]
    ) -> tuple[int, str, Mapping[str, str]] | None:
        """Status, words and headers for a request that may not go on. methods: those that its path takes, if any."""
        if self._crowded():
            return 503, "too many connections; try again", {"Retry-After": "1", "Connection": "close"}
        host = _host_name(headers.get("host", ""))
        if not self._any_host and not is_loopback(host):
            return 421, f"host: got {host[:80]!r}, expected one of {', '.join(LOOPBACK)}", {}
        origin = headers.get("origin")
        if scope["method"] not in ("GET", "HEAD") and origin is not None and _place(origin) != headers.get("host"):
            return 403, f"origin: got {origin[:80]!r}, expected the service's own page", {}
        if self._token is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
                return (
                    401,
                    "token: got none or a wrong one, expected Authorization: Bearer TOKEN",
                    {"WWW-Authenticate": "Bearer"},
                )
        if methods and scope["method"] not in methods:
            return 405, f"method: got {scope['method'][:20]}, expected one of {', '.join(methods)}", _allow(methods)
        if scope["path"].startswith("/v1/") and service.in_flight > service.settings.max_requests:
            return 429, f"{service.settings.max_requests} requests are being answered; try again", {"Retry-After": "1"}
        return None


def _route(scope: Scope) -> tuple[str, list[str]]:
    """The path as its route spells it, such as /v1/classes/{number}, and its methods; "other" and none for no route."""
    found = [route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE]
    methods = {method for route in found for method in route.methods}
    methods |= {"HEAD"} if "GET" in methods else set()
    return (found[0].path, sorted({*methods, "OPTIONS"})) if found else ("other", [])


def _allow(methods: list[str]) -> dict[str, str]:
    return {"Allow": ", ".join(methods)}


async def _say(send: Send, status: int, words: str, headers: Mapping[str, str], *, number: str) -> None:
    """A whole answer in the form of all errors."""
    body = json.dumps(problem(words, number)).encode()
    listed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    listed += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


def problem(words: str, number: str) -> dict[str, Any]:
    """The body of an error's answer."""
    return {"detail": words, "request_id": number}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _place(origin: str) -> str:
    """Host and port of an Origin; "" for what is none, such as null."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
