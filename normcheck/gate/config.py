"""Configuration file: ``[tool.normcheck]`` of a pyproject.toml, whose options the command line overrides.

A key is an option of ``verify`` with ``_`` for ``-``. Paths in the file are relative to the file's folder. With
``--op``, ``--impl`` or ``--dtype`` on the command line the run is only a part of the gate that the file describes: its
required implementations, known failures and baseline may name cells that this run does not check.
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
from normcheck.files import contents
from normcheck.gate.options import VerifyOptions
from normcheck.options import options_of, typed

NAME = "pyproject.toml"
LARGEST_BYTES = 1 << 20
"""Bytes that a configuration file may have at most."""

KEYS = tuple(name for name, option in options_of(VerifyOptions).items() if option.stored)

_CELLS = ("op", "impl", "dtype", "layout")
_GATE = {"known_failures", "baseline"}
Values = dict[str, Any]


def settings(given: Mapping[str, Any], file: str | None) -> Values:
    """The options of ``verify`` by name: the values of ``given`` that are not None, else those of the file.

    ``file``: the value of ``--config``, or None for the nearest pyproject.toml with such a table, from the current
    folder upward. With a file there are three more keys. ``part``: whether the command line chooses some of the file's
    cells. ``config``: the path of the file. ``from_config``: the names of the options that come from it.
    Raises UsageError, in one line with the file's name, for anything that is wrong with the file.
    """
    path = _named(file) if file is not None else found(Path.cwd())
    own = {key: value for key, value in given.items() if value is not None}
    if path is None:
        return own
    stored = load(path)
    kept = {key: value for key, value in stored.items() if key not in own}
    # A file without op or dtype is about all of them, and so are its known failures and baseline. A file without impl
    # leaves it to the command line which implementations it is about.
    part = any(key in own and (key in stored or (key != "impl" and _GATE & kept.keys())) for key in _CELLS)
    return {**kept, **own, "part": part, "config": str(path), "from_config": tuple(kept)}


@contextmanager
def blamed(values: Values) -> Iterator[None]:
    """Within it, a UsageError about a value from the configuration file names the file."""
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
        if os.path.isfile(path) and _table(path) is not None:  # False if the folder may not even be read
            return path
    return None


def load(path: Path) -> Values:
    """The values of a file, checked, with paths relative to the current folder. Raises UsageError."""
    table = _table(path)
    if table is None:
        raise UsageError(f"{_short(path)}: expected a table [tool.normcheck] in it")
    try:
        values = typed(VerifyOptions, {key: _known(key, value) for key, value in table.items()})
    except UsageError as error:
        raise UsageError(f"{_short(path)}: [tool.normcheck] {error}") from error
    if "seed" in table:
        values["seed"] = str(table["seed"])  # as the command line has it
    return {key: _rooted(key, value, path) for key, value in values.items()}


def _named(file: str) -> Path:
    if not os.path.isfile(file):
        raise UsageError(f"config={one_line(file, 200)}: no such file, expected one with [tool.normcheck]")
    return Path(file)


def _table(path: Path) -> dict[str, Any] | None:
    """The table of a TOML file, None if it has none. Raises UsageError for a file that cannot be read."""
    where = _short(path)
    try:
        document = tomllib.loads(contents(path, LARGEST_BYTES).decode("utf-8-sig"))
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


def _known(key: str, value: object) -> object:
    said = f"{one_line(key, 60)}={shown(value)}"
    if key not in KEYS:
        name = key.replace("-", "_")
        near = [own for own in KEYS if name.startswith(own)] or get_close_matches(name, KEYS, n=1, cutoff=0.5)
        raise UsageError(f"{said}: no such key; {f'did you mean {near[0]}?' if near else f'expected {one_of(KEYS)}'}")
    if value == [] and key in _CELLS:
        raise UsageError(f"{said}: expected at least one; without the key it is all of them")
    if key == "seed" and value != "random" and type(value) is not int:
        raise UsageError(f'{said}: expected an integer, or "random"')
    return value


def _rooted(key: str, value: Any, path: Path) -> Any:
    """``value`` with its paths, which are relative to the file, made relative to the current folder."""
    folder = path.parent.resolve()  # not path.resolve().parent: the file may be a link to one kept elsewhere
    if key in ("known_failures", "baseline", "database", "timings"):
        return _path(value, folder)
    if key == "impl":
        return tuple(_spec(spec, folder) for spec in value)
    if key == "report":
        return tuple(_target(target, folder) for target in value)
    return value


def _path(text: str, folder: Path) -> str:
    return os.path.relpath(folder / text) if text else text


def _spec(spec: str, folder: Path) -> str:
    """An ``--impl`` with its path rooted: FILE.py and FILE.py:NAME have one; a known name and MODULE:NAME do not."""
    file, colon, name = (spec, "", "") if spec.endswith(".py") else spec.rpartition(":")
    return f"{_path(file, folder)}{colon}{name}" if file.endswith(".py") else spec


def _target(target: str, folder: Path) -> str:
    name, colon, path = target.partition(":")
    return f"{name}{colon}{_path(path, folder)}" if path and path != "-" else target


def _short(path: Path) -> str:
    return one_line(str(path), 200) if path.name != NAME else one_line(os.path.relpath(path), 200)
