"""No garbage is looked for while torch is imported; afterwards it is, by whoever calls a kernel as well."""

from __future__ import annotations

import gc

import pytest

from normcheck.cli import imports
from tests.command_line import Cli, KernelFile

KERNEL = """
import gc, torch

def rmsnorm(x, weight, bias, *, eps):
    assert gc.isenabled()
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""


def test_it_is_looked_for_again() -> None:
    with imports.at_once():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with imports.at_once():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


@pytest.mark.slow
def test_it_is_looked_for_in_a_kernels_process(cli: Cli, kernel_file: KernelFile) -> None:
    few = ("--dtype", "fp32", "--device", "cpu", "--max-examples", "1", "--allow-thin")
    done = cli("verify", "--impl", str(kernel_file(KERNEL)), *few, "--isolation")
    assert done.code == 0, done.out
    assert gc.isenabled()
