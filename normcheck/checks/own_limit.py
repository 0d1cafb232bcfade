"""A limit that a kernel states itself: it raises on purpose, as ``raise RuntimeError("feature dim >= 64KB")`` does."""

from __future__ import annotations

import re
import sysconfig

from normcheck.checks.contract import Problem

_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+) in [^:]*: (?P<code>.*)", re.DOTALL)
_RAISED = re.compile(r"(?:forward|backward)\b[^:]* raised (?P<type>\w+):")
_STATEMENT = re.compile(r"(?:^|[:;]\s*)(?:raise\s+(?:\w+\.)*(?P<type>\w+)|(?P<assertion>assert)\b)")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_NOT_ITS_OWN = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:torch|triton)[/\\]")
"""Who raises in these says what went wrong, such as a kernel that does not compile, not what the kernel supports."""


def advice(problem: Problem) -> str:
    """What to do about an exception that states a limit; "" when it does not, or when a GPU went wrong.

    It does when the innermost frame is a ``raise`` of that very type, or an ``assert``, in a file of the kernel or of
    its library. One that was raised while another was handled ends with its cause instead.
    """
    frame = _FRAME.fullmatch(problem.frames[-1]) if problem.frames else None
    raised = _RAISED.match(problem.message)
    if problem.kind != "exception" or problem.gpu_failed or frame is None or raised is None:
        return ""
    statement = _STATEMENT.search(frame["code"])
    if statement is None or _elsewhere(frame["file"]):
        return ""
    stated = "AssertionError" if statement["assertion"] else statement["type"]
    if stated != raised["type"]:
        return ""
    return (
        f"The kernel raises this itself, in line {frame['line']} of {frame['file']}. If that is a limit of the kernel, "
        "raise normcheck.UnsupportedCase there, or declare the limit with supports(case) or shapes=: such cases are "
        "then skipped, and counted."
    )


def _elsewhere(file: str) -> bool:
    """Whether ``file`` is torch's, Triton's or Python's own."""
    if _PACKAGES.search(file):
        return bool(_NOT_ITS_OWN.search(file))
    return file.startswith(sysconfig.get_path("stdlib"))
