"""The table of tolerances, read from tolerances.toml, and the facts of it that an implementation may declare."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from normcheck.errors import UsageError, one_of, shown


@dataclass(frozen=True)
class Model:
    """Facts about a kernel's arithmetic: ``[model]`` of the table, which explains them, or an implementation's own.

    ``reason``: why the implementation declares them, for the readers of a report.
    """

    accumulate: str = "fp32"
    chain: str | int = "any"
    variance: str = "any"
    y_form: str = "centered"
    bwd_form: str = "centered"
    rsqrt_ulp: int = 3
    ftz: bool = True
    y_given_stats: bool = True
    bitmask_compare: str = "either"
    special: str = "row"
    sum: str = "any"
    scale: str = "given"
    scale_floor: float | None = None
    scale_limit: bool = False
    round_before_quant: str = "any"
    scaling: str = "any"
    gate: str = "any"
    activation: str = "any"
    rounding: str = "any"
    pairs: str = "any"
    round_gated: str = "any"
    round_factor: str = "any"
    group: int | str = "any"
    eps: str = "any"
    reason: str = ""


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "accumulate": ("fp32",),
    "variance": ("any", "two_pass"),
    "y_form": ("centered", "folded"),
    "bwd_form": ("centered", "raw"),
    "bitmask_compare": ("either", "fp32", "rounded"),
    "special": ("row", "exact"),
    "sum": ("any", "rounded", "exact", "mixed"),
    "scale": ("given", "token", "block64", "block128", "any"),
    "round_before_quant": ("any", "none", "io", "xhat"),
    "scaling": ("any", "division", "reciprocal"),
    "gate": ("any", "after", "before"),
    "activation": ("any", "silu", "sigmoid", "none"),
    "rounding": ("any", "once", "each", "normed", "rotated"),
    "pairs": ("any", "neox", "interleaved"),
    "round_gated": ("any", "io", "none"),
    "eps": ("any", "sum", "max", "mean"),
    "round_factor": ("any", "none", "io", "apart"),
}

_MOST_RSQRT_ULP = 16
"""Ulps that a declared root may be off: three times the error of the worst root in fp32, so that none is refused.

1/sqrt is off by 1, CUDA's rsqrtf and rsqrt.approx by 2 (2^-22.9, as documented), a root off by 1 with a division off by
2 by 4, one Newton step from a root in fp16 by 5. Roots that are off by more are estimates: 40 for the bit trick with
two steps, 191 for one step from 8 bits, 4,096 for a root in fp16. tests/oracle/test_tolerances.py counts over all fp32
numbers from 1 to 4.
"""


@dataclass(frozen=True)
class Table:
    """The contents of tolerances.toml: the default model, the counts of roundings, the stores, the policy."""

    model: Model
    autograd_cpu: Mapping[str, Any]
    grouped: Mapping[str, Any]
    count: Mapping[str, int]
    store: Mapping[str, float]
    safety: float
    max_uncheckable: float


@cache
def table() -> Table:
    """The package's own table, read once."""
    text = files("normcheck.oracle").joinpath("tolerances.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    model = dict(data["model"])
    autograd_cpu, grouped = model.pop("autograd_cpu"), model.pop("grouped")
    policy = data["policy"]
    return Table(
        declared_model(Model(), model, "tolerances.toml"),
        autograd_cpu,
        grouped,
        data["count"],
        data["store"],
        float(policy["safety"]),
        float(policy["max_uncheckable"]),
    )


def declared_model(base: Model, declared: Mapping[str, Any], who: str) -> Model:
    """``base`` with the values that ``who`` declares. Raises UsageError for a key or a value that no model has."""
    known = {f.name: f.type for f in fields(Model)}
    for key, value in declared.items():
        text = isinstance(value, str)
        if not isinstance(key, str) or key not in known:
            raise UsageError(f"model={shown(key)} of {who}: expected {one_of(known)}")
        if key in _CHOICES and not (text and value in _CHOICES[key]):
            raise UsageError(f"model.{key}={shown(value)} of {who}: expected {one_of(_CHOICES[key])}")
        if key in ("ftz", "y_given_stats", "scale_limit") and not isinstance(value, bool):
            raise UsageError(f"model.{key}={shown(value)} of {who}: expected true or false")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "scale_floor" and not (number and 0 <= value <= 1):
            expected = "a number from 0 to 1, the least scale that is returned"
            raise UsageError(f"model.scale_floor={shown(value)} of {who}: expected {expected}")
        if key == "reason" and not text:
            raise UsageError(f"model.reason={shown(value)} of {who}: expected text, printed with what is declared")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if key == "chain" and not ((text and value == "any") or (whole and 1 <= value <= 2**34)):
            raise UsageError(f"model.chain={shown(value)} of {who}: expected 'any' or an integer from 1 to 2^34")
        if key == "group" and not ((text and value == "any") or (whole and 0 <= value <= 2**34)):
            expected = "0, for the whole row, or the columns of a group, an integer up to 2^34"
            raise UsageError(f"model.group={shown(value)} of {who}: expected {expected}")
        if key == "rsqrt_ulp" and not (whole and 0 <= value <= _MOST_RSQRT_ULP):
            expected = f"an integer from 0 to {_MOST_RSQRT_ULP}; a root that is off by more is not one in fp32"
            raise UsageError(f"model.rsqrt_ulp={shown(value)} of {who}: expected {expected}")
    return replace(base, **declared)


_TIGHTEST_FIRST: Mapping[str, tuple[object, ...]] = {
    "rsqrt_ulp": tuple(range(_MOST_RSQRT_ULP + 1)),
    "ftz": (False, True),
    "y_form": ("centered", "folded"),
    "bwd_form": ("centered", "raw"),
    "y_given_stats": (True, False),
}
"""The keys whose values may widen a bound or leave out a check: key -> values, the tightest first.

Declaring a chain, a two-pass variance or how bits are compared only makes the bounds of the table tighter.
"""


def is_wider(declared: Model, base: Model) -> bool:
    """Whether ``declared`` widens a bound of ``base``, or leaves out a check."""
    own, default = vars(declared), vars(base)
    return any(order.index(own[key]) > order.index(default[key]) for key, order in _TIGHTEST_FIRST.items())
