"""JSON from somebody else: strict, limited, sealed with a checksum. What is wrong with it is one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from normcheck.errors import UsageError, one_line, shown

SEAL = "sha256"
"""The key that holds the checksum of all others."""

_MOST_DIGITS = 15  # of an integer: nothing here is counted beyond 2^49
_LONGEST = 2_000  # characters of a text


def seal(data: Mapping[str, Any]) -> str:
    """sha256 of ``data`` without its seal, in one form of writing: sorted keys, no blanks, ASCII."""
    rest = {key: value for key, value in data.items() if key != SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with its seal."""
    return {**data, SEAL: seal(data)}


def parsed(content: bytes, who: str) -> dict[str, Any]:
    """The object that ``content`` is: no key twice, no fractions, no huge integers, as it was sealed.

    Raises UsageError that begins with ``who``.
    """
    try:
        data = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_once,
            parse_float=_no_number,
            parse_constant=_no_number,
            parse_int=_integer,
        )
    except UnicodeDecodeError:
        raise UsageError(f"{who}: expected UTF-8 text") from None
    except RecursionError:
        raise UsageError(f"{who}: is nested too deeply, expected a manifest of normcheck golden record") from None
    except ValueError as error:
        raise UsageError(f"{who}: expected JSON: {one_line(str(error), 200)}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{who}: expected an object, got {type(data).__name__}")
    try:
        expected = seal(data)
    except (ValueError, RecursionError):
        raise UsageError(f"{who}: expected plain text and integers") from None
    if data.get(SEAL) != expected:
        raise UsageError(f"{who}: {SEAL}={shown(data.get(SEAL), 80)}: it was changed, expected {expected}")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{one_line(text, 40)}: expected integers only")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} characters: expected at most {_MOST_DIGITS}")
    return int(text)


def keys_of(data: object, who: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """``data``, if it is an object with all ``required`` keys and no others but ``optional`` ones."""
    if not isinstance(data, dict):
        raise UsageError(f"{who}: expected an object, got {shown(data, 60)}")
    required, optional = tuple(required), tuple(optional)
    for name in required:
        if name not in data:
            raise UsageError(f"{who}: {name} is missing: expected it")
    for name in data:
        if name not in required and name not in optional:
            raise UsageError(f"{who}: {shown(name, 60)} expected only {', '.join((*required, *optional))}")
    return data


def text_of(data: object, who: str, *, empty: bool = False) -> str:
    """``data``, if it is a text that is not too long."""
    if not isinstance(data, str) or len(data) > _LONGEST or not (data or empty):
        raise UsageError(f"{who}={shown(data, 60)}: expected text of at most {_LONGEST} characters")
    return data


def list_of(data: object, who: str, most: int) -> list[Any]:
    """``data``, if it is a list that is not too long."""
    if not isinstance(data, list) or len(data) > most:
        raise UsageError(f"{who}={shown(data, 60)}: expected a list of at most {most}")
    return data


def texts_of(data: object, who: str, most: int) -> dict[str, str]:
    """``data``, if it is an object of texts with at most ``most`` keys."""
    if not isinstance(data, dict) or len(data) > most:
        raise UsageError(f"{who}={shown(data, 60)}: expected an object of at most {most} texts")
    return {text_of(key, f"{who}.key"): text_of(value, f"{who}.{one_line(key, 60)}") for key, value in data.items()}
