"""``[tool.normcheck]`` of a pyproject.toml: what ``normcheck verify`` is asked for where the command line says nothing.

A key is an option of ``verify`` with ``_`` for ``-``. Paths in the file are relative to the file's folder. With
``--op``, ``--impl`` or ``--dtype`` on the command line the run is a part of the gate, not the gate: what the file
requires, and its known failures and baseline, may name cells that are not checked.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from normcheck.errors import UsageError, one_line, one_of, shown

NAME = "pyproject.toml"
LARGEST = 1 << 20
"""Bytes that a configuration file may have."""

KEYS: dict[str, str] = {
    "impl": "strings",
    "op": "strings",
    "dtype": "strings",
    "profile": "string",
    "max_examples": "integer",
    "time_budget": "number",
    "seed": "seed",
    "device": "string",
    "timeout": "number",
    "workers": "integer",
    "isolation": "boolean",
    "require": "strings",
    "allow_thin": "boolean",
    "known_failures": "string",
    "baseline": "string",
    "drift_ratio": "number",
    "drift_ulp": "number",
    "database": "string",
    "report": "strings",
}
"""Key -> what its value is."""

EXPECTED = {
    "strings": "a string or an array of strings",
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "seed": 'an integer, or "random"',
}

_CELLS = ("op", "impl", "dtype")
_GATE = {"known_failures", "baseline"}
Values = dict[str, Any]


def settings(given: Mapping[str, Any], file: str | None) -> Values:
    """What ``verify`` is asked for: ``given`` where it is not None, else the file's, else nothing.

    ``file``: ``--config``, or None for the nearest pyproject.toml with such a table, from the current folder upward.
    Raises UsageError for whatever is wrong with the file, in one line with its name. The key ``part`` says whether the
    command line says which cells, ``config`` is the path of the file, and ``from_config`` the keys that are the file's.
    """
    path = _named(file) if file is not None else found(Path.cwd())
    own = {key: value for key, value in given.items() if value is not None}
    if path is None:
        return own
    stored = load(path)
    kept = {key: value for key, value in stored.items() if key not in own}
    # without op and dtype a file means all of them; without impl it leaves it to the command line what the gate is of
    part = any(key in own and (key in stored or (key != "impl" and _GATE & kept.keys())) for key in _CELLS)
    return {**kept, **own, "part": part, "config": str(path), "from_config": tuple(kept)}


@contextmanager
def blamed(values: Values) -> Iterator[None]:
    """Within it, a complaint about a value that is a configuration file's says so."""
    try:
        yield
    except UsageError as error:
        key = str(error).partition("=")[0]
        if key not in values.get("from_config", ()):
            raise
        raise UsageError(f"{_short(Path(values['config']))}: [tool.normcheck] {error}") from error


def found(folder: Path) -> Path | None:
    """The nearest pyproject.toml that has ``[tool.normcheck]``, in ``folder`` or above it."""
    for place in (folder, *folder.parents):
        path = place / NAME
        if os.path.isfile(path) and _table(path) is not None:  # False where the folder may not even be looked into
            return path
    return None


def load(path: Path) -> Values:
    """The checked values of a file, its paths relative to the current folder. Raises UsageError."""
    table = _table(path)
    if table is None:
        raise UsageError(f"{_short(path)}: expected a table [tool.normcheck] in it")
    return {key: _rooted(key, _value(key, value, path), path) for key, value in table.items()}


def _named(file: str) -> Path:
    if not os.path.isfile(file):
        raise UsageError(f"config={one_line(file, 200)}: no such file, expected one with [tool.normcheck]")
    return Path(file)


def _table(path: Path) -> dict[str, Any] | None:
    """The table of a TOML file; None where it has none. A file that cannot be read is an error, not an absence."""
    where = _short(path)
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{where}: expected at most {LARGEST:,} bytes of TOML")
        document = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{where}: expected TOML, it cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: expected TOML in UTF-8 (byte {error.start} is not)") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError; so is an integer of 5000 digits
        raise UsageError(f"{where}: expected TOML: {one_line(str(error), 200)}") from error
    tool = document.get("tool", {})
    table = tool.get("normcheck") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{where}: tool.normcheck={shown(table)}: expected a table [tool.normcheck]")
    return table


def _value(key: str, value: object, path: Path) -> Any:
    where = f"{_short(path)}: [tool.normcheck] {one_line(key, 60)}={shown(value)}"
    if key not in KEYS:
        said = key.replace("-", "_")
        near = [own for own in KEYS if said.startswith(own)] or get_close_matches(said, KEYS, n=1, cutoff=0.5)
        expected = f"did you mean {near[0]}?" if near else f"expected {one_of(KEYS)}"
        raise UsageError(f"{where}: no such key; {expected}")
    kind = KEYS[key]
    if kind == "strings" and isinstance(value, str):
        return (value,)
    right = {
        "strings": isinstance(value, list) and all(isinstance(item, str) for item in value),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "seed": value == "random" or (isinstance(value, int) and not isinstance(value, bool)),
    }[kind]
    if not right:
        raise UsageError(f"{where}: expected {EXPECTED[kind]}")
    if isinstance(value, list):
        if not value and key in _CELLS:
            raise UsageError(f"{where}: expected at least one; without the key it is all of them")
        return tuple(value)
    return str(value) if kind == "seed" else value


def _rooted(key: str, value: Any, path: Path) -> Any:
    """``value`` with its paths, which are relative to the file, made relative to the current folder."""
    folder = path.parent.resolve()  # where the file was found: a store may hold it, and the project a link to it
    if key in ("known_failures", "baseline", "database"):
        return _path(value, folder)
    if key == "impl":
        return tuple(_spec(spec, folder) for spec in value)
    if key == "report":
        return tuple(_target(target, folder) for target in value)
    return value


def _path(text: str, folder: Path) -> str:
    return os.path.relpath(folder / text) if text else text


def _spec(spec: str, folder: Path) -> str:
    """FILE.py and FILE.py:NAME are paths; a known name and MODULE:NAME are not."""
    file, colon, name = (spec, "", "") if spec.endswith(".py") else spec.rpartition(":")
    return f"{_path(file, folder)}{colon}{name}" if file.endswith(".py") else spec


def _target(target: str, folder: Path) -> str:
    name, colon, path = target.partition(":")
    return f"{name}{colon}{_path(path, folder)}" if path and path != "-" else target


def _short(path: Path) -> str:
    return one_line(str(path), 200) if path.name != NAME else one_line(os.path.relpath(path), 200)
