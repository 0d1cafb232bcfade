"""Exact vectors: hard cases of every op, computed by mpmath at 50 digits from the definitions, as hex floats.

``python tests/oracle/make_exact.py`` writes golden/exact/*.json again; the same bytes every time. Nothing of
normcheck's reference is used: the gradients come from the Jacobian of a row, element by element, not from sums that
are shared.

    z_j = g_j * xc_j * r + b_j,    dz_j/dx_i = g_j * r * (d_ij - 1/N - xc_i * xc_j * r^2 / N)    (rmsnorm: no 1/N)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath

from normcheck.golden.sealed_json import sealed

FOLDER = Path(__file__).parents[2] / "golden" / "exact"
SCHEMA = "normcheck-exact/1"
DIGITS = 50
OPS = ("layernorm", "layernorm_zero_centered", "layernorm_relu_bitmask", "rmsnorm", "rmsnorm_gemma")
CLIPS = {"lower_clip": -0.75, "upper_clip": 1.25}

Rows = list[list[float]]
Number = mpmath.mpf


@dataclass(frozen=True)
class Hard:
    """Inputs of one case. ``x`` and ``dy`` are functions of the row, the column and a noise in [-2, 2).

    Without a ``bias`` that is None, and there is no db.
    """

    name: str
    M: int
    N: int
    eps: float
    x: Callable[[int, int, float], float]
    dy: Callable[[int, int, float], float] = lambda i, j, n: n + 0.5
    bias: bool = True


HARD = (
    Hard("normal", 3, 5, 1e-5, lambda i, j, n: n),
    Hard("one_column", 2, 1, 1e-5, lambda i, j, n: n),
    Hard("two_columns", 2, 2, 1e-3, lambda i, j, n: n),
    Hard("zero_rows", 2, 4, 1e-5, lambda i, j, n: 0.0),
    Hard("constant_rows", 2, 6, 1e-12, lambda i, j, n: 1234.1 * (i + 1)),
    Hard("nearly_constant", 2, 6, 1e-12, lambda i, j, n: 3.5 + 2.0**-20 * (j == 1 + i)),
    Hard("offset", 2, 6, 1e-3, lambda i, j, n: 4096.0 + n),
    Hard("far_offset", 2, 7, 1e-5, lambda i, j, n: 2.0**23 + j % 3),
    Hard("cancellation", 2, 6, 1e-5, lambda i, j, n: (1e7, -1e7, 1.0, 1e-3, -3e6, 3e6)[(i + j) % 6]),
    Hard("tiny_variance", 2, 6, 1e-1, lambda i, j, n: n * 2.0**-12),
    Hard("variance_near_eps", 2, 5, 1e-8, lambda i, j, n: n * 1e-4),
    Hard("subnormal", 2, 4, 1e-5, lambda i, j, n: n * 2.0**-130),
    Hard("no_eps", 2, 5, 0.0, lambda i, j, n: n * 2.0**-60),
    Hard("huge", 2, 5, 1e-5, lambda i, j, n: n * 2.0**60),
    Hard("outlier", 2, 7, 1e-5, lambda i, j, n: 40000.0 if j == 6 - i else n),
    Hard("mixed_scales", 2, 6, 1e-6, lambda i, j, n: n * 2.0 ** (6 * j - 22)),
    Hard("dy_cancels", 2, 6, 1e-5, lambda i, j, n: n, lambda i, j, n: 2.0**20 * (-1) ** (i + j) + n),
    Hard("dy_zero", 2, 3, 1e-5, lambda i, j, n: n, lambda i, j, n: 0.0),
    Hard("tall", 9, 3, 1e-5, lambda i, j, n: n + i),
    Hard("no_bias", 3, 5, 1e-5, lambda i, j, n: n, bias=False),
    Hard("no_bias_offset", 2, 6, 1e-3, lambda i, j, n: 4096.0 + n, bias=False),
    Hard(
        "no_bias_dy_cancels", 2, 6, 1e-5, lambda i, j, n: n, lambda i, j, n: 2.0**20 * (-1) ** (i + j) + n, bias=False
    ),
)


def fp32(value: float) -> float:
    """The nearest fp32 number: what a kernel could be given."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def noise(position: int, stream: int) -> float:
    """A multiple of 2^-22 in [-2, 2), all 24 bits of it, from a hash of integers (Knuth's multiplicative one)."""
    return (((position * 4 + stream + 1) * 2654435761 % 2**32) >> 8) / 2**22 - 2


def inputs(hard: Hard, op: str) -> tuple[Rows, list[float], list[float] | None, Rows]:
    """x, weight, bias, dy as fp32 numbers. Column 2 of the clamped op has weight 0 and a limit as its bias: a tie."""
    place = [(i, [i * hard.N + j for j in range(hard.N)]) for i in range(hard.M)]
    x = [[fp32(hard.x(i, j, noise(at, 0))) for j, at in enumerate(row)] for i, row in place]
    dy = [[fp32(hard.dy(i, j, noise(at, 1))) for j, at in enumerate(row)] for i, row in place]
    weight = [fp32(noise(j, 2)) for j in range(hard.N)]
    if not hard.bias:
        return x, weight, None, dy
    bias = [fp32(noise(j, 3)) for j in range(hard.N)]
    if op == "layernorm_relu_bitmask" and hard.N > 2:
        weight[2], bias[2] = 0.0, CLIPS["upper_clip"]
    return x, weight, bias, dy


def rounded(value: Number) -> str:
    """The nearest fp64 number, ties to even, as a hex float: the division of two integers rounds correctly."""
    sign, mantissa, exponent, _ = value._mpf_
    exact = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    return float(-exact if sign else exact).hex()


def outputs(op: str, hard: Hard) -> dict[str, Any]:
    """Every output in exact arithmetic, but for the digits of mpmath's context."""
    x, weight, bias, dy = inputs(hard, op)
    size, centered = hard.N, op.startswith("layernorm")
    g = [mpmath.mpf(w) + (op in ("layernorm_zero_centered", "rmsnorm_gemma")) for w in weight]
    found: dict[str, Any] = {name: [] for name in ("y", "rstd", "dx", *(["mean"] if centered else []))}
    if op == "layernorm_relu_bitmask":
        found["bits"] = []
    dw, db = [mpmath.mpf(0)] * size, [mpmath.mpf(0)] * size
    for row, cotangents in zip(x, dy, strict=True):
        values = [mpmath.mpf(v) for v in row]
        mean = sum(values) / size if centered else mpmath.mpf(0)
        xc = [v - mean for v in values]
        r = 1 / mpmath.sqrt(sum(c * c for c in xc) / size + mpmath.mpf(hard.eps))
        z = [c * r * gain for c, gain in zip(xc, g, strict=True)]
        z = z if bias is None else [p + mpmath.mpf(b) for p, b in zip(z, bias, strict=True)]
        passed = [True] * size
        if "bits" in found:
            lower, upper = CLIPS.values()
            passed = [lower < v < upper for v in z]
            found["bits"].append(passed)
            z = [min(max(v, mpmath.mpf(lower)), mpmath.mpf(upper)) for v in z]
        d = [mpmath.mpf(v) * bit for v, bit in zip(cotangents, passed, strict=True)]
        dx = []
        for i in range(size):
            terms = [
                d[j] * g[j] * ((i == j) - mpmath.mpf(centered) / size - xc[i] * xc[j] * r * r / size)
                for j in range(size)
            ]
            dx.append(r * sum(terms))
        dw = [total + v * c * r for total, v, c in zip(dw, d, xc, strict=True)]
        db = [total + v for total, v in zip(db, d, strict=True)]
        found["y"].append([rounded(v) for v in z])
        found["dx"].append([rounded(v) for v in dx])
        found["rstd"].append(rounded(r))
        if centered:
            found["mean"].append(rounded(mean))
    sums = {"dw": dw} if bias is None else {"dw": dw, "db": db}
    return {**found, **{name: [rounded(v) for v in total] for name, total in sums.items()}}


def cases(op: str, digits: int) -> Iterator[dict[str, Any]]:
    """Every case of an op, as it is written."""
    for hard in HARD:
        x, weight, bias, dy = inputs(hard, op)
        with mpmath.workdps(digits):
            computed = outputs(op, hard)
        yield {
            "name": hard.name,
            "eps": hard.eps.hex(),
            "x": [[v.hex() for v in row] for row in x],
            "weight": [v.hex() for v in weight],
            **({} if bias is None else {"bias": [v.hex() for v in bias]}),
            "dy": [[v.hex() for v in row] for row in dy],
            **computed,
        }


def text_of(op: str, digits: int = DIGITS) -> str:
    """The file of an op: a line for each case, sealed."""
    clips = {name: limit.hex() for name, limit in CLIPS.items()} if op == "layernorm_relu_bitmask" else {}
    data = sealed({"schema": SCHEMA, "op": op, "digits": DIGITS, "options": clips, "cases": list(cases(op, digits))})
    lines = ",\n".join(json.dumps(case) for case in data.pop("cases"))
    rest = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    return f'{{\n{rest},\n"cases": [\n{lines}\n]\n}}\n'


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in OPS:
        (FOLDER / f"{name}.json").write_text(text_of(name), encoding="ascii")
