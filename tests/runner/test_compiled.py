"""torch.compile gives up after eight recompilations: not in a kernel's process, and if it does, that is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normcheck.runner import compiled
from tests.command_line import Cli, KernelFile

COMPILED = Path(__file__).parents[1] / "quality" / "got_past" / "compiled.py"
FEW = ("--dtype", "fp32", "--device", "cpu", "--allow-thin", "--no-contexts", "--seed", "0", "--report", "json:r.json")


def source(compiler: str, *, limit: int = 0) -> str:
    """The kernel with another compiler, which takes no seconds; ``limit``: recompilations that it allows itself."""
    found = COMPILED.read_text().replace("@torch.compile", f"@torch.compile({compiler})")
    if not limit:
        return found
    of_call = f"    torch._dynamo.config.recompile_limit = {limit}\n    return compiled(x, weight, eps)\n"
    return f"{found.replace('rmsnorm', 'compiled')}\n\ndef rmsnorm(x, weight, eps):\n{of_call}"


def verdict(cli: Cli, path: Path, most: int) -> Any:
    cli("verify", "--impl", f"{path}:rmsnorm", "--op", "rmsnorm", "--max-examples", str(most), *FEW)
    return json.loads(Path("r.json").read_text())["verdicts"][0]


@pytest.mark.slow
def test_what_recompiles_often_is_compiled_each_time(cli: Cli, kernel_file: KernelFile) -> None:
    cell = verdict(cli, kernel_file(source('backend="eager", dynamic=False')), 14)
    assert cell["shapes"] > 8 and cell["failure"] is None
    assert "torch.compile gave up" not in cell["detail"]


@pytest.mark.slow
def test_a_compiler_that_gives_up_makes_a_cell_thin(cli: Cli, kernel_file: KernelFile) -> None:
    cell = verdict(cli, kernel_file(source('backend="eager", dynamic=False', limit=2)), 8)
    assert (cell["status"], cell["failure"]) == ("thin", None)
    assert "torch.compile gave up" in cell["detail"]


def test_only_what_a_kernel_has_imported_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch._dynamo.config", "torch._dynamo.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    compiled.prepare(on_gpu=True)
    assert compiled.eager_calls() == 0 and "torch._dynamo.config" not in sys.modules
    config = SimpleNamespace(recompile_limit=8, accumulated_recompile_limit=1 << 30)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", config)
    compiled.prepare(on_gpu=True)
    assert config.recompile_limit > 10**5 and config.accumulated_recompile_limit == 1 << 30
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={"frames": {"total": 5, "ok": 3}}))
    assert compiled.eager_calls() == 2


TRIALS = """
import subprocess, torch
from torch._inductor import config, cpu_vec_isa
from normcheck.runner import compiled

tried = []
cpu_vec_isa.VecISA.check_build = lambda self, code: tried.append(str(self)) or True
for name in ("avx512_bf16", "vnni"):
    setattr(torch.cpu, f"_is_{name}_supported", lambda: True)
config.cpp.vec_isa_ok = True  # as the sandbox answers
compiled.prepare(on_gpu=ON_GPU)
print(bool(cpu_vec_isa.VecAVX512()), bool(cpu_vec_isa.VecAVX512VNNI()), len(tried) > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("on_gpu", "said"), [(True, "True False False"), (False, "True True True")])
def test_inductor_tries_no_vector_instructions_for_a_scalar_of_a_gpus_graph(on_gpu: bool, said: str) -> None:
    """It asked six times for the first new eps on an H200's host, 5 s each, though the plain sets were answered."""
    script = TRIALS.replace("ON_GPU", str(on_gpu))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == said
