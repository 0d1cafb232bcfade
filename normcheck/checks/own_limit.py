"""Advice for a kernel that raises on purpose to state a limit, such as ``RuntimeError("feature dim >= 64KB")``."""

from __future__ import annotations

import re
import sysconfig

from normcheck.checks.contract import Problem

_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+) in [^:]*: (?P<code>.*)", re.DOTALL)
_RAISED = re.compile(r"(?:forward|backward)\b[^:]* raised (?P<type>\w+):")
_STATEMENT = re.compile(r"(?:^|[:;]\s*)(?:raise\s+(?:\w+\.)*(?P<type>\w+)|(?P<assertion>assert)\b)")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_NOT_ITS_OWN = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:torch|triton)[/\\]")
"""Packages whose exceptions report a failure, such as a kernel that does not compile, and not a limit of a kernel."""


def advice(problem: Problem) -> str:
    """What to do about an exception that states a limit; "" if it states none, or if a GPU failed.

    It states one if its innermost frame is a ``raise`` of its very type, or an ``assert``, in a file of the kernel or
    of its library. The frames of an exception raised while another was handled end with that other one instead.
    """
    frame = _FRAME.fullmatch(problem.frames[-1]) if problem.frames else None
    raised = _RAISED.match(problem.message)
    if problem.kind != "exception" or problem.gpu_failed or frame is None or raised is None:
        return ""
    statement = _STATEMENT.search(frame["code"])
    if statement is None or _is_foreign(frame["file"]):
        return ""
    stated = "AssertionError" if statement["assertion"] else statement["type"]
    if stated != raised["type"]:
        return ""
    return (
        f"The kernel raises this itself, in line {frame['line']} of {frame['file']}. If that is a limit of the kernel, "
        "raise normcheck.UnsupportedCase there, or declare the limit with supports(case) or shapes=: such cases are "
        "then skipped, and counted."
    )


def _is_foreign(file: str) -> bool:
    """Whether ``file`` is torch's, Triton's or Python's own."""
    if _PACKAGES.search(file):
        return bool(_NOT_ITS_OWN.search(file))
    return file.startswith(sysconfig.get_path("stdlib"))
