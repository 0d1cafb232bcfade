"""rmsnorm_llama and rmsnorm_gemma: each by its own contract, whatever a correct kernel leaves unrounded or rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.audit.mutants.casting import CONTROLS, MUTANTS
from normcheck.audit.mutants.correct import KERNELS
from normcheck.audit.mutants.kernel import CLEAN, GEMMA, HALF, LLAMA, OPS, Kernel, rounded
from normcheck.cases.case import Case
from normcheck.cases.data_kinds import DY_KINDS, NOT_FINITE, ROW_KINDS, ROWS
from normcheck.cases.dtypes import DTYPES, FORMATS
from normcheck.cases.inputs import make, torch_dtype
from normcheck.cases.ops import OPS as TABLE
from normcheck.checks.ask import UNPROBED
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.errors import UsageError
from normcheck.gate.options import ReproOptions
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.repro import repro_cases
from normcheck.gate.sweep import run_cell
from normcheck.oracle import casting, forward_bounds, reference, rounding
from normcheck.oracle.forward_bounds import EXACT
from normcheck.oracle.tolerances import Model
from tests.some import some

BY_NAME = TABLE
OP = BY_NAME["rmsnorm_llama"]
REGROUPED = ("reverse_rsqrt_product", "blocked128_gain_fma", "chan_blocks", "chan_strided_fma", "folded")
"""Makes that multiply rstd by the weight first: of rmsnorm_llama that would be another op."""
IN_IO: Mapping[str, Any] = {
    "wdy": lambda c: rounded(c.dy * c.g, c.io),
    "dw": lambda c: c.sum_m(rounded(c.dy * c.cast(c.xh), c.io)),
}


def llama_makes() -> dict[str, Kernel]:
    """Every order of sums and form of rstd, the gradients' products once in fp32 and once in the io dtype."""
    found = {}
    for name, kernel in KERNELS.items():
        form = {"preact": CLEAN.preact} if name in REGROUPED else {}
        found[name] = replace(kernel, **form, **({"dw": CLEAN.dw} if name == "raw_backward" else {}))
        found[f"{name}_in_io"] = replace(kernel, **form, **IN_IO)
    return found


FIELDS: Mapping[str, Mapping[str, Any]] = {
    "fp64_inside": {"model": {"y_given_stats": False}},
    "raw_backward": {"model": {"bwd_form": "raw"}},
    "folded": {"model": {"y_form": "folded"}},
}
MAKES = [
    *CONTROLS,
    *(kernel.implementation(n, "rmsnorm_gemma", **FIELDS.get(n, {})) for n, kernel in KERNELS.items()),
    *(
        k.implementation(n, "rmsnorm_llama", **FIELDS.get(n.removesuffix("_in_io"), {}))
        for n, k in llama_makes().items()
    ),
]


def result_of(implementation: Implementation, **fields: Any) -> Result:
    op = BY_NAME[implementation.op]
    case = Case(**{"op": op.name, "dtype": "fp16", "M": 3, "N": 257, "bias": op.biases[0], **fields})
    return check(implementation, op, case, "cpu", UNPROBED)


# that no correct kernel is accused


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES, ids=lambda i: f"{i.name}-{i.op}")
def test_no_correct_kernel_is_accused(make: Implementation) -> None:
    """44 makes x 8 cases, in one dtype each by turns; CI also runs the audit, which has some of them in every one."""
    extent = replace(PROFILES["quick"].extent, elements=4096)  # some makes take a Python loop over the columns
    profile = replace(PROFILES["quick"], extent=extent, max_examples=8, seconds=600.0, large_share=0.0)
    cell = Cell(BY_NAME[make.op], make, DTYPES[MAKES.index(make) % len(DTYPES)], "tests")
    plan = Plan((cell,), profile, sum(map(ord, make.name)), "cpu", 120.0)
    verdict = run_cell(cell, plan, lambda cases, worst: None, with_coverage=False)
    assert verdict.failure is None, (verdict.failure.case, verdict.failure.message)
    assert verdict.cases == 8


@pytest.mark.slow
@pytest.mark.parametrize("rows", sorted(set(ROW_KINDS) - set(NOT_FINITE)))
@pytest.mark.parametrize("dtype", HALF)
def test_every_kind_of_data(dtype: str, rows: str) -> None:
    """Each pair of rows and dy, in both dtypes: by one of two makes in the one, by the other in the other.

    Weights of the io dtype and of fp32 take turns of two.
    """
    makes, turn = llama_makes(), sorted(ROW_KINDS).index(rows) + HALF.index(dtype)
    names = ("sequential_two_pass_in_io", "strided32_rsqrt_2ulp")
    for seed, dy in enumerate(some(sorted(set(DY_KINDS) - set(NOT_FINITE)))):
        name, weight_dtype = names[(turn + seed) % 2], ("same", "fp32")[(turn + seed) // 2 % 2]
        fields = {"rows": rows, "dy": dy, "seed": seed, "M": 20, "N": 33, "eps": (1e-5, 1e-12, 0.5)[seed % 3]}
        made = makes[name].implementation(name, "rmsnorm_llama")
        result = result_of(made, dtype=dtype, weight_dtype=weight_dtype, **fields)
        assert not result.failed, (str(result.case), [c.output for c in result.wrong])


@pytest.mark.parametrize("rows", [*ROWS, "blend"])
@pytest.mark.parametrize("dtype", HALF)
def test_xhat_from_adversarial_statistics(dtype: str, rows: str) -> None:
    """rstd off by all of its bound, either way, xhat by two roundings: it is never rounded past low or high."""
    case = Case(op=OP.name, dtype=dtype, M=20, N=129, rows=rows, bias=False)
    io, one = FORMATS[dtype], rounding.rules(OP, Model())
    exact = reference.normalise(OP, make(case, OP, "cpu").x.double(), case.eps)
    by = forward_bounds.statistics(one, exact, case.eps)
    found = casting.cast(one, exact, by, io)
    for sign in (-1, 0, 1):
        xh = exact.xh * (1 + sign * by.al) * (1 + sign * one.u)  # .float() is the second rounding
        stored = xh.float().to(torch_dtype(dtype)).double()
        assert ((found.low <= stored) & (stored <= found.high)).all()


# what it is made of


@pytest.mark.parametrize("dtype", HALF)
def test_rounded_is_torchs_rounding(dtype: str) -> None:
    """On numbers of fp32, which torch rounds once: of every size, ties and subnormals among them."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(20000, generator=generator) * 2.0 ** torch.randint(-30, 15, (20000,), generator=generator)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch_dtype(dtype)).float()
    every = every[every.abs() <= FORMATS[dtype].max / 2].sort().values
    values = torch.cat((wide, every, (every[1:] + every[:-1]) / 2))
    got = casting.rounded(values.double(), FORMATS[dtype])
    assert torch.equal(got.float(), values.to(torch_dtype(dtype)).float())


@pytest.mark.parametrize("dtype", HALF)
def test_y_is_the_definition_in_mpmath(dtype: str) -> None:
    case = Case(op=OP.name, dtype=dtype, M=4, N=33, bias=False)
    inputs, io, one = make(case, OP, "cpu"), FORMATS[dtype], rounding.rules(OP, Model())
    rows = reference.normalise(OP, inputs.x.double(), case.eps)
    cast = casting.cast(one, rows, EXACT, io)
    y = casting.output_y(one, cast, reference.scale(OP, inputs.weight), io)[0].y
    weights = [mpmath.mpf(v) for v in inputs.weight.tolist()]
    with mpmath.workdps(60):
        for i, row in enumerate(some(inputs.x.tolist())):
            root = mpmath.sqrt(sum(mpmath.mpf(v) ** 2 for v in row) / case.N + mpmath.mpf(case.eps))
            for j, v in enumerate(some(row)):
                with mpmath.workprec(io.p):  # mpmath rounds to nearest, ties to even
                    xhat = +(mpmath.mpf(v) / root)
                assert float(y[i, j]) == float(xhat * weights[j]), (i, j)


def test_the_count_of_xhat_widens_what_it_may_be() -> None:
    rows = reference.normalise(
        OP, make(Case(op=OP.name, dtype="fp16", M=9, N=400, bias=False), OP, "cpu").x.double(), 0.1
    )
    one = rounding.rules(OP, Model())
    more = replace(one, count={**one.count, "xhat": one.count["xhat"] + 500})
    tight, loose = (casting.cast(rules, rows, EXACT, FORMATS["fp16"]) for rules in (one, more))
    assert torch.equal(tight.value, loose.value)
    assert (loose.doubt >= tight.doubt).all() and loose.doubt.sum() > tight.doubt.sum()


def in_doubt(dtype: str, n: int) -> tuple[float, float]:
    """The share of elements with two right values: given the statistics, and end to end."""
    case = Case(op=OP.name, dtype=dtype, M=64, N=n, bias=False)
    one, io = rounding.rules(OP, Model()), FORMATS[dtype]
    rows = reference.normalise(OP, make(case, OP, "cpu").x.double(), case.eps)
    by = (forward_bounds.saved_statistics(one, rows), forward_bounds.statistics(one, rows, case.eps))
    given, whole = (float((casting.cast(one, rows, b, io).doubt > 0).double().mean()) for b in by)
    return given, whole


def test_few_elements_have_two_right_values() -> None:
    """Given the statistics hardly any, a few of short rows, whose lanes may differ; end to end more of longer sums."""
    assert in_doubt("fp16", 2049)[0] < 0.001 and in_doubt("bf16", 4097)[0] < 0.001
    assert in_doubt("fp16", 257)[0] < 0.005
    assert in_doubt("fp16", 257)[1] < 0.08
    assert in_doubt("fp16", 257)[1] < in_doubt("fp16", 1025)[1]


# that what is not of the contract is found


def wrong(result: Result) -> set[str]:
    return {c.output for c in result.wrong}


@pytest.mark.parametrize("dtype", HALF)
def test_each_casting_is_wrong_as_another(dtype: str) -> None:
    plain, llama = CLEAN.preact, lambda c: c.plus_b(rounded(c.xc * c.r, c.io) * c.g)
    as_llama = Kernel(xhat=lambda c: c.xc * c.r, preact=plain).implementation("plain", "rmsnorm_llama")
    as_plain = Kernel(preact=llama).implementation("llama", "rmsnorm")
    as_gemma = Kernel(preact=llama).implementation("llama", "rmsnorm_gemma")
    for implementation in (as_llama, as_plain, as_gemma):
        assert "y" in wrong(result_of(implementation, dtype=dtype))
        assert not result_of(implementation, dtype="fp32").failed


def test_a_missing_rounding_is_found_without_the_statistics_too() -> None:
    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        xf = x.float()
        return (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    implementation = Implementation(name="plain", op="rmsnorm_llama", forward=forward)
    for dtype, n in (("fp16", 2049), ("bf16", 8191)):
        assert "y" in wrong(result_of(implementation, dtype=dtype, N=n))


def test_dw_of_an_unrounded_xhat_shows_where_few_rows_are_summed() -> None:
    (fault,) = (m for m in MUTANTS if m.id == "llama-dw-unrounded")
    assert wrong(result_of(fault.make("rmsnorm_llama"), M=1, N=1000)) == {"dw"}
    assert wrong(result_of(fault.make("rmsnorm_llama"), M=2000, N=7)) == set()  # roundings of as many products


def test_the_faults_are_of_these_ops_only() -> None:
    assert {op for m in MUTANTS for op in m.ops} == {*LLAMA, *GEMMA}
    assert not {*LLAMA, *GEMMA} & set(OPS)


def test_the_terms_of_y_add_up_to_its_bound() -> None:
    inputs = make(Case(op=OP.name, dtype="fp16", M=9, N=400, bias=False), OP, "cpu")
    one, io = rounding.rules(OP, Model()), FORMATS["fp16"]
    rows = reference.normalise(OP, inputs.x.double(), 1e-5)
    by = forward_bounds.statistics(one, rows, 1e-5)
    bound = casting.output_y(one, casting.cast(one, rows, by, io), reference.scale(OP, inputs.weight), io)[1].y
    assert bound.lower is not None
    parts = sum(bound.terms().values())
    assert torch.allclose(torch.maximum(bound.upper, bound.lower), parts, rtol=1e-12)
    assert (bound.upper != bound.lower).any()  # the other value lies on one side


def test_a_case_line_says_what_the_op_has() -> None:
    complaint = "bias=yes in the case line: rmsnorm_llama has none, expected bias=none"
    with pytest.raises(UsageError, match=complaint):
        repro_cases("torch", ["rmsnorm_llama fp16 M=3 N=9"], ReproOptions(device="cpu", timeout=60.0))
