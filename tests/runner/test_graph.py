"""How many gradients of x autograd adds up in half precision, by the graph behind y."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from normcheck.runner.graph import joined


class Fused(torch.autograd.Function):
    """Uses x twice, and hands over one gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float() * x.float().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def through_a_view(x: Tensor) -> Tensor:
    rows = x.reshape(-1, 4)
    return rows.float() * rows.float().mean(-1, keepdim=True)


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "once": (lambda x: (lambda f: f * f.mean(-1, keepdim=True))(x.float()), 1),
    "twice": (lambda x: x.float() * x.float().mean(-1, keepdim=True), 2),
    "promoted": (lambda x: x * x.float().mean(-1, keepdim=True), 2),
    "three times": (lambda x: (x.float() - x.float().mean()) * x.float().var(), 3),
    "both factors": (lambda x: (x * x).float(), 2),
    "a view of x": (through_a_view, 2),
    "a copy of x": (lambda x: through_a_view(x.clone().contiguous()), 2),
    "a function of its own": (lambda x: Fused.apply(x), 1),
    "torch's own norm": (lambda x: functional.layer_norm(x, (4,)).float() * 2, 1),
    "nothing of x": (lambda x: torch.ones(3, 4, requires_grad=True) * 2, 0),
    "no graph": (lambda x: x.detach().float(), 0),
    "x itself": (lambda x: x.view(4, 3), 1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_how_many_gradients_are_added(way: str, dtype: torch.dtype) -> None:
    of, count = WAYS[way]
    x = torch.randn(3, 4).to(dtype).requires_grad_()
    assert joined(of(x), x) == count


def test_a_tensor_that_is_none_is_not_asked() -> None:
    class Lazy(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("asked")

    assert joined(torch.ones(2).as_subclass(Lazy), torch.ones(2, requires_grad=True)) == 0


def test_an_input_that_was_detached() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert joined(y, x.detach()) == 0
