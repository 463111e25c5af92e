"""Verification sets in the InsightFace project's .bin format: pairs of encoded images and whether each is one person.

The format is a pickle, which in general runs code when read. Here none is unpickled: a small machine carries out the
few steps that build lists, bytes and byte arrays, and refuses a file with any other.
"""

import codecs
import io
import os
import pickletools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.decoding import decode_image
from plsc.data.images import _check_format
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
    """numpy's element type by its code, such as u1; its state says the order of the bytes."""

    def __init__(self, code: object) -> None:
        text = _text(code)
        if text is None or text.lstrip("<>=|") not in _TYPES:
            raise _Refused(f"got an array of {text[:20] if text else _say(code)}, not of whole numbers or booleans")
        self.code = text.lstrip("<>=|")
        self.order = text[0] if text[0] in "<>" else "<"

    def fill(self, state: object) -> None:
        order = _text(state[1]) if isinstance(state, tuple) and len(state) > 1 else None
        if order is None or order not in tuple("<>=|"):
            raise ValueError("the state of a numpy type is not one")
        self.order = order if order in "<>" else self.order

    def values(self, data: bytes) -> list[int]:
        return [int(value) for value in np.frombuffer(data, self.order + self.code)]


class _Array:
    """A numpy array of one axis as its bytes; filled when the file gives its state."""

    def __init__(self) -> None:
        self.kind: _Type | None = None
        self.data = b""

    def fill(self, shape: object, kind: object, data: object) -> None:
        if not isinstance(kind, _Type) or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise ValueError("the state of an array is not one")
        sizes = [size for size in shape if size != 1]
        needed = (sizes or [1])[0] * int(kind.code[1:]) if all(type(size) is int for size in shape) else -1
        if len(sizes) > 1 or needed != len(data):
            raise ValueError(f"an array holds {len(data)} bytes, expected one axis of them")
        self.kind, self.data = kind, data


_STEPS = {step.code.encode("latin-1"): step for step in pickletools.opcodes}
_TYPES = {"b1", *(f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8))}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "STRING"}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_SIMPLE = {*_CONSTANTS, *_NUMBERS, *_BYTES, *_TEXTS}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _build(data: bytes) -> Any:
    """What a pickle of any protocol describes, of lists, tuples, numbers, text, bytes and arrays of one axis.

    Python 2's strings become bytes. _Refused for whatever could run code.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    converted = 0
    for name, value in _steps(data):
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


def _steps(data: bytes) -> Iterator[tuple[str, Any]]:
    """Name and argument of each step, as pickletools.genops reads them; that one stops at bytes in Python 2's text."""
    file = io.BytesIO(data)
    while code := file.read(1):
        step = _STEPS.get(code)
        if step is None:
            raise ValueError(f"byte {file.tell() - 1} begins no pickle step")
        if step.name == "STRING":
            yield step.name, _python2_string(file.readline())
        else:
            yield step.name, None if step.arg is None else step.arg.reader(file)


def _python2_string(line: bytes) -> bytes:
    """The bytes of a string as Python 2's repr writes it, quotes and escapes, up to the end of the line."""
    if len(line) < 3 or line[-1:] != b"\n" or line[:1] not in b"'\"" or line[-2] != line[0]:
        raise ValueError("a string without its quotes")
    try:
        return codecs.escape_decode(line[1:-2])[0]
    except DeprecationWarning as error:  # where warnings are errors
        raise ValueError(f"a string with an {error}") from None


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


def _scalar(kind: object, data: object) -> int:
    """numpy's own whole number or boolean."""
    if not isinstance(kind, _Type) or not isinstance(data, bytes) or len(data) != int(kind.code[1:]):
        raise ValueError("a number of numpy's is not one")
    return kind.values(data)[0]


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
        return target.fill(state)
    if not isinstance(target, _Array) or not isinstance(state, tuple) or len(state) not in (4, 5):
        raise _Refused(f"got a state for {_say(target)}, which no list of images needs")
    shape, kind, _, data = state[-4:]  # a version may stand before
    target.fill(shape, kind, data)


def _text(value: object) -> str | None:
    """A word as text, which Python 2 writes as bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else value if isinstance(value, str) else None


def _say(value: object) -> str:
    """The kind of a value, in words for a message; never its content, which may be anything."""
    if isinstance(value, _Name):
        return value.text[:80]
    return {_Array: "an array", _Type: "a numpy type", _Mark: "an open list"}.get(type(value), type(value).__name__)


def _image(path: str | os.PathLike[str], i: int, image: object) -> bytes:
    if isinstance(image, _Array) and image.kind is not None and image.kind.code == "u1":
        image = image.data
    if not isinstance(image, bytes) or not image:
        got = "an empty one" if image == b"" else _say(image)
        raise ValueError(f"{path}: got {got} as image {i}, expected an encoded image as bytes or an array of uint8")
    return image


def _same(path: str | os.PathLike[str], same: object) -> NDArray[np.bool_]:
    if isinstance(same, _Array) and same.kind is not None:
        same = same.kind.values(same.data)
    if not isinstance(same, list | tuple):
        raise ValueError(f"{path}: got {_say(same)} for the pairs, expected a list of booleans")
    for k, value in enumerate(same):
        if type(value) not in (bool, int) or value not in (0, 1):
            got = value if type(value) is int and abs(value) < 2**63 else _say(value)
            raise ValueError(f"{path}: got {got} for pair {k}, expected true or false (1 or 0)")
    return np.array(same, np.bool_)
