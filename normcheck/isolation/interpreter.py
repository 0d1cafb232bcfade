"""The Python interpreter of another environment: what it has, and how it finds this normcheck and nothing else of ours.

It needs torch and numpy, and nothing that normcheck's own environment has besides: a kernel's process imports no more.
What it says is read as words of a stranger, since any program can stand at that path.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import normcheck
from normcheck.errors import UsageError, one_line
from normcheck.isolation.sandbox import run_folder

START_SECONDS = 60.0
"""Within which it must have told its versions: it imports torch."""

_MOST_BYTES = 1 << 20  # of what it prints
_MOST_FACTS, _LONGEST_FACT = 30, 200

_MARK = "normcheck-environment "
_TELL = """\
import sys
sys.path[:] = [{folder!r}, *sys.path]
import json
import torch, numpy
from normcheck.isolation import preload
from normcheck.runner.environment import environment
print("\\n{mark}" + json.dumps(environment({device!r})), flush=True)
"""

_EXPECTED = "expected the interpreter of an environment with torch and numpy, such as /path/to/env/bin/python"


@cache
def _folder_of_normcheck(process: int) -> str:
    folder = os.path.join(run_folder(process), "only-normcheck")
    os.makedirs(folder, mode=0o700)
    os.symlink(Path(normcheck.__file__).parent, os.path.join(folder, "normcheck"))
    return folder


def folder_of_normcheck() -> str:
    """A folder with this normcheck and no other package: on another interpreter's path it hides nothing of its own."""
    return _folder_of_normcheck(os.getpid())


def is_child(number: int, parent: int) -> bool:
    """Whether the process ``number`` is there, as a child of ``parent``."""
    if number <= 1:
        return False
    try:
        status = Path(f"/proc/{number}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f"\nPPid:\t{parent}\n" in status


def found(python: str) -> str:
    """The absolute path of the interpreter that ``--with`` names. Raises UsageError.

    Links stay: by its path an interpreter knows its environment.
    """
    path = shutil.which(python) if python and "\0" not in python else None
    if path is None or not os.path.isfile(path):
        inside = Path(python) / "bin" / "python" if python and "\0" not in python else None
        hint = f"; {one_line(str(inside), 200)} is one" if inside is not None and shutil.which(inside) else ""
        why = "is a folder" if os.path.isdir(python) else "is no program" if os.path.exists(python) else "no such file"
        raise UsageError(f"with={one_line(python, 200)}: {why}; {_EXPECTED}{hint}")
    return os.path.abspath(path)


def environment_of(python: str, device: str) -> Mapping[str, str]:
    """Name -> version or description, as ``runner.environment`` has them, of the interpreter at the path ``python``.

    On return it has shown that it can import what a kernel's process needs. Raises UsageError.
    """
    script = _TELL.format(folder=folder_of_normcheck(), mark=_MARK, device=device)
    who = f"with={one_line(python, 200)}"
    try:
        code, text = _said([python, "-c", script], START_SECONDS)
    except OSError as error:
        raise UsageError(f"{who}: it cannot be started ({error.strerror or error}); {_EXPECTED}") from None
    if code is None:
        raise UsageError(f"{who}: it told no versions within {START_SECONDS:g} s, or printed too much; {_EXPECTED}")
    lines = [line for line in text.splitlines() if line.strip()]
    told = next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), None)
    facts = _facts(told) if told is not None and code == 0 else None
    if facts is None:
        last = one_line(lines[-1], 200, keep_end=False) if lines else "nothing"
        raise UsageError(f"{who}: it ended with exit code {code}, and printed last: {last}; {_EXPECTED}")
    return facts


def _facts(told: str) -> dict[str, str] | None:
    """The names and versions in a line of JSON, cut to what a report can show; None if it is anything else."""
    try:
        value = json.loads(told)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not {"python", "torch"} <= value.keys() or len(value) > _MOST_FACTS:
        return None
    if not all(isinstance(fact, str) for fact in value.values()):
        return None
    return {one_line(name, 40): one_line(fact, _LONGEST_FACT) for name, fact in value.items()}


def _said(argv: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit code of a program and what it printed; None if it did not end in time, or printed too much.

    Whatever it has started in its session ends with it. Raises OSError.
    """
    program = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert program.stdout is not None
    text, end = b"", time.monotonic() + seconds
    poll = select.poll()
    poll.register(program.stdout, select.POLLIN | select.POLLHUP)
    try:
        while len(text) <= _MOST_BYTES and (left := end - time.monotonic()) > 0:
            if not poll.poll(left * 1000):
                continue
            chunk = os.read(program.stdout.fileno(), 1 << 16)
            if not chunk:
                with suppress(subprocess.TimeoutExpired):
                    return program.wait(max(0.0, end - time.monotonic())), text.decode("utf-8", "replace")
                break
            text += chunk
        return None, ""
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        program.stdout.close()
