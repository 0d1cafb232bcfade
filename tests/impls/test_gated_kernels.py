"""Our kernels of gated norms are within their bounds in every layout, in one block or several; functions of users."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import Result, check
from normcheck.errors import UsageError
from normcheck.impls import torch_gated
from normcheck.impls.adapt import adapt, require_named
from normcheck.impls.discovery import wrapped
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import GATES
from normcheck.impls.triton import IMPLEMENTATIONS as TRITON
from normcheck.runner.device import device_for
from tests.inner_loop import parametrize

DEVICE = device_for("auto")
OP = OPS["rmsnorm_gated"]
OURS = {own.name: own for own in TRITON if own.op == OP.name}
TORCH = {own.name: own for own in torch_gated.IMPLEMENTATIONS}


def result_of(implementation: Implementation, **fields: Any) -> Result:
    own = {"M": 5, "N": 129, "dtype": "bf16", "seed": 2, "bias": False, "gate": "turning", **fields}
    return check(implementation, OP, Case(**{"op": OP.name, **own}), DEVICE, Ask())  # type: ignore[arg-type]


@parametrize("layout", ["contiguous", "misaligned", "x_strided", "dy_strided", "strided", "rank3"], inner=1)
@pytest.mark.parametrize("name", GATES)
def test_our_kernels_are_right_in_every_layout(name: str, layout: str) -> None:
    gap = 8 if "strided" in layout else 0
    result = result_of(OURS[name], layout=layout, gap=gap, weight_dtype="fp32")
    assert not result.failed, result
    assert {c.output for c in result.checked} == {"y", "rstd", "dx", "dgate", "dw"}


@pytest.mark.parametrize("name", GATES)
def test_rows_wider_than_a_block_are_as_right(name: str) -> None:
    from normcheck.impls.kernels import gated

    before, sigmoid = GATES[name]
    case = Case(op=OP.name, dtype="fp32", M=4, N=50, bias=False, seed=1)
    inputs = make(case, OP, DEVICE)
    assert inputs.gate is not None
    own = {"before": before, "sigmoid": sigmoid}
    found = []
    for block in (64, 16):
        saved = gated.forward(inputs.x, inputs.gate, inputs.weight, eps=case.eps, max_block=block, **own)
        rest = gated.backward(
            inputs.dy, inputs.x, inputs.gate, inputs.weight, rstd=saved["rstd"], max_block=block, **own
        )
        found.append({**saved, **rest})
    assert found[0].keys() == {"y", "rstd", "dx", "dgate", "dw"}
    for output, whole in found[0].items():
        torch.testing.assert_close(found[1][output], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("weights", ["normal", "none"])
def test_those_of_torch_are_right(name: str, weights: str) -> None:
    for M, N in ((3, 256), (0, 128)):
        result = result_of(TORCH[name], M=M, N=N, weights=weights)
        assert not (result.failed or result.refused), result


def test_another_n_than_its_groups_have_is_refused() -> None:
    refused = result_of(TORCH["torch_nemotron_h"], N=129).refused
    assert refused == "N=129 is no multiple of group=128, as declared"


def mine(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (xhat * weight.float() * torch.nn.functional.silu(gate.float())).to(x.dtype)


def before(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() * torch.sigmoid(gate.float())
    xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * xhat.to(x.dtype)


def of_groups(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float().reshape(len(x), -1, 64)
    xhat = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    return (xhat * weight.float() * torch.nn.functional.silu(gate.float())).to(x.dtype)


def wrong(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return mine(x, torch.relu(gate), weight, eps)


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (mine, {"gate": "after", "activation": "silu", "rounding": "once", "group": 0}),
        (before, {"gate": "before", "activation": "sigmoid", "rounding": "each", "round_gated": "none", "group": 0}),
        (of_groups, {"gate": "after", "activation": "silu", "rounding": "once", "group": 64}),
    ],
)
def test_the_convention_of_a_function_is_found(function: Any, convention: dict[str, str | int]) -> None:
    result = result_of(wrapped(adapt(function), OP.name, "mine", ""), gate="normal", N=1024)
    assert not result.failed
    assert result.conventions == (tuple(convention.items()),)


def test_none_that_fits_is_a_finding() -> None:
    result = result_of(wrapped(adapt(wrong), OP.name, "mine", ""), gate="normal")
    assert result.failed and result.conventions == ()


def test_what_is_gated_may_be_rounded_alone_if_that_is_declared() -> None:
    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float, gate: Tensor) -> Tensor:
        h = (x.float() * torch.nn.functional.silu(gate.float())).to(x.dtype).float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    once = {"gate": "before", "activation": "silu", "rounding": "once", "group": 0}
    for model, right in ((once, False), ({**once, "round_gated": "io"}, True)):
        own = Implementation(name="mine", op=OP.name, forward=forward, model=model)
        assert result_of(own, gate="normal").failed is not right


@pytest.mark.parametrize(
    ("op", "model", "words"),
    [
        (OP.name, {"activation": "none"}, "one of silu, sigmoid, any, as op=rmsnorm_gated has them"),
        ("groupnorm", {"activation": "sigmoid"}, "one of none, silu, any, as op=groupnorm has them"),
        (OP.name, {"sum": "rounded"}, "one of the keys gate, activation, rounding, round_gated, group"),
        ("rmsnorm", {"rounding": "each"}, "none of a convention"),
    ],
)
def test_a_value_that_another_op_has_is_refused(op: str, model: dict[str, str], words: str) -> None:
    own = Implementation(name="mine", op=op, forward=lambda *given, **named: given[0], model=model)
    with pytest.raises(UsageError, match=words):
        check(own, OPS[op], Case(op=op, dtype="bf16", M=2, N=4, bias=False), "cpu", Ask())


def test_a_class_of_a_module_gets_the_gate_by_name() -> None:
    class Gated(torch.nn.Module):
        def __init__(self, N: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(N)), eps

        def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
            return mine(hidden, gate, self.weight, self.eps)

    adapted = adapt(Gated)
    assert adapted.named == ("gate",)
    assert not result_of(wrapped(adapted, OP.name, "class", "")).failed


def test_a_function_without_a_gate_and_one_with_it_belong_to_other_ops() -> None:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    with pytest.raises(UsageError, match=r"a parameter named gate: plain\(x, gate, weight, eps\) -> y"):
        require_named(adapt(plain), plain, OP, "f.py:plain")
    with pytest.raises(UsageError, match=r"no parameter named gate, or --op rmsnorm_gated"):
        require_named(adapt(mine), mine, OPS["rmsnorm"], "f.py:mine")

    def front(x: Tensor, residual: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        return x

    words = r"a parameter named residual_gate, and no parameter named gate: front\(x, residual, residual_gate, scale"
    with pytest.raises(UsageError, match=words):
        require_named(adapt(front), front, OPS["fused_add_rmsnorm_modulate"], "f.py:front")

    def grouped(x: Tensor, chunks: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return x

    with pytest.raises(UsageError, match=r"expected a function grouped\(x, groups, weight, bias, eps\) -> y"):
        adapt(grouped, op=OPS["groupnorm"])


def test_a_gate_has_a_row_stride_of_its_own() -> None:
    case = Case(op=OP.name, dtype="fp16", M=3, N=8, bias=False)
    strides: dict[str, set[tuple[int, int, int]]] = {}
    for seed in range(6):
        for layout, gap in (("contiguous", 0), ("x_strided", 4), ("dy_strided", 4), ("strided", 4)):
            inputs = make(replace(case, layout=layout, gap=gap, seed=seed), OP, "cpu")
            assert inputs.gate is not None
            strides.setdefault(layout, set()).add(tuple(t.stride(0) for t in (inputs.x, inputs.gate, inputs.dy)))
    assert strides == {
        "contiguous": {(8, 8, 8)},
        "x_strided": {(12, 8, 8), (8, 12, 8)},
        "dy_strided": {(8, 8, 12)},
        "strided": {(12, 12, 12), (12, 16, 20)},  # chunks of one projection, and of several
    }
