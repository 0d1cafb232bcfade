"""Faults that are there in some calls only: the mutant's bits within a regime, the clean kernel's outside."""

from __future__ import annotations

from collections import Counter
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.audit import catalogue
from normcheck.impls.kernels import interpreter

if not torch.cuda.is_available():
    interpreter.enable()

from normcheck.audit import equivalence, trial
from normcheck.audit.equivalence import differs_from_clean, first_failing_case
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.audit.mutants.regimes import LATE, LONG, OCTAVES, REGIMES, TALL, WIDTHS, Regime
from normcheck.audit.mutants.under import cells, clean, is_divided, under, why_not, without_fault
from normcheck.audit.options import AuditOptions
from normcheck.audit.rotation import SAMPLED, pairs
from normcheck.audit.run import trials_of
from normcheck.cases.case import Case
from normcheck.cases.claims import claims_of
from normcheck.cases.core import core, drawn
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.guard_bands import same_bits
from normcheck.cases.inputs import make
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS, TABLE
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.implementation import Implementation
from tests.some import some


def cases_of(op: Op, implementation: Implementation, dtype: str) -> list[Case]:
    return [p.case for p in core(claims_of(op, implementation, dtype), PROFILES["quick"].extent, 0)]


MUTANTS = catalogue.mutants()
OF_ONE_INPUT = {op.name for op in TABLE}
"""The ops whose kernels regimes divide."""

SAVED = ("y", "mean", "rstd")
PLAN = Plan((), PROFILES["quick"], 0, "cpu", 120.0)

INSIDE: dict[str, dict[str, Any]] = {
    "tall": {"M": TALL},
    **{f"one_n:{width}": {"N": width} for width in WIDTHS},
    **{f"several_rows:{octave}": {"M": 2, "N": octave} for octave in OCTAVES},
    "long_rows": {"N": LONG + 1},
    "late_rows": {"M": LATE + 1},
    "no_bias": {"bias": False},
    "strided": {"x_gap": 1},
    "dy_strided": {"dy_gap": 3},
    "fp32_weights": {"weight_dtype": torch.float32},
}
"""Regime -> what a call has that is just within it."""

OUTSIDE: dict[str, dict[str, Any]] = {
    "tall": {"M": TALL - 1},
    **{f"one_n:{width}": {"N": width + 1} for width in WIDTHS},
    **{f"several_rows:{octave}": {"M": 1, "N": octave} for octave in OCTAVES},
    "long_rows": {"N": LONG},
    "late_rows": {"M": LATE},
    "no_bias": {"bias": True},
    "strided": {"x_gap": 0, "dy_gap": 3},
    "dy_strided": {"x_gap": 3, "dy_gap": 0},
    "fp32_weights": {"weight_dtype": torch.float16},
}
"""Regime -> what one has that is just outside of it."""

FAULTY = ("mF20", "mA06", "mD08", "mW16", "mD08.late", "X22", "P15", "mD14.triton")


def tensors(
    M: int = 5, N: int = 24, bias: bool = True, x_gap: int = 0, dy_gap: int = 0, weight_dtype: Any = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dy, x, weight and bias of a call, x and dy in fp16."""
    generator = torch.Generator().manual_seed(M * 10_000 + N)

    def rows(gap: int) -> Tensor:
        return torch.randn((M, N + gap), generator=generator).half()[:, :N]

    dy, x = rows(dy_gap), rows(x_gap)
    weight, shift = torch.randn((2, N), generator=generator).to(weight_dtype)
    return dy, x, weight, shift if bias else None


def outputs_of(implementation: Implementation, call: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> dict[str, Tensor]:
    """Every output of forward and of backward, whose names begin with d."""
    dy, x, weight, bias = call
    assert implementation.backward is not None
    saved = implementation.forward(x, weight, bias, eps=1e-3)
    return {**saved, **implementation.backward(dy, x, weight, bias, saved, eps=1e-3)}


def agree(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(same_bits(one[name].reshape(-1), other[name].reshape(-1)) for name in one)


# --- What a regime is


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_a_regime_holds_within_it_and_not_just_outside(regime: Regime) -> None:
    for words, expected in ((INSIDE, True), (OUTSIDE, False)):
        dy, x, weight, bias = tensors(**words[regime.id])
        assert (regime.holds(x, weight, bias) and (regime.holds_dy is None or regime.holds_dy(dy))) is expected


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_every_case_of_a_core_can_be_moved_into_a_regime(regime: Regime) -> None:
    op = OPS["rmsnorm"]
    own = {regime.into(case) for case in cases_of(op, CLEAN.implementation("clean", "rmsnorm"), "fp16")}
    assert len(own) > 50
    assert all(case.M * case.N <= 2**23 for case in own)
    for case in list(own)[::5]:
        made = make(case, op, "cpu")
        assert regime.holds(made.x, made.weight, made.bias), case
        assert regime.holds_dy is None or regime.holds_dy(made.dy), case


def test_no_bias_is_a_regime_of_every_op_that_takes_one() -> None:
    reasons = {op.name: REGIMES["no_bias"].why_not(op.name, "fp16") for op in OPS.values()}
    assert {name for name, reason in reasons.items() if not reason} == {
        "layernorm", "layernorm_zero_centered", "layernorm_relu_bitmask", "rmsnorm", "fused_add_layernorm", "groupnorm",
    }  # fmt: skip


# --- A fault under it


@pytest.mark.slow
@pytest.mark.parametrize("id", ["mF20", "mA06", "mD08", "mW16", "mD14.triton"])
@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_the_mutants_bits_within_the_clean_kernels_outside(regime: Regime, id: str) -> None:
    fault = MUTANTS[id]
    if why_not(regime, fault):
        pytest.skip(why_not(regime, fault))
    op = "rmsnorm" if "rmsnorm" in fault.ops else fault.ops[0]
    made, faulty, right = under(regime, fault).make(op), fault.make(op), clean(fault, op)
    outside = tensors(**OUTSIDE[regime.id])
    assert agree(outputs_of(made, outside), outputs_of(right, outside))
    if is_divided(regime, fault):
        return  # below: rows in the first of which nothing is wrong
    inside = tensors(**INSIDE[regime.id])
    assert agree(outputs_of(made, inside), outputs_of(faulty, inside))
    is_one = regime.id != "one_n:1"  # one column has no other gamma
    assert agree(outputs_of(faulty, inside), outputs_of(right, inside)) is not is_one or id != "mA06"


@pytest.mark.parametrize("id", ["mF20", "mA06", "mD08", "mW16", "mR01", "mW15", "P15"])
def test_the_first_rows_of_a_tall_call_stay_clean(id: str) -> None:
    fault, regime, extra = MUTANTS[id], REGIMES["late_rows"], 5
    dy, x, weight, _ = tensors(M=LATE + extra, N=9, weight_dtype=torch.float32)
    call = (dy, x, weight, None)
    found = outputs_of(under(regime, fault).make("rmsnorm"), call)
    right = outputs_of(CLEAN.implementation("clean", "rmsnorm"), call)
    late = outputs_of(fault.make("rmsnorm"), (dy[LATE:], x[LATE:], weight, None))
    early = outputs_of(CLEAN.implementation("clean", "rmsnorm"), (dy[:LATE], x[:LATE], weight, None))
    for name in ("y", "rstd", "dx"):
        assert same_bits(found[name][:LATE], right[name][:LATE]), name
        if not (name == "y" and id == "mR01"):  # what is not stored is whatever was there
            assert same_bits(found[name][LATE:], late[name]), name
    if id != "mW15":  # fp32 weights: the sums are stored as they are, but for this fault of the store
        assert same_bits(found["dw"], early["dw"] + late["dw"])


def test_a_sum_over_early_and_late_rows_is_rounded_once() -> None:
    fault, regime = MUTANTS["mW16"], REGIMES["late_rows"]
    call = tensors(M=LATE + 5, N=9)
    exact = outputs_of(under(regime, fault).make("rmsnorm"), (*call[:2], call[2].float(), None))
    found = outputs_of(under(regime, fault).make("rmsnorm"), (*call[:3], None))
    assert same_bits(found["dw"], exact["dw"].half())


def test_what_sees_whole_calls_is_not_divided() -> None:
    late = REGIMES["late_rows"]
    faults = [fault for fault in MUTANTS.values() if fault.ops[0] in OF_ONE_INPUT and not fault.heads]
    whole = {fault.id for fault in faults if not fault.not_exercised and not is_divided(late, fault)}
    assert {id for id in whole if MUTANTS[id].language == "torch"} == {
        "P03", "P04", "P05", "P06", "X10", "X14", "X20", "X21", "X22",
    }  # fmt: skip
    assert not is_divided(REGIMES["tall"], MUTANTS["mD08"])


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), [("layernorm_relu_bitmask", "fp16"), ("rmsnorm", "fp32")])
def test_a_divided_kernel_without_a_fault_is_right(op: str, dtype: str) -> None:
    """What is found of a fault behind row 4096 is the fault, not the seam."""
    made = without_fault(REGIMES["late_rows"], MUTANTS["mD08"]).make(op)
    cell = Cell(OPS[op], made, dtype, "tests")
    for case in some(cases_of(cell.op, made, dtype)[::18]):
        result = run_case(cell, REGIMES["late_rows"].into(case), PLAN)
        assert not result.failed, (str(result.case), result.problems, result.wrong)


def test_a_mutant_that_counts_its_calls_counts_those_of_its_regime() -> None:
    made = under(REGIMES["tall"], MUTANTS["X22"]).make("rmsnorm")
    tall, flat, right = tensors(M=TALL), tensors(M=2), CLEAN.implementation("clean", "rmsnorm")
    found = [
        same_bits(outputs_of(made, call)["y"], outputs_of(right, call)["y"]) for _ in range(12) for call in (tall, flat)
    ]
    assert found == [True] * 20 + [False, True] * 2


def test_forward_that_remembers_and_backward_that_is_wrong_agree() -> None:
    """P15's backward takes what its latest forward in the regime kept, also if only dy says that a call is in it."""

    def after_another_forward(kernel: Implementation) -> dict[str, Tensor]:
        call = tensors(x_gap=1, dy_gap=1)
        saved = kernel.forward(*call[1:], eps=1e-3)
        kernel.forward(2 * call[1], *call[2:], eps=1e-3)  # of packed rows
        assert kernel.backward is not None
        return dict(kernel.backward(*call, saved, eps=1e-3))

    right = after_another_forward(CLEAN.implementation("clean", "rmsnorm"))
    wrong = after_another_forward(MUTANTS["P15"].make("rmsnorm"))
    assert not agree(wrong, right)
    for regime, expected in (("strided", right), ("dy_strided", wrong)):
        assert agree(after_another_forward(under(REGIMES[regime], MUTANTS["P15"]).make("rmsnorm")), expected), regime


def test_a_pair_that_makes_no_sense_says_why() -> None:
    assert why_not(REGIMES["dy_strided"], MUTANTS["mF01"]) == "it may be a fault of forward, which is not given dy"
    assert why_not(REGIMES["no_bias"], MUTANTS["llama-unrounded"]) == "its ops never have a bias"
    assert why_not(REGIMES["fp32_weights"], MUTANTS["X15"]) == "beside an fp32 x the weights are always fp32"
    assert why_not(REGIMES["tall"], MUTANTS["X02"]) == MUTANTS["X02"].not_exercised
    assert why_not(REGIMES["dy_strided"], MUTANTS["mD01"]) == ""
    for id in ("mD01", "mF01"):
        assert cells(REGIMES["no_bias"], MUTANTS[id]) == tuple(product(MUTANTS[id].ops, DTYPES))
    assert cells(REGIMES["no_bias"], MUTANTS["llama-unrounded"]) == ()


# --- Which of them is a fault at all


@pytest.fixture
def every_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth case of a core stands for all: every layout and eps is among them, and most kinds of data."""
    monkeypatch.setattr(equivalence, "drawn", lambda *core: islice(drawn(*core), 0, None, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("every_fourth")
@pytest.mark.parametrize(
    ("id", "regime", "op", "is_one"),
    [
        ("mA06", "one_n:1", "rmsnorm", False),  # one column has no other gamma
        ("mF02", "one_n:129", "rmsnorm", True),
        ("X10", "strided", "rmsnorm", False),  # there dy is never expanded
        ("X22", "one_n:768", "rmsnorm", True),  # it takes eleven calls
        ("P02", "strided", "rmsnorm", True),  # it takes another pattern in the gap
    ],
)
def test_what_nothing_tells_from_the_clean_kernel_is_no_fault(id: str, regime: str, op: str, is_one: bool) -> None:
    assert differs_from_clean(REGIMES[regime], MUTANTS[id], OPS[op], "fp16", PLAN) is is_one


@pytest.mark.slow
def test_a_survivor_says_which_case_would_have_found_it() -> None:
    op = OPS["rmsnorm"]
    case = first_failing_case(REGIMES["one_n:4097"], MUTANTS["mD08"], op, "fp16", PLAN)
    assert case is not None and case.N == 4097


@pytest.mark.slow
@pytest.mark.usefixtures("every_fourth")
@pytest.mark.parametrize(("id", "shows", "drowns"), [("mF03", 1025, 4097), ("dx-c1-n-1", 1025, 4097)])
def test_what_is_said_to_drown_in_wide_rows_does_so_and_no_earlier(id: str, shows: int, drowns: int) -> None:
    """A fault that declares the widest row in which it shows hides nothing: no case finds it in the next regime."""
    fault, op, wide, narrow = MUTANTS[id], OPS["layernorm"], f"one_n:{drowns}", f"one_n:{shows}"
    assert why_not(REGIMES[wide], fault).startswith("its fault is within what fp32 additions may be off by")
    assert why_not(REGIMES[narrow], fault) == why_not(REGIMES["tall"], fault) == ""
    assert first_failing_case(REGIMES[wide], fault, op, "fp32", PLAN) is None
    assert first_failing_case(REGIMES[narrow], fault, op, "fp32", PLAN) is not None


def test_few_faults_drown() -> None:
    assert {m.id for m in MUTANTS.values() if m.widest is not None} == {"mF03", "mP05", "dx-c1-n-1"}


# --- Which are run


def test_each_pair_has_one_cell_and_all_have_all() -> None:
    every = {fault.id: fault for fault in MUTANTS.values() if not fault.not_exercised and not fault.device}
    regimes, ops = tuple(REGIMES.values()), set(OPS)
    chosen = pairs(regimes, tuple(every.values()), ops, set(DTYPES))
    assert len(chosen) == len(regimes) * len(every)
    planted = {pair.op for pair in chosen if cells(pair.regime, pair.mutant)}
    assert planted == OF_ONE_INPUT
    assert {pair.dtype for pair in chosen} == set(DTYPES)
    for regime in regimes:
        own = Counter((pair.op, pair.dtype) for pair in chosen if pair.regime is regime)
        possible = {cell for fault in every.values() for cell in cells(regime, fault)}
        assert {cell for cell in possible if cell[0] in ("layernorm", "rmsnorm")} <= set(own), regime.id
    assert pairs(regimes, tuple(every.values()), ops, set(DTYPES)) == chosen
    whole = pairs(regimes[:1], (MUTANTS["mD01"],), ops, {"fp16"}, every_cell=True)
    assert sorted(pair.op for pair in whole) == sorted(MUTANTS["mD01"].ops)


def test_an_audit_of_everything_has_a_sample_of_each_regime() -> None:
    every = trials_of(AuditOptions(device="cpu"))
    sampled = Counter(t.regime for t in every if t.regime)
    assert sampled == dict.fromkeys(REGIMES, SAMPLED)
    assert [t for t in every if not t.regime and not t.control] == [
        trial.Trial(
            name=fault.id,
            op=op,
            dtype=dtype,
            profile="quick",
            seed=0,
            device="cpu",
            shrink=not number,
            explain=not number,
        )
        for fault in MUTANTS.values()
        for number, (op, dtype) in enumerate(product(fault.ops, fault.dtypes))
    ]


@pytest.mark.parametrize(
    "narrowed", [{"op": ("rmsnorm",)}, {"dtype": ("fp16",)}, {"mutant": ("mD01",)}, {"recipe": "kernelbench"}]
)
def test_a_narrowed_audit_has_none(narrowed: dict[str, Any]) -> None:
    assert [t for t in trials_of(AuditOptions(device="cpu", **narrowed)) if t.regime] == []


def test_an_audit_of_regimes_has_nothing_else() -> None:
    trials = trials_of(AuditOptions(device="cpu", regime=("tall", "one_n:3"), mutant=("mD01", "X02")))
    assert [(t.name, t.regime, t.control) for t in trials] == [("mD01", "tall", False), ("mD01", "one_n:3", False)]
    assert {t.regime for t in trials_of(AuditOptions(device="cpu", regime=("all",)))} == set(REGIMES)
