"""A strict JSON reader for foreign files: limited in size, sealed with a checksum. Each error is one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from normcheck.errors import UsageError, one_line, shown
from normcheck.reports.document import once

SEAL = "sha256"
"""The key that holds the checksum of all others."""

_MOST_DIGITS = 15  # of an integer: no count here exceeds 2^49


def seal(data: Mapping[str, Any]) -> str:
    """The sha256 of ``data`` without its seal, written in one form: sorted keys, no blanks, ASCII."""
    rest = {key: value for key, value in data.items() if key != SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with its seal."""
    return {**data, SEAL: seal(data)}


def parsed(content: bytes, who: str) -> dict[str, Any]:
    """The object in ``content``: no key twice, no fractions, no huge integers, and with the seal that it should have.

    Raises UsageError, which begins with ``who``.
    """
    try:
        data = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=once,
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


def _no_number(text: str) -> Any:
    raise ValueError(f"{one_line(text, 40)}: expected integers only")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} characters: expected at most {_MOST_DIGITS}")
    return int(text)
