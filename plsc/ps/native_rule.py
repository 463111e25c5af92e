"""A rule of the user's own in C++ (or C): compiled against plsc_rule.h, loaded, and run where the rows are."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from plsc.ps.rules import RULES, Rule, check_state

INCLUDE = Path(__file__).parent / "core"  # where plsc_rule.h lies
VERSION = 1  # of its interface
SUFFIXES = (".cc", ".cpp", ".cxx", ".c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")


@dataclass(frozen=True)
class NativeRule(Rule):
    """The rule that a file defines as plsc_rule.h says: its source, or a shared library that you have compiled.

    A source (.cc, .cpp, .cxx, .c) is compiled when it is first met, by $CXX ($CC) or the system's compiler, for this
    machine's processor, and kept in the user's cache. args: constants, handed to its functions as floats. `name` is
    written into saved tables; by default that of the file. weight_decay and clipping are done before it, as for any
    rule. Its code runs in this process: load no file that you do not trust.
    """

    path: str | PathLike[str] = ""
    args: Sequence[float] = ()

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        args: Sequence[float] = (),
        name: str | None = None,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        clip_value: float = 0.0,
    ) -> None:
        given = {"path": fspath(path), "args": tuple(float(x) for x in args), "name": name or Path(path).stem}
        constants = {"weight_decay": weight_decay, "clip_norm": clip_norm, "clip_value": clip_value}
        for key, value in {**given, **constants}.items():
            object.__setattr__(self, key, value)
        self.__post_init__()
        if self.name in RULES:
            raise ValueError(f"NativeRule: {self.name!r} is a rule of plsc.ps; give yours another name=")
        _library(self.library())

    def constants(self) -> dict[str, Any]:
        """Not its args: they may be any numbers; nor where it lies, which is no business of a saved table."""
        return {"weight_decay": self.weight_decay, "clip_norm": self.clip_norm, "clip_value": self.clip_value}

    def library(self) -> str:
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"NativeRule: got {path}, expected a source or a shared library that exists")
        return _compiled(path, path.read_bytes()) if path.suffix in SUFFIXES else str(path.resolve())

    def options(self, dim: int) -> dict[str, Any]:
        library = _library(self.library())
        args = (ctypes.c_float * max(len(self.args), 1))(*self.args)
        library.plsc_rule_state.restype = ctypes.c_int
        state = check_state(library.plsc_rule_state(ctypes.c_int(dim), args))
        step = ctypes.cast(library.plsc_rule_step, ctypes.c_void_p).value
        return {"kind": "user", **self.constants(), "step": step, "custom_state": state, "args": list(self.args)}


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    """Loaded once and never let go: tables hold the address of its step."""
    try:
        library = ctypes.CDLL(path)
        version = ctypes.c_int.in_dll(library, "plsc_rule_version").value
        _ = library.plsc_rule_state, library.plsc_rule_step
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"NativeRule: {path} is no library with the functions of {INCLUDE / 'plsc_rule.h'} ({error}); include that "
            "file and define plsc_rule_state and plsc_rule_step"
        ) from None
    if version != VERSION:
        raise ValueError(
            f"NativeRule: {path} has version {version} of plsc_rule.h, expected {VERSION}; compile it anew"
        )
    return library


@functools.cache
def _compiled(source: Path, text: bytes) -> str:
    """The library made from this text, from the cache where it was made before."""
    language = "CC" if source.suffix == ".c" else "CXX"
    command = shlex.split(os.environ.get(language, "")) or _compiler(language)
    flags = [*FLAGS, "-std=c++17"] if language == "CXX" else [*FLAGS]
    asked = "\0".join([*command, *flags, _processor()]).encode() + (INCLUDE / "plsc_rule.h").read_bytes() + text
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plsc" / "rules"
    target = cache / f"{source.stem}-{hashlib.sha256(asked).hexdigest()[:24]}.so"
    if target.exists():
        return str(target)
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache) as place:
        made = Path(place) / "rule.so"
        full = [*command, *flags, f"-I{INCLUDE}", str(source), "-o", str(made), "-lm"]
        done = subprocess.run(full, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"NativeRule: {source} does not compile:\n{done.stderr[-4000:]}")
        os.replace(made, target)  # another process may have made the same
    return str(target)


@functools.cache
def _processor() -> str:
    """What machine code made for this processor may use: a cache in a shared home serves machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kinds = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(kinds)}))


def _compiler(language: str) -> list[str]:
    for name in ("cc", "gcc", "clang") if language == "CC" else ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise ValueError(f"NativeRule: found no compiler; install g++, set ${language}, or give a compiled shared library")
