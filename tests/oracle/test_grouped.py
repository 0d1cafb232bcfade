"""Norms of groups: the reference against the definition in mpmath, blocks, channels-last memory, conventions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.cases.split import CHANNEL_COUNTS, GROUP_COUNTS
from normcheck.oracle import rounding
from normcheck.oracle.activation import SILU, activated
from normcheck.oracle.conventions import candidates, in_words, plainest, with_convention
from normcheck.oracle.grouped import SLOPE
from normcheck.oracle.tolerances import Model, table
from tests.oracle.definitions import Numbers, assert_held_to, dot, exact, held_of, in_blocks, slopes
from tests.some import some

OP = OPS["groupnorm"]


def case_of(**fields: Any) -> Case:
    own = {"op": OP.name, "dtype": "fp32", "M": 2, "N": 12, "seed": 3, "channels": "4", "groups": "2"}
    return Case(**{**own, **fields})


def model_of(**declared: Any) -> Model:
    return replace(table().model, **{"activation": "none", "rounding": "once", **declared})


def definition(case: Case, x: Numbers, weight: Numbers, bias: Numbers, *, silu: bool) -> Numbers:
    """y of a case, in exact numbers: element i is of channel i // L of its sample."""
    y: Numbers = []
    groups, channels, length = case.split
    size = channels // groups * length
    for first in range(0, len(x), size):
        own = x[first : first + size]
        mean = sum(own) / size
        rstd = 1 / mpmath.sqrt(sum((v - mean) ** 2 for v in own) / size + mpmath.mpf(case.eps))
        for i, v in enumerate(own, first):
            channel = i // length % channels
            z = (v - mean) * rstd * weight[channel] + bias[channel]
            y.append(z / (1 + mpmath.exp(-z)) if silu else z)
    return y


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("groups", ["1", "2", "4"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_reference_is_the_definition(activation: str, groups: str, layout: str) -> None:
    """The gradients are central differences of sum(dy * y)."""
    case = case_of(groups=groups, layout=layout, seed=4)  # x and dy lie alike
    held, inputs = held_of(case, model_of(activation=activation)), make(case, OP, "cpu")
    assert inputs.weight is not None and inputs.bias is not None
    assert inputs.x.shape == (2, 4, 3) and inputs.weight.shape == (4,)
    assert (inputs.x.stride(1) == 1) == (layout == "channels_last")
    with mpmath.workdps(65):
        leaves = {"dx": exact(inputs.x), "dw": exact(inputs.weight), "db": exact(inputs.bias)}
        dy, silu = exact(inputs.dy), activation == "silu"

        def y() -> Numbers:
            return definition(case, *leaves.values(), silu=silu)

        assert_held_to(held, {"y": y(), **slopes(leaves, lambda: dot(dy, y()))})


def test_the_statistics_are_those_of_each_group() -> None:
    case = case_of()
    held, inputs = held_of(case, model_of()), make(case, OP, "cpu")
    groups = inputs.x.double().reshape(4, 6)
    assert torch.allclose(held["mean"].expected.flatten(), groups.mean(1), rtol=1e-12)
    var = groups.var(1, correction=0)
    assert torch.allclose(held["rstd"].expected.flatten(), (var + case.eps).rsqrt(), rtol=1e-12)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_samples_in_several_blocks_have_what_one_block_gives(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = case_of(M=5, dtype="fp16"), model_of(activation=activation, rounding="each")
    for name, one, other in some(in_blocks(case, model, 2, monkeypatch)):
        assert torch.allclose(one, other, rtol=1e-12, atol=0), name


def test_the_error_of_silu_is_the_largest_at_any_argument_within_that_of_the_norm() -> None:
    rules = rounding.rules(OP, model_of())
    z = torch.linspace(-30, 30, 4001, dtype=torch.float64)
    for off in (0.0, 1e-6, 0.3):
        by = activated(rules, z, SILU, torch.full_like(z, off))
        for side in (-1.0, 0.0, 1.0):
            near = activated(rules, z + side * off, SILU)
            assert bool((near.off <= by.off * (1 + 1e-12)).all()), off
            assert bool((near.slope_off <= by.slope_off * (1 + 1e-12)).all()), off
            assert bool(((near.value - by.value).abs() <= SLOPE * off + 1e-15).all())
            assert bool(((near.slope - by.slope).abs() <= 0.5 * off + 1e-15).all())
        assert bool((by.slope.abs() < SLOPE).all())


def test_conventions_that_a_case_tells_apart() -> None:
    every = candidates(OP, table().model)
    assert every == (
        (("activation", "none"),),
        (("activation", "silu"), ("rounding", "once")),
        (("activation", "silu"), ("rounding", "each")),
    )
    assert in_words(OP, every[:1]) == ["applies nothing to what it norms"]
    fp32, fp16 = case_of(), case_of(dtype="fp16")
    assert len({plainest(each, fp32) for each in every}) == 2 and len({plainest(each, fp16) for each in every}) == 3
    once, each = (held_of(fp16, with_convention(table().model, one))["y"] for one in every[1:])
    exact_y = once.expected
    assert not torch.equal(exact_y, each.expected)
    assert bool(((exact_y - each.expected).abs() <= 2 * 2.0 ** -FORMATS["fp16"].p * (1 + exact_y.abs())).all())


@pytest.mark.parametrize("columns", [1, 2, 7, 24, 25, 129, 768])
def test_every_word_splits_every_number_of_columns(columns: int) -> None:
    for channels in CHANNEL_COUNTS:
        for groups in GROUP_COUNTS:
            split = case_of(N=columns, channels=channels, groups=groups).split
            assert split.channels * split.length == columns and split.channels % split.groups == 0
            assert split.columns > 1 or columns == 1
