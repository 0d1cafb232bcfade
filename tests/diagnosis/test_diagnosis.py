"""What a wrong output might be: the known fault that explains all of it is named, and nothing else ever is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.audit import catalogue
from normcheck.audit.explanations import RIGHT
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import claims_of, scales_of
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.diagnosis import explain, gated, grouped, modulated, rotary, row_groups
from normcheck.diagnosis.evidence import Evidence, evidence, has_formulas, ways
from normcheck.diagnosis.explain import explanation
from normcheck.diagnosis.fit import explains
from normcheck.diagnosis.formula import TEXTBOOK, Way
from normcheck.diagnosis.known import FAULTS, known
from normcheck.diagnosis.l2norm import NAMES
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.implementation import Implementation
from normcheck.oracle.conventions import keys
from normcheck.result import Explanation
from tests import plain_rmsnorm
from tests.case_lines import NORMS
from tests.command_line import Cli, KernelFile
from tests.inner_loop import parametrize
from tests.plain_rmsnorm import plain

PLAN = Plan((), PROFILES["quick"], 0, "cpu", 60.0)


def cell_of(implementation: Implementation, dtype: str = "fp16") -> Cell:
    return Cell(OPS[implementation.op], implementation, dtype, implementation.name)


def told(implementation: Implementation, dtype: str = "fp16", **case: Any) -> Explanation | None:
    """What the diagnosis says of the failure of a small case."""
    cell = cell_of(implementation, dtype)
    values: dict[str, Any] = {"M": 9, "N": 40, "eps": 1e-3, "seed": 9, **case}
    clips = cell.op.clips((0.0, 6.0)) if cell.op.clamped else ()
    takes_bias = cell.op.takes_bias and True in implementation.biases and case.get("weights") != NO_WEIGHT
    values = {"bias": takes_bias, "scale": scales_of(cell.op, implementation)[0], **values}
    failed = run_case(cell, Case(op=cell.op.name, dtype=dtype, options=clips, **values), PLAN)
    assert failed.failed
    return explanation(cell, failed, PLAN, seconds=60.0)


def named(implementation: Implementation, dtype: str = "fp16", **case: Any) -> str:
    """The name of what it says, "" if it says nothing."""
    found = told(implementation, dtype, **case)
    return found.name if found else ""


def cases_of(cell: Cell) -> Iterator[Result]:
    claims = claims_of(cell.op, cell.implementation, cell.dtype)
    for number, values in enumerate(explain._CASES):
        yield run_case(cell, explain._case(claims, values, number), PLAN, UNPROBED)


@pytest.mark.slow
def test_the_textbook_explains_every_correct_kernel() -> None:
    """So what it does not explain is wrong, and the bounds around its numbers are wide enough."""
    tried = 0
    for number, control in enumerate(catalogue.controls()):
        dtype = control.dtypes[number % len(control.dtypes)]
        cell = cell_of(control, dtype)
        if control.name.endswith(".triton") or control.name in MIXED or not has_formulas(cell.op):
            continue
        own, left = control.backward is not None, {Way(*each) for each in _EVERY}
        for result in islice(cases_of(cell), number % 2, None, 2):  # half of them, by turns
            found = evidence(cell.op, result, own_backward=own)
            if found is not None:
                tries = left.intersection(ways(cell.op, result, own_backward=own))
                left = {way for way in tries if explains(TEXTBOOK, found, way)}
                assert left, f"{control.name} {control.op} {result.case}"
                tried += 1
    assert tried > 200


MIXED = ("add_mixed",)
"""The kernels that norm the stored sum by the statistics of the one in fp32, for which no formula is."""

_SUMS, _ROUNDS = ("", "rounded", "exact"), ("", "none", "io", "xhat")
_EVERY = [*product(_SUMS, _SUMS, _ROUNDS, ("any", "division", "reciprocal"))]


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean(-1, keepdim=True)


PLAIN: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + eps).pow(1.01) * w.float(),  # nobody's fault
    "eps_outside": lambda x, w, eps: x.float() / (_rms(x).sqrt() + eps) * w.float(),
    "eps_twice": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + 2 * eps) * w.float(),
    "eps_1e-6": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + 1e-6) * w.float(),
    "eps_missing": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x)) * w.float(),
    "not_divided": lambda x, w, eps: x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps) * w,
    "padded_divisor": lambda x, w, eps: (
        x.float() * torch.rsqrt(_rms(x) * x.shape[-1] / (1 << (x.shape[-1] - 1).bit_length()) + eps) * w.float()
    ),
    "mean_subtracted": lambda x, w, eps: (
        x.float() * torch.rsqrt(x.float().var(-1, keepdim=True, unbiased=False) + eps) * w.float()
    ),
    "rstd_squared": lambda x, w, eps: x.float() / (_rms(x) + eps) * w.float(),
    "one_plus_unasked": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + eps) * (1 + w.float()),
    "weight_missing": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + eps),
    "dx_c1_missing": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + eps).detach() * w.float(),
    "eps_after_root": lambda x, w, eps: x.float() * (torch.rsqrt(_rms(x)) + eps) * w.float(),
    "eps_over_n": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + eps / x.shape[-1]) * w.float(),
    "eps_times_n": lambda x, w, eps: x.float() * torch.rsqrt(_rms(x) + eps * x.shape[-1]) * w.float(),
    "stats_without_tail_2": lambda x, w, eps: (
        x.float()
        * torch.rsqrt(x.float()[..., : x.shape[-1] // 2 * 2].square().sum(-1, keepdim=True) / x.shape[-1] + eps)
        * w.float()
    ),
    "all_io": lambda x, w, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w.to(x.dtype),
    "n_minus_1": lambda x, w, eps: (
        x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + eps) * w.float()
    ),
    "last_column_left_out": lambda x, w, eps: (
        x.float() * torch.rsqrt(x.float()[..., :-1].square().sum(-1, keepdim=True) / x.shape[-1] + eps) * w.float()
    ),
}
"""Name of the fault -> a plain function that has it, whose gradients autograd makes."""


@parametrize("name", PLAIN, inner=3)
def test_a_plain_function_with_a_fault_is_told_which(name: str) -> None:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Any]:
        return {"y": PLAIN[name](x, weight, eps).to(x.dtype)}

    odd = {"N": 41} if name == "stats_without_tail_2" else {}
    assert named(plain(forward=forward, backward=None, biases=(False,)), **odd) == name


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_one_column_that_is_lost_is_told_as_what_it_is(dtype: str) -> None:
    """With one element in a row anything fits an rstd of its own: y = 0 is the division by 0."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Any]:
        return {"y": PLAIN["n_minus_1"](x, weight, eps).to(x.dtype)}

    assert named(plain(forward=forward, backward=None, biases=(False,)), dtype, N=1) == "n_minus_1"


@pytest.mark.slow
def test_without_a_weight_its_faults_are_left_out() -> None:
    """Those that need none are told as ever, and no other is said of what only a weight could show."""
    op = OPS["rmsnorm"]
    steps = {"gamma", "gamma_b", "casts"}
    assert not any(fault.formula.changed & steps for fault in known(op, "fp16", weight=False))
    assert any(fault.formula.changed & steps for fault in known(op, "fp16"))
    for mutant, expected in (("mN01", "rstd_missing"), ("mN02", "bare_gamma_2"), ("mN03", "bare_gamma_0")):
        planted = catalogue.mutants()[mutant]
        assert named(planted.make(planted.ops[0]), weights=NO_WEIGHT, rows="shifted") == expected


def test_dw_and_db_exchanged() -> None:
    """One row and one column hide it: there dw is db times xhat."""

    def backward(*arguments: Any, **options: Any) -> dict[str, Any]:
        found = control.backward(*arguments, **options)  # type: ignore[misc]
        return {**found, "dw": found["db"], "db": found["dw"]}

    control = next(c for c in catalogue.controls() if c.op == "layernorm" and c.backward is not None)
    assert named(replace(control, backward=backward)) == "dw_db_exchanged"


@parametrize(
    ("op", "mutant", "name", "of"),
    [
        ("fused_add_rmsnorm", "mS01", "residual_left_out", {}),
        ("fused_add_layernorm", "mS03", "residual_out_is_residual", {}),
        ("fused_add_layernorm", "mS16", "dresidual_out_missing", {}),
        ("fused_add_rmsnorm", "mS22", "backward_of_x", {}),
        ("fused_add_rmsnorm_llama", "mS01", "residual_left_out", {}),
        ("fused_add_rmsnorm_llama", "mS27", "fits_sum_exact", {"M": 39, "N": 130}),
        ("fused_add_rmsnorm_llama", "add-llama-truncated", "xhat_truncated", {"M": 39, "N": 130}),
        ("fused_add_rmsnorm_gemma", "add-gemma-weight", "one_plus_missing", {}),
        ("fused_add_rmsnorm_quant", "mQ33", "residual_out_is_residual", {}),
        ("fused_add_rmsnorm_quant", "mQ34", "fits_sum_exact", {"M": 39, "N": 130}),
        ("rmsnorm_quant", "mQ02", "codes_truncated", {}),
        ("rmsnorm_quant", "mQ08", "scale_multiplied", {}),
        ("rmsnorm_quant", "mQ15", "codes_twice_fp16", {"M": 39}),
        ("rmsnorm_quant", "mQ19", "scale_without_tail_8", {"N": 37, "M": 39}),
        ("rmsnorm_quant", "mQ27", "scale_of_other_row", {}),
    ],
    inner=1,
)
def test_a_kernel_that_adds_a_residual_or_returns_codes_is_told_which(
    op: str, mutant: str, name: str, of: dict[str, Any]
) -> None:
    assert named(catalogue.mutants()[mutant].make(op), bias=op.endswith("layernorm"), **of) == name


@parametrize(
    ("op", "control"),
    [
        (f"{adding}{op}", f"{adding}{control}")
        for adding in ("", "fused_add_")
        for casting in ("rmsnorm_llama", "rmsnorm_gemma")
        for op, control in (("rmsnorm", casting), (casting, "rmsnorm"))
    ],
    inner=1,
)
def test_a_kernel_of_another_op_is_told_which(op: str, control: str) -> None:
    def of_one(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        wide = x.float()
        xhat = wide * torch.rsqrt(_rms(wide) + eps)
        if control.endswith("llama"):
            return weight * xhat.to(x.dtype)
        return (xhat * (weight.float() + control.endswith("gemma"))).to(x.dtype)

    def of_sum(x: Tensor, weight: Tensor, bias: None, *, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
        stored = x + residual
        return of_one(stored, weight, bias, eps=eps), stored

    forward = of_sum if OPS[op].adds_residual else of_one
    kernel = Implementation(name="mine", op=op, forward=forward, biases=(False,))
    found = told(kernel, M=39, N=130, bias=False)
    assert found is not None
    assert found.words.endswith(f"this is what {control} computes: did you mean --op {control}?")


@parametrize(
    ("op", "mutant", "name"),
    [
        ("layernorm", "mF03", "n_minus_1"),
        ("layernorm", "mF01", "tail_not_masked"),
        ("layernorm", "mF19", "mean_missing"),
        ("layernorm", "mD02", "dx_c2_missing"),
        ("layernorm_zero_centered", "mA02", "one_plus_missing"),
        ("rmsnorm", "mD08", "dx_rstd_missing"),
        ("layernorm", "mF12", "stats_accumulated_io"),
        ("layernorm_relu_bitmask", "bitmask-msb-first", "bits_order"),
        ("layernorm_relu_bitmask", "mB01", "bits_ge_lower"),
        ("layernorm", "X24", ""),  # which is known to nobody
    ],
    inner=2,
)
def test_a_kernel_with_its_own_backward_is_told_which(op: str, mutant: str, name: str) -> None:
    assert named(catalogue.mutants()[mutant].make(op), rows="normal" if mutant == "X24" else "shifted") == name


def test_rows_read_as_if_they_were_packed() -> None:
    def packed(x: Tensor) -> Tensor:
        return x.as_strided(x.shape, (x.shape[-1], 1))

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Any]:
        return plain_rmsnorm.forward(packed(x), weight, bias, eps=eps)

    def backward(dy: Tensor, x: Tensor, *others: Any, eps: float) -> dict[str, Any]:
        return plain_rmsnorm.backward(dy, packed(x), *others, eps=eps)

    kernel = plain(forward=forward, backward=backward)
    assert named(kernel, layout="x_strided", gap=8) == "row_stride_of_x_ignored"


def _sometimes(is_wrong: Callable[[Tensor, Tensor | None], bool]) -> Implementation:
    """eps outside the root, in the calls that are wrong."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Any]:
        mean = x.float().square().mean(-1, keepdim=True)
        rstd = 1 / (mean.sqrt() + eps) if is_wrong(x, bias) else torch.rsqrt(mean + eps)
        y = x.float() * rstd * weight.float()
        return {"y": (y if bias is None else y + bias.float()).to(x.dtype), "rstd": rstd.squeeze(-1)}

    return plain(forward=forward)


def test_a_fault_of_some_calls_only_is_named_with_what_they_have_in_common() -> None:
    """Its formula is wrong about the calls that are right: it predicts those that are like the failing one."""
    of_one_n = told(_sometimes(lambda x, bias: x.shape[-1] == 40))
    assert of_one_n is not None
    assert (of_one_n.name, of_one_n.only, of_one_n.cases) == ("eps_outside", "N=40, a bias", 7)
    of_no_bias = told(_sometimes(lambda x, bias: bias is None), bias=False)
    assert of_no_bias is not None
    assert (of_no_bias.name, of_no_bias.only) == ("eps_outside", "N=40, no bias")


def test_a_fault_of_calls_that_are_not_alike_is_not_named() -> None:
    assert named(_sometimes(lambda x, bias: x.shape[0] == 9)) == ""


def test_a_fault_is_not_named_by_one_n_if_another_n_is_wrong_by_something_else() -> None:
    """Two columns of N are one tail of eight, or the last column: at N = 37 it is five of them."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Any]:
        wide, whole = x.float(), max(x.shape[-1] // 8 * 8, 1)
        rstd = 1 / (wide[:, :whole].square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
        y = wide * rstd * weight.float()
        return {"y": (y if bias is None else y + bias.float()).to(x.dtype)}

    assert told(plain(forward=forward, backward=None), M=5, N=2, bias=True) is None


def test_of_faults_that_fit_alike_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case is not enough to tell them apart, and there are no others to look at."""
    monkeypatch.setattr(explain, "_CASES", ())
    assert named(plain(forward=_eps_outside)) == ""


def _eps_outside(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Any]:
    rstd = 1 / (x.float().square().mean(-1, keepdim=True).sqrt() + eps)
    y = x.float() * rstd * weight.float()
    return {"y": (y if bias is None else y + bias.float()).to(x.dtype), "rstd": rstd.squeeze(-1)}


HARMLESS = ("dw_first_", "dx_first_", "stats_first_", "bits_of_stored_y", "variance_one_pass", "row_stride_of_dy")
SOMETIMES = ("weight_missing_without_bias", "bare_gamma_")
"""How the names of known faults begin that no case of ``explain._CASES`` shows: the failing case alone does."""


@pytest.mark.slow
@pytest.mark.parametrize("op", NORMS)
def test_each_known_fault_is_told_from_the_textbook(op: str) -> None:
    """The textbook's own numbers are explained by no fault, in all cases together, but by the harmless ones.

    Those of fp32 tell most of them; what they leave must be told in fp16.
    """
    kernel = next(c for c in catalogue.controls() if c.op == op and c.backward is not None)
    unseen = {f.name for f in known(OPS[op], "fp16") if not f.name.startswith((*HARMLESS, *SOMETIMES))}
    assert unseen
    for dtype in ("fp32", "fp16"):
        cell, left = cell_of(kernel, dtype), {f.name: f for f in known(OPS[op], dtype) if f.name in unseen}
        for result in cases_of(cell) if left else ():
            found = evidence(cell.op, result, own_backward=True)
            assert isinstance(found, Evidence)
            way = ways(cell.op, result, own_backward=True)[0]
            left = {name: f for name, f in left.items() if explains(f.formula, found, way)}
        unseen &= set(left)
    assert unseen == set()


def test_names_are_for_programs_and_words_for_people() -> None:
    words = {fault.name: fault.words for fault in FAULTS}
    assert all(words[fault.name] == fault.words for fault in FAULTS)  # one name, one meaning
    assert all(name.isascii() and " " not in name and len(text) < 130 for name, text in words.items())
    assert all(fault.formula.changed or fault.formula.one_pass for fault in FAULTS)


@pytest.mark.slow
def test_what_is_right_for_a_planted_fault_is_a_name_that_exists() -> None:
    of_ways = {f"fits_{key}_{value}" for values in map(keys, OPS.values()) for key in values for value in values[key]}
    of_gates = {f"{key}_{value}" for key, values in keys(OPS["rmsnorm_gated"]).items() for value in values}
    of_gates |= {
        f"{key}_{value}" for key, values in keys(OPS["fused_add_rmsnorm_modulate"]).items() for value in values
    }
    of_gates |= {
        told.name for told in (*gated.OF_INPUTS, *modulated.OF_INPUTS, *modulated.OF_GATES, *grouped.OF_INPUTS)
    }
    of_gates |= {f"{key}_{value}" for key, values in keys(OPS["groupnorm"]).items() for value in values}
    of_gates |= {f"{key}_{value}" for key, values in keys(OPS["qk_norm_rope"]).items() for value in values}
    of_gates |= {told.name for told in (*rotary.OF_INPUTS, *row_groups._EVERY)}
    assert set(RIGHT) <= {fault.name for fault in FAULTS} | of_ways | of_gates | NAMES
    assert {id for ids in RIGHT.values() for id in ids} <= set(catalogue.mutants())
    for (one, its), (other, others) in product(RIGHT.items(), repeat=2):
        alike = {one, other} <= {name for name in RIGHT if "io" in name or "16" in name or "accumulated" in name}
        alike |= one.startswith("dx_first_") and other.startswith("dx_first_")  # the last full block of the case's N
        assert one == other or alike or not its & others  # else only the dtype of a rounding may have two names


@pytest.mark.slow
def test_the_report_says_it(cli: Cli, kernel_file: KernelFile) -> None:
    path = kernel_file(
        "import torch\n",
        "def rmsnorm(x, weight, bias=None, eps=1e-6):\n",
        "    y = x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + eps) * weight.float()\n",
        "    return (y if bias is None else y + bias.float()).to(x.dtype)\n",
    )
    few, reports = ("--dtype", "fp16", "--max-examples", "60"), ("json:out.json", "html:out.html")
    done = cli("verify", "--impl", str(path), *few, *(word for report in reports for word in ("--report", report)))
    assert done.code == 1
    said = " ".join(done.out.split())
    assert "Might be: eps is added outside the root: 1 / (sqrt(v) + eps); this predicts all" in said
    with open("out.json", encoding="utf-8") as stream:
        report = json.load(stream)
    found = report["verdicts"][0]["failure"]["explanation"]
    assert found["name"] == "eps_outside"
    assert found["cases"] >= 6
    assert found["others"] > 100
    with open("out.html", encoding="utf-8") as stream:
        assert "eps is added outside the root" in stream.read()


@pytest.mark.slow
def test_the_audit_counts_it(cli: Cli) -> None:
    done = cli("audit", "--mutant", "mF07", "--mutant", "X24", "--op", "rmsnorm", "--dtype", "fp16", "--workers", "1")
    said = " ".join(done.out.split())
    assert "named rightly 1 of 2 wrong values (50%), none wrongly 1 of all 2 faults that were found (50%)" in said


@pytest.mark.slow
def test_a_wrong_name_fails_the_audit(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normcheck.audit.explanations.RIGHT", {})
    done = cli("audit", "--mutant", "mF07", "--op", "rmsnorm", "--dtype", "fp16", "--workers", "1")
    assert done.code == 1
    assert "was named eps_outside" in done.out


def test_a_row_that_is_all_tail_does_not_show_a_fault_of_the_tail() -> None:
    """It norms the exact sum if N mod 8 is not 0, whole rows: at N = 7 that is what the tail alone would be."""

    def forward(x, weight, bias, *, eps, residual):  # type: ignore[no-untyped-def]
        wide = x.float() + residual.float()
        stored = wide.to(x.dtype)
        normed = stored.float() if x.shape[-1] % 8 == 0 else wide
        return {"y": (normed * torch.rsqrt(_rms(normed) + eps) * weight.float()).to(x.dtype), "residual_out": stored}

    kernel = Implementation(
        name="mine", op="fused_add_rmsnorm", forward=forward, biases=(False,), model={"sum": "rounded"}
    )
    assert named(kernel, M=5, N=7, residual="large", eps=1e-5, seed=1) == "fits_sum_exact"
