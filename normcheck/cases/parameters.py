"""The parameters that a case has, and its place: what a compilation or a plan may depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from normcheck.cases.case import NO_WEIGHT, Case


class Parameters(NamedTuple):
    """Whether a case has a weight, whether it has a bias, the dtype of the two, and that of a residual."""

    weight: bool
    bias: bool
    weight_dtype: str
    residual_dtype: str = "same"


PARAMETERS = Parameters._fields
"""The axes of ``Parameters``, in its order."""

Place = tuple[int, int, bool, bool, str, str, str]
"""M, N, the Parameters and the layout of a case: what a compilation or a plan may depend on."""


def place_of(case: Case) -> Place:
    """The place of a case."""
    return case.M, case.N, *parameters_of(case), case.layout


def parameters_of(case: Case) -> Parameters:
    """The parameters of a case."""
    return Parameters(case.weight, case.bias, case.weight_dtype, case.residual_dtype)


def with_parameters(case: Case, parameters: Parameters) -> Case:
    """``case`` with other parameters; normal weights if it had none, and no dtype of them without them."""
    weight, bias, weight_dtype, residual_dtype = parameters
    if not weight:
        weights, weight_dtype = NO_WEIGHT, "same"
    else:
        weights = case.weights if case.weight else "normal"
    return replace(case, weights=weights, bias=bias, weight_dtype=weight_dtype, residual_dtype=residual_dtype)
