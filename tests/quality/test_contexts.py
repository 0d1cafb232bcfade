"""The correct kernels of the audit are right in every context of a CPU: none of them is accused.

Of a make of several ops one is tried, by turns: what a context changes is how a kernel is called, which its steps tell.
A make whose name ends in open is another one, which declares less: it is not tried.
"""

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


def one_of_each_make() -> list[tuple[int, Implementation]]:
    """Each make once, with its number: of the first its first op, of the next its second, so that each op has some."""
    makes: dict[str, list[Implementation]] = {}
    for kernel in controls():
        if not kernel.name.endswith("_open"):
            makes.setdefault(kernel.name, []).append(kernel)
    return [(number, ops[number % len(ops)]) for number, ops in enumerate(makes.values())]


def test_each_op_has_some() -> None:
    assert {kernel.op for _, kernel in one_of_each_make()} == {kernel.op for kernel in controls()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kernel"),
    one_of_each_make(),
    ids=lambda own: own if isinstance(own, int) else f"{own.op}-{own.name}",
)
def test_a_correct_kernel_of_the_audit_is_accused_in_no_context(number: int, kernel: Implementation) -> None:
    """At the first of the telling shapes, or the second, by fours."""
    claims = claims_of(OPS[kernel.op], kernel, kernel.dtypes[0])
    packed = [case for case in telling(claims, 0) if case.layout == "contiguous" and case.M > 1 and case.N > 1][:2]
    line = str(replace(packed[number // 4 % len(packed)], rows="blend", dy="normal"))
    (verdict,) = normcheck.verify(kernel, case=line, context=CONTEXTS, device="cpu")
    assert verdict.status in ("pass", "skip"), verdict.detail
    assert verdict.status == "skip" or "held" in {how.status for how in verdict.contexts.values()}
