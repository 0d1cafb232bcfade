"""JSON documents, read and written by their types.

Reading checks strictly: a wrong value is an error of one line, with the file and the place in it. Writing makes strict
JSON: NaN and the infinities, which JSON does not have, are strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from normcheck.errors import UsageError, complaint, one_line, shown
from normcheck.files import contents

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

LARGEST_BYTES = 1 << 28
"""Bytes that a file may have at most; a report of 10,000 cells has 40 million."""


EMBEDDED = "normcheck-report"
"""The id of the element of a page that has the document from which the page was made."""


def load(file: str, schema: str) -> dict[str, Any]:
    """The object in a JSON file of this ``schema``, or in a page of HTML that was made from it.

    Raises UsageError, in one line, for any other file.
    """
    where = one_line(file, 200)
    try:
        text = contents(file, LARGEST_BYTES).decode("utf-8-sig")
        text = _embedded(text) if text[:15].lower() == "<!doctype html>" else text
        value = json.loads(text, parse_constant=_constant, object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: expected {schema}, in UTF-8 (byte {error.start} is not)") from error
    except OSError as error:
        raise UsageError(f"{where}: expected {schema}; it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # also an integer of 5000 digits, and a name that no file can have
        raise UsageError(f"{where}: expected {schema}, in JSON: {one_line(str(error), 200)}") from error
    if not isinstance(value, dict) or value.get("schema") != schema:
        own = value.get("schema") if isinstance(value, dict) else value
        raise UsageError(f"{where}: schema={shown(own, 80)}: expected {schema}")
    return value


def checked(kind: type[T], value: object, where: str) -> T:
    """``value`` as a ``kind``. Raises UsageError, which begins with ``where``, for the first thing that is wrong."""
    from pydantic import ValidationError

    read: Any = kind
    try:
        found: T = _adapter(read).validate_python(value)
    except ValidationError as error:
        raise UsageError(f"{where}: {complaint(error.errors(include_url=False)[0])}") from None
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def text_of(document: object, indent: int | None = 2) -> str:
    """``document`` as JSON and a newline, in ASCII, so that no encoding of a stream can refuse it.

    ``indent``: None for a line without spaces.
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(plain(document), indent=indent, separators=separators, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """``value`` as JSON has it: an object for frozen data, a string for a number that is not finite."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object as a dict. Raises ValueError for a key that is there twice, which is ambiguous."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key of an object is there twice")
    return result


class _Embedded(HTMLParser):
    """Collects the text of the elements with the id EMBEDDED, whatever else a page has."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and ("id", EMBEDDED) in attrs
        self.found += [""] * self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found[-1] += data


def _embedded(page: str) -> str:
    """The JSON text in a page. Raises ValueError unless there is one."""
    reader = _Embedded()
    try:
        reader.feed(page)
        reader.close()
    except AssertionError as error:  # of the parser, about a declaration that is none
        raise ValueError(str(error)) from error
    if len(reader.found) != 1:
        raise ValueError(f"{len(reader.found)} elements of the page have the id {EMBEDDED}, and one is expected")
    return reader.found[0]


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
