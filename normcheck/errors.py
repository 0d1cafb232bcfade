"""Every error that normcheck raises on purpose.

Messages have one form: ``name=value``, what was expected, what to do. They fit on one line, because a command line
prints them as one line, without a traceback.
"""

from __future__ import annotations

import json
import shlex
import traceback
from collections.abc import Iterable, Mapping
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


class ExitCode(IntEnum):
    """The exit codes of commands; ``gate.decision`` chooses one for ``verify``."""

    PASS = 0
    FOUND = 1
    USAGE = 2
    BROKEN = 3
    NOTHING = 5
    INTERRUPTED = 130


class NormcheckError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line returns for it."""

    exit_code = ExitCode.BROKEN


class UsageError(NormcheckError):
    """A wrong command line, case line, configuration or implementation file."""

    exit_code = ExitCode.USAGE


class ImportFailed(UsageError):
    """A file or a module with implementations that cannot be imported."""


class UnsupportedCase(NormcheckError):
    """An implementation's own library refuses this case, which is then skipped. The message is its reason."""


class ItselfFailed(NormcheckError):
    """normcheck's own code raised while it called a kernel, or took a result. It says nothing of the kernel."""


class Broken(Exception):
    """A call of an implementation returned nothing that can be judged. The fields are those of a finding."""

    def __init__(self, kind: str, output: str, message: str, frames: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.kind, self.output, self.message, self.frames = kind, output, message, frames


_CONTEXT_LOST = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")


def loses_context(message: str) -> bool:
    """Whether an error with this message destroys the GPU's context, so that every later call in the process fails."""
    return any(words in message for words in _CONTEXT_LOST)


LONGEST_COMPLAINT = 1_000
"""Characters of a message on the command line; longer ones are cut."""


def visible(text: str) -> str:
    r"""``text`` with what does not print (newlines, direction marks, surrogates) as ``\x1b`` and the like."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str, most: int = LONGEST_COMPLAINT, *, keep_end: bool = True) -> str:
    """Foreign text as one visible line of at most ``most`` characters.

    A long text loses its middle, or with ``keep_end=False`` its end.
    """
    line = " ".join(text.split())
    if len(line) > most and keep_end:
        head = most * 2 // 3
        line = f"{line[:head]} ... {line[head + 5 - most :]}"
    line = visible(line[: most + 1])  # an escape has more characters than what it stands for
    return line if len(line) <= most else f"{line[: most - 3].rstrip()}..."


def cut(text: str, most: int) -> str:
    """``text`` as it is, or its beginning and its end if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail]} ... [{len(text) - most:,} characters cut] ... {text[-tail:]}"


def shown(value: object, most: int = 120) -> str:
    """``repr(value)`` as one line of at most ``most`` characters; the type's name if ``repr`` raises."""
    try:
        text = repr(value)
    except Exception:  # foreign code, or an int of more than 4,300 digits
        text = f"<{type(value).__name__}>"
    return one_line(text, most)


def error_text(error: BaseException, most: int = 10_000) -> str:
    """``Type: message`` of a foreign exception, whose message may be missing or a megabyte long."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be read)"
    return f"{one_line(type(error).__name__, 120)}: {cut(text, most)}"


ITSELF_FAILED = "normcheck itself failed"
MORE_MEMORY = "end what else uses the memory, or judge one cell at a time (--workers 1)"


def itself_failed(error: BaseException) -> str:
    """The message for an exception of normcheck's own in one cell, with its file and line. The other cells go on."""
    if isinstance(error, ItselfFailed):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    advice = f": {MORE_MEMORY}" if is_of_memory(error) else ""
    return f"{ITSELF_FAILED}: {type(error).__name__}: {error} ({where}){advice}"


def is_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of this machine or of a GPU, in whatever class torch says so."""
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def one_of(choices: Iterable[str]) -> str:
    """The allowed values for the end of an error message: ``one of a, b, c``."""
    return "one of " + ", ".join(choices)


def check_names(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise UsageError for the first ``given`` name that is not ``known``; ``option`` is the option's name."""
    for name in given:
        if name not in known:
            raise UsageError(f"{option}={name}: expected {one_of(known)}")


CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder that this package lies in: a checkout, if it has a pyproject.toml."""


def to_install(extra: str) -> str:
    """The command that installs normcheck with an extra, from where this one came: a checkout, what pip noted as its
    origin (https://packaging.python.org/specifications/direct-url), else an index.
    """
    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{CHECKOUT}[{extra}]')}"
    try:
        origin = json.loads(distribution("normcheck").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    version_control = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    source = f" @ {version_control}{origin['url']}" if origin else ""
    return f"pip install {shlex.quote(f'normcheck[{extra}]{source}')}"


_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "an array",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "unexpected_keyword_argument": "no such key",
    "too_long": "fewer of them",
}
"""Pydantic's name for an error -> the value that it expected."""


def complaint(problem: Mapping[str, Any]) -> str:
    """``name=value: expected ...`` for one of pydantic's ``ValidationError.errors()``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{one_line(part, 60)}" for part in problem["loc"])
    name = "".join(parts).removeprefix(".")
    if problem["type"] == "missing":
        return f"{name} is missing: expected it"
    if problem["type"] == "value_error":  # from a validator of normcheck
        return f"{name}={problem['ctx']['error']}"
    words = _EXPECTED.get(problem["type"], problem["msg"])  # else the words of ``json_types.Only``
    return f"{name}={shown(problem['input'])}: expected {words}"
