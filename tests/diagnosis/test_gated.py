"""What a gated norm does instead: a planted fault has its name, and one that nothing else explains has none."""

from __future__ import annotations

import pytest

from normcheck.audit.catalogue import mutants
from normcheck.audit.explanations import is_right
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.check import Result, check
from normcheck.diagnosis import instead
from normcheck.diagnosis.gated import instead as of_gates
from tests.inner_loop import parametrize

OP = OPS["rmsnorm_gated"]
SIZES = ((5, 128, "normal", "normal"), (4, 192, "turning", "shifted"), (6, 256, "wide", "uniform"))


def results_of(id: str) -> list[Result]:
    made = mutants()[id].make(OP.name)
    cases = [
        Case(op=OP.name, dtype="bf16", M=m, N=n, bias=False, gate=gate, rows=rows, seed=m) for m, n, gate, rows in SIZES
    ]
    return [check(made, OP, case, "cpu", UNPROBED) for case in cases]


@parametrize(
    ("id", "name"),
    [
        ("mG01", "activation_sigmoid"),
        ("mG03", "gate_before"),
        ("mG04", "gate_after"),
        ("mG05", "group_0"),
        ("mG08", "weight_missing"),
        ("mG09", "gate_swapped"),
        ("mG20", "gate_of_next_row"),
        ("mG22", "rounding_each"),
        ("mG23", "rounding_once"),
    ],
    inner=3,
)
def test_it_is_named(id: str, name: str) -> None:
    failed, *others = results_of(id)
    told = instead.explained(of_gates, OP, failed, others)
    assert told is not None and told.name == name and is_right(told.name, id)
    assert told.cases == len(SIZES)
    assert instead.tells(of_gates, OP, failed, name)


@pytest.mark.parametrize("id", ["mG07", "mG10", "mG18"])
def test_what_no_other_thing_explains_has_no_name(id: str) -> None:
    failed, *others = results_of(id)
    assert failed.failed and instead.explained(of_gates, OP, failed, others) is None
