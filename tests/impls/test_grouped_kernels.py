"""Our kernels of norms of groups are within their bounds in every layout and any groups; functions of users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import make
from normcheck.cases.layouts import OF_CHANNELS
from normcheck.cases.ops import OPS
from normcheck.cases.split import CHANNEL_COUNTS, GROUP_COUNTS
from normcheck.checks.ask import Ask
from normcheck.checks.check import Result, check
from normcheck.errors import UsageError
from normcheck.impls.adapt import adapt, require_named
from normcheck.impls.implementation import Implementation
from normcheck.impls.torch_grouped import IMPLEMENTATIONS as TORCH
from normcheck.impls.triton import IMPLEMENTATIONS as TRITON
from normcheck.runner.device import device_for
from tests.some import some

DEVICE = device_for("auto")
OP = OPS["groupnorm"]
OURS = {own.name: own for own in TRITON if own.op == OP.name}
LAYOUTS = tuple(layout for layout in OF_CHANNELS if layout not in ("dy_scalar", "weight_strided"))


def result_of(implementation: Implementation, **fields: Any) -> Result:
    own = {"M": 5, "N": 120, "dtype": "bf16", "seed": 2, "channels": "12", "groups": "4", "weights": "probe"}
    return check(implementation, OP, Case(**{"op": OP.name, **own, **fields}), DEVICE, Ask())  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OURS)
def test_our_kernels_are_right_in_every_layout(name: str, layout: str) -> None:
    result = result_of(OURS[name], layout=layout, gap=8 if "strided" in layout else 0, weight_dtype="fp32")
    assert not result.failed, result
    assert {c.output for c in result.checked} == {"mean", "rstd", "y", "dx", "dw", "db"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", CHANNEL_COUNTS)
@pytest.mark.parametrize("groups", GROUP_COUNTS)
def test_our_kernels_are_right_for_any_groups(groups: str, channels: str, layout: str) -> None:
    own = {"channels": channels, "groups": groups, "layout": layout, "dtype": "fp32"}
    assert not result_of(OURS["triton_silu"], M=3, N=45, **own).failed


@pytest.mark.slow
@pytest.mark.parametrize("own", [*TORCH, *OURS.values()], ids=lambda own: str(own.name))
def test_without_samples_weight_or_bias(own: Implementation) -> None:
    assert not result_of(own, M=0).failed
    assert not result_of(own, weights="none", bias=False).failed
    assert not result_of(own, weights="none", bias=True).failed
    assert not result_of(own, bias=False).failed


@pytest.mark.parametrize("samples", [2, 3])  # with two a program of the interpreter has several groups
def test_groups_longer_than_a_block_are_as_right(samples: int) -> None:
    from normcheck.impls.kernels import grouped

    inputs = make(Case(op=OP.name, dtype="fp32", M=samples, N=120, seed=1, channels="12", groups="3"), OP, DEVICE)
    found = []
    for block in (64, 16):
        saved = grouped.forward(inputs.x, inputs.weight, inputs.bias, eps=1e-5, groups=3, silu=True, max_block=block)
        own = {"mean": saved["mean"], "rstd": saved["rstd"], "groups": 3, "silu": True, "max_block": block}
        rest = grouped.backward(inputs.dy, inputs.x, inputs.weight, inputs.bias, **own)
        found.append({**saved, **rest})
    for output, right in some(found[0].items()):
        torch.testing.assert_close(found[1][output], right, rtol=1e-5, atol=1e-5)


def mine(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = torch.nn.functional.group_norm(x.float(), groups, weight.float(), None if bias is None else bias.float(), eps)
    return y.to(x.dtype)


def test_a_function_gets_groups_by_name() -> None:
    adapted = adapt(mine)
    require_named(adapted, mine, OP, "mine")
    assert adapted.named == ("groups",) and adapted.biases == (False, True) and adapted.weights == (True,)
    own = Implementation(name="mine", op=OP.name, forward=adapted.forward)
    result = result_of(own)
    assert not result.failed and result.conventions == ((("activation", "none"),),)
    with pytest.raises(UsageError, match="a parameter named groups: mine"):
        require_named(adapt(lambda x, weight, bias, eps: x), mine, OP, "mine")
    with pytest.raises(UsageError, match="no parameter named groups, or --op groupnorm"):
        require_named(adapted, mine, OPS["layernorm"], "mine")


class Norm(torch.nn.GroupNorm):
    """torch's own module, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if t is None else t.float() for t in (self.weight, self.bias))
        return torch.nn.functional.group_norm(x.float(), self.num_groups, weight, bias, self.eps).to(x.dtype)


class Plain(Norm):
    """The same without weight and bias, made by (channels, groups)."""

    def __init__(self, channels: int, num_groups: int, eps: float = 1e-5) -> None:
        super().__init__(num_groups, channels, eps=eps, affine=False)


@pytest.mark.parametrize("kind", [Norm, Plain])
def test_a_class_is_made_for_groups_and_channels(kind: type[Norm]) -> None:
    adapted = adapt(kind)
    require_named(adapted, kind, OP, "mine")
    affine = kind is Norm
    assert (True in adapted.biases, adapted.weights) == (affine, (affine,))
    own = Implementation(
        name="mine", op=OP.name, forward=adapted.forward, biases=adapted.biases, weights=adapted.weights
    )
    assert not result_of(own, **({} if affine else {"weights": "none", "bias": False})).failed


def test_one_sample_of_one_element_may_be_refused_among_others_too() -> None:
    adapted = adapt(Norm)
    own = Implementation(name="mine", op=OP.name, forward=adapted.forward, biases=adapted.biases)
    fields: dict[str, Any] = {"M": 2, "N": 1, "channels": "root", "groups": "few", "dtype": "fp16"}
    assert not check(own, OP, Case(op=OP.name, **fields), "cpu", Ask(depth=Depth.ROWS)).failed


def test_a_norm_of_one_group_is_a_finding() -> None:
    def ignoring(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, groups: int) -> Tensor:
        return mine(x, 1, weight, bias, eps)

    result = result_of(Implementation(name="ignoring", op=OP.name, forward=ignoring))
    assert "y" in {c.output for c in result.wrong}
