"""The fp64 reference against the textbook definitions in mpmath at 60 digits, for every op that there is.

Nothing of the reference's algebra is used here: the gradients are central differences of sum(dy * y).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mpmath
import pytest
import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import Inputs, torch_dtype
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.oracle import backward_bounds, forward_bounds, reference, rounding
from normcheck.oracle.backward_bounds import Block
from normcheck.oracle.tolerances import Model
from tests.case_lines import NORMS
from tests.inner_loop import parametrize

M, N = 2, 6
DIGITS = 65
STEP = "1e-20"  # the error of a central difference is of the order of its square
NEGLIGIBLE = 1e-6  # of the tolerance: what the reference may be off without a say in any verdict
CLIPS = {"lower_clip": -0.75, "upper_clip": 1.25}

Vector = list[mpmath.mpf]


@dataclass(frozen=True)
class Problem:
    """A problem in exact numbers: ``x``, ``dy`` rows of N; what is differentiated is sum(dy * y)."""

    op: str
    x: list[Vector]
    weight: Vector
    bias: Vector
    dy: list[Vector]
    eps: mpmath.mpf


def row_of(p: Problem, x: Vector) -> tuple[mpmath.mpf | None, mpmath.mpf, Vector]:
    """mean, rstd and z of a row, by the definition of the op; that of Llama before its rounding, see test_casting.

    The row of an op that adds a residual is the sum, see test_residual.
    """
    size = len(x)
    if p.op.removeprefix("fused_add_") in ("rmsnorm", "rmsnorm_llama", "rmsnorm_gemma"):
        scale = [1 + w for w in p.weight] if p.op.endswith("rmsnorm_gemma") else p.weight
        rms = mpmath.sqrt(sum(v * v for v in x) / size + p.eps)
        return None, 1 / rms, [v / rms * g + b for v, g, b in zip(x, scale, p.bias, strict=True)]
    if p.op not in ("layernorm", "layernorm_zero_centered", "layernorm_relu_bitmask", "fused_add_layernorm"):
        raise AssertionError(f"op={p.op}: write its definition here")
    scale = [1 + w for w in p.weight] if p.op == "layernorm_zero_centered" else p.weight
    mean = sum(x) / size
    deviation = mpmath.sqrt(sum((v - mean) ** 2 for v in x) / size + p.eps)
    return mean, 1 / deviation, [(v - mean) / deviation * g + b for v, g, b in zip(x, scale, p.bias, strict=True)]


def y_of(p: Problem, z: Vector) -> Vector:
    if p.op != "layernorm_relu_bitmask":
        return z
    return [min(max(v, mpmath.mpf(CLIPS["lower_clip"])), mpmath.mpf(CLIPS["upper_clip"])) for v in z]


def objective(p: Problem) -> mpmath.mpf:
    return sum(
        d * v for x, dy in zip(p.x, p.dy, strict=True) for d, v in zip(dy, y_of(p, row_of(p, x)[2]), strict=True)
    )


def slope(p: Problem, variable: Vector, at: int) -> mpmath.mpf:
    """d objective / d variable[at]; ``variable`` is one of ``p``'s own lists."""
    step, value = mpmath.mpf(STEP), variable[at]
    ends = []
    for moved in (value + step, value - step):
        variable[at] = moved
        ends.append(objective(p))
    variable[at] = value
    return (ends[0] - ends[1]) / (2 * step)


def numbers(values: Tensor) -> Vector:
    return [mpmath.mpf(v) for v in values.double().tolist()]


ROWS: dict[str, Callable[[Tensor], tuple[Tensor, float]]] = {
    "normal": lambda n: (n, 1e-5),
    "offset": lambda n: (n + 4096, 1e-3),
    "nearly_constant": lambda n: (torch.where(torch.arange(N) == 1, 3.5 + 2.0**-7, 3.5).expand(M, N), 1e-12),
    "constant": lambda n: (torch.full((M, N), 1234.0), 1e-12),
    "large": lambda n: (n * 10000, 1e-5),
    "tiny": lambda n: (n * 2.0**-10, 1e-1),
}


def tensors(rows: str, dtype: str) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(5)
    n, dy = torch.randn(2, M, N, generator=generator)
    weight, bias = torch.randn(2, N, generator=generator)
    x, eps = ROWS[rows](n)
    io = torch_dtype(dtype)
    return x.to(io), weight.to(io), bias.to(io), (dy + 0.5).to(io), eps


def ratio(actual: Tensor, exact: list[Vector], bound: Tensor | float) -> float:
    """The largest |actual - exact| / bound, the difference taken exactly."""
    limits = torch.as_tensor(bound).double().expand(actual.shape).flatten().tolist()
    flat = [v for row in exact for v in row]
    worst = mpmath.mpf(0)
    for got, want, limit in zip(actual.flatten().tolist(), flat, limits, strict=True):
        error = abs(mpmath.mpf(got) - want)
        if error:
            worst = max(worst, error / mpmath.mpf(limit))
    return float(worst)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@parametrize("rows", ROWS, inner=2)
@pytest.mark.parametrize("name", NORMS)
def test_reference_is_exact(name: str, rows: str, dtype: str) -> None:
    op, fmt = OPS[name], FORMATS[dtype]
    x, weight, bias, dy, eps = tensors(rows, dtype)
    rules = rounding.rules(op, Model())
    got = reference.normalise(op, x.double(), eps)
    scale = reference.scale(op, weight)
    fwd = reference.forward(op, got, scale.g, bias.double(), CLIPS)
    passed = reference.bits(fwd.z, CLIPS) if op.clamped else torch.ones(M, N, dtype=torch.bool)
    bwd = reference.backward(op, got, scale.g, dy.double() * passed)
    statistics = forward_bounds.statistics(rules, got, eps)
    y_bound = forward_bounds.output_y(rules, got, fwd, scale, bias.double().abs(), statistics, fmt)

    with mpmath.workdps(DIGITS):
        exact = Problem(
            name, [numbers(r) for r in x], numbers(weight), numbers(bias), [numbers(r) for r in dy], mpmath.mpf(eps)
        )
        mean, rstd, z = zip(*(row_of(exact, row) for row in exact.x), strict=True)
        if op.clamped:  # differences see no kink, and the bits are those of the exact z
            limits = [mpmath.mpf(v) for v in CLIPS.values()]
            assert min(abs(v - c) for row in z for v in row for c in limits) > 1e-6
            assert passed.tolist() == [[limits[0] < v < limits[1] for v in row] for row in z]
        dx = [[slope(exact, row, i) for i in range(N)] for row in exact.x]
        dw = [slope(exact, exact.weight, i) for i in range(N)]
        db = [slope(exact, exact.bias, i) for i in range(N)]
        ratios = {
            "rstd": ratio(got.rstd, [[v] for v in rstd], statistics.rstd.lower),
            "z": ratio(fwd.z, list(z), y_bound.before_store + 1e-300),
            "y": ratio(fwd.y, [y_of(exact, row) for row in z], y_bound.y.upper),
        }
        if op.centered:
            assert got.mean is not None
            ratios["mean"] = ratio(got.mean, [[v] for v in mean], statistics.mean.upper)
        bound, sums = backward_bounds.output_dx(rules, Block(got, bwd, dy.double() * passed, statistics), fmt)
        ratios["dx"] = ratio(bwd.dx, dx, bound.upper)
        ratios["dw"] = ratio(bwd.dw, [dw], backward_bounds.output_dw(rules, M, bwd.dw, sums, None, fmt).upper)
        ratios["db"] = ratio(bwd.db, [db], backward_bounds.output_db(rules, M, bwd.db, sums, None, fmt).upper)
    assert {key: value for key, value in ratios.items() if not value < NEGLIGIBLE} == {}


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NORMS)
def test_reference_without_a_weight_is_exact(name: str, rows: str, dtype: str) -> None:
    """Gamma is 1, as with a weight of 0 in a zero-centred op and of 1 in the others."""
    op, fmt = OPS[name], FORMATS[dtype]
    x, _, _, dy, eps = tensors(rows, dtype)
    rules = rounding.rules(op, Model(), weight=False)
    got, scale = reference.normalise(op, x.double(), eps), reference.scale_of(op, Inputs(x, None, None, dy))
    fwd = reference.forward(op, got, scale.g, None, CLIPS)
    passed = reference.bits(fwd.z, CLIPS) if op.clamped else torch.ones(M, N, dtype=torch.bool)
    bwd = reference.backward(op, got, scale.g, dy.double() * passed)
    statistics = forward_bounds.statistics(rules, got, eps)
    y_bound = forward_bounds.output_y(rules, got, fwd, scale, None, statistics, fmt)
    with mpmath.workdps(DIGITS):
        ones, zeros = [mpmath.mpf(1 - op.zero_centered)] * N, [mpmath.mpf(0)] * N
        exact = Problem(name, [numbers(r) for r in x], ones, zeros, [numbers(r) for r in dy], mpmath.mpf(eps))
        z = [row_of(exact, row)[2] for row in exact.x]
        dx = [[slope(exact, row, i) for i in range(N)] for row in exact.x]
        bound = backward_bounds.output_dx(rules, Block(got, bwd, dy.double() * passed, statistics), fmt)[0]
        assert ratio(fwd.z, z, y_bound.before_store + 1e-300) < NEGLIGIBLE
        assert ratio(fwd.y, [y_of(exact, row) for row in z], y_bound.y.upper) < NEGLIGIBLE
        assert ratio(bwd.dx, dx, bound.upper) < NEGLIGIBLE


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_given_statistics_are_taken_as_exact(op: Op) -> None:
    rows = reference.normalise(op, torch.randn(M, N, dtype=torch.float64), 1e-5)
    mean = torch.full((M, 1), 0.25, dtype=torch.float64) if op.centered else None
    given = reference.normalise_with(rows, mean, torch.full((M, 1), 3.0, dtype=torch.float64))
    assert torch.equal(given.xh, (rows.x - 0.25 * op.centered) * 3)
    assert torch.equal(given.xh_abs, given.xh.abs())
    assert given.var is None


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_scale_is_exact(op: Op) -> None:
    """1 + weight in fp64, and where that is 0."""
    weight = torch.tensor([2.0**-9, -1.0, 0.0], dtype=torch.bfloat16)
    scale = reference.scale(op, weight)
    assert scale.g.tolist() == ([1 + 2.0**-9, 0.0, 1.0] if op.weight_offset else [2.0**-9, -1.0, 0.0])
    assert scale.where is not None
    assert scale.where.tolist() == [float(v != 0) for v in scale.g.tolist()]
    assert reference.scale(op, torch.full((3,), 0.5)).where is None
    x = torch.full((2, 3), torch.nan, dtype=torch.bfloat16)
    without = reference.scale_of(op, Inputs(x, None, None, x))
    assert without.g.tolist() == [1.0, 1.0, 1.0]
    assert without.where is None


def test_bits_are_strict() -> None:
    z = torch.tensor([[-0.75, -0.7, 1.25, 1.2, float("nan")]], dtype=torch.float64)
    assert reference.bits(z, CLIPS).tolist() == [[False, True, False, True, False]]
