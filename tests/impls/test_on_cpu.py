# ruff: noqa: E402  (the interpreter is enabled before triton is imported)
"""What published Triton kernels ask of a GPU is answered on a CPU, and their own faults stay theirs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normcheck.impls.kernels import interpreter

if torch.cuda.is_available():
    pytest.skip("kernels are not interpreted on a GPU", allow_module_level=True)
interpreter.enable()

import triton
import triton.language as tl
from triton.language.extra import libdevice

from normcheck.errors import ExitCode, UnsupportedCase
from normcheck.impls.kernels.on_cpu import LIBDEVICE
from normcheck.runner.kernel_errors import guarded
from tests.command_line import Cli

KERNEL = """
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

CONFIGS = [triton.Config({{"BLOCK": block}}, num_warps=4) for block in (64, 1024)]

@triton.autotune(CONFIGS, key=["N"])
@triton.jit
def kernel(x_ptr, weight_ptr, y_ptr, M, N, eps, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
            squares += x * x
        rstd = libdevice.rsqrt(tl.sum(squares) / {divisor} + eps.to(tl.float32))
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(y_ptr + row * N + cols, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=cols < N)

def rmsnorm(x, weight, eps):
    y, N = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    assert properties["multiprocessor_count"] == processors
    with torch.cuda.device(x.device):
        kernel[(processors,)](x.contiguous(), weight, y, x.numel() // N, N, eps)
    return y
"""

FEW = ("--dtype", "fp16", "--no-contexts", "--allow-thin", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("divisor", "code", "cases"), [("N", ExitCode.PASS, 5), ("(N + 1)", ExitCode.FOUND, 12)])
def test_an_autotuned_kernel_that_asks_for_much_is_judged_by_its_values(
    divisor: str, code: int, cases: int, tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(KERNEL.format(divisor=divisor), encoding="utf-8")
    done = cli("verify", "--impl", str(file), *FEW, "--max-examples", str(cases))
    assert done.code == code, done.out
    assert code == ExitCode.PASS or "FAIL rmsnorm mine.py:rmsnorm fp16: y is wrong" in done.out


@triton.jit
def one(x_ptr, y_ptr, function: tl.constexpr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, function(tl.load(x_ptr + cols)))


def only_long_blocks(configs: list[Any], arguments: dict[str, Any], **_: Any) -> list[Any]:
    return [config for config in configs if config.kwargs["BLOCK"] >= arguments["N"]]


@triton.autotune(
    [triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})],
    key=["N"],
    prune_configs_by={"early_config_prune": only_long_blocks},
)
@triton.jit
def copied(x_ptr, y_ptr, N, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols, mask=cols < N), mask=cols < N)


def test_a_configuration_that_the_kernel_rules_out_is_not_taken() -> None:
    for n in (3, 9, 20):
        x, y = torch.randn(n), torch.zeros(n)
        copied[(1,)](x, y, n)
        torch.testing.assert_close(y, x, rtol=0, atol=0)


UNARY = ("rsqrt", "sqrt", "tanh", "exp", "exp2", "expm1", "log", "log2", "log1p", "erf", "sin", "cos", "floor", "ceil")


@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_libdevice_is_rounded_once(name: str) -> None:
    x = torch.linspace(0.125, 3.0, 16)
    y = torch.empty_like(x)
    one[(1,)](x, y, getattr(libdevice, name), 16)
    torch.testing.assert_close(y, getattr(torch, name)(x.double()).float(), rtol=0, atol=0)


def test_functions_of_several_values_and_names() -> None:
    a, b, c = (np.array([value]) for value in (6.0, 4.0, 0.5))
    assert [float(LIBDEVICE[name](a, b)[0]) for name in ("div_rn", "fast_dividef", "pow")] == [1.5, 1.5, 1296.0]
    assert float(LIBDEVICE["fma"](a, b, c)[0]) == 24.5
    assert float(LIBDEVICE["rcp_rn"](b)[0]) == 0.25


def test_another_dtype_is_refused_as_by_a_gpu() -> None:
    x = torch.ones(16, dtype=torch.float16)
    with pytest.raises(Exception, match=r"libdevice\.tanh of fp16: expected fp32 or fp64"):
        one[(1,)](x, torch.empty_like(x), libdevice.tanh, 16)


def test_there_is_still_no_gpu() -> None:
    assert not torch.cuda.is_available()
    target: Any = triton.runtime.driver.active.get_current_target()
    assert (target.backend, target.arch) == ("cuda", 90)


def test_torch_itself_still_finds_no_gpu() -> None:
    """Its compiler asks, and takes no error for a GPU of another make."""
    asks = {"__name__": "torch.somewhere", "torch": torch}
    exec("def ask():\n    return torch.cuda.get_device_properties(0)", asks)
    with pytest.raises((AssertionError, RuntimeError)):
        asks["ask"]()  # type: ignore[operator]
    assert torch.cuda.get_device_properties(0).multi_processor_count == 4


WRONG = """
import triton
import triton.language as tl

@triton.jit
def inner(value):
    return value.nothing_of_this_name()

@triton.jit
def kernel(x_ptr):
    inner(tl.load(x_ptr))

def rmsnorm(x, weight, eps):
    kernel[(1,)](x)
    return x
"""


@pytest.mark.slow
def test_what_a_kernel_raises_is_told_with_its_own_lines(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "mine.py"
    file.write_text(WRONG, encoding="utf-8")
    done = cli("verify", "--impl", str(file), *FEW)
    said = "".join(done.out.split())  # a line may end anywhere in a long path
    assert "'nothing_of_this_name',inakernelthatTriton's" in said
    assert "mine.py:7ininner:returnvalue.nothing_of_this_name()" in said
    assert "mine.py:11inkernel:inner(tl.load(x_ptr))" in said
    assert "triton/runtime" not in said


def a_copy_of_libdevice() -> Any:
    """As packages load it that look for the place where their triton has it."""
    spec = importlib.util.find_spec("triton.language.extra.libdevice")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_copy_of_libdevice_computes_too() -> None:
    copy = a_copy_of_libdevice()
    x = torch.linspace(0.125, 3.0, 16)
    y = torch.empty_like(x)
    one[(1,)](x, y, copy.rsqrt, 16)
    torch.testing.assert_close(y, x.double().rsqrt().float(), rtol=0, atol=0)


@pytest.mark.parametrize("module", [libdevice, a_copy_of_libdevice()], ids=["libdevice", "copy"])
def test_what_is_not_computed_is_refused_by_name(module: Any) -> None:
    x = torch.ones(16)
    with pytest.raises(UnsupportedCase, match=r"libdevice\.j0 runs on a GPU only"), guarded("forward"):
        one[(1,)](x, torch.empty_like(x), module.j0, 16)


BUFFERS = """
import torch
import triton
import triton.language as tl

DEVICE = torch.device("cuda")

@triton.jit
def kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * N + cols, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=cols < N)

def rmsnorm(x, weight, eps):
    M, N = x.numel() // x.shape[-1], x.shape[-1]
    rstd = torch.empty(M, dtype=torch.float32, device="cuda")
    y = torch.zeros(x.shape, dtype=x.dtype, device=torch.device("cuda", 0)).to(DEVICE)
    weight = weight.to("cuda:0").cuda()
    kernel[(M,)](x.contiguous(), weight, y, rstd, N, eps, BLOCK=triton.next_power_of_2(N))
    return y
"""


@pytest.mark.slow
def test_buffers_on_a_gpu_are_on_the_cpu(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BUFFERS, encoding="utf-8")
    done = cli("verify", "--impl", str(file), *FEW, "--max-examples", "5")
    assert done.code == ExitCode.PASS, done.out


ASKS = """
import torch
HAS_GPU = torch.cuda.is_available()
{at_import}

def rmsnorm(x, weight, eps):
    {in_call}
"""
NO_GPU = "(torch.cuda.is_available() told library that there is no GPU)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_import", "in_call", "says"),
    [("", "assert HAS_GPU", True), ("assert HAS_GPU", "", True), ("", "return x.nothing_of_this_name", False)],
    ids=["call", "import", "own_fault"],
)
def test_an_error_for_want_of_a_gpu_says_so(at_import: str, in_call: str, says: bool, tmp_path: Path, cli: Cli) -> None:
    library = ASKS.format(at_import=at_import, in_call=in_call or "pass")
    (tmp_path / "library.py").write_text(library, encoding="utf-8")
    file = tmp_path / "mine.py"
    file.write_text("from library import rmsnorm", encoding="utf-8")
    done = cli("verify", "--impl", f"{file}:rmsnorm", "--op", "rmsnorm", *FEW)
    assert done.code != ExitCode.PASS
    assert (NO_GPU in " ".join((done.out + done.err).split())) == says
