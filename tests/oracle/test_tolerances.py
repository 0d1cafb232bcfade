"""The bounds: their parts against independent arithmetic; no correct kernel is beyond them, and they are not loose."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import ROWS
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import make, torch_dtype
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.errors import UsageError
from normcheck.oracle import backward_bounds, forward_bounds, reference
from normcheck.oracle.backward_bounds import Block
from normcheck.oracle.forward_bounds import EXACT
from normcheck.oracle.rounding import half_ulp, plus_store, rules, store
from normcheck.oracle.tolerances import Model, declared_model, is_wider
from normcheck.oracle.tolerances import table as read_table

LAYERNORM = OPS["layernorm"]
NORMED = [op for op in OPS.values() if not (op.modulated or op.grouped or op.rotary)]
"""Ops with a weight of their own, for each column; others: test_modulated.py and test_grouped.py."""
FP16, FP32 = FORMATS["fp16"], FORMATS["fp32"]
TOML = tomllib.loads(files("normcheck.oracle").joinpath("tolerances.toml").read_text(encoding="utf-8"))


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# half an ulp, and the store


@pytest.mark.parametrize(("fmt", "kind"), [("fp16", np.float16), ("fp32", np.float32)])
@given(data=st.data())
def test_half_ulp_is_half_of_numpys_spacing(fmt: str, kind: Any, data: st.DataObject) -> None:
    width = 16 if fmt == "fp16" else 32
    value = data.draw(st.floats(0, FORMATS[fmt].max, exclude_max=True, width=width))  # numpy knows no spacing at max
    assert float(half_ulp(t(value), FORMATS[fmt])) == float(np.spacing(kind(value)).astype(np.float64)) / 2


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_half_ulp_at_powers_of_two(fmt: Any) -> None:
    for exponent in range(max(fmt.emin, -900), min(int(math.log2(fmt.max)), 900), 7):
        power = 2.0**exponent
        assert float(half_ulp(t(power), fmt)) == power * fmt.u
        assert float(half_ulp(t(math.nextafter(power, 0)), fmt)) == max(power / 2, 2.0**fmt.emin) * fmt.u
    if fmt.name != "fp64":
        smallest = 2.0 ** (fmt.emin - fmt.p)
        assert half_ulp(t(0.0, 5e-324, 2.0**fmt.emin / 3), fmt).tolist() == [smallest] * 3


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32"])
def test_formats_are_torchs(fmt: str) -> None:
    info, known = torch.finfo(torch_dtype(fmt)), FORMATS[fmt]
    assert (known.max, known.u, 2.0**known.emin) == (info.max, info.eps / 2, info.tiny)


def test_the_store_is_the_worst_rounding_there_is() -> None:
    """Round-to-nearest reaches half an ulp exactly, at a tie: the term cannot be smaller."""
    tie = 1 + 2.0**-11
    error = abs(float(torch.tensor(tie, dtype=torch.float64).half()) - tie)
    assert error == float(half_ulp(t(tie), FP16))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("declared", [{}, {"ftz": False}])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_plus_store_adds_the_store_to_the_last_bit(fmt: str, declared: dict[str, Any], factor: float) -> None:
    """Zero, subnormals of every format, powers of two and their neighbours, infinity and NaN."""
    one = rules(LAYERNORM, Model(**declared))
    one = replace(one, store={**one.store, "y": factor})
    powers = 2.0 ** torch.arange(-180, 130, dtype=torch.float64)
    sizes = torch.cat([powers, powers * 1.5, torch.nextafter(powers, powers * 0), torch.tensor([0.0, 3e38, torch.inf])])
    size = torch.cat([sizes, torch.tensor([torch.nan], dtype=torch.float64)]).reshape(-1, 1)
    for e in (0.0, 2.0**-133, 1e-6, 1.0):
        error = torch.full_like(size, e)
        added = plus_store(one, error, size, FORMATS[fmt], "y")
        expected = error + store(one, size + error, FORMATS[fmt], "y")
        assert torch.equal(added.view(torch.int64), expected.view(torch.int64))
        assert bool((error == e).all())


def test_store() -> None:
    one = rules(LAYERNORM, Model())
    assert store(one, t(1.0), FP32, "y") == 0.0  # counted with the arithmetic already
    assert float(store(one, t(1.0), FP16, "y")) == 2.0**-11
    assert float(store(one, t(2.0**-20), FP16, "y")) == 2.0**-25  # fp16 subnormals are stored, not flushed
    flushed, kept = (
        float(store(rules(LAYERNORM, Model(ftz=f)), t(2.0**-127), FORMATS["bf16"], "y")) for f in (True, False)
    )
    assert flushed - kept == 2.0**-126
    doubled = replace(one, store={**one.store, "y": 2})
    assert float(store(doubled, t(1.0), FP16, "y")) == 2.0**-10


@pytest.mark.parametrize("weight", [0.95 * 2.0**-126, 0.0])
@pytest.mark.parametrize("flushes", [True, False])
def test_a_subnormal_bias_may_be_read_as_zero(weight: float, flushes: bool) -> None:
    """Where a kernel flushes, the product and the bias are both 0 to it; elsewhere neither is."""
    rmsnorm, bias = OPS["rmsnorm"], t(0.95 * 2.0**-126)
    rows = reference.normalise(rmsnorm, t(1.0).reshape(1, 1), 0.0)
    scale = reference.scale(rmsnorm, torch.tensor([weight]))
    forward = reference.forward(rmsnorm, rows, scale.g, bias, {})
    model = rules(rmsnorm, Model(ftz=flushes))
    bound = forward_bounds.output_y(model, rows, forward, scale, bias, EXACT, FP32)
    assert bool((forward.y.abs() <= bound.y.upper).all()) == flushes  # the error of 0
    usual = forward_bounds.output_y(model, rows, forward, scale, bias * 2, EXACT, FP32)
    assert float(usual.before_store) <= (2.0**-126 * (1 + 1e-6) if weight else 0)  # it is not read as 0


# the table and what an implementation declares


def test_every_number_of_the_table_is_read() -> None:
    table = read_table()
    model = {key: value for key, value in TOML["model"].items() if key not in ("autograd_cpu", "grouped")}
    assert {key: getattr(table.model, key) for key in model} == model
    assert dict(table.grouped) == TOML["model"]["grouped"]
    assert dict(table.autograd_cpu) == TOML["model"]["autograd_cpu"]
    assert dict(table.count) == TOML["count"]
    assert dict(table.store) == TOML["store"]
    assert (table.safety, table.max_uncheckable) == (TOML["policy"]["safety"], TOML["policy"]["max_uncheckable"])
    assert TOML["schema"] == 1
    assert set(TOML) == {"schema", "model", "count", "store", "policy"}  # nothing that changing would not change
    assert set(TOML["policy"]) == {"safety", "max_uncheckable"}


def bounds(
    op: Op, model: Model, dtype: str = "fp16", table: Mapping[str, Any] | None = None, **fields: Any
) -> dict[str, Tensor]:
    """Every upper bound of a case, by output; ``table`` replaces numbers of the rules."""
    case = {"M": 9, "N": 40, "rows": "shifted", "seed": 2, **fields}
    options = (("lower_clip", -1.0), ("upper_clip", 1.0)) if op.clamped else ()
    inputs = make(Case(op=op.name, dtype=dtype, options=options, **case), op, "cpu")
    one = replace(rules(op, model), **(table or {}))
    eps = fields.get("eps", 1e-5)
    rows = reference.normalise(op, inputs.x.double(), eps)
    scale, bias = reference.scale(op, inputs.weight), inputs.bias.double()
    fwd = reference.forward(op, rows, scale.g, bias, dict(options))
    dy, fmt = inputs.dy.double(), FORMATS[dtype]
    bwd = reference.backward(op, rows, scale.g, dy)
    statistics = forward_bounds.statistics(one, rows, eps)
    found = {"rstd": statistics.rstd.upper, "rstd_lo": statistics.rstd.lower}
    if statistics.mean is not None:
        found["mean"] = statistics.mean.upper
    given = {"": statistics, "_given": EXACT}
    found["y"] = forward_bounds.output_y(one, rows, fwd, scale, bias.abs(), statistics, fmt).y.upper
    saved = forward_bounds.saved_statistics(one, rows)
    found["y_given"] = forward_bounds.output_y(one, rows, fwd, scale, bias.abs(), saved, fmt).y.upper
    for suffix, by in given.items():
        dx, sums = backward_bounds.output_dx(one, Block(rows, bwd, dy, by), fmt)
        found["dx" + suffix] = dx.upper
        found["dw" + suffix] = backward_bounds.output_dw(one, case["M"], bwd.dw, sums, None, fmt).upper
        found["db" + suffix] = backward_bounds.output_db(one, case["M"], bwd.db, sums, None, fmt).upper
    return found


def wider(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The outputs whose bound grew; none may have shrunk."""
    for name in before:
        assert (after[name] >= before[name]).all(), name
    return {name for name in before if (after[name] > before[name]).any()}


END_TO_END = {"rstd", "rstd_lo", "y", "dx", "dw"}
OF_GATES = {"exp", "exp_argument", "sigmoid", "sigmoid_absolute", "activation", "slope", "gated", "dgate"}
OF_LENGTHS = {"y_l2norm", "eps"}
ELSEWHERE = {"xhat", "dresidual", "scale", "code", "factor", "xhat_centered", "rotation"} | OF_GATES | OF_LENGTHS
"""Counts that test_casting, test_residual, test_quantised, test_gated, test_l2norm, test_modulated and test_rotary are
about."""


@pytest.mark.parametrize("name", sorted(set(TOML["count"]) - ELSEWHERE))
def test_every_count_widens_what_it_is_about(name: str) -> None:
    op = OPS[{"rms": "rmsnorm", "y_zero_centered": "layernorm_zero_centered"}.get(name, "layernorm")]
    count = {**TOML["count"], name: TOML["count"][name] + 50}
    if name.startswith("y"):
        table: dict[str, Any] = {"k_y": TOML["count"][name] + 50}
        assert rules(op, Model(), weight=name != "y_without_weight").k_y == TOML["count"][name]
    else:
        table = {"count": count}
    grown = wider(bounds(op, Model(), "fp32"), bounds(op, Model(), "fp32", table))
    assert (
        grown
        == {
            "mean": END_TO_END | {"mean"},
            "var": END_TO_END,
            "rms": END_TO_END,
            "y": {"y", "y_given"},
            "y_zero_centered": {"y", "y_given"},
            "y_without_weight": {"y", "y_given"},
            "dx_elementwise": {"dx", "dx_given"},
            "c1": {"dx", "dx_given"},
            "c2": {"dx", "dx_given"},
            "dw": {"dw", "dw_given"},
            "db": {"db", "db_given"},
            "stats_saved": {"y_given"},
            "lanes": {"y_given"},
        }[name]
    )


def rstds_of_lanes(x: Tensor, eps: float) -> Tensor:
    """rstd (m, N) that each of N lanes has of a row of x, fp32, as compilers make it.

    The first sum of two squares is an FMA of a lane's own x, to which the other's rounded square is added. The
    instruction for 1 / sqrt is an ulp off, here up or down by the last bit of its argument.
    """
    lanes, own = torch.arange(x.shape[1]), x.double()
    other = (x * x)[:, lanes ^ (x.shape[1] // 2)].double()
    sums, step = own.mul(own).add(other).float(), x.shape[1] // 4
    while step:
        sums, step = sums + sums[:, lanes ^ step], step // 2
    variance = sums / x.shape[1] + torch.tensor(eps)
    exact, toward = variance.double().rsqrt().float(), torch.where(variance.view(torch.int32) % 2 == 0, 0.0, math.inf)
    return torch.nextafter(exact, toward)


def test_each_lane_may_have_a_sum_of_its_own() -> None:
    """What Triton 3.6 and 3.7 make of a row in one warp on a GPU: y of a lane that does not store its rstd."""
    op, eps = OPS["rmsnorm"], 1e-5
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((50_000, 16), np.float32))  # alike on every machine
    rstds = rstds_of_lanes(x, eps)
    saved = rstds[:, :1].double()
    rows = reference.normalise_with(reference.normalise(op, x.double(), eps), None, saved)
    scale = reference.scale(op, torch.ones(16))
    forward = reference.forward(op, rows, scale.g, torch.zeros(16).double(), {})
    right = {}
    for lanes in (0, TOML["count"]["lanes"]):
        one = rules(op, Model(), weight=False)
        one = replace(one, count={**one.count, "lanes": lanes})
        given = forward_bounds.saved_statistics(one, rows)
        bound = forward_bounds.output_y(one, rows, forward, scale, torch.zeros(16).double(), given, FP32).y.upper
        right[lanes] = bool(((x * rstds).double() - forward.y).abs().le(bound).all())
    assert right == {0: False, 20: True}


@pytest.mark.parametrize("name", list(TOML["store"]))
def test_every_store_widens_its_output(name: str) -> None:
    grown = wider(bounds(LAYERNORM, Model()), bounds(LAYERNORM, Model(), table={"store": {**TOML["store"], name: 3}}))
    assert grown == ({name, f"{name}_given"} if name != "stats" else set())  # statistics are fp32: no store of theirs


@pytest.mark.parametrize(
    ("tight", "loose"),
    [
        (Model(chain=4), Model(chain=8)),
        (Model(chain=8), Model(chain="any")),
        (Model(variance="two_pass"), Model()),
        (Model(), Model(y_form="folded")),
        (Model(), Model(bwd_form="raw")),
        (Model(rsqrt_ulp=0), Model(rsqrt_ulp=3)),
        (Model(ftz=False), Model(ftz=True)),
    ],
    ids=lambda model: str({key: value for key, value in vars(model).items() if value != getattr(Model(), key)}),
)
@pytest.mark.parametrize("op", NORMED, ids=lambda op: op.name)
def test_a_wider_model_never_tightens(op: Op, tight: Model, loose: Model) -> None:
    rows = "shifted" if tight.ftz == loose.ftz else "subnormal"  # flushing to zero is nothing beside a 1
    grown = wider(bounds(op, tight, "fp32", rows=rows), bounds(op, loose, "fp32", rows=rows))
    assert grown or (loose.variance != tight.variance and not op.centered)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_longer_chain_never_tightens(n: int, chain: int) -> None:
    one, longer, any_ = (rules(LAYERNORM, Model(chain=c)) for c in (chain, chain + 1, "any"))
    assert min(n, chain) <= one.chain(n) <= longer.chain(n) <= any_.chain(n) == n
    assert one.chain(n) <= one.chain(n + 1)


def test_gam() -> None:
    one = rules(LAYERNORM, Model())
    assert one.gam(0) == 0
    assert one.gam(1) == pytest.approx(2.0**-24, rel=1e-6)
    assert one.gam(2**23) == math.inf  # nothing is known of a sum of that many roundings
    assert one.gam(2**22) < 1


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ({"chian": 4}, "model='chian' of mine: expected one of accumulate, chain,"),
        ({1: 2}, "model=1 of mine"),
        ({"chain": 0}, "model.chain=0"),
        ({"chain": "all"}, "model.chain='all'"),
        ({"chain": True}, "model.chain=True"),
        ({"chain": 1.5}, "model.chain=1.5"),
        ({"accumulate": "fp64"}, "model.accumulate='fp64'"),
        ({"variance": ["any"]}, "model.variance=['any']"),
        ({"y_form": "Folded"}, "expected one of centered, folded"),
        ({"bwd_form": None}, "expected one of centered, raw"),
        ({"bitmask_compare": ""}, "expected one of either, fp32, rounded"),
        ({"rsqrt_ulp": -1}, "model.rsqrt_ulp=-1"),
        ({"rsqrt_ulp": 2.0}, "model.rsqrt_ulp=2.0"),
        ({"rsqrt_ulp": 10**9}, "an integer from 0 to 16; a root that is off by more is not one in fp32"),
        ({"rsqrt_ulp": 17}, "model.rsqrt_ulp=17"),
        ({"ftz": 1}, "model.ftz=1"),
        ({"y_given_stats": "no"}, "expected true or false"),
        ({"reason": 5}, "model.reason=5"),
    ],
    ids=str,
)
def test_declared_mistakes(declared: dict[Any, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        declared_model(Model(), declared, "mine")
    assert complaint in str(caught.value)
    assert "mine" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_declared_is_laid_over_the_base() -> None:
    declared = {"chain": 128, "y_given_stats": False, "reason": "partial sums per warp"}
    assert declared_model(Model(ftz=False), declared, "mine") == Model(ftz=False, **declared)  # type: ignore[arg-type]


# that a correct kernel stays within them


@pytest.mark.parametrize("op", NORMED, ids=lambda op: op.name)
def test_bounds_are_finite_for_eps_above_zero(op: Op) -> None:
    for rows, dtype, eps in product((*ROWS, "blend"), ("fp16", "fp32"), (1e-12, 1e-5)):
        found = bounds(op, Model(), dtype, rows=rows, eps=eps)
        wrong = {name for name, bound in found.items() if not bound.isfinite().all() or not (bound > 0).all()}
        assert not wrong, rows


@pytest.mark.parametrize("op", NORMED, ids=lambda op: op.name)
def test_y_from_adversarial_statistics(op: Op) -> None:
    """mean off by all of dm, rstd off by all of al, in every combination of signs: y in fp64 stays within E."""
    for rows, dtype in product((*ROWS, "blend"), ("fp16", "fp32")):
        options = (("lower_clip", -1.0), ("upper_clip", 1.0)) if op.clamped else ()
        case = Case(op=op.name, dtype=dtype, M=20, N=33, rows=rows, weights="small", options=options)
        inputs, one = make(case, op, "cpu"), rules(op, Model())
        exact = reference.normalise(op, inputs.x.double(), case.eps)
        scale, bias = reference.scale(op, inputs.weight), inputs.bias.double()
        fwd = reference.forward(op, exact, scale.g, bias, dict(options))
        by = forward_bounds.statistics(one, exact, case.eps)
        before = forward_bounds.output_y(one, exact, fwd, scale, bias.abs(), by, FORMATS[dtype]).before_store
        ratios = []
        for sign_mean in (-1, 0, 1):
            mean = None if exact.mean is None else exact.mean + sign_mean * by.mean.upper
            for sign_rstd in (-1, 0, 1):
                rstd = exact.rstd * (1 + sign_rstd * by.al)
                off = reference.normalise_with(exact, mean, rstd)
                y = reference.forward(op, off, scale.g, bias, dict(options)).y
                ratios.append(float(((y - fwd.y).abs() / (before + 1e-300)).max()))
        assert max(ratios) <= 1, rows
        if rows == "shifted" and not op.clamped:
            assert max(ratios) > 0.25  # nor is it loose: that error is most of the bound


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("rows", [*ROWS, "blend"])
def test_sequential_sums_in_fp32_stay_within_the_statistics_bounds(rows: str, order: str) -> None:
    """The longest chain there is, on constant rows too, where the roundings do not average out."""
    case = Case(op="layernorm", dtype="fp32", M=20, N=257, rows=rows)
    x = make(case, LAYERNORM, "cpu").x
    exact = reference.normalise(LAYERNORM, x.double(), case.eps)
    by = forward_bounds.statistics(rules(LAYERNORM, Model(variance="two_pass")), exact, case.eps)
    columns = range(257) if order == "forwards" else range(256, -1, -1)

    def mean_of(values: Tensor) -> Tensor:
        total = torch.zeros(20)
        for i in columns:
            total = total + values[:, i]
        return (total / 257)[:, None]

    mean = mean_of(x)
    rstd = 1 / (mean_of((x - mean) ** 2) + case.eps).sqrt()
    assert ((mean.double() - exact.mean).abs() <= by.mean.upper).all()
    error = rstd.double() - exact.rstd
    assert ((error <= by.rstd.upper) & (-error <= by.rstd.lower)).all()


# that they are not loose: what a factor on them would let through


def y_from_exact(stored: Tensor, dtype: str, safety: float) -> float:
    """The ratio of a y that is exact up to its store, judged given its own statistics."""
    case = Case(op="layernorm", dtype=dtype, M=8, N=100)
    inputs = make(case, LAYERNORM, "cpu")
    one = replace(rules(LAYERNORM, Model()), safety=safety)
    rows = reference.normalise(LAYERNORM, inputs.x.double(), case.eps)
    scale, bias = reference.scale(LAYERNORM, inputs.weight), inputs.bias.double()
    fwd = reference.forward(LAYERNORM, rows, scale.g, bias, {})
    bound = forward_bounds.output_y(one, rows, fwd, scale, bias.abs(), EXACT, FORMATS[dtype]).y.upper
    return float(((stored.double() - fwd.y).abs() / bound).max())


def exact_y(dtype: str) -> Tensor:
    inputs = make(Case(op="layernorm", dtype=dtype, M=8, N=100), LAYERNORM, "cpu")
    rows = reference.normalise(LAYERNORM, inputs.x.double(), 1e-5)
    scale = reference.scale(LAYERNORM, inputs.weight)
    return reference.forward(LAYERNORM, rows, scale.g, inputs.bias.double(), {}).y


def truncated(y: Tensor, dtype: str) -> Tensor:
    """Rounded towards zero."""
    nearest = y.to(torch_dtype(dtype))
    below = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.double().abs() > y.abs(), below, nearest)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_safety_of_two_would_lose_truncation(dtype: str) -> None:
    y = exact_y(dtype)
    assert 0.9 < y_from_exact(y.to(torch_dtype(dtype)), dtype, 1.0) <= 1
    assert 1.9 < y_from_exact(truncated(y, dtype), dtype, 1.0) <= 2
    assert y_from_exact(truncated(y, dtype), dtype, 2.0) <= 1


def test_a_safety_above_1_13_would_lose_double_rounding() -> None:
    """fp16 by way of fp32 is harmless; bf16 by way of fp16 costs an eighth of a half-ulp more."""
    y = exact_y("bf16")
    ratio = y_from_exact(y.half().bfloat16(), "bf16", 1.0)
    assert 1 < ratio < 1.13
    assert y_from_exact(y.half().bfloat16(), "bf16", 1.13) <= 1


def test_given_the_statistics_the_bound_has_no_n_in_it() -> None:
    narrow, wide = (bounds(LAYERNORM, Model(), rows="normal", N=n, M=4)["y_given"] for n in (64, 16384))
    assert narrow.max() == wide.max() or wide.max() / narrow.max() < 2.01  # one binade: a larger y
    at_one = bounds(LAYERNORM, Model(), "fp16", rows="normal", N=16384, M=1)
    assert (at_one["y"] / at_one["y_given"]).max() > 2  # end to end it grows with N


def _newton(q: Tensor, start: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        start = start * (1.5 - 0.5 * q * start * start)
    return start


def test_the_limit_of_rsqrt_ulp_admits_every_root_in_fp32_and_no_estimate() -> None:
    """Ulps as the table counts them, 2^-23 of the root; every 97th of the fp32 numbers from 1 to 4."""
    q = (torch.arange(0, 1 << 24, 97) + (127 << 23)).int().view(torch.float32)
    exact = q.double().rsqrt()
    magic = (0x5F3759DF - (q.view(torch.int32) >> 1)).view(torch.float32)
    eight_bits = (exact.float().view(torch.int32) & ~((1 << 15) - 1)).view(torch.float32)
    up, zero = torch.full_like(q, math.inf), torch.zeros_like(q)
    root_down = torch.nextafter(q.sqrt(), zero)
    roots = {
        "1/sqrt": 1 / q.sqrt(),
        "two floats above": torch.nextafter(torch.nextafter(exact.float(), up), up),
        "a root off by 1, a division off by 2": torch.nextafter(torch.nextafter(1 / root_down, up), up),
        "a root in fp16, one step": _newton(q, exact.half().float(), 1),
        "bit trick, three steps": _newton(q, magic, 3),
        "8 bits, two steps": _newton(q, eight_bits, 2),
    }
    estimates = {
        "bit trick, two steps": _newton(q, magic, 2),
        "8 bits, one step": _newton(q, eight_bits, 1),
        "a root in fp16": exact.half().float(),
        "a root in bf16": exact.bfloat16().float(),
    }
    ulps = {name: float((r.double() / exact - 1).abs().max() * 2**23) for name, r in (roots | estimates).items()}
    declared_model(Model(), {"rsqrt_ulp": 16}, "mine")
    assert max(ulps[name] for name in roots) < 16 / 3
    assert min(ulps[name] for name in estimates) > 2 * 16


@pytest.mark.parametrize(
    ("declared", "wider"),
    [
        ({"rsqrt_ulp": 4}, True),
        ({"y_form": "folded"}, True),
        ({"bwd_form": "raw"}, True),
        ({"y_given_stats": False}, True),
        ({"rsqrt_ulp": 2, "reason": "CUDA's rsqrtf"}, False),
        ({"chain": 2**34}, False),
        ({"variance": "two_pass", "ftz": False, "special": "exact"}, False),
        ({"bitmask_compare": "rounded"}, False),
        ({"chain": 64, "y_form": "folded"}, True),
    ],
    ids=str,
)
def test_what_widens_a_bound(declared: dict[str, Any], wider: bool) -> None:
    assert is_wider(declared_model(read_table().model, declared, "mine"), read_table().model) == wider


def test_raw_sums_are_no_widening_where_they_are_the_default() -> None:
    raw = declared_model(Model(), {"bwd_form": "raw"}, "mine")
    assert not is_wider(raw, raw)
