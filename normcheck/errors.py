"""Every error that normcheck raises on purpose.

Messages have one form: ``name=value``, what was expected, what to do. They fit on one line, because a command line
prints them as one line, without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable


class NormcheckError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line returns for it."""

    exit_code = 3


class UsageError(NormcheckError):
    """A wrong command line, case line, configuration or implementation file: exit code 2."""

    exit_code = 2


class UnsupportedCase(NormcheckError):
    """An implementation's own library refuses this case; the message is the library's reason. The case is skipped."""


class Broken(Exception):
    """An implementation did not return something that can be judged: ``kind`` and ``output`` are a finding's."""

    def __init__(self, kind: str, output: str, message: str, frames: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.kind, self.output, self.message, self.frames = kind, output, message, frames


LONGEST_COMPLAINT = 1_000
"""Characters of a message on the command line, however long what it is about."""


def one_line(text: str, most: int = LONGEST_COMPLAINT) -> str:
    r"""Foreign text as one printable line: the middle of a long one cut, what does not print as ``\x1b``."""
    line = " ".join(text.split())
    if len(line) > most:
        head = most * 2 // 3
        line = f"{line[:head]} ... {line[head + 5 - most :]}"
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return escaped if len(escaped) <= most else f"{escaped[: most - 4]} ..."


def shown(value: object, most: int = 120) -> str:
    """``repr(value)`` for a message, whatever it is: one line, cut; its type where it has no repr."""
    try:
        text = repr(value)
    except Exception:  # an object of somebody else's, or an int of 5000 digits
        text = f"<{type(value).__name__}>"
    return one_line(text, most)


def told(error: BaseException, most: int = 10_000) -> str:
    """``Type: message`` of somebody else's exception, which may have no message, or one of a megabyte."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be read)"
    if len(text) > most:
        text = f"{text[: most // 2]} ... [{len(text) - most:,} characters cut] ... {text[-(most // 2) :]}"
    return f"{one_line(type(error).__name__, 120)}: {text}"


def one_of(choices: Iterable[str]) -> str:
    """Format the allowed values of something for the end of an error message: ``one of a, b, c``."""
    return "one of " + ", ".join(choices)


def check_names(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse a name that is not among the known ones."""
    for name in given:
        if name not in known:
            raise UsageError(f"{option}={name}: expected {one_of(known)}")
