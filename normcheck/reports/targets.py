"""Targets of reports: ``--report FORMAT:PATH``, checked before anything runs and written after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import TextIO

from normcheck.errors import UsageError, one_line, one_of, to_install
from normcheck.files import resolved, writable


@dataclass(frozen=True)
class Target:
    """The target of a report: its format and a path; "-" is standard output."""

    format: str
    path: str

    @property
    def shown(self) -> str:
        """The target in an error message: ``report=FORMAT:PATH``."""
        return f"report={self.format}:{one_line(self.path, 200)}"


def targets(
    reports: Sequence[str],
    formats: Collection[str],
    read: Iterable[str] = (),
    needs: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[Target, ...]:
    """The target in each of ``reports``, checked. Raises UsageError for one that could not be written later.

    ``read``: files that the run reads, which are no target; ``needs``: format -> the modules that it is made with.
    """
    found = []
    for text in reports:
        name, colon, path = text.partition(":")
        if name not in formats or not colon or not path:
            raise UsageError(f"report={text}: expected FORMAT:PATH with FORMAT {one_of(formats)}")
        if path != "-" and not writable(path):
            raise UsageError(
                f"report={one_line(text, 200)}: expected a path of a file that can be written, in a folder that exists"
            )
        missing = [module for module in needs.get(name, ()) if find_spec(module) is None]
        if missing:
            raise UsageError(f"report={one_line(text, 200)}: expected {' and '.join(missing)}; {to_install('plot')}")
        found.append(Target(name, path))
    if sum(target.path == "-" for target in found) > 1:
        raise UsageError("report=...:-: expected at most one report on standard output")
    paths = [resolved(target.path) for target in found if target.path != "-"]
    used = {resolved(path) for path in read if path}
    for target in found:
        if target.path != "-" and paths.count(resolved(target.path)) > 1:
            raise UsageError(f"{target.shown}: expected a file of its own for each report")
    for target in found:
        if target.path != "-" and resolved(target.path) in used:
            raise UsageError(f"{target.shown}: expected another file, this one is read")
    return tuple(found)


def screen(targets: Sequence[Target]) -> TextIO:
    """The stream for people: standard output, or standard error if a report goes to standard output."""
    return sys.stderr if any(target.path == "-" for target in targets) else sys.stdout


def written(target: Target, write: Callable[[TextIO], None]) -> str:
    """Write one report; returns why that failed, or ""."""

    def write_it() -> None:
        if target.path == "-":
            write(sys.stdout)
        else:
            with open(target.path, "w", encoding="utf-8", newline="") as stream:
                write(stream)

    return unwritten(target, write_it)


def unwritten(target: Target, write: Callable[[], None]) -> str:
    """Call ``write``, which writes a report to ``target``; returns why that failed, or ""."""
    try:
        write()
    except OSError as error:
        return f"{target.shown}: it cannot be written: {error.strerror or error}"
    return ""
