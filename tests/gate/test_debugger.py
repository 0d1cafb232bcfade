"""``normcheck repro --pdb``: the debugger opens in the user's own frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from normcheck.errors import ExitCode
from tests.command_line import Cli, KernelFile
from tests.plain_rmsnorm import THROUGH_AUTOGRAD

STAGED = """
import torch
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    mine = "of the forward"
    return {"y": (x.float() * rstd[:, None] * weight.float()).to(x.dtype), "rstd": rstd}

def backward(dy, x, weight, bias, saved, *, eps):
    theirs = "of the backward"
    return {"dx": dy, "dw": weight}

IMPLEMENTATIONS = (Implementation(name="mine", op="rmsnorm", forward=forward, backward=backward, biases=(False,)),)
"""

SMALL = "rmsnorm fp16 M=3 N=4 eps=1e-05 rows=normal dy=normal layout=contiguous seed=0 bias=none"


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    """A debugger that is left goes on tracing if it has a breakpoint, which slows every later test of this process."""
    yield
    assert sys.gettrace() is None


def test_pdb_stops_where_forward_and_backward_return(
    kernel_file: KernelFile, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = 'p mine, tuple(__return__["rstd"].shape)\nc\np theirs, __return__["dx"] is dy\nc\n'
    done = cli("repro", str(kernel_file(STAGED, name="mine.py")), SMALL, "--pdb", "--device", "cpu", stdin=commands)
    assert done.code == ExitCode.FOUND  # the backward is wrong
    said, shown = done.err, capfd.readouterr().out
    assert "forward returns: what it returns is __return__['y'], __return__['rstd']; its own variables" in said
    assert "backward returns: what it returns is __return__['dx'], __return__['dw']; its own" in said
    assert "mine.py(8)forward()->{" in shown
    assert "('of the forward', (3,))" in shown
    assert "mine.py(12)backward()->{" in shown
    assert "('of the backward', True)" in shown
    assert "debugger.py" not in shown


def test_pdb_stops_in_a_plain_function_and_goes_on_to_a_breakpoint(
    kernel_file: KernelFile, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    file = str(kernel_file(THROUGH_AUTOGRAD.format(backward="return dy, dy.sum(0), None"), name="mine.py"))
    commands = "up\np tuple(wide.shape)\ndown\np tuple(__return__.shape)\ntbreak {}:12\nc\np dy.shape == (3, 4)\nq\n"
    done = cli("repro", file, SMALL, "--pdb", "--device", "cpu", stdin=commands.format(file))
    shown = capfd.readouterr().out
    assert "forward returns: y is __return__" in done.err
    assert "mine.py(15)rmsnorm()->tensor(" in shown
    assert "(3, 4)" in shown
    assert "mine.py(12)backward()" in shown
    assert "True" in shown
    assert done.code == ExitCode.INTERRUPTED
    assert "left the debugger, nothing was judged" in done.err


def test_pdb_stops_in_the_users_frame_where_torch_raises(
    kernel_file: KernelFile, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import torch\n\ndef rmsnorm(x, weight, eps):\n    mine = 17\n    return torch.einsum(x, weight)\n"
    file = str(kernel_file(text, name="mine.py"))
    done = cli("repro", file, SMALL, "--pdb", "--device", "cpu", stdin="p mine + 1\nq\n")
    shown = capfd.readouterr().out
    assert "mine.py(5)rmsnorm()" in shown
    assert "18\n" in shown
    assert "--Return--" not in shown
    assert done.code == ExitCode.FOUND
    assert "FAIL" in done.last


def test_a_kernel_that_has_no_frame(kernel_file: KernelFile, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    text = "from normcheck import Implementation\n"
    text += "IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward='a text'.format, biases=(False,)),)\n"
    file = str(kernel_file(text, name="mine.py"))
    done = cli("repro", file, SMALL, "--pdb", "--device", "cpu", stdin="p returned\nc\n")
    assert "forward is no Python function: this is normcheck's own call, and returned is what came of it" in done.err
    assert "'a text'" in capfd.readouterr().out
    assert done.code == ExitCode.FOUND
