"""Verification sets in the InsightFace project's .bin format: pairs of encoded images and whether each is one person.

The format is a pickle, which in general runs code when read. Here none is unpickled: a small machine carries out the
few steps that build lists, bytes and byte arrays, and refuses a file with any other.
"""

import os
import pickletools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.images import _check_format, decode_image
from plsc.data.pairs import Pairs


class VerificationSet:
    """The 2n images of a .bin file, in their order and encoded until asked for, and their n pairs.

    Image 2k is compared with image 2k + 1. Images have no class: their label is -1. `pairs` are in `folds` stretches.
    ValueError: not such a file, anything in it but plain data, images that do not match the pairs, fewer pairs than
    folds.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, image_size: int = 112, channels: int = 3, folds: int = 10
    ) -> None:
        _check_format(image_size, channels)
        if folds < 1:
            raise ValueError(f"got folds={folds}, expected at least 1")
        self.path, self.image_size, self.channels = os.fspath(path), image_size, channels
        self._images, same = read_bin(self.path)
        if len(same) < folds:
            raise ValueError(f"{self.path}: got {len(same)} pairs, expected at least one in each of {folds} folds")
        rows = np.arange(len(self._images), dtype=np.int64)
        self.pairs = Pairs(rows[::2].copy(), rows[1::2].copy(), same, folds)
        self.labels: NDArray[np.int64] = np.full(len(rows), -1, np.int64)
        self.num_classes = 0

    def __len__(self) -> int:
        return len(self._images)

    def name(self, i: int) -> str:
        return f"{self.path}, image {i} (pair {i // 2})"

    def encoded(self, i: int) -> bytes:
        """Image i as the file holds it."""
        return self._images[i]

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        if not 0 <= i < len(self):
            raise IndexError(f"got image {i}, expected 0 to {len(self) - 1}")
        return decode_image(self._images[i], self.image_size, self.channels, name=self.name(i)), -1


def read_bin(path: str | os.PathLike[str]) -> tuple[list[bytes], NDArray[np.bool_]]:
    """The encoded images [2n] of a .bin file, pair after pair, and whether a pair is one person [n]."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        content = _build(data)
    except _Refused as error:
        raise ValueError(f"{path}: {error}; expected a .bin set of image pairs, nothing in it was run") from None
    except (ValueError, IndexError, KeyError, UnicodeError, OverflowError) as error:
        raise ValueError(f"{path}: broken or not a .bin set of image pairs ({error}); fetch it again") from error
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise ValueError(f"{path}: got {_say(content)}, expected the images and, for each pair, whether it is the same")
    images, same = content
    if not isinstance(images, list | tuple):
        raise ValueError(f"{path}: got {_say(images)} as images, expected a list")
    found = [_image(path, i, image) for i, image in enumerate(images)]
    kinds = _same(path, same)
    if len(found) != 2 * len(kinds):
        raise ValueError(f"{path}: got {len(found)} images for {len(kinds)} pairs, expected {2 * len(kinds)}")
    return found, kinds


class _Refused(ValueError):
    """A step that data alone does not need."""


class _Mark:
    """The place on the stack from which a list or tuple is made."""


class _Name:
    """A name the file asks to import: never imported, only compared."""

    def __init__(self, module: str, name: str) -> None:
        module = {"__builtin__": "builtins"}.get(module, module).replace("numpy.core", "numpy._core")
        self.text = f"{module}.{name}"


class _Type:
    """numpy's element type by its code, such as u1."""

    def __init__(self, code: object) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        if text not in ("u1", "b1", "|u1", "|b1"):
            raise _Refused(f"got an array of {text if isinstance(text, str) else _say(text)}, not of bytes or booleans")
        self.code = str(text)[-2:]


class _Array:
    """A numpy array as its bytes; filled when the file gives its state."""

    def __init__(self) -> None:
        self.code, self.data = "", b""

    def fill(self, shape: object, kind: object, data: object) -> None:
        if not isinstance(kind, _Type) or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise ValueError("the state of an array is not one")
        sizes = [size for size in shape if size != 1]
        if len(sizes) > 1 or any(type(size) is not int for size in shape) or (sizes or [1])[0] != len(data):
            raise ValueError(f"an array holds {len(data)} bytes, expected one axis of them")
        self.code, self.data = kind.code, data


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "INT", "LONG1"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_SIMPLE = {*_CONSTANTS, *_NUMBERS, *_BYTES, *_TEXTS}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _build(data: bytes) -> Any:
    """What a pickle describes, of lists, tuples, numbers, text, bytes and arrays of bytes.

    Python 2's strings become bytes. _Refused for whatever could run code.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    converted = 0
    for code, value, _ in pickletools.genops(data):
        name = code.name
        if name in _SIMPLE:
            value = _CONSTANTS.get(name, value)
            stack.append(bytes(value) if isinstance(value, bytearray) else value)
        elif name in ("SHORT_BINSTRING", "BINSTRING"):
            stack.append(str(value).encode("latin-1"))
        elif name == "MARK":
            stack.append(_Mark())
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("LIST", "TUPLE"):
            items = _to_mark(stack)
            stack.append(items if name == "LIST" else tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else _to_mark(stack)
            if type(stack[-1]) is not list:
                raise ValueError("items for something that is no list")
            stack[-1].extend(items)
        elif name in _TUPLES:
            count = _TUPLES[name]
            if count > len(stack):
                raise ValueError("a tuple of more items than there are")
            items = [stack.pop() for _ in range(count)]
            stack.append(tuple(reversed(items)))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(value or 0)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(value or 0)])
        elif name == "GLOBAL":
            module, _, attr = str(value).partition(" ")
            stack.append(_Name(module, attr))
        elif name == "STACK_GLOBAL":
            attr, module = stack.pop(), stack.pop()
            stack.append(_Name(str(module), str(attr)))
        elif name == "REDUCE":
            args, called = stack.pop(), stack.pop()
            made = _call(called, args)
            converted += len(made) if isinstance(made, bytes) else 0
            if converted > len(data):  # one text, converted over and over
                raise _Refused("got more bytes than the file holds")
            stack.append(made)
        elif name == "BUILD":
            state = stack.pop()
            _fill(stack[-1], state)
        elif name == "STOP":
            return stack[-1]
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"got the pickle step {name}, which no list of images needs")
    raise ValueError("it has no end")


def _to_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while at >= 0 and not isinstance(stack[at], _Mark):
        at -= 1
    if at < 0:
        raise ValueError("a list or tuple without its beginning")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _call(called: object, args: object) -> object:
    """What a call that writers of images make would return; anything else is refused."""
    text = called.text if isinstance(called, _Name) else _say(called)
    make = _CALLS.get(text)
    if make is None or not isinstance(args, tuple):
        raise _Refused(f"got a call of {text[:80]}, which no list of images needs")
    try:
        return make(*args)
    except TypeError:
        raise ValueError(f"wrong arguments for {text}") from None


def _encode(text: object = None, codec: object = None) -> bytes:
    """How Python 3 writes bytes in an old protocol."""
    if not isinstance(text, str) or codec not in ("latin1", "latin-1", b"latin1", b"latin-1"):
        raise ValueError("wrong arguments for _codecs.encode")
    return text.encode("latin-1")


def _empty_bytes() -> bytes:
    return b""


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    if not isinstance(kind, _Name) or kind.text != "numpy.ndarray":
        raise _Refused("got an array of an unknown kind")
    return _Array()


def _dtype(code: object, align: object = False, copy: object = False) -> _Type:
    return _Type(code)


def _scalar(kind: object, data: object) -> bool:
    """numpy's own boolean."""
    if not isinstance(kind, _Type) or data not in (b"\0", b"\1"):
        raise ValueError("a number is not a boolean")
    return data == b"\1"


def _frombuffer(data: object, kind: object, shape: object, order: object) -> _Array:
    array = _Array()
    array.fill(shape, kind, data)
    return array


_CALLS: dict[str, Callable[..., object]] = {
    "_codecs.encode": _encode,
    "builtins.bytes": _empty_bytes,
    "numpy.dtype": _dtype,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _frombuffer,
}


def _fill(target: object, state: object) -> None:
    if isinstance(target, _Type):
        return  # byte order and the like: nothing for single bytes
    if not isinstance(target, _Array) or not isinstance(state, tuple) or len(state) not in (4, 5):
        raise _Refused(f"got a state for {_say(target)}, which no list of images needs")
    shape, kind, _, data = state[-4:]  # a version may stand before
    target.fill(shape, kind, data)


def _say(value: object) -> str:
    """The kind of a value, in words for a message; never its content, which may be anything."""
    if isinstance(value, _Name):
        return value.text[:80]
    return {_Array: "an array", _Type: "a numpy type", _Mark: "an open list"}.get(type(value), type(value).__name__)


def _image(path: str | os.PathLike[str], i: int, image: object) -> bytes:
    if isinstance(image, _Array) and image.code == "u1":
        image = image.data
    if not isinstance(image, bytes) or not image:
        got = "an empty one" if image == b"" else _say(image)
        raise ValueError(f"{path}: got {got} as image {i}, expected an encoded image as bytes or an array of uint8")
    return image


def _same(path: str | os.PathLike[str], same: object) -> NDArray[np.bool_]:
    values: Sequence[Any]
    if isinstance(same, _Array):
        values = same.data
    elif isinstance(same, list | tuple):
        values = same
    else:
        raise ValueError(f"{path}: got {_say(same)} for the pairs, expected a list of booleans")
    for k, value in enumerate(values):
        if type(value) not in (bool, int) or value not in (0, 1):
            raise ValueError(f"{path}: got {_say(value)} for pair {k}, expected true or false")
    return np.array(values if isinstance(values, list | tuple) else list(values), np.bool_)
