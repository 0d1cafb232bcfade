"""Every file of normcheck between a kernel's process and the kernel is watched, and left out of a crash's traceback."""

from __future__ import annotations

import re

import pytest

from normcheck.isolation.intact import _WATCHING
from normcheck.isolation.process import _OWN_LINE
from tests.command_line import Cli, KernelFile

TELLS = """\
import traceback

def rmsnorm(x, weight, bias, *, eps):
    files = [frame.filename for frame in traceback.extract_stack()]
    raise RuntimeError("behind " + " ".join(files[files.index(next(f for f in files if "isolation/worker" in f)):]))
"""


@pytest.mark.slow
def test_what_lies_between_a_process_and_its_kernel_is_watched(cli: Cli, kernel_file: KernelFile) -> None:
    done = cli("repro", f"{kernel_file(TELLS)}:rmsnorm", "rmsnorm fp32 M=1 N=8")
    between = {f"normcheck.{a}.{b}" for a, b in re.findall(r"/normcheck/(\w+)/(\w+)\.py", "".join(done.out.split()))}
    assert {"normcheck.isolation.calls", "normcheck.runner.kernel_errors"} <= between, done.out
    assert between <= {*_WATCHING, "normcheck.impls.adapt"}
    lines = [f'  File "/a/{name.replace(".", "/")}.py", line 3 in f' for name in between & {*_WATCHING}]
    assert all(map(_OWN_LINE.search, lines))
