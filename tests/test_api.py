"""verify and assert_conforms: the gate from Python, in somebody else's process."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import normcheck
from normcheck import Case, Implementation
from normcheck.api import Options
from normcheck.errors import UsageError
from normcheck.gate.options import VerifyOptions
from normcheck.runner.time_limit import alarm

FEW: dict[str, Any] = {"max_examples": 12, "device": "cpu"}
CORE: dict[str, Any] = {"time_budget": 0.01, "device": "cpu"}
"""Little beyond the core, without which nothing passes."""


def rms(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def wrong(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return rms(x, weight, bias, eps) * 1.01


class Module(torch.nn.Module):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return rms(x, weight, bias, eps)


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
def test_what_is_right_passes_in_every_form() -> None:
    scale = 1.0
    forms = (rms, lambda x, weight, bias, eps: rms(x, weight, bias, eps) * scale, Module())
    for fn in forms:
        (verdict,) = normcheck.verify(fn, op="rmsnorm", dtypes="fp16", **FEW)
        assert (verdict.status, verdict.cases, verdict.op, verdict.dtype) == ("thin", 12, "rmsnorm", "fp16")
        normcheck.assert_conforms(fn, op="rmsnorm", dtypes="bf16", allow_thin=True, **FEW)
    normcheck.assert_conforms(rms, op="rmsnorm", dtypes="bf16", **CORE)
    shapes = ((5, 7), (20, 24), (3, 129))
    declared = Implementation(name="mine", op="rmsnorm", forward=rms, dtypes=("fp16",), shapes=shapes)
    verdicts = normcheck.verify(declared, **CORE)
    assert [(v.implementation, v.dtype, v.status) for v in verdicts] == [
        ("mine", "fp16", "pass"),
        ("mine", "bf16", "skip"),
        ("mine", "fp32", "skip"),
    ]


@pytest.mark.slow
def test_few_cases_do_not_conform_unless_that_is_meant() -> None:
    with pytest.raises(AssertionError) as raised:
        normcheck.assert_conforms(rms, op="rmsnorm", dtypes="fp16", **FEW)
    message = " ".join(str(raised.value).split())
    assert re.search(r"core not finished, 12 of \d+ cases ran \(max_examples=12\): no ", message)
    assert "; raise max_examples, or let it pass by allow_thin=True quick" in message
    assert message.startswith("THIN ") and "--" not in message
    assert str(raised.value).splitlines()[0].endswith(". Next: raise max_examples")
    normcheck.assert_conforms(rms, op="rmsnorm", dtypes="fp16", allow_thin=True, **FEW)
    with pytest.raises(AssertionError, match="y is wrong"):
        normcheck.assert_conforms(wrong, op="rmsnorm", dtypes="fp16", allow_thin=True, **FEW)


def test_the_terminal_block_is_the_message() -> None:
    with pytest.raises(AssertionError) as raised:
        normcheck.assert_conforms(wrong, op="rmsnorm", dtypes=["fp16"], **FEW)
    message = str(raised.value)
    assert "FAIL rmsnorm wrong fp16: y is wrong" in message
    assert "Worst element at index" in message
    file = os.path.relpath(__file__)
    assert f"Reproduce: normcheck repro {file}:wrong 'rmsnorm fp16 M=" in message
    outcome, blank, cell, *_ = message.splitlines()  # a summary of tests shows the first
    assert outcome.startswith("FAIL  1 of 1 cell failed: rmsnorm/wrong fp16 (y)")
    assert (blank, cell[:5], message.count(outcome)) == ("", "FAIL ", 1)
    assert "\x1b" not in message


@pytest.mark.parametrize(("typed", "meant"), [("dtype", "dtypes"), ("max_example", "max_examples"), ("ops", "op")])
def test_an_argument_that_is_spelt_wrong(typed: str, meant: str) -> None:
    given: Any = {typed: "fp16"}
    with pytest.raises(
        TypeError, match=f"^{typed}: did you mean {meant}\\? expected one of op, dtypes, case, allow_thin, "
    ):
        normcheck.assert_conforms(rms, **given)
    with pytest.raises(
        TypeError, match=f"^{typed}: did you mean {meant}\\? expected one of op, dtypes, case, profile, "
    ):
        normcheck.verify(rms, **given)


def test_a_closure_is_reproduced_from_python() -> None:
    factor = 1.01

    def closure(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return rms(x, weight, bias, eps) * factor

    (verdict,) = normcheck.verify(closure, op="rmsnorm", dtypes="fp16", **FEW)
    assert verdict.failure is not None
    assert verdict.failure.reproduce == f"normcheck.verify(fn, op='rmsnorm', case={verdict.failure.case!r})"
    (again,) = normcheck.verify(closure, op="rmsnorm", case=verdict.failure.case, device="cpu")
    assert (again.status, again.cases) == ("fail", 1)
    assert again.failure is not None
    assert again.failure.case == verdict.failure.case
    (passed,) = normcheck.verify(rms, op="rmsnorm", case=verdict.failure.case, device="cpu")
    assert (passed.status, passed.cases) == ("pass", 1)


def test_nothing_checked_does_not_conform() -> None:
    def refuses(case: Case) -> str:
        return "not today"

    fn = Implementation(name="mine", op="rmsnorm", forward=rms, supports=refuses)
    with pytest.raises(AssertionError, match="not today"):
        normcheck.assert_conforms(fn, dtypes="fp16", **FEW)


def test_a_name_that_has_no_encoding() -> None:
    (verdict,) = normcheck.verify(Implementation(name="n\ud800", op="rmsnorm", forward=wrong), dtypes="fp16", **FEW)
    assert verdict.status == "fail", verdict.detail


def test_what_a_function_raises_is_a_finding() -> None:
    def broken(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        raise ValueError("no such tile")

    (verdict,) = normcheck.verify(broken, op="rmsnorm", dtypes="fp16", **FEW)
    assert verdict.failure is not None
    assert verdict.failure.kind == "exception"
    assert "no such tile" in verdict.failure.message


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (rms, {}, "op=: expected one of layernorm"),
    (rms, {"op": "norm"}, "op=norm: expected one of layernorm"),
    (3, {"op": "rmsnorm"}, "fn=3: expected a function"),
    (rms, {"op": "rmsnorm", "dtypes": "fp64"}, "dtypes=fp64: expected one of fp16"),
    (rms, {"op": "rmsnorm", "dtypes": [["fp16"]]}, "dtypes=[['fp16']]: expected one of fp16, bf16, fp32, or a list"),
    (rms, {"op": "rmsnorm", "dtypes": torch.float16}, "dtypes=torch.float16: expected one of fp16"),
    (rms, {"op": "rmsnorm", "dtypes": []}, "dtypes=[]: expected one of fp16"),
    (rms, {"op": "rmsnorm", "profile": "slow"}, "profile=slow"),
    (rms, {"op": "rmsnorm", "max_examples": 0}, "max_examples=0"),
    (rms, {"op": "rmsnorm", "timeout": 0}, "timeout=0"),
    (rms, {"op": "rmsnorm", "device": "tpu"}, "device=tpu"),
    (rms, {"op": "rmsnorm", "case": "rmsnorm"}, "case='rmsnorm': expected"),
    (rms, {"op": "rmsnorm", "case": "layernorm fp16 M=1 N=2"}, "expected a case of rmsnorm"),
    (Implementation(name="", op="rmsnorm", forward=rms), {}, "expected text of 1 to"),
    (Implementation(name="x", op="rmsnorm", forward=rms), {"op": "layernorm"}, "op=layernorm: expected rmsnorm"),
    (torch.nn.RMSNorm(8), {"op": "rmsnorm"}, "functional_call"),
]


@pytest.mark.parametrize(("fn", "options", "expected"), MISTAKES)
def test_mistakes(fn: Any, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        normcheck.verify(fn, **options)
    assert expected in str(raised.value)


def test_options_are_those_of_the_command_line() -> None:
    declared = get_type_hints(VerifyOptions)
    assert get_type_hints(Options) == {name: declared[name] for name in Options.__annotations__}
    with pytest.raises(TypeError, match="workers: expected one of op, dtypes, case, profile, "):
        normcheck.verify(rms, op="rmsnorm", workers=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"seed=1\.5: expected an integer"):
        normcheck.verify(rms, op="rmsnorm", seed=1.5)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_the_state_of_the_caller_stays_as_it_was() -> None:
    def rude(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        torch.manual_seed(3)
        random.seed(3)
        torch.set_num_threads(1)
        torch._C._set_deterministic_algorithms(False, warn_only=False)
        warnings.simplefilter("error")
        return rms(x, weight, bias, eps)

    def state() -> tuple[object, ...]:
        flags = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        numbers = (torch.get_rng_state().tolist(), random.getstate())
        grad = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
        return (
            *flags,
            *numbers,
            *grad,
            torch.get_num_threads(),
            list(warnings.filters),
            dict(os.environ),
            list(sys.path),
        )

    normcheck.verify(rms, op="rmsnorm", dtypes="fp16", **FEW)  # imports what it needs
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode():
            before = state()
            (verdict,) = normcheck.verify(rude, op="rmsnorm", dtypes="fp16", **FEW)
            assert state() == before
        with torch.no_grad():
            before = state()
            normcheck.assert_conforms(rms, op="rmsnorm", dtypes="fp16", allow_thin=True, **FEW)
            assert state() == before
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert verdict.failure is not None and "torch.initial_seed() is 3" in verdict.failure.message
    assert "dx" in verdict.worst


def test_somebody_elses_timer_goes_on() -> None:
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30.0)
        with alarm(60.0):
            time.sleep(0.05)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 29.95
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with alarm(60.0):
            time.sleep(0.1)
        until = time.monotonic() + 30.0
        while not rang and time.monotonic() < until:
            time.sleep(0.01)
        assert len(rang) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_importing_normcheck_does_not_import_torch() -> None:
    code = "import sys, normcheck; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        normcheck.nonsense  # noqa: B018
