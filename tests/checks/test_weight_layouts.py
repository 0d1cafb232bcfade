"""Weights that are strided, and weights of groups of rows: their tensors, their judge, right kernels and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.audit import catalogue
from normcheck.audit.mutants.mutant import Mutant
from normcheck.cases.axes import covered
from normcheck.cases.case import Case, with_rows
from normcheck.cases.case_line import parsed
from normcheck.cases.claims import Claims, claims_of, unclaimed
from normcheck.cases.core import core
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.layouts import OF_WEIGHTS, WEIGHT_STACKED
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.finding import finding
from normcheck.compare.pair import Both
from normcheck.errors import UsageError
from normcheck.gate.explain_bound import Question, explain
from normcheck.gate.plan import PROFILES, asked_for
from normcheck.impls.discovery import validated
from normcheck.oracle import judge as judging
from normcheck.oracle.expectations import expectations, whole
from normcheck.oracle.judge import END_TO_END, judge_of
from normcheck.oracle.tolerances import table
from normcheck.runner.call import poisoned_memory
from tests.case_lines import case_of
from tests.inner_loop import parametrize
from tests.some import some

MUTANTS = [fault for fault in catalogue.mutants().values() if fault.weight_layouts]
CONTROLS = [kernel for kernel in catalogue.controls() if kernel.weight_layouts]
OF_GROUPS = sorted(name for name, op in OPS.items() if op.of_row_groups)


def case(op: str, how: str, **changes: Any) -> Case:
    clips = " lower_clip=0.0 upper_clip=6.0" if OPS[op].clamped else ""
    made = case_of(f"{op} fp16 M=20 N=24 rows=shifted dy=shifted layout=weight_{how} seed=2 eps=0.001{clips}")
    return replace(made, **{"bias": OPS[op].takes_bias, **changes})


def checked(implementation: Implementation, of: Case, depth: Depth = Depth.ROWS) -> Result:
    with poisoned_memory():
        return check(implementation, OPS[of.op], of, "cpu", Ask(depth))


def mine(**fields: Any) -> Implementation:
    return Implementation(name="mine", op="rmsnorm", forward=lambda x, weight, bias, *, eps: x, **fields)


# --- The tensors.


@pytest.mark.parametrize(("op", "dtype"), [("layernorm", "fp16"), ("rmsnorm_quant", "bf16"), ("groupnorm", "fp32")])
def test_a_strided_weight_is_every_second_element_of_a_buffer_of_nan(op: str, dtype: str) -> None:
    own = {"groupnorm": " channels=6 groups=2", "rmsnorm_quant": " scale=normal bias=none"}
    line = f"{op} {dtype} M=3 N=12 seed=5{own.get(op, '')}"
    packed, strided = (make(parsed(f"{line} layout={how}"), OPS[op], "cpu") for how in ("contiguous", "weight_strided"))
    for name in ("weight", "bias"):
        one, other = getattr(packed, name), getattr(strided, name)
        if one is not None:
            assert other.stride() == (2,)
            assert torch.equal(one, other)
            between = other.as_strided((len(one) - 1,), (2,), other.storage_offset() + 1)
            assert bool(between.isnan().all())
    assert torch.equal(packed.x, strided.x)


@pytest.mark.parametrize("how", ["stacked", "interleaved"])
def test_each_group_of_rows_has_a_weight_twice_as_large(how: str) -> None:
    of = case("layernorm", how, N=2000)
    inputs, plain = make(of, OPS["layernorm"], "cpu"), make(replace(of, layout="contiguous"), OPS["layernorm"], "cpu")
    assert inputs.weight is not None and inputs.bias is not None
    assert tuple(inputs.weight.shape) == tuple(inputs.bias.shape) == (5, 2000)
    assert tuple(inputs.x.shape) == ((5, 4, 2000) if how == "stacked" else (4, 5, 2000))
    assert torch.equal(inputs.x.reshape(20, 2000), plain.x)
    assert make(replace(of, M=0), OPS["layernorm"], "cpu").x.shape == (
        (1, 0, 2000) if how == "stacked" else (0, 1, 2000)
    )
    sizes = inputs.weight.float().square().mean(1).sqrt()
    assert (sizes[1:4] / sizes[:3]).tolist() == pytest.approx([2.0, 2.0, 2.0], rel=0.1)
    rows = [tuple(index) for index in torch.cartesian_prod(*map(torch.arange, inputs.x.shape[:2])).tolist()]
    assert [of.group_of(row) for row in range(20)] == [at[0 if how == "stacked" else 1] for at in rows]


@pytest.mark.parametrize(
    ("rows", "groups"),
    [(0, 1), (1, 1), (2, 2), (4, 2), (5, 5), (9, 3), (17, 1), (20, 5), (65, 13), (300, 30), (65537, 1)],
)
def test_how_many_groups_so_many_rows_are(rows: int, groups: int) -> None:
    of = case("rmsnorm", "stacked", M=rows)
    assert of.row_groups == groups
    assert of.shape == (groups, rows // groups, 24)
    assert replace(of, layout="weight_interleaved").shape == (rows // groups, groups, 24)
    assert replace(of, layout="contiguous").row_groups == 1
    assert with_rows(of, 3).sides == (1, 24)


def test_a_line_may_say_how_many_groups() -> None:
    of = parsed("rmsnorm fp16 M=24 N=7 layout=weight_interleaved weight_groups=6 bias=none")
    assert (of.row_groups, of.shape, of.sides) == (6, (4, 6, 7), (6, 7))
    assert parsed(str(of)) == of
    for words, complaint in (
        ("layout=weight_stacked weight_groups=5", "weight_groups=5: expected a number that divides M=24"),
        ("weight_groups=2", "weight_groups=2 layout=contiguous: expected one of weight_stacked, weight_interleaved"),
    ):
        with pytest.raises(UsageError, match=complaint):
            parsed(f"rmsnorm fp16 M=24 N=7 {words}")
    for op, how in (("fused_add_rmsnorm", "stacked"), ("l2norm", "strided"), ("layernorm_modulate", "strided")):
        with pytest.raises(UsageError, match=f"layout=weight_{how}: expected"):
            parsed(f"{op} fp16 M=24 N=7 layout=weight_{how}")


# --- The judge.


def _alone(of: Case, inputs: Inputs, group: int) -> tuple[Case, Inputs]:
    """The rows of a group as a case of their own."""
    rows = [row for row in range(of.M) if of.group_of(row) == group]
    own = {name: t.reshape(of.M, of.N)[rows] for name, t in (("x", inputs.x), ("dy", inputs.dy))}
    both = {name: getattr(inputs, name)[group] for name in ("weight", "bias") if getattr(inputs, name) is not None}
    return replace(of, M=len(rows), layout="contiguous"), replace(inputs, **own, **both)


def _whole(of: Case, inputs: Inputs) -> Mapping[str, tuple[Tensor, ...]]:
    """Output -> its expected values, and bounds above and below, of all blocks."""
    judge = judge_of(OPS[of.op], of, inputs, table().model, {})
    every = whole(expectations(judge, own_bits=True))
    return {output: both for (output, check), both in every.items() if check == END_TO_END}


@pytest.mark.parametrize("how", ["stacked", "interleaved"])
@pytest.mark.parametrize("op", OF_GROUPS)
def test_each_group_is_judged_as_its_rows_alone(op: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and bounds, those of dw and db by the rows of their own group; also if a block ends within a group."""
    monkeypatch.setitem(judging.BLOCK_ELEMENTS, "cpu", 24 * 7)
    of = case(op, how)
    inputs = make(of, OPS[op], "cpu")
    together = _whole(of, inputs)
    assert of.row_groups == 5
    for group in range(5):
        rows = [row for row in range(of.M) if of.group_of(row) == group]
        by_itself = _whole(*_alone(of, inputs, group))
        assert by_itself.keys() == together.keys()
        for name, alone in by_itself.items():
            at: Any = group if name in ("dw", "db") else rows
            for mine, own in zip(together[name], alone, strict=True):
                torch.testing.assert_close(mine[at], own, rtol=1e-6, atol=1e-300)


# --- Right kernels, and faults.

DATA: tuple[dict[str, Any], ...] = (
    {},
    {"weights": "probe", "weight_dtype": "fp32", "dy": "first_row"},
    {"M": 5, "N": 7, "rows": "nan"},
    {"M": 12, "N": 7, "rows": "inf"},
    {"M": 12, "N": 7, "rows": "largest", "weights": "small"},
    {"M": 12, "N": 3, "dy": "nan"},
    {"M": 0},
    {"M": 1, "N": 1},
    {"M": 65, "N": 40, "rows": "blend", "dtype": "bf16"},
)


@parametrize("right", CONTROLS, inner=6, ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_a_right_kernel_passes(right: Implementation) -> None:
    for how in some(right.weight_layouts):
        for changes in DATA:
            result = checked(right, case(right.op, how, **changes))
            named = {c.output: c.comparison.ratio for c in result.wrong}
            assert not result.failed, (str(result.case), named, result.problems)
            assert result.refused == ""
        assert {"y", "dx", "dw"} <= {c.output for c in result.checked}
        assert result.probed is not None and result.probed.invariant
        assert all(result.probed.invariant[name] for name in ("y", "dx"))


@parametrize("fault", MUTANTS, inner=6, ids=lambda fault: fault.id)
def test_a_planted_fault_shows_in_its_layout_alone(fault: Mutant) -> None:
    (how,) = fault.weight_layouts
    for op in some(fault.ops):
        found = [checked(fault.make(op), case(op, how, M=m, bias=True), Depth.MEMORY) for m in (20, 117)]
        kinds = {p.kind for result in found for p in result.problems if p.output in fault.outputs}
        assert kinds & {*fault.kinds} or any(c.output in fault.outputs for result in found for c in result.wrong)
        packed = checked(fault.make(op), case(op, how, layout="contiguous", bias=True), Depth.MEMORY)
        assert not packed.failed


def test_a_finding_says_which_group_and_what_to_look_at() -> None:
    told = {fault.id: fault for fault in MUTANTS}
    for id, how, words in (
        ("mT05", "stacked", "x is (G, S, N) = (5, 4, 24) here, weight (5, 24): does row (g, s) have weight[g]?"),
        ("mT14", "interleaved", "x is (S, G, N) = (4, 5, 24) here, weight (5, 24): does row (s, g) have weight[g]?"),
        (
            "mT01",
            "strided",
            "weight and bias have stride 2 here: does it use weight.stride(0), or weight.contiguous()?",
        ),
    ):
        kernel = told[id].make("layernorm")
        of = case("layernorm", how)
        cell = Cell(OPS["layernorm"], kernel, "fp16", "mine")
        found = finding(cell, checked(kernel, of), "cpu")
        assert found.advice == words
        if how != "strided":
            assert found.index is not None
            assert f"at {list(found.index)} (group {of.group_of(found.index[0])}) got" in found.message


def test_the_bound_of_an_element_of_dw_is_told_by_its_group() -> None:
    line = str(case("layernorm", "stacked"))
    stream = StringIO()
    explain(Question(line=line, output="dw", at="3,5", impl="", device="cpu"), stream)
    inputs = make(parsed(line), OPS["layernorm"], "cpu")
    expected = _whole(parsed(line), inputs)["dw"][0][3, 5]
    assert f"expected  {float(expected):.17g}" in stream.getvalue()
    with pytest.raises(UsageError, match="expected GROUP,COLUMN of dw, with GROUP from 0 to 4"):
        explain(Question(line=line, output="dw", at="5,5", impl="", device="cpu"), StringIO())


# --- Who is asked.


def claims(op: str, implementation: Implementation) -> Claims:
    return claims_of(OPS[op], implementation, "fp16")


def test_only_who_declares_them_is_asked() -> None:
    assert {*OF_WEIGHTS}.isdisjoint(claims("rmsnorm", mine()).layouts)
    assert claims("rmsnorm", mine(weight_layouts=("stacked", "strided"))).layouts[-2:] == (
        "weight_strided",
        WEIGHT_STACKED,
    )
    with_residual = mine(weight_layouts=("stacked", "strided"))
    assert {*OF_WEIGHTS} & {*claims("fused_add_rmsnorm", with_residual).layouts} == {"weight_strided"}
    assert {*OF_WEIGHTS}.isdisjoint(claims("l2norm", with_residual).layouts)
    assert {*OF_WEIGHTS}.isdisjoint(claims("rmsnorm", mine(weight_layouts=("strided",), weights=(False,))).layouts)
    for how in OF_WEIGHTS:
        line = case("rmsnorm", how.removeprefix("weight_"))
        assert unclaimed(OPS["rmsnorm"], mine(), line) == f"layout={how}: weight_layouts=() is declared"
        asked = asked_for([how], "mine.py", mine())
        assert asked.weight_layouts == (how.removeprefix("weight_"),)
        assert not unclaimed(OPS["rmsnorm"], asked, line)


@pytest.mark.parametrize("weights", [(True,), (False, True)])
def test_the_core_of_who_declares_them_has_them_with_a_weight(weights: tuple[bool, ...]) -> None:
    declared = mine(weight_layouts=("strided", "interleaved"), weights=weights)
    made = list(core(claims("rmsnorm", declared), PROFILES["quick"].extent.on("cpu"), 0))
    for how in ("weight_strided", "weight_interleaved"):
        own = [planned.case for planned in made if planned.case.layout == how and planned.case.weight]
        assert len({(one.M, one.N) for one in own}) > 20
        assert {one.bias for one in own} == {False, True}
        assert {one.weight_dtype for one in own} == {"same", "fp32"}
    bare = replace(case("rmsnorm", "strided"), weights="none", bias=False)
    assert covered(bare, Depth.MEMORY)["layout"] == ()


def test_one_kernel_has_one_order_of_groups() -> None:
    for fields in ({"weight_layouts": ("stacked", "interleaved")}, {"weight_layouts": ("stacked",), "trailing": True}):
        with pytest.raises(UsageError, match="expected stacked, interleaved or trailing alone"):
            validated(mine(**fields), "mine")
    with pytest.raises(UsageError, match="expected a tuple with one of strided"):
        validated(mine(weight_layouts=("packed",)), "mine")


def test_two_kernels_are_compared_on_what_both_declare() -> None:
    one, other = mine(weight_layouts=("strided", "stacked")), mine(weight_layouts=("strided",))
    a, b = (Cell(OPS["rmsnorm"], i, "fp16", "mine") for i in (one, other))
    assert Both(a, b, ()).shared.implementation.weight_layouts == ("strided",)


def test_a_kernel_that_refuses_a_strided_weight_is_not_accused() -> None:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        if not weight.is_contiguous():
            raise ValueError("weight must be contiguous")
        return x

    kernel = Implementation(name="mine", op="rmsnorm", forward=forward, weight_layouts=("strided",))
    result = checked(kernel, case("rmsnorm", "strided"))
    assert result.refused == "layout=weight_strided: forward raised ValueError: weight must be contiguous"
    assert not result.failed
    assert checked(replace(kernel, weight_layouts=()), case("rmsnorm", "strided", layout="contiguous")).failed
