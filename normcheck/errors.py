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


def one_of(choices: Iterable[str]) -> str:
    """Format the allowed values of something for the end of an error message: ``one of a, b, c``."""
    return "one of " + ", ".join(choices)
