"""Strict JSON documents: bounded, typed field by field, nothing unknown let through."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from jdelta.errors import FormatError

FORMAT = "jdelta"
FORMAT_VERSION = 1
MAX_BYTES = 32 << 20
"""Of a manifest: some 200,000 tensors."""
MAX_INT = (1 << 63) - 1


def dump(kind: str, fields: dict[str, Any]) -> bytes:
    """A document as compact ASCII JSON; the same bytes for the same fields.

    Raises:
        FormatError: it is larger than is read.
    """
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "type": kind,
        **fields,
    }
    data = json.dumps(
        document, ensure_ascii=True, allow_nan=False, separators=(",", ":")
    ).encode()
    _check_size(data, kind, MAX_BYTES)
    return data


def load(
    data: bytes | bytearray | memoryview, kind: str, max_bytes: int = MAX_BYTES
) -> Fields:
    """The fields of a document of type `kind`.

    Raises:
        FormatError: the bytes are no such document, or one of a newer format.
    """
    fields = Fields(parse_object(data, kind, max_bytes), kind)
    if fields.take("format") != FORMAT:
        fields.fail("format", f"is not {FORMAT!r}")
    version = fields.integer("format_version", 1)
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{kind}: made by a newer jdelta: format_version {version}, this one reads "
            f"{FORMAT_VERSION}; update jdelta"
        )
    found = fields.text("type", 64)
    if found != kind:
        raise FormatError(f"{kind}: the document is a {found!r}")
    return fields


def parse_object(
    data: bytes | bytearray | memoryview, kind: str, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """One strict JSON object: UTF-8, no duplicate keys, no NaN, no huge numbers.

    Raises:
        FormatError: the bytes are something else.
    """
    data = bytes(data)
    _check_size(data, kind, max_bytes)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
        )
    except FormatError as error:
        raise FormatError(f"{kind}: {error}") from None
    except RecursionError:
        raise FormatError(f"{kind}: nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON
        raise FormatError(f"{kind}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{kind}: not a JSON object")
    return value


class Fields:
    """The fields of a JSON object, each taken once and checked."""

    def __init__(self, fields: Any, where: str):
        """Wraps a parsed object; `where` begins every message."""
        self._where = where
        if not isinstance(fields, dict):
            raise FormatError(f"{where}: not a JSON object")
        self._left = dict(fields)

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raises FormatError about one field."""
        raise FormatError(f"{self._where}: {key!r} {problem}")

    def take(self, key: str) -> Any:
        """A field's value, unchecked."""
        if key not in self._left:
            self.fail(key, "is missing")
        return self._left.pop(key)

    def integer(self, key: str, low: int = 0, high: int = MAX_INT) -> int:
        """An integer from `low` to `high`."""
        value = self.take(key)
        if type(value) is not int or not low <= value <= high:
            self.fail(key, f"is not an integer from {low} to {high}: {_show(value)}")
        return value

    def number(self, key: str) -> float:
        """A finite number, 0 or more."""
        value = self.take(key)
        if type(value) not in (int, float) or not 0 <= value <= MAX_INT:
            self.fail(key, f"is not a number, 0 or more: {_show(value)}")
        return float(value)

    def text(self, key: str, most: int = 1024) -> str:
        """A string of 1 to `most` characters that UTF-8 can hold."""
        value = self.take(key)
        if type(value) is not str or not 1 <= len(value) <= most or not is_text(value):
            self.fail(key, f"is not a text of 1 to {most} characters: {_show(value)}")
        return value

    def hexadecimal(self, key: str, digits: int) -> str:
        """A string of that many lower-case hexadecimal digits."""
        value = self.take(key)
        if type(value) is not str or not is_hexadecimal(value, digits):
            self.fail(key, f"is not {digits} hexadecimal digits: {_show(value)}")
        return value

    def array(self, key: str, most: int) -> list[Any]:
        """A list of at most `most` items."""
        value = self.take(key)
        if type(value) is not list or len(value) > most:
            self.fail(key, f"is not a list of at most {most} items: {_show(value)}")
        return value

    def end(self) -> None:
        """Checks that no field is left over."""
        if self._left:
            self.fail(str(next(iter(self._left)))[:80], "is an unknown field")


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold `value` (a lone surrogate it cannot)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_hexadecimal(value: str, digits: int) -> bool:
    """Whether `value` is that many lower-case hexadecimal digits."""
    return len(value) == digits and not value.strip("0123456789abcdef")


def _check_size(data: bytes, kind: str, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise FormatError(f"{kind}: {len(data)} bytes, at most {max_bytes} are read")
    # Empty lists would take 30 times their text in memory.
    if data.count(b"[") + data.count(b"{") > 1024 + len(data) // 8:
        raise FormatError(f"{kind}: more lists and objects than it could need")


def _show(value: Any) -> str:
    shown = (
        repr(value) if isinstance(value, str | int | float) else type(value).__name__
    )
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError("a key appears twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise FormatError(f"{text} is no number of JSON")


def _parse_int(text: str) -> int:
    if len(text) > 20:
        raise FormatError(f"a number has {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FormatError("a number is too large")
    return value
