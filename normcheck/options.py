"""Options that are declared once, as the fields of a dataclass: what an ``Option`` is, and how values are checked.

The name, type and default of an option are its field's, and the ``Option`` in the field's annotation has the rest. The
fields become the parameters of the command line and the keys of ``[tool.normcheck]``. ``built`` checks all values,
whether they come from there or from a caller in Python. This module is quick to import: pydantic is imported when
something is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from normcheck.errors import UsageError, complaint, one_line, one_of, shown

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler, ValidationInfo
    from pydantic_core import CoreSchema

T = TypeVar("T")

_TYPES_ONLY = "types only"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The facts of an option beside its name, type and default.

    ``names``: its allowed values, which a shell offers; with ``open`` any other value is allowed as well, and with
    ``files`` the shell also offers Python files. ``check``: raises ValueError("VALUE: expected ...") for a wrong value.
    ``read``: converts a given value to the declared type. ``text``: on the command line it is a string. ``flags``: its
    flags on the command line, if they do not follow from its name. ``stored``: it may stand in ``[tool.normcheck]``.
    """

    help: str
    names: Callable[[], Iterable[str]] | None = None
    open: bool = False
    files: bool = False
    check: Callable[[Any], None] | None = None
    read: Callable[[object], object] | None = None
    text: bool = False
    flags: tuple[str, ...] = ()
    stored: bool = True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        schema = core_schema.with_info_after_validator_function(self._checked, handler(source))
        return core_schema.no_info_before_validator_function(self.read, schema) if self.read else schema

    def _checked(self, value: Any, info: ValidationInfo) -> Any:
        if value is None or info.context == _TYPES_ONLY:
            return value
        if self.names and not self.open:
            known = tuple(self.names())
            for name in value if isinstance(value, tuple) else (value,):
                if name not in known:
                    raise ValueError(f"{one_line(name)}: expected {one_of(known)}")  # pydantic needs UTF-8
        if self.check:
            self.check(value)
        return value


def within(least: int, most: int) -> Callable[[int], None]:
    """A check of an integer."""

    def check(value: int) -> None:
        if not least <= value <= most:
            raise ValueError(f"{value}: expected an integer from {least} to {most}")

    return check


def at_least(least: int) -> Callable[[float], None]:
    """A check of a finite number."""

    def check(value: float) -> None:
        if not least <= value < math.inf:
            raise ValueError(f"{value:g}: expected a number >= {least}")

    return check


def count(value: int) -> None:
    """A check of an integer: at least 1."""
    if value < 1:
        raise ValueError(f"{value}: expected an integer >= 1")


def seconds(value: float) -> None:
    """A check of a duration."""
    if not 0 < value <= 1e6:  # timers overflow above it
        raise ValueError(f"{value:g}: expected seconds > 0, at most 1e6")


def several(value: object) -> tuple[str, ...]:
    """A string or several, as a tuple."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError(f"{shown(value)}: expected a string or an array of strings")


@cache
def options_of(kind: type) -> dict[str, Option]:
    """Name -> ``Option``, for each option of ``kind``. Of two annotations the later one has the help."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        declared = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Option)]
        if declared:
            found[name] = replace(declared[0], help=declared[-1].help)
    return found


def built(kind: type[T], values: Mapping[str, Any]) -> T:
    """A ``kind`` with these ``values``, and the defaults of all others. Raises UsageError for a wrong value."""
    return kind(**_validated(kind, values))


def typed(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, if each is of its option's type; only ``built`` checks them further. Raises UsageError."""
    return _validated(kind, values, _TYPES_ONLY)


def _validated(kind: type, values: Mapping[str, Any], context: str = "") -> dict[str, Any]:
    from pydantic import ValidationError

    try:
        model = _model(kind).model_validate(values, context=context)
    except ValidationError as error:
        raise UsageError(complaint(error.errors(include_url=False)[0])) from None
    return {name: getattr(model, name) for name in values}


@cache
def _model(kind: Any) -> type[BaseModel]:
    from pydantic import ConfigDict, create_model

    hints = get_type_hints(kind, include_extras=True)
    declared: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in fields(kind)}
    return create_model(kind.__name__, __config__=ConfigDict(strict=True, extra="forbid"), **declared)
