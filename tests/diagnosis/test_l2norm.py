"""What a norm by length does instead: a planted fault has its name, and one that nothing else explains has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normcheck.audit.catalogue import mutants
from normcheck.audit.explanations import is_right
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.check import Result, check
from normcheck.diagnosis.l2norm import explained, tells
from normcheck.impls.adapt import adapt
from normcheck.impls.discovery import wrapped
from normcheck.impls.implementation import Implementation

OP = OPS["l2norm"]
SIZES = ((20, 40, "blend", 1e-2), (5, 128, "tiny_variance", 0.5), (6, 33, "scaled", 1e-3), (4, 96, "uniform", 0.1))


def results_of(made: Implementation, dtype: str = "fp16") -> list[Result]:
    cases = [
        Case(op=OP.name, dtype=dtype, M=m, N=n, bias=False, weights="none", rows=rows, eps=eps, seed=m)
        for m, n, rows, eps in SIZES
    ]
    return [check(made, OP, case, "cpu", UNPROBED) for case in cases]


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("mL01", "eps_mean"),
        ("mL02", "eps_sum"),
        ("mL04", "eps_max"),
        ("mL05", "length_plus_eps"),
        ("mL06", "length_without_eps"),
        ("mL07", "length_eps_unsquared"),
        ("mL08", "length_eps_1e-06"),
        ("mL09", "length_of_rmsnorm"),
        ("mL12", "length_of_all_rows"),
        ("mL14", "length_in_io"),
        ("mL16", "dx_without_sum"),
        ("mL17", "dx_of_mean"),
        ("mL18", "dx_of_x"),
        ("mL19", "dx_past_floor"),
        ("mL20", "dx_times_length"),
    ],
)
def test_it_is_named(id: str, name: str) -> None:
    failed, *others = sorted(results_of(mutants()[id].make(OP.name)), key=lambda result: not result.failed)
    told = explained(failed, others)
    assert told is not None and told.name == name and is_right(told.name, id)
    assert told.cases == len(SIZES)
    assert tells(failed, name)


@pytest.mark.parametrize("id", ["mL13", "mL15", "mL22"])
def test_what_no_other_thing_explains_has_no_name(id: str) -> None:
    made = results_of(mutants()[id].make(OP.name), "bf16")
    failed, *others = sorted(made, key=lambda result: not result.failed)
    assert failed.failed and explained(failed, others) is None


def behind_the_root(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide / (wide.norm(dim=-1, keepdim=True) + eps)).to(x.dtype)


def in_half(x: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1, eps=eps)


def test_a_function_that_declares_nothing_is_named_too() -> None:
    for function, name in ((behind_the_root, "length_plus_eps"), (in_half, "length_in_io")):
        failed, *others = results_of(wrapped(adapt(function), OP.name, "mine", ""), "bf16")
        told = explained(failed, others)
        assert failed.failed and told is not None and told.name == name, function


def of_the_sum(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def test_what_another_convention_has_is_no_fault_of_the_one_that_another_case_fitted() -> None:
    """A kernel that changes its convention with M: the failed case, judged by the other one, is right by the sum."""
    own = replace(wrapped(adapt(of_the_sum), OP.name, "mine", ""), model={"eps": "max"})
    failed, *others = (replace(result, open=("eps",)) for result in results_of(own, "bf16"))
    assert failed.failed and explained(failed, others) is None
