"""The command line of normcheck in this process: what a test calls where a process of its own is not the subject."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol
from unittest.mock import patch

import typer.main

from normcheck.cli import app
from normcheck.gate import unchanged

get_command, files = cache(typer.main.get_command), unchanged._files


def own_files(packages: tuple[str, ...]) -> Iterator[str]:
    """Those of ``packages`` without torch's and Triton's, which are 2,700."""
    return files(tuple(package for package in packages if package not in ("torch", "triton")))


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
    """Run ``normcheck *argv`` with both outputs in pipes. The fixture ``cli`` does so in an empty folder.

    What each run of a process does once is done once for all of them: Typer makes the commands, for 29 ms. Of the files
    that judge those of torch and Triton are not watched, for 90 ms a run: ``gate/test_unchanged.py`` is about them.
    """
    out, err = _Pipe("strict"), _Pipe("backslashreplace")
    with (
        patch.object(typer.main, "get_command", get_command),
        patch.object(unchanged, "_files", own_files),
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
