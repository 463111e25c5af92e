"""tables.toml: what a server serves and how, read into the arguments of Table and Server."""

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from plsc.ps.native_rule import SUFFIXES, NativeRule
from plsc.ps.rules import RULES, Rule
from plsc.ps.table import Table

# name -> types that are taken
SERVER: dict[str, tuple[type, ...]] = {
    "host": (str,),
    "port": (int,),
    "index": (int,),
    "count": (int,),
    "folder": (str,),
    "durability": (str,),
    "sync": (bool,),
    "save_every": (int, float),
    "run": (str,),
    "token_file": (str,),
    "tls_certificate": (str,),
    "tls_key": (str,),
    "client_ca": (str,),
    "limit_mb": (int,),
    "metrics_port": (int,),
}
_SECTIONS = {"server": "server", "tables": "tables.clicks"}
# What Table.load wants again beside the file.
_AGAIN = ("locked", "stripes", "arena", "admit_after", "admit_probability", "max_rows", "policy")


def read_settings(path: str | PathLike[str], overrides: Mapping[str, Any]) -> tuple[dict[str, Table], dict[str, Any]]:
    """Tables by name and the keyword arguments of Server; `overrides` are entries of [server] that win.

    Paths in the file are relative to it. The token comes from token_file, else from PLSC_PS_TOKEN.
    """
    where = Path(path)
    try:
        content = tomllib.loads(where.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    _names(content, ("server", "tables"), f"{where}:")
    for name in ("server", "tables"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(f"{where}: {name} is {content[name]!r}, expected a section such as [{_SECTIONS[name]}]")
    server = dict(content.get("server", {}))
    _names(server, SERVER, f"{where}: [server]")
    for name, value in server.items():
        if type(value) not in SERVER[name]:
            expected = " or ".join(kind.__name__ for kind in SERVER[name])
            raise ValueError(f"{where}: [server] {name} is {value!r}, expected {expected}")
    for name in ("folder", "token_file", "tls_certificate", "tls_key", "client_ca"):
        if name in server:
            server[name] = str(where.parent / server[name])
    server |= {name: value for name, value in overrides.items() if value is not None}
    tables = content.get("tables", {})
    if not tables:
        raise ValueError(f"{where} names no table; expected at least one [tables.NAME] with its dim")
    made, again = {}, {}
    for name, options in tables.items():
        if not re.fullmatch(r"[\w-]{1,64}", name):
            raise ValueError(f"{where}: got table {name!r}, expected up to 64 letters, digits, '_' and '-'")
        made[name], again[name] = _table(options, f"{where}: [tables.{name}]", where.parent)
    return made, {**_access(server, where), "load_options": again}


def _access(server: dict[str, Any], where: Path) -> dict[str, Any]:
    """[server] as Server takes it: secrets read, files paired."""
    certificate, key = server.pop("tls_certificate", None), server.pop("tls_key", None)
    if (certificate is None) != (key is None):
        raise ValueError(f"{where}: tls_certificate and tls_key go together, got one of them")
    if certificate is not None:
        server["tls"] = (certificate, key)
    file = server.pop("token_file", None)
    token = Path(file).read_text(encoding="utf-8").strip() if file is not None else os.environ.get("PLSC_PS_TOKEN")
    if token:
        server["token"] = token
    return server


def _table(options: Any, where: str, folder: Path) -> tuple[Table, dict[str, Any]]:
    if not isinstance(options, dict):
        raise ValueError(f"{where} is {options!r}, expected a table of options")
    options = {"locked": True, **options}
    arguments = options.pop("rule_args", {})
    _names(options, list(inspect.signature(Table).parameters), where)
    rule = options.pop("rule", "adagrad")
    if isinstance(options.get("arena"), str):
        options["arena"] = str(folder / options["arena"])
    make = _rule(rule, arguments, where, folder)
    try:
        table = Table(**options, rule=make(**arguments))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} {error}") from None
    return table, {name: options[name] for name in _AGAIN if name in options}


def _rule(rule: Any, arguments: Mapping[str, Any], where: str, folder: Path) -> Callable[..., Rule]:
    """What makes the rule of these arguments: a rule by name, or by the file of one of the user's own."""
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} rule_args is {arguments!r}, expected a table such as {{ weight_decay = 1e-5 }}")
    if isinstance(rule, str) and rule in RULES:
        _names(arguments, [each.name for each in fields(RULES[rule])], f"{where} rule_args")
        for name, value in arguments.items():
            if type(value) not in (int, float):
                raise ValueError(f"{where} rule_args: {name} is {value!r}, expected a number")
        return RULES[rule]
    if not isinstance(rule, str) or Path(rule).suffix not in (*SUFFIXES, ".so"):
        raise ValueError(f"{where} rule is {rule!r}, expected one of {', '.join(RULES)}, or your own's file (.cc, .so)")
    _names(arguments, list(inspect.signature(NativeRule).parameters)[1:], f"{where} rule_args")
    return partial(NativeRule, folder / rule)


def _names(got: Mapping[str, Any], known: Any, where: str) -> None:
    if strangers := [name for name in got if name not in known]:
        raise ValueError(f"{where} unknown {', '.join(strangers)}; expected {', '.join(known)}")
