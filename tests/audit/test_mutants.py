"""The planted faults as data: the whole catalogue is there, each says what it is, and the clean kernel is clean."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from normcheck.audit import catalogue
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.audit.mutants.mutant import Mutant, mutant
from normcheck.audit.mutants.residual import Adding
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import BY_NAME, GRADIENTS
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls import discovery
from normcheck.result import KINDS
from tests.case_lines import NORMS
from tests.some import some

CATALOGUE = (
    "mF01", "mF02", "mF03", "mF04", "mF05", "mF06", "mF07", "mF08", "mF09", "mF10", "mF11", "mF12", "mF13", "mF14",
    "mF15", "mF16", "mF17", "mF18", "mF19", "mF20", "mF21", "mF22", "mF23", "mF24", "mA01", "mA01b", "mA02", "mA03",
    "mA04", "mA05", "mA06", "mA07", "mA08", "mA09", "mA10", "mR01", "mB01", "mB02", "mB03", "mB04", "mB05", "mB06",
    "mB07", "mB08", "mB09", "mB10", "mB12", "mB13", "mD01", "mD02", "mD03", "mD04", "mD05", "mD06", "mD07", "mD08",
    "mD10", "mD11", "mD12", "mD13", "mD14", "mD15", "mD17", "mD18", "mD19", "mD20", "mD21", "mW01", "mW03", "mW04",
    "mW05", "mW06", "mW07", "mW09", "mW10", "mW11", "mW12", "mW13", "mW14", "mW15", "mW16", "mW17", "mW18",
)  # fmt: skip
"""The 83 faults of one line that the catalogue of real bugs measured."""

STRUCTURAL = [f"X{i:02}" for i in range(1, 25)]
INPUTS = ("x", "weight", "bias", "dy", "residual")
"""What a fault may break besides its outputs, by writing to it."""

MUTANTS = catalogue.mutants()


def test_every_fault_of_the_catalogue_is_there() -> None:
    assert len(set(CATALOGUE)) == 83
    assert set(CATALOGUE) <= set(MUTANTS)
    assert set(STRUCTURAL) <= {id.removesuffix(".triton") for id in MUTANTS}


def test_ids_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    one = mutant("mF01", CLEAN, what="a", source="invented", outputs=("y",))
    module = ModuleType("twice")
    module.MUTANTS = (one, one)  # type: ignore[attr-defined]
    monkeypatch.setattr(catalogue, "modules", lambda package: iter((module,)))
    with pytest.raises(ValueError, match=r"^id='mF01' in twice: another mutant has it$"):
        catalogue.mutants.__wrapped__()


def unsaid(fault: Mutant) -> list[str]:
    """The names of what a mutant says of itself and should not."""
    bugs = [] if fault.source == "invented" else fault.source.split(", ")
    right = {
        "what": fault.what and "\n" not in fault.what and not fault.what.endswith("."),
        "source": all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", bug) for bug in bugs),
        "promised": fault.promised in PROFILES,
        "device": fault.device in ("", "cuda"),
        "ops": fault.ops and set(fault.ops) <= set(OPS),
        "dtypes": fault.dtypes and set(fault.dtypes) <= set(DTYPES),
        "outputs": fault.outputs,
        "kinds": fault.kinds and set(fault.kinds) <= set(KINDS),
    }
    return [name for name, is_right in right.items() if not is_right]


def test_a_mutant_says_what_it_is() -> None:
    """As one test: four hundred take seconds of the tests' own machinery."""
    assert {fault.id: wrong for fault in some(MUTANTS.values()) if (wrong := unsaid(fault))} == {}
    broken = replace(MUTANTS["mF01"], what="It is wrong.", source="a bug", promised="slow", device="tpu", ops=("no",))
    assert unsaid(broken) == ["what", "source", "promised", "device", "ops"]
    broken = replace(MUTANTS["mF01"], what="", dtypes=("fp8",), outputs=(), kinds=("odd",))
    assert unsaid(broken) == ["what", "dtypes", "outputs", "kinds"]


def test_a_mutant_breaks_what_each_op_of_its_own_has() -> None:
    every = {name for op in OPS.values() for name in op.outputs} | {*GRADIENTS, *BY_NAME.values(), *INPUTS, ""}
    for fault in some(MUTANTS.values()):
        assert set(fault.outputs) <= every, fault.id
        for op in fault.ops:
            own = {*OPS[op].outputs, *OPS[op].gradients(weight=True, bias=True), *INPUTS, ""}
            assert set(fault.outputs) & own, (fault.id, op)


def test_a_mutant_makes_what_it_says() -> None:
    for fault in some(m for m in MUTANTS.values() if not m.not_exercised):
        for op in some(fault.ops):
            made = fault.make(op)
            assert (made.name, made.op) == (fault.id, op)


def test_each_is_found_by_name() -> None:
    for spec, op in (("statistics:mF01", "layernorm"), ("dx:mD01", "rmsnorm"), ("unseen:P01", "rmsnorm")):
        (found,) = discovery.select(f"normcheck.audit.mutants.{spec}", (op,))
        assert (found.name, found.op) == (spec.split(":")[1], op)


def test_what_one_run_remembers_another_does_not() -> None:
    """A fault of the eleventh call is a new fault each time that it is made."""
    x, w = torch.randn(2, 4), torch.ones(4)
    fault, clean = MUTANTS["X22"], CLEAN.implementation("clean", "rmsnorm")
    for _ in range(2):
        made = fault.make("rmsnorm")
        right = [
            torch.equal(made.forward(x, w, None, eps=1e-5)["y"], clean.forward(x, w, None, eps=1e-5)["y"])
            for _ in range(12)
        ]
        assert right == [True] * 10 + [False] * 2


@pytest.mark.slow
@pytest.mark.parametrize("op", NORMS)
def test_the_clean_kernel_passes(op: str) -> None:
    """Every mutant is this kernel but for the fault, so that nothing but the fault is found.

    The beginning of a core, of a seed of its own: an op differs from the others in few terms.
    """
    clean = Adding() if OPS[op].adds_residual else CLEAN
    cell = Cell(OPS[op], clean.implementation("clean", op), "bf16", "tests")
    plan = Plan((cell,), replace(PROFILES["quick"], max_examples=12), list(OPS).index(op), "cpu", 120.0)
    verdict = run_cell(cell, plan, lambda cases, worst: None, with_coverage=False)
    assert verdict.failure is None, (verdict.failure.case, verdict.failure.message)
    assert (verdict.status, verdict.cases) == ("pass", 12)


@pytest.mark.parametrize("fault", [m for m in MUTANTS.values() if m.not_exercised], ids=lambda m: m.id)
def test_what_is_not_exercised_says_why(fault: Mutant) -> None:
    assert len(fault.not_exercised) > 10
    assert "\n" not in fault.not_exercised
