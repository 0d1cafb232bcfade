"""A configuration that is wrong and never wins is found, in a forward and in a backward; right ones are left alone.

On a CPU under Triton's interpreter; ``pytest -m gpu tests/quality/test_configurations.py -n 0`` on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normcheck import Implementation
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.gate.configurations import Tried, each_configuration
from normcheck.gate.plan import PROFILES, Plan
from normcheck.runner.session import session_of
from tests.quality import configuration_kernels as kernels

HAS_GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="kernels are not interpreted on a GPU")),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU; torch sees none here")],
    ),
]
LINE = "rmsnorm {dtype} M=24 N=33 eps=1e-05 rows=tail dy=normal layout=contiguous seed=1 bias=none"


def tried(kernel: Implementation, device: str, dtype: str = "fp16", **more: Any) -> Tried:
    """How the configurations of ``kernel`` do, after a core of one case."""
    cell = Cell(OPS["rmsnorm"], kernel, dtype, "mine.py")
    plan = Plan((cell,), PROFILES["quick"], 0, device, 120.0, **{"configs": "all", **more})
    ran: tuple[Case, ...] = (parsed(LINE.format(dtype=dtype)),)
    with session_of(kernel):
        return each_configuration(cell, plan, ran, used=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("name", kernels.WRONG)
def test_a_wrong_configuration_that_never_wins_is_found_and_named(name: str, dtype: str, device: str) -> None:
    kernel, of, number, output = kernels.WRONG[name]
    found = tried(kernel, device, dtype)
    assert found.failed is not None
    if device == "cuda" and name == "unmasked":  # to time it writes out of bounds as well, whichever is taken then
        assert not found.wrong
    else:
        assert found.wrong.startswith(f"{of}:{number} (BLOCK: ") and "num_warps: 4" in found.wrong
    outputs = [c.output for c in found.failed.wrong] + [p.output for p in found.failed.problems]
    assert output in outputs


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_right_kernel_with_twelve_configurations_is_left_alone(device: str) -> None:
    """In bf16; in fp16 and fp32 the right ones beside those that are wrong are."""
    found = tried(kernels.TWELVE, device, "bf16")
    assert (found.failed, found.wrong) == (None, "") and found.configured is not None
    assert (found.configured.judged, found.configured.allowed, found.configured.why) == (16, 16, "")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", [kernels.PRUNED, kernels.NOT_AMONG_THE_BEST], ids=lambda kernel: kernel.name)
def test_a_configuration_that_the_kernel_rules_out_is_not_judged(kernel: Implementation, device: str) -> None:
    found = tried(kernel, device)
    assert found.failed is None and found.configured is not None
    assert (found.configured.judged, found.configured.allowed) == (6, 6)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_configuration_that_cannot_be_launched_is_told_and_no_failure(device: str) -> None:
    found = tried(kernels.UNLAUNCHABLE, device)
    assert found.failed is None and found.configured is not None
    ((name, why),) = found.configured.cannot.items()
    assert name.startswith("_forward:2 (BLOCK: 128, ") and why.startswith("OutOfResources: out of resource: shared")
    assert (found.configured.judged, found.configured.allowed) == (6, 6)
