"""The command line of normcheck in this process: what a test calls where a process of its own is not the subject."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol
from unittest.mock import patch

from typer import main as typer_main

from normcheck.cli import app

_commands = cache(typer_main.get_command)
"""Made of the functions in ``app.py`` once, where a process of its own makes them for its one command: a sixth of a
short run."""


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.rstrip("\n").split("\n")[-1]


class Cli(Protocol):
    """``cli("verify", "--impl", "torch")``; ``stdin`` is what the command reads there."""

    def __call__(self, *argv: str, stdin: str = "") -> Done: ...


class KernelFile(Protocol):
    """``kernel_file(SOURCE, "more of it")`` is the path of a file with these lines, below the test's folder."""

    def __call__(self, *parts: str, name: str = "") -> Path: ...


class _Pipe(io.TextIOWrapper):
    """A pipe, as strict about what it encodes as the real one."""

    def __init__(self, errors: str) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)

    def text(self) -> str:
        return self.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]


def normcheck(*argv: str, stdin: str = "") -> Done:
    """Run ``normcheck *argv`` with both outputs in pipes. The fixture ``cli`` does so in an empty folder."""
    out, err = _Pipe("strict"), _Pipe("backslashreplace")
    with (
        patch.object(typer_main, "get_command", _commands),
        patch.object(sys, "argv", ["normcheck", *argv]),
        patch.object(sys, "stdin", io.StringIO(stdin)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            app.main()
        except SystemExit as stopped:
            return Done(stopped.code, out.text(), err.text())  # type: ignore[arg-type]
    raise AssertionError("main always exits")
