# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""The faults of real Triton kernels: they apply to today's kernels, they run, and the gate finds them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normcheck.cases.ops import OPS
from normcheck.impls.kernels import interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.enabled() else "cpu"
if DEVICE == "cpu":
    interpreter.enable()

from normcheck.audit.mutants._patched import PARTS, Lines, Patched, module_of
from normcheck.audit.mutants.triton_columns import MUTANTS as OF_COLUMNS
from normcheck.audit.mutants.triton_grid import MUTANTS as OF_ROWS
from normcheck.audit.mutants.triton_quantised import MUTANTS as OF_CODES
from normcheck.audit.mutants.triton_residual import MUTANTS as OF_A_RESIDUAL
from normcheck.cases.dtypes import DTYPES
from normcheck.checks.cell import Cell
from normcheck.errors import NormcheckError
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import CODED, unavailable
from normcheck.impls.triton import IMPLEMENTATIONS as EVERY
from normcheck.result import Verdict
from tests.inner_loop import parametrize
from tests.some import some

MUTANTS = (*OF_COLUMNS, *OF_ROWS, *OF_A_RESIDUAL, *OF_CODES)
BY_ID = {mutant.id: mutant for mutant in MUTANTS}
PATCHED = [mutant for mutant in MUTANTS if isinstance(mutant.make, Patched)]
ON_CPU = [mutant.id for mutant in MUTANTS if not mutant.device and not mutant.not_exercised]
ON_GPU = [m.id for m in MUTANTS if m.device and not m.not_exercised and m.promised != "deep"]  # deep takes 15 minutes
UNCHANGED = Patched(
    name="unchanged",
    forward=(Lines(old="MAX_BLOCK = 16384", new="MAX_BLOCK = 16384"),),
    backward=(Lines(old="MAX_BLOCK = 8192", new="MAX_BLOCK = 8192"),),
)
IMPLEMENTATIONS = [
    own
    for own in EVERY
    if own.backward is not None
    and not (OPS[own.op].gated or OPS[own.op].modulated or OPS[own.op].l2 or OPS[own.op].grouped)
    and not OPS[own.op].rotary
]
OURS = {own.op: own for own in IMPLEMENTATIONS}
OPTIONS = {"layernorm_relu_bitmask": {"lower_clip": -0.5, "upper_clip": 1.0}}
requires_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, and TRITON_INTERPRET not set")


def outputs_of(implementation: Implementation, M: int, N: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every output of forward and backward, x and a residual with 3 elements behind each row."""
    generator = torch.Generator().manual_seed(M * 1000 + N)
    x, dy = torch.randn((2, M, N + 3), generator=generator).to(DEVICE, dtype)
    weight, bias = torch.randn((2, N), generator=generator).to(DEVICE, dtype)
    own = {"eps": 1e-5, **OPTIONS.get(implementation.op, {})}
    of_backward = {}
    if OPS[implementation.op].adds_residual:
        own["residual"], added = torch.randn((2, M, N + 3), generator=generator).to(DEVICE, dtype)[..., :N]
        of_backward["dresidual_out"] = added.clone()
    saved = implementation.forward(x[:, :N], weight, bias, **own)
    assert implementation.backward is not None
    cotangent = dy[:, :N].clone()
    return {**saved, **implementation.backward(cotangent, x[:, :N], weight, bias, saved, **own, **of_backward)}


def verdict_of(implementation: Implementation, dtype: str, profile: str = "quick") -> Verdict:
    cell = Cell(OPS[implementation.op], implementation, dtype, "tests")
    plan = Plan((cell,), replace(PROFILES[profile], shrink_seconds=0.0), 0, DEVICE, 120.0)  # the audit shrinks them
    return run_cell(cell, plan, lambda cases, worst: None)


@pytest.mark.parametrize("mutant", PATCHED, ids=lambda mutant: mutant.id)
def test_every_patch_applies_to_todays_kernels(mutant: object) -> None:
    patched = mutant.make
    assert any(getattr(patched, part) for part in PARTS)
    for part in PARTS:
        if getattr(patched, part):
            compile(patched.source(part), part, "exec")
            assert all(lines.old != lines.new for lines in getattr(patched, part))


def test_lines_that_are_not_there_as_often_as_said_are_an_error() -> None:
    for lines in (Lines(old="no such line", new=""), Lines(old="tl.div_rn", new="tl.fdiv")):
        with pytest.raises(NormcheckError, match=r"mutant=stale: .* in forward\.py; expected 1"):
            module_of(Patched(name="stale", forward=(lines,)), "forward")


@parametrize(("M", "N"), [(5, 7), (70, 20), (2, 20000)], inner=2)
@pytest.mark.parametrize("own", IMPLEMENTATIONS, ids=lambda implementation: implementation.op)
def test_an_unchanged_text_computes_the_same_bits(own: Implementation, M: int, N: int) -> None:
    ours, loaded = (outputs_of(i, M, N, torch.bfloat16) for i in (own, UNCHANGED(own.op)))
    assert module_of(UNCHANGED, "backward").load_tile is module_of(UNCHANGED, "forward").load_tile
    for name in ours:
        assert torch.equal(ours[name], loaded[name]), name


@pytest.mark.parametrize(("M", "N"), [(5, 7), (70, 20), (2, 20000)])
@pytest.mark.parametrize("coded", CODED)
def test_an_unchanged_text_computes_the_same_codes(coded: str, M: int, N: int) -> None:
    unchanged = Patched(
        name=f"unchanged.{coded}",
        forward=UNCHANGED.forward,
        quantised=(Lines(old="sums, x.stride(0),", new="sums, x.stride(0),"),),
        coded=coded,
    )
    op = "fused_add_rmsnorm_quant"
    (own,) = (i for i in EVERY if (i.name, i.op) == (coded, op))
    generator = torch.Generator().manual_seed(M * 1000 + N)
    x, residual = torch.randn((2, M, N + 3), generator=generator).to(DEVICE, torch.bfloat16)[..., :N]
    given = {"scale": torch.tensor([0.05], device=DEVICE)} if own.model["scale"] == "given" else {}
    ours, loaded = (i.forward(x, None, None, eps=1e-5, residual=residual, **given) for i in (own, unchanged(op)))
    assert module_of(unchanged, "quantised").load_sum is module_of(unchanged, "forward").load_sum
    assert ours.keys() == loaded.keys() >= {"q", "residual_out"}
    for name in ours:
        assert torch.equal(ours[name].view(torch.uint8), loaded[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    "mutant", [m for m in PATCHED if m.make.without_fault().backward], ids=lambda mutant: mutant.id
)
def test_lines_that_are_called_harmless_are(mutant: object) -> None:
    made = mutant.make.without_fault()(mutant.ops[0])
    for M, N in ((5, 7), (70, 20), (9, 129)):
        ours, found = (outputs_of(i, M, N, torch.float32) for i in (OURS[made.op], made))
        for name in some(ours):
            torch.testing.assert_close(found[name], ours[name], rtol=1e-4, atol=1e-4)


def test_what_is_not_patched_is_ours() -> None:
    from normcheck.impls.kernels import backward, forward

    assert module_of(Patched(name="none"), "backward") is backward
    assert module_of(Patched(name="backward", backward=UNCHANGED.backward), "forward") is forward
    assert module_of(Patched(name="forward", forward=UNCHANGED.forward), "backward") is not backward


@pytest.mark.slow
def test_reading_the_catalogue_does_not_import_triton() -> None:
    code = (
        "import sys, normcheck.audit.mutants.triton_grid as t;"
        "[m.make(op) for m in t.MUTANTS for op in m.ops]; print('triton' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


def test_mutants_are_whole() -> None:
    assert len(BY_ID) == len(MUTANTS)
    for mutant in MUTANTS:
        assert set(mutant.ops) <= set(OPS) and set(mutant.dtypes) <= set(DTYPES)
        for op in mutant.ops:
            implementation = mutant.make(op)
            assert (implementation.name, implementation.op) == (mutant.id, op)


@pytest.mark.slow
@pytest.mark.parametrize("id", ON_CPU[::8])
def test_a_finding_names_what_a_fault_breaks(id: str) -> None:
    """A sample: ``normcheck audit``, which CI runs as well, kills every one, and accuses no control."""
    mutant = BY_ID[id]
    verdict = verdict_of(mutant.make(mutant.ops[0]), mutant.dtypes[0], mutant.promised)
    assert verdict.status == "fail" and verdict.failure is not None
    assert verdict.failure.kind in mutant.kinds, verdict.failure.message
    assert verdict.failure.output in mutant.outputs, verdict.failure.message


@pytest.mark.gpu
@requires_gpu
@pytest.mark.parametrize("id", ON_GPU)
def test_faults_of_a_gpu_are_found(id: str) -> None:
    """Each in a process of its own: a kernel that leaves its memory takes the GPU's context along."""
    mutant = BY_ID[id]
    code = (
        f"import sys; sys.path.insert(0, {str(__file__.rpartition('/')[0])!r}); import test_mutants_triton as t;"
        f"v = t.verdict_of(t.BY_ID[{id!r}].make({mutant.ops[0]!r}), {mutant.dtypes[0]!r}, {mutant.promised!r});"
        "print('VERDICT', v.status, v.failure and (v.failure.kind, v.failure.output, v.failure.case))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "VERDICT fail" in run.stdout, (run.stdout[-500:], run.stderr[-500:])


def test_unavailable_is_that_of_the_kernels() -> None:
    assert all(mutant.make(mutant.ops[0]).unavailable is unavailable for mutant in MUTANTS)
