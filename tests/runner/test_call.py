"""Whose exception it is: the kernel's, if a frame of it is there, and else normcheck's, which took the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.cases.guard_bands import as_integers, in_memory, same_bits
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import Broken, ItselfFailed
from normcheck.gate.engine import verdict_of
from normcheck.gate.plan import PROFILES, Plan
from normcheck.isolation import worker
from normcheck.isolation.replies import broken_of
from normcheck.runner import call, overwriting
from normcheck.runner.call import Unwatched
from normcheck.runner.own_memory import Results
from tests.case_lines import case_of
from tests.command_line import Cli

NEGATED = Path(__file__).parents[1] / "quality" / "got_past" / "neg_view.py"
CASE = case_of("rmsnorm fp32 M=3 N=8 seed=1 bias=none")
OP = OPS["rmsnorm"]


def right(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def of(forward: Callable[..., Any], **more: Any) -> Implementation:
    return Implementation(name="mine", op="rmsnorm", forward=forward, biases=(False,), **more)


def forward(implementation: Implementation) -> dict[str, Tensor]:
    return call.forward(implementation, CASE, make(CASE, OP, "cpu"), Unwatched())


class Refuses(Mapping[str, Tensor]):
    """What a kernel may return: it raises when it is read."""

    def __getitem__(self, name: str) -> Tensor:
        raise RuntimeError("read")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("read")

    def __len__(self) -> int:
        return 1


def raises(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("of the kernel")


@pytest.mark.parametrize(
    "kernel",
    [raises, math.sqrt, torch.nn.functional.rms_norm, lambda *_, **__: Refuses()],
    ids=["its own line", "a builtin", "torch's line", "what it returned"],
)
def test_what_a_kernel_raises_is_its_own(kernel: Callable[..., Any]) -> None:
    with pytest.raises(Broken) as broken:
        forward(of(kernel))
    assert broken.value.kind == "exception"


TAKING = (
    "normcheck.runner.call._of_several",
    "normcheck.runner.call._named",
    "normcheck.runner.call._settle",
    "normcheck.runner.call._tensors",
    "normcheck.runner.overwriting.apart",
    "normcheck.cases.guard_bands.same_bits",
)
"""What takes a result of a forward, one after the other."""


def fails() -> Any:
    """As a view of bits fails: torch raises it, in a line of normcheck."""
    source = "def taken(*_, **__): return torch.ones(2, dtype=torch.int8).view(torch.int64)"
    exec(compile(source, call.__file__, "exec"), names := {"torch": torch})
    return names["taken"]


@pytest.mark.parametrize("name", TAKING)
def test_what_raises_while_a_result_is_taken_is_not_the_kernels(name: str) -> None:
    def overwriting(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor) -> Any:
        residual.add_(x)
        return {"y": x.copy_(right(residual, weight, bias, eps=eps)), "residual_out": residual}

    adding = Implementation(name="mine", op="fused_add_rmsnorm", forward=overwriting, overwrites=("x", "residual"))
    case = case_of("fused_add_rmsnorm fp32 M=3 N=8 seed=1 bias=none")
    inputs = make(case, OPS[case.op], "cpu")
    with (
        patch(name, fails()),
        pytest.raises(ItselfFailed, match=r"normcheck itself failed: RuntimeError.*call\.py:\d+"),
    ):
        call.forward(adding, case, inputs, Unwatched())


def test_a_gpu_that_failed_was_failed_by_the_kernel() -> None:
    """What it did shows when the device is waited for."""

    def settled(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with patch("normcheck.runner.call._settle", settled), pytest.raises(Broken, match="illegal memory access"):
        forward(of(right))


def test_a_cell_in_which_normcheck_fails_is_an_error() -> None:
    cell = Cell(OP, of(right), "fp32", "mine")
    plan = Plan((cell,), PROFILES["quick"], 0, "cpu", 10.0)
    with patch("normcheck.runner.overwriting.apart", fails()):
        verdict = verdict_of(cell, plan, lambda cases, worst: None)
    assert (verdict.status, verdict.failure) == ("error", None)
    assert verdict.detail.startswith("normcheck itself failed: RuntimeError") and not verdict.error
    with patch("normcheck.gate.engine.run_cell", side_effect=torch.OutOfMemoryError("CUDA error: out of memory")):
        verdict = verdict_of(cell, plan, lambda cases, worst: None)
    assert (verdict.status, verdict.error) == ("error", "memory")
    assert verdict.detail == "OutOfMemoryError: CUDA error: out of memory"


def test_a_kernels_process_tells_a_failure_of_its_own() -> None:
    """The parent raises it, and no kernel is blamed."""
    state = worker.State(worker.HostMemory(), sandboxed=False, noted=worker.Noted())
    error = broken_of(worker._answer(state, {"do": "load"})["broken"])  # without what load needs
    assert isinstance(error, ItselfFailed) and "KeyError: 'device' (worker.py:" in str(error)
    with patch.dict(worker._REQUESTS, {"load": raises}):
        assert worker._answer(state, {"do": "load"})["broken"]["kind"] == "exception"


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["--isolation", "--no-isolation"])
def test_a_result_that_is_negated_when_it_is_read_is_taken(cli: Cli, isolation: str) -> None:
    few = ("--dtype", "fp16", "--max-examples", "24", "--allow-thin", "--device", "cpu")
    done = cli("verify", "--impl", f"{NEGATED}:rmsnorm", "--op", "rmsnorm", *few, isolation)
    assert done.code == 0, done.out


def test_bits_of_a_negated_result() -> None:
    """On a GPU they are looked at while streams may still write: of the memory itself, not of a copy."""
    memory = torch.tensor([1.0, -2.0])
    negated = torch._neg_view(memory)
    assert same_bits(negated, torch.tensor([-1.0, 2.0]))
    assert as_integers(negated).view(torch.float32).tolist() == [-1.0, 2.0]
    assert in_memory(negated).data_ptr() == memory.data_ptr() and in_memory(negated).tolist() == [1.0, -2.0]
    parameter = torch.nn.Parameter(memory)
    returned = {"y": negated, "rstd": parameter, "wide": memory.expand(3, 2), "other": torch.ones(2, device="meta")}
    bits = call._bits_on(memory.device, returned)
    memory += 1
    assert {name: t.view(torch.float32).tolist() for name, t in bits.items()} == {
        "y": [2.0, -1.0],
        "rstd": [2.0, -1.0],
        "wide": [[2.0, -1.0]] * 3,
    }


class Lazy(Tensor):
    """A tensor without memory, which computes when an operation looks at it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def test_a_tensor_without_memory_lies_nowhere() -> None:
    inputs = make(case_of("rmsnorm fp32 M=4 N=8 bias=none"), OPS["rmsnorm"], "cpu")
    make_one: Any = Tensor._make_wrapper_subclass
    lazy = make_one(Lazy, inputs.x.shape, dtype=inputs.x.dtype)
    assert overwriting.apart({"y": lazy}, inputs)["y"] is lazy
    results = Results()
    for _ in range(2):
        results.require_own_memory("y", lazy, dict(inputs.named()))
