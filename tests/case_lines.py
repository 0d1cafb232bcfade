"""The words of a case line, for tests that read one."""

from __future__ import annotations

from normcheck.cases.case import Case
from normcheck.cases.case_line import parse
from normcheck.cases.ops import OPS

NORMS = {
    name: op
    for name, op in OPS.items()
    if not (op.quantises or op.gated or op.modulated or op.l2 or op.grouped or op.rotary)
}
"""The ops that return y, and have gradients, without a gate, of a mean. Those that return codes:
tests/oracle/test_quantised.py; gated ones: tests/oracle/test_gated.py; modulated ones: tests/oracle/test_modulated.py;
by a length: tests/oracle/test_l2norm.py; of heads: tests/oracle/test_rotary.py."""

OPTIONS = {name: op.options for name, op in OPS.items()}
"""Op -> the names of its own numbers."""


def case_of(line: str) -> Case:
    """The case of a line. Raises UsageError."""
    return parse(line)
