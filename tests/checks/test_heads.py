"""Every check and every probe of a case of heads: a right kernel passes them all, a wrong one is found by each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normcheck.audit import catalogue
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.cases.case import Case
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.check import Result, check
from normcheck.impls.implementation import Implementation
from normcheck.oracle import judge as judging
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.judge_forward import judge_forward
from normcheck.oracle.tolerances import table
from normcheck.runner.carried import CARRIER, Carrier
from tests.case_lines import case_of

CASE = case_of("layernorm fp16 M=20 N=64 rows=shifted dy=shifted layout=heads seed=2 gap=8")
MUTANTS, CONTROLS = catalogue.mutants(), {(c.name, c.op): c for c in catalogue.controls()}
OF_HEADS = [fault for fault in MUTANTS.values() if fault.heads]


def checked(implementation: Implementation, case: Case = CASE) -> Result:
    return check(replace(implementation, heads=True), OPS[case.op], case, "cpu")


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", ["heads_in_place", "heads_as_views", "clean"])
def test_a_right_kernel_passes_every_check_and_keeps_its_bits(
    name: str, carried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if carried:  # as a GPU's kernel gets the tensors of a small case

        def carries(self: Carrier, case: Case, device: str) -> str:
            self.begin("cpu")
            return device

        monkeypatch.setattr(Carrier, "home", carries)
    kernel = CLEAN.implementation("clean", "layernorm") if name == "clean" else CONTROLS[name, "layernorm"]
    for case in (CASE, replace(CASE, M=5, gap=0), replace(CASE, M=3), replace(CASE, M=1), replace(CASE, M=0)):
        result = checked(kernel, case)
        CARRIER.begin("")
        assert not result.failed, (str(case), result.problems)
        assert {c.output for c in result.checked} >= {"mean", "rstd", "y", "dx", "dw", "db"}
        assert result.probed is not None
        assert all(result.probed.repeats.values())
        assert all(result.probed.invariant.values())
        assert bool(result.probed.invariant) == (case.M > 1)


@pytest.mark.parametrize("fault", OF_HEADS, ids=lambda fault: fault.id)
def test_a_planted_fault_shows_in_a_case_of_heads_and_in_no_other(fault: object) -> None:
    assert isinstance(fault, type(OF_HEADS[0]))
    kernel = fault.make("layernorm")
    found = [checked(kernel, case) for case in (CASE, replace(CASE, M=5), replace(CASE, M=6))]
    kinds = {p.kind for result in found for p in result.problems}
    assert kinds & set(fault.kinds) or any(result.wrong for result in found)
    packed = replace(CASE, layout="strided", gap=8)
    assert not checked(kernel, packed).failed


@pytest.mark.parametrize(("id", "kind"), [("X21", "not_repeatable"), ("X14", "input_modified")])
def test_a_fault_of_any_layout_is_found_among_heads(id: str, kind: str) -> None:
    result = checked(MUTANTS[id].make("layernorm"))
    assert kind in {problem.kind for problem in result.problems}


@pytest.mark.slow
@pytest.mark.parametrize("m", [0, 1, 7, 24, 600])
def test_the_judge_finds_the_same_as_of_packed_rows(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a block begins or ends within a token."""
    monkeypatch.setitem(judging.BLOCK_ELEMENTS, "cpu", 64 * 5)
    op, found = OPS["layernorm"], []
    for case in (replace(CASE, M=m), replace(CASE, M=m, layout="contiguous", gap=0)):
        torch.manual_seed(0)
        y, dx = torch.randn(2, *case.shape).half()
        judge = judge_of(op, case, make(case, op, "cpu"), table().model, {})
        checks, saved = judge_forward(judge, {"y": y})
        checks += judge_gradients(judge, {"dx": dx, "dw": torch.zeros(64)}, saved, given=False)
        found.append([(c.output, c.comparison.ratio, c.comparison.worst) for c in checks])
    assert repr(found[0]) == repr(found[1])
