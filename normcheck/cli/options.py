"""Parameters of a command, made from the declared options of a dataclass. Imports nothing that takes time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from normcheck.options import Option, options_of

Given = Mapping[str, Any]
"""Option -> value, for the options that are on the command line or have a default there."""


def options(
    kind: type, *, only: Sequence[str] = (), help: Mapping[str, str] | None = None, unset: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: replace a command's parameter ``given`` by the options of ``kind``, whose values it then gets by name.

    ``only``: the options to take, all if empty. ``help``: option -> its help in this command. ``unset``: leave options
    that are not on the command line out of ``given``, since a configuration file may have them.
    """
    declared = options_of(kind)
    hints = get_type_hints(kind)
    names = tuple(only) or tuple(declared)
    defaults = {field.name: field.default for field in fields(kind)}
    own = {name: _parameter(name, declared[name], hints[name], defaults[name], help or {}, unset) for name in names}

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        def called(**values: Any) -> None:
            given = {name: value for name in own if (value := values.pop(name)) is not None}
            command(**values, given=given)

        signature = inspect.signature(command, eval_str=True)
        parameters = [
            new
            for name, parameter in signature.parameters.items()
            for new in (own.values() if name == "given" else (parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY),))
        ]
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return called

    return with_options


def offered(option: Option) -> Callable[[str], list[str]]:
    """The completion of an option's value: a function from its beginning to what a shell offers."""

    def starting(incomplete: str) -> list[str]:
        names = list(option.names()) if option.names else []
        if option.files:
            folder, slash, _ = incomplete.rpartition("/")
            files = (f"{folder}{slash}{path.name}" for path in Path(folder or (slash or ".")).glob("*.py"))
            names += sorted(files)
        return [name for name in names if name.startswith(incomplete)]

    return starting


def _parameter(
    name: str, option: Option, hint: Any, default: Any, help: Mapping[str, str], unset: bool
) -> inspect.Parameter:
    text = help.get(name, option.help)
    many = get_origin(hint) is tuple
    if unset and default not in ("", None, ()) and hint is not bool:
        text = f"{text} Default: {default:g}." if hint is float else f"{text} Default: {default}."
    info = typer.Option(
        *(option.flags or (f"--{name.replace('_', '-')}",)),
        help=text,
        show_default=not (unset and hint is bool),
        autocompletion=offered(option) if option.names else None,
    )
    kind = list[str] if many else str if option.text else hint
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind | None if many or unset else kind, info],
        default=None if many or unset else default,
    )
