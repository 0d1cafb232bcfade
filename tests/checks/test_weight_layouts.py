"""Weights that are strided, and weights of groups of rows: their tensors, their judge, right kernels and faults."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
import torch

from normcheck import Implementation
from normcheck.audit import catalogue
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.cases.axes import covered
from normcheck.cases.case import OF_ROW_GROUPS, OF_WEIGHTS, WEIGHT_STACKED, WEIGHT_STRIDED, Case, with_rows
from normcheck.cases.case_line import parsed
from normcheck.cases.claims import claims_of, layouts_of, unclaimed
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.checks.ask import FULLY
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.finding import finding
from normcheck.compare.pair import Both
from normcheck.errors import UsageError
from normcheck.gate.explain_bound import Question, explain
from normcheck.gate.plan import asked_for
from normcheck.impls.discovery import validated
from normcheck.oracle.expectations import expectations
from normcheck.oracle.judge import END_TO_END, judge_of
from normcheck.oracle.tolerances import table
from tests.case_lines import case_of

MUTANTS = [fault for fault in catalogue.mutants().values() if fault.weight_layouts]
CONTROLS = [kernel for kernel in catalogue.controls() if kernel.weight_layouts]
LINE = "{op} fp16 M=20 N=24 rows=shifted dy=shifted layout=weight_{how} seed=2"


def case(op: str, how: str, **changes: object) -> Case:
    made = case_of(LINE.format(op=op, how=how))
    return replace(made, bias=OPS[op].takes_bias, **changes)  # type: ignore[arg-type]


def kernel(how: str, op: str) -> Implementation:
    """A right kernel of any op that may have row groups."""
    right = next(c for c in CONTROLS if c.name == f"weight_{how}")
    (function,) = (f for f in (CLEAN.implementation,) if how == "strided") or (None,)
    return function("right", op, weight_layouts=(how,)) if function else replace(right, op=op)


def checked(implementation: Implementation, of: Case) -> Result:
    return check(implementation, OPS[of.op], of, "cpu")
