"""A JSON file from outside, read strictly: what is not as expected is one line with the file and the place in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from normcheck.errors import UsageError, one_line, one_of, shown
from normcheck.files import contents

LARGEST = 1 << 28
"""Bytes that a file may have; a report of 10,000 cells has 40 million."""

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Node:
    """A value of a document, and where it is: ``report.json: verdicts[3].cases``. Each method raises UsageError."""

    value: object
    where: str

    def wrong(self, expected: str) -> NoReturn:
        """Complain that this is not what was ``expected``."""
        raise UsageError(f"{self.where}={shown(self.value, 80)}: expected {expected}")

    def entries(self) -> dict[str, Node]:
        """The values of an object."""
        if not isinstance(self.value, dict):
            self.wrong("an object")
        return {key: Node(value, self._place(key)) for key, value in self.value.items()}

    def items(self) -> list[Node]:
        """The values of an array."""
        if not isinstance(self.value, list):
            self.wrong("an array")
        return [Node(value, f"{self.where}[{number}]") for number, value in enumerate(self.value)]

    def __getitem__(self, key: str) -> Node:
        if not isinstance(self.value, dict):
            self.wrong("an object")
        if key not in self.value:
            raise UsageError(f"{self._place(key)} is missing: expected it")
        return Node(self.value[key], self._place(key))

    def get(self, key: str, default: object) -> Node:
        """A value that older files do not have."""
        if not isinstance(self.value, dict):
            self.wrong("an object")
        return Node(self.value.get(key, default), self._place(key))

    def _place(self, key: str) -> str:
        return f"{self.where}{' ' if self.where.endswith(':') else '.'}{one_line(key, 60)}"

    def text(self, choices: Iterable[str] = ()) -> str:
        """A string, one of ``choices`` where there are any."""
        allowed = tuple(choices)
        if not isinstance(self.value, str):
            self.wrong("a string")
        if allowed and self.value not in allowed:
            self.wrong(one_of(allowed))
        return self.value

    def texts(self) -> tuple[str, ...]:
        """An array of strings."""
        return tuple(item.text() for item in self.items())

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.wrong("true or false")
        return self.value

    def integer(self, least: int = 0) -> int:
        """A count: an integer of at most 18 digits."""
        if self.whole() < least or self.whole() >= 10**18:
            self.wrong(f"an integer >= {least}")
        return self.whole()

    def whole(self) -> int:
        """An integer of any size."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            self.wrong("an integer")
        return self.value

    def number(self) -> float:
        """A number, or one that JSON does not have as a string: NaN, Infinity, -Infinity."""
        if isinstance(self.value, str) and self.value in _NOT_FINITE:
            return _NOT_FINITE[self.value]
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or abs(self.value) > 1.8e308:
            self.wrong('a number, or "NaN", "Infinity", "-Infinity"')
        return self.value

    @property
    def known(self) -> bool:
        """Whether there is a value: null is what is not known."""
        return self.value is not None


def load(file: str, schema: str) -> Node:
    """The object in a JSON file of this ``schema``. Raises UsageError, in one line, for a file that is none."""
    where = one_line(file, 200)
    try:
        text = contents(file, LARGEST).decode("utf-8-sig")
        value = json.loads(text, parse_constant=_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: expected {schema}, in UTF-8 (byte {error.start} is not)") from error
    except OSError as error:
        raise UsageError(f"{where}: expected {schema}; it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # also an integer of 5000 digits, and a name that no file can have
        raise UsageError(f"{where}: expected {schema}, in JSON: {one_line(str(error), 200)}") from error
    if not isinstance(value, dict) or value.get("schema") != schema:
        own = value.get("schema") if isinstance(value, dict) else value
        raise UsageError(f"{where}: schema={shown(own, 80)}: expected {schema}")
    return Node(value, f"{where}:")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key of an object is there twice")
    return found
