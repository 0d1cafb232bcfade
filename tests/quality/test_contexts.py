"""The correct kernels of the audit are right in every context of a CPU: none of them is accused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import normcheck
from normcheck import Implementation
from normcheck.audit.catalogue import controls
from normcheck.cases.beyond import telling
from normcheck.cases.claims import claims_of
from normcheck.cases.ops import OPS
from normcheck.contexts.catalogue import contexts_on

CONTEXTS = tuple(name for name in contexts_on("cpu") if name != "autocast")  # which is told, and asked for by nobody


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kernel"),
    list(enumerate(controls())),
    ids=lambda own: own if isinstance(own, int) else f"{own.op}-{own.name}",
)
def test_a_correct_kernel_of_the_audit_is_accused_in_no_context(number: int, kernel: Implementation) -> None:
    """At the first of the telling shapes, or the second, by turns."""
    claims = claims_of(OPS[kernel.op], kernel, kernel.dtypes[0])
    packed = [case for case in telling(claims, 0) if case.layout == "contiguous" and case.M > 1 and case.N > 1][:2]
    line = str(replace(packed[number % len(packed)], rows="blend", dy="normal"))
    (verdict,) = normcheck.verify(kernel, case=line, context=CONTEXTS, device="cpu")
    assert verdict.status in ("pass", "skip"), verdict.detail
    assert verdict.status == "skip" or "held" in {how.status for how in verdict.contexts.values()}
