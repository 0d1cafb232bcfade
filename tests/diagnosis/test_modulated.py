"""What a modulated norm does instead: a planted fault has its name, and one that nothing else explains has none."""

from __future__ import annotations

import pytest

from normcheck.audit.catalogue import mutants
from normcheck.audit.explanations import is_right
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.check import Result, check
from normcheck.diagnosis import instead
from normcheck.diagnosis.modulated import instead as of_modulations
from tests.inner_loop import parametrize

OP = OPS["layernorm_modulate"]
SIZES = ((6, 96, "few", "normal", "same"), (20, 64, "many", "probe", "fp32"), (9, 130, "each", "small", "same"))


def results_of(id: str, dtype: str) -> list[Result]:
    made = mutants()[id].make(OP.name)
    own = {"op": OP.name, "dtype": dtype, "bias": False}
    cases = [
        Case(M=m, N=n, samples=samples, weights=weights, weight_dtype=wide, seed=m, **own)  # type: ignore[arg-type]
        for m, n, samples, weights, wide in SIZES
    ]
    return [check(made, OP, case, "cpu", UNPROBED) for case in cases]


@parametrize(
    ("id", "name", "dtype"),
    [
        ("mM01", "first_sample", "bf16"),
        ("mM02", "modulation_swapped", "bf16"),
        ("mM05", "next_sample", "bf16"),
        ("mM06", "one_missing", "bf16"),
        ("mM07", "one_twice", "bf16"),
        ("mM09", "modulation_in_bf16", "fp16"),
        ("mM10", "shift_missing", "bf16"),
        ("mM15", "rounding_each", "bf16"),
        ("mM16", "rounding_once", "bf16"),
        ("mM17", "round_factor_io", "bf16"),
        ("mM18", "round_factor_none", "bf16"),
    ],
    inner=3,
)
def test_it_is_named(id: str, name: str, dtype: str) -> None:
    failed, *others = results_of(id, dtype)
    told = instead.explained(of_modulations, OP, failed, others)
    assert told is not None and told.name == name and is_right(told.name, id)
    assert told.cases == len(SIZES)
    assert instead.tells(of_modulations, OP, failed, name)


@pytest.mark.parametrize("id", ["mM03", "mM11", "mM20", "mM24", "mM29"])
def test_what_no_other_thing_explains_has_no_name(id: str) -> None:
    failed, *others = results_of(id, "bf16")
    assert any(result.failed for result in (failed, *others))
    assert instead.explained(of_modulations, OP, failed, others) is None
