"""What a confirmation needs: numbers, what is right in fp64, and how far from it something is. No normcheck."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE: dict[str, tuple[str, bool]] = {}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16


def shows(package: str, gpu: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Of which package a confirmation is, and whether it takes a GPU."""

    def note(function: Callable[[], None]) -> Callable[[], None]:
        PACKAGE[function.__name__] = (package, gpu)
        return function

    return note


def numbers(*shape: int, dtype: Any = F32, seed: int = 0, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype).to(DEVICE).requires_grad_(grad)


def apart(rows: int, columns: int, gap: int, dtype: Any) -> torch.Tensor:
    """Rows that lie ``gap`` apart, as the first columns of a wider tensor."""
    return numbers(rows, columns + gap, dtype=dtype)[:, :columns]


def rms(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    x = x.to(F64)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w.to(F64)


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    x = x.to(F64)
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * w.to(F64) + b.to(F64)


def gradients(function: Any, inputs: tuple[torch.Tensor, ...], *dys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The exact gradients, by autograd in fp64."""
    leaves = [t.detach().to(F64).requires_grad_() for t in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.autograd.grad(outputs, leaves, [dy.to(F64) for dy in dys])


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of what is wrong over the norm of what is right; NaN and infinity are infinity."""
    value = float((actual.to(F64) - exact).norm() / exact.norm())
    return value if value == value else float("inf")


def half_ulps(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error, in roundings of the dtype of ``actual``: at most about 1 if it was rounded once."""
    unit = torch.finfo(actual.dtype).eps / 2
    return float(((actual.to(F64) - exact).abs() / (exact.abs() * unit)).max())


def hollow(package: str, *inside: str) -> None:
    """An installed package and those ``inside`` it, without what they would import."""
    spec = importlib.util.find_spec(package)
    assert spec and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for path in ("", *inside):
        name = f"{package}.{path}" if path else package
        bare(name, __path__=[str(root.joinpath(*path.split(".")))])


def bare(name: str, **names: Any) -> None:
    """A module that holds nothing but ``names``, in place of one that would import a whole server or trainer."""
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[name] = module


def on_another_gpu(call: Callable[[torch.Tensor], torch.Tensor], before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``call(x)`` of tensors on the second GPU while the first one is current and busy, as who reads it there sees it.

    A call that launches on the GPU of its tensors is done before; one that launches on the current GPU has not begun.
    ``before``: other numbers, for a call that compiles.
    """
    with torch.cuda.device(0):
        call(before)
        for gpu in (0, 1):
            torch.cuda.synchronize(gpu)
        torch.cuda._sleep(1 << 31)
        returned = call(x)
    with torch.cuda.device(1):
        seen = returned.clone()
        torch.cuda.synchronize(1)
    torch.cuda.synchronize(0)
    return seen
