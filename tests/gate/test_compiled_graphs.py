"""The first case again, after all others, of a function of which torch.compile has several graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from normcheck.errors import ExitCode
from tests.command_line import Cli

JIT = """
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import torch

CALLS, SHAPES, OTHER = [0], set(), []
counts = SimpleNamespace(counters=defaultdict(Counter))  # as of torch's own, whose import takes seconds
dynamo = sys.modules.setdefault("torch._dynamo.utils", counts)

def rmsnorm(x, weight, eps):
    CALLS[0] += 1
    if CALLS[0] >= 40 and not OTHER and x.shape not in SHAPES:  # another graph is made for another shape
        OTHER.append(x.shape)
        dynamo.counters["stats"]["unique_graphs"] += {graphs}
    SHAPES.add(x.shape)
    wide = x.float()
    if OTHER:
        return wide / torch.sqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps) * weight.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize("graphs", [2, 1])
def test_another_graph_of_torch_compile_may_have_other_bits(graphs: int, cli: Cli, tmp_path: Path) -> None:
    """Which of several a call gets hangs on the calls before it; a kernel of one has no such reason."""
    (tmp_path / "jit.py").write_text(JIT.format(graphs=graphs), encoding="utf-8")
    few = ("--dtype", "fp32", "--max-examples", "24", "--allow-thin", "--no-contexts", "--device", "cpu")
    done = cli("verify", "--impl", str(tmp_path / "jit.py"), "--op", "rmsnorm", *few)
    assert done.code == (ExitCode.PASS if graphs > 1 else ExitCode.FOUND), done.out
    assert ("depends on earlier calls" in done.out) == (graphs == 1)
