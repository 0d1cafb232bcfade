"""Other people's recipes, as they are: correct kernels pass them, and known faults pass or fail as in their sources."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.audit import catalogue
from normcheck.audit.mutants.kernel import CLEAN, OPS, Kernel
from normcheck.audit.mutants.residual import Adding
from normcheck.audit.recipe_judge import (
    CAUGHT,
    MISSED,
    NOT_EXERCISED,
    Judgement,
    _close,
    _outputs,
    judge_kernel,
    judge_mutant,
    tasks_of,
)
from normcheck.audit.recipes import (
    EXACT,
    RECIPES,
    TORCH_DEFAULTS,
    Drawing,
    FixedTolerance,
    Recipe,
    recipe,
)
from normcheck.cases.dtypes import DTYPES, FORMATS
from normcheck.cases.ops import OPS as EVERY_OP
from normcheck.errors import UsageError
from normcheck.impls.implementation import Implementation
from tests.inner_loop import parametrize
from tests.some import some

ROW_1 = recipe("atol=5e-3,rtol=5e-3")
S, Z = RECIPES["cudnn-relu-bitmask"], RECIPES["cudnn-zero-centered"]
CLEAN_OF = {op: CLEAN.implementation("clean", op) for op in OPS}
CELLS = [
    (r, op, dtype)
    for r in (*RECIPES.values(), ROW_1)
    for op in r.ops
    for dtype in r.dtypes
    if r.name != "flashinfer-quant"
]
"""Of flashinfer's, which has large calls, ``test_recipes_of_flashinfer.py`` judges the clean kernel beside faults."""
MAKES = ("sequential_two_pass", "welford_tree_fma", "folded")


def ids(value: object) -> str:
    return value.name if isinstance(value, Recipe) else str(value)


def summed(judgements: Iterable[Judgement]) -> Judgement:
    """One mutant over ops and dtypes: caught if it is caught in any, else missed if it was exercised in any."""
    order = (CAUGHT, MISSED, NOT_EXERCISED)
    return min(judgements, key=lambda j: order.index(j.status), default=Judgement(NOT_EXERCISED))


def verdict(mutant: str, r: Recipe, dtype: str, ops: tuple[str, ...] = OPS) -> Judgement:
    found = catalogue.mutants()[mutant]
    chosen = [op for op in found.ops if op in ops]
    return summed(judge_mutant(r, found.make(op), CLEAN_OF[op], dtype) for op in chosen)


def faulty(op: str, **steps: Any) -> Implementation:
    return Kernel(**steps).implementation("faulty", op)


# Correct kernels.


@pytest.mark.slow
@pytest.mark.parametrize(("r", "op", "dtype"), CELLS, ids=ids)
def test_the_clean_kernel_passes(r: Recipe, op: str, dtype: str) -> None:
    clean = Adding() if EVERY_OP[op].adds_residual else CLEAN
    assert judge_kernel(r, clean.implementation("clean", op), dtype) == Judgement(MISSED)


JUDGED = [S, Z, RECIPES["cudnn-rmsnorm"], RECIPES["kernelbench"], RECIPES["vllm-rmsnorm"], ROW_1]


@pytest.mark.slow
@parametrize(("r", "make"), [*zip(JUDGED, cycle(MAKES), strict=False)], ids=ids, inner=2)
def test_correct_makes_pass(r: Recipe, make: str) -> None:
    """By turns: each recipe one of three, that is not the clean kernel."""
    controls = [c for c in catalogue.controls() if c.name == make and c.op in r.ops]
    assert controls
    for control in controls:
        for dtype in r.dtypes:
            assert judge_kernel(r, control, dtype) == Judgement(MISSED), (control.op, dtype)


def test_the_tight_default_of_fp32_accuses_a_correct_make() -> None:
    """A chain of 128 fp32 additions is off by more than 1e-5 + 1.3e-6 of the sum: the recipe cries wolf."""
    (make,) = (c for c in catalogue.controls() if (c.name, c.op) == ("sequential_two_pass", "rmsnorm"))
    assert judge_kernel(RECIPES["torch-testing"], make, "fp32") == Judgement(CAUGHT, ("dw",))
    assert judge_kernel(RECIPES["torch-testing"], make, "fp16").status == MISSED


def test_gradients_by_autograd_are_compared() -> None:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        xf = x.float()
        y = xf * torch.rsqrt((xf * xf).mean(1, keepdim=True) + eps) * weight.float()
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def half(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        return (forward(x, weight, bias, eps=eps) + forward(x, weight, bias, eps=eps).detach()) / 2

    right = Implementation(name="plain", op="rmsnorm", forward=forward)
    assert judge_kernel(ROW_1, right, "fp32") == Judgement(MISSED)
    assert judge_kernel(ROW_1, replace(right, forward=half), "fp32") == Judgement(CAUGHT, ("dx", "dw", "db"))


# What the recipes are, beside their sources.


@pytest.mark.slow
def test_zeros_for_dx_pass_the_bitmask_notebook() -> None:
    """dy is 1e-6 and atol 2e-4. The first half of the zero-centred notebook is no better."""
    for r, dtype in ((S, "fp32"), (Z, "fp16")):
        zeros = faulty(r.ops[0], dx=lambda c: torch.zeros_like(c.x))
        assert judge_mutant(r, zeros, CLEAN_OF[r.ops[0]], dtype) == Judgement(MISSED)
        assert judge_mutant(ROW_1, zeros, CLEAN_OF[r.ops[0]], dtype) == Judgement(CAUGHT, ("dx",))
        assert tasks_of(r, r.ops[0], dtype)[0].expected["dx"].abs().max() < 2e-4


@pytest.mark.slow
def test_zeros_for_dw_do_not_pass_it() -> None:
    zeros = faulty("layernorm_relu_bitmask", dw=lambda c: torch.zeros_like(c.w))
    assert judge_mutant(S, zeros, CLEAN_OF["layernorm_relu_bitmask"], "fp32") == Judgement(CAUGHT, ("dw",))


def test_the_reference_of_the_layernorm_notebooks_is_the_unbiased_one() -> None:
    (task,) = tasks_of(S, "layernorm_relu_bitmask", "fp32")
    biased = torch.rsqrt(task.x.var(1, correction=0) + task.eps)
    assert 5e-4 < (task.expected["rstd"] - biased).abs().max() < 1e-3
    (own,) = tasks_of(ROW_1, "layernorm", "fp32")
    assert torch.equal(own.expected["mean"], own.x.mean(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tolerances_by_dtype_are_those_of_the_installed_torch(dtype: str) -> None:
    rtol, atol = torch.testing._comparison.default_tolerances(getattr(torch, FORMATS[dtype].torch_name))
    assert getattr(TORCH_DEFAULTS, dtype) == FixedTolerance(atol, rtol)


@parametrize(
    ("mutant", "r", "dtype", "status", "outputs"),
    [
        ("mF03", S, "fp32", CAUGHT, ("bitmask",)),
        ("mF03", Z, "fp16", MISSED, ()),
        ("mF03", ROW_1, "fp32", MISSED, ()),
        ("mF06", S, "fp32", CAUGHT, ("bitmask",)),
        ("mF06", Z, "fp16", MISSED, ()),
        ("mF04", S, "fp32", MISSED, ()),
        ("mF20", S, "fp32", CAUGHT, ("rstd",)),
        ("mF15", S, "fp32", NOT_EXERCISED, ()),
        ("mA04", S, "fp32", CAUGHT, ("y", "bitmask", "dw", "db")),
        ("mA02", S, "fp32", NOT_EXERCISED, ()),
        ("mA02", Z, "fp16", CAUGHT, ("y",)),
        ("mD01", S, "fp32", MISSED, ()),
        ("mD01", Z, "fp16", MISSED, ()),
        ("mD01", ROW_1, "fp32", CAUGHT, ("dx",)),
        ("mD01", ROW_1, "bf16", CAUGHT, ("dx",)),
        ("mD01", RECIPES["kernelbench"], "fp32", NOT_EXERCISED, ()),
        ("mW05", S, "fp32", CAUGHT, ("dw",)),
        ("mW15", ROW_1, "fp32", MISSED, ()),
    ],
    ids=ids,
    inner=4,
)
def test_cells_of_the_catalogue(mutant: str, r: Recipe, dtype: str, status: str, outputs: tuple[str, ...]) -> None:
    """As faults.md measured them in numpy; forward faults in row 1 without the op whose bits they flip."""
    ops = tuple(op for op in OPS if r is not ROW_1 or op != "layernorm_relu_bitmask")
    judgement = verdict(mutant, r, dtype, ops)
    assert (judgement.status, judgement.outputs) == (status, outputs)


# Several calls.


def test_each_trial_has_inputs_of_its_own() -> None:
    r = RECIPES["kernelbench-by-precision"]
    tasks = tasks_of(r, "rmsnorm", "fp32")
    assert len(tasks) == 5
    assert len({task.x[0, 0].item() for task in tasks}) == 5
    assert [drawing.seed for drawing in r.inputs_of("rmsnorm")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("dtype", "off", "status"), [("fp32", 3e-4, CAUGHT), ("bf16", 3e-3, MISSED)])
def test_a_tolerance_by_the_precision(dtype: str, off: float, status: str) -> None:
    kernel = faulty("rmsnorm", preact=lambda c: CLEAN.preact(c) * (1 + off))
    assert judge_mutant(RECIPES["kernelbench-by-precision"], kernel, CLEAN_OF["rmsnorm"], dtype).status == status


# Judging.


def test_an_exception_is_caught() -> None:
    def forward(*tensors: Tensor | None, **options: float) -> Tensor:
        raise RuntimeError("no kernel image")

    broken = Implementation(name="broken", op="layernorm", forward=forward)
    judgement = judge_mutant(ROW_1, broken, CLEAN_OF["layernorm"], "fp32")
    assert (judgement.status, judgement.output) == (CAUGHT, "")
    assert judgement.reason == "exception: RuntimeError: no kernel image"
    assert judge_kernel(ROW_1, broken, "fp32") == judgement


def test_what_is_missing_or_of_another_dtype_or_shape_is_caught() -> None:
    def without(name: str) -> Any:
        return lambda c, out: {k: v for k, v in out.items() if k != name}

    clean = CLEAN_OF["layernorm"]
    for name in ("dw", "dx", "db"):
        assert judge_mutant(ROW_1, faulty("layernorm", finish=without(name)), clean, "fp16").outputs == (name,)
    no_mean = replace(clean, forward=lambda *a, **o: {"y": clean.forward(*a, **o)["y"]}, backward=None)
    assert judge_mutant(ROW_1, no_mean, clean, "fp32").outputs[:2] == ("mean", "rstd")
    wide = faulty("layernorm", store=lambda c, t, dtype, name: t.float() if name == "y" else t.to(dtype))
    assert judge_mutant(ROW_1, wide, clean, "fp16") == Judgement(CAUGHT, ("y",))
    short = faulty("layernorm", db=lambda c: c.dy.sum(0)[1:])
    assert judge_mutant(ROW_1, short, clean, "fp32") == Judgement(CAUGHT, ("db",))


def test_an_op_or_dtype_that_a_recipe_does_not_test_is_not_exercised() -> None:
    zeros = faulty("rmsnorm", preact=lambda c: torch.zeros_like(c.x))
    assert judge_mutant(S, zeros, CLEAN_OF["rmsnorm"], "fp32").reason == "cudnn-relu-bitmask does not test rmsnorm"
    judgement = judge_mutant(RECIPES["kernelbench"], zeros, CLEAN_OF["rmsnorm"], "bf16")
    assert (judgement.status, judgement.reason) == (NOT_EXERCISED, "kernelbench does not test bf16")


def test_not_exercised_is_bit_for_bit() -> None:
    clean = CLEAN_OF["layernorm"]
    assert judge_mutant(ROW_1, faulty("layernorm"), clean, "fp32").status == NOT_EXERCISED
    one_ulp = faulty("layernorm", rstd=lambda c: torch.nextafter(CLEAN.rstd(c), torch.tensor(9.0)))
    assert judge_mutant(ROW_1, one_ulp, clean, "fp32") == Judgement(MISSED)


def test_a_kernel_that_changes_its_inputs_does_not_change_them_for_the_next() -> None:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, **options: float) -> Any:
        out = CLEAN_OF["layernorm"].forward(x, weight, bias, **options)
        x.zero_()
        return out

    spoiler = replace(CLEAN_OF["layernorm"], name="spoiler", forward=forward)
    assert judge_mutant(ROW_1, spoiler, CLEAN_OF["layernorm"], "fp32").outputs == ("dx", "dw")
    assert judge_kernel(ROW_1, CLEAN_OF["layernorm"], "fp32") == Judgement(MISSED)


@pytest.mark.parametrize("r", [ROW_1, RECIPES["torch-testing"]], ids=ids)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e9])
def test_one_wrong_element_is_seen(r: Recipe, wrong: float) -> None:
    def finish(c: Any, out: dict[str, Tensor]) -> dict[str, Tensor]:
        if "y" in out:
            out["y"][-1, -1] = wrong
        return out

    assert judge_mutant(r, faulty("rmsnorm", finish=finish), CLEAN_OF["rmsnorm"], "fp32") == Judgement(CAUGHT, ("y",))


@pytest.mark.parametrize("swapped", [False, True])
def test_close_is_assert_close(swapped: bool) -> None:
    """On values around the edge, with infinities and NaN, in the order in which the source passes the two."""
    values = [0.0, 1.0, 1.1, 1.11, 1.2, 2.0, float("inf"), -float("inf"), float("nan")]
    for a in some(values):
        for e in some(values):
            actual, expected = torch.tensor([a]), torch.tensor([e])
            pair = (expected, actual) if swapped else (actual, expected)
            try:
                torch.testing.assert_close(*pair, atol=0.01, rtol=0.1)
                close = True
            except AssertionError:
                close = False
            assert _close(actual, expected, FixedTolerance(0.01, 0.1, of_actual=swapped)) == close, (a, e)


def test_bits_are_compared_exactly_and_packed_or_not() -> None:
    bits, other = torch.tensor([[True, False]]), torch.tensor([[True, True]])
    assert _close(bits, bits, EXACT) and not _close(bits, other, EXACT)
    plain = Kernel(packed=False).implementation("plain", "layernorm_relu_bitmask")
    assert judge_kernel(ROW_1, plain, "fp32") == Judgement(MISSED)
    (task,) = tasks_of(ROW_1, "layernorm_relu_bitmask", "fp32")
    packed = _outputs(CLEAN_OF["layernorm_relu_bitmask"], task)["bitmask"]
    assert torch.equal(packed, _outputs(plain, task)["bitmask"])


def test_a_mutant_is_caught_if_it_is_caught_anywhere() -> None:
    judgements = [Judgement(NOT_EXERCISED), Judgement(MISSED), Judgement(CAUGHT, ("y",))]
    assert summed(judgements) == Judgement(CAUGHT, ("y",))
    assert summed(judgements[:2]) == Judgement(MISSED)
    assert summed([]) == Judgement(NOT_EXERCISED)


# Names and one's own tolerances.


def test_recipes_are_found_by_name() -> None:
    assert all(recipe(name) is found for name, found in RECIPES.items())
    for r in RECIPES.values():
        assert len(r.shapes) == len(r.ops)
        assert all(r.inputs_of(op) for op in r.ops)
        assert r.source.startswith("https://") and "\n" not in r.summary


def test_ones_own_tolerances() -> None:
    own = recipe("atol=1e-3, rtol=2e-2")
    assert dict(own.tolerances) == {
        **dict.fromkeys(("y", "mean", "rstd", "dx", "dw", "db"), FixedTolerance(1e-3, 2e-2)),
        "bitmask": EXACT,
    }
    assert own.ops == OPS
    assert own.inputs_of("rmsnorm") == (Drawing(shape=(128, 1024), width=1, seed=1),)
    assert dict(recipe("rtol=0.5").tolerances)["y"] == FixedTolerance(0.0, 0.5)
    assert recipe("atol=0.25") == recipe("atol=0.25") and hash(own)
    assert judge_kernel(recipe("atol=0"), CLEAN_OF["layernorm"], "fp32").status == CAUGHT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipe=: expected one of cudnn-zero-centered, "),
        ("cudnn", "recipe=cudnn: expected one of cudnn-zero-centered, "),
        ("atol=1e-3,eps=1", "recipe=atol=1e-3,eps=1: expected one of cudnn-zero-centered, "),
        ("atol=1,atol=2", "recipe=atol=1,atol=2: expected atol and rtol once each"),
        ("atol", "atol= in recipe=atol: expected a finite number >= 0"),
        ("rtol=-1", "rtol=-1 in recipe=rtol=-1: expected a finite number >= 0"),
        ("atol=nan", "atol=nan in recipe=atol=nan: expected a finite number >= 0"),
        ("atol=1,rtol=inf", "rtol=inf in recipe=atol=1,rtol=inf: expected a finite number >= 0"),
        ("atol=5e-3;", "atol=5e-3; in recipe=atol=5e-3;: expected a finite number >= 0"),
    ],
)
def test_anything_else_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        recipe(text)
    assert str(error.value).startswith(message)


def test_recipes_are_read_without_torch() -> None:
    code = "import sys, normcheck.audit.recipes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
