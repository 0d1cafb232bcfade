"""The context ``profiler``, with a double of torch's: what it hands on, and how that comes from another process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.contexts.kernel import Launched
from normcheck.contexts.perform import perform
from normcheck.isolation.replies import _launched
from normcheck.runner import compiled
from tests.contexts.test_gpu import SMALL, Gpu, Scaled


@dataclass
class Profile:
    """In place of torch.profiler.profile: each launch in its block has two events."""

    names: list[str] = field(default_factory=list)
    refuses: str = ""
    open: bool = False

    def start(self) -> None:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.open = True

    def stop(self) -> None:
        self.open = False

    def events(self) -> list[Any]:
        return [
            SimpleNamespace(name=n, device_type=device, is_user_annotation=False, time_range=SimpleNamespace(start=at))
            for at, n in enumerate(self.names)
            for device in (DeviceType.CUDA, DeviceType.CPU)
        ]


class Launching(Gpu):
    """A GPU whose launches a profile sees."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.profiles, self.refuses = list(names), list[Profile](), ""

    def launch(self, work: Any) -> None:
        assert self.profiles[-1].open
        self.profiles[-1].names += self.names
        super().launch(work)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*names: str) -> Launching:
        gpu = Launching(*names)

        def profile(activities: object) -> Profile:
            gpu.profiles.append(Profile(refuses=gpu.refuses))
            return gpu.profiles[-1]

        monkeypatch.setattr(torch.profiler, "profile", profile)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return gpu

    return use


def performed(gpu: Launching, expects: str = "") -> Any:
    kernel = Scaled(gpu, expects=expects, was_built=3)
    inputs = make(parsed(SMALL), OPS["rmsnorm"], "cpu")
    return perform("profiler", kernel, inputs, inputs)


def test_forward_and_backward_are_profiled_each_by_itself(profiled: Any) -> None:
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    (step,) = performed(profiled("void rms<4>", "sum")).steps
    assert step.launched == Launched(("rms<4>", "sum"), ("rms<4>", "sum"), True, 3)
    assert set(step.outputs) == {"y", "dx"} and step.exact and step.of == (0,)
    assert torch._C._get_deterministic_fill_uninitialized_memory() == filled


def test_what_is_declared_is_looked_for_in_whole_names_which_are_cut_afterwards(profiled: Any) -> None:
    long = "cudnn::" + "x" * 300 + "_rms_fwd"
    assert performed(profiled(long), "rms_fwd$").steps[0].launched.expected
    launched = performed(profiled(long), "rms_bwd").steps[0].launched
    assert not launched.expected and {len(name) for name in launched.forward} == {60}


def test_a_profiler_that_sees_nothing_is_no_finding(profiled: Any) -> None:
    done = performed(profiled(), "rms_fwd")
    assert not done.steps and done.not_tried == "torch's profiler saw no kernel"


def test_a_profiler_that_does_not_start_is_no_finding_either(profiled: Any) -> None:
    gpu = profiled("rms")
    gpu.refuses = "Profiler is already enabled"
    done = performed(gpu, "rms_fwd")
    assert not done.steps and done.not_tried == "torch's profiler does not start: Profiler is already enabled"


def test_an_answer_is_cut_and_has_no_control_characters() -> None:
    told = asdict(Launched(("a\x1b[31m" + "b" * 200,) * 500, ("c",), True, 10**12)) | {"expected": "yes"}
    found = _launched(told)
    assert len(found.forward) == 100 and len(found.forward[0]) <= 60 and "\x1b" not in found.forward[0]
    assert (found.backward, found.expected, found.built) == (("c",), False, 1_000_000)
    with pytest.raises((KeyError, TypeError, ValueError)):
        _launched({"forward": 5, "backward": [], "expected": True, "built": 0})


class JITFunction:
    """In place of Triton's: device -> its kernels by signature, and more."""

    def __init__(self, **kernels: object) -> None:
        self.device_caches = {0: (kernels, {}, None, None, None)}


class Autotuner:
    """In place of Triton's: key -> the best configuration."""

    def __init__(self, **best: object) -> None:
        self.cache = best


class InAFile(Autotuner):
    """In place of flag-gems': what it keeps has no length."""

    def __init__(self) -> None:
        self.cache = object()


def test_what_triton_has_compiled_and_tuned_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With doubles: a process that imports Triton cannot interpret it any more, as other tests do."""
    monkeypatch.setattr(compiled, "graphs", lambda: 5)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(JITFunction=JITFunction))
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=Autotuner))
    assert compiled.built() == 5
    kernels = JITFunction(fp16=1, fp32=2), JITFunction(), Autotuner(m1=1), InAFile()
    assert compiled.built() == 5 + 2 + 0 + 1
    del kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_triton_itself_keeps_what_it_compiled_where_it_is_counted() -> None:
    """In a process of its own, for the same reason."""
    code = (
        "import torch, triton, sys\n"
        "from tests.quality import gpu_launching_kernels as kernels\n"
        "from normcheck.runner import compiled\n"
        "def count(m):\n"
        "    before, x = compiled.built(), torch.ones(m, 64, device='cuda')\n"
        "    kernels.for_each_m(x, torch.ones(64, device='cuda'), None, eps=1e-5)\n"
        "    return compiled.built() - before\n"
        "print(count(3), count(3), count(5))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["1", "0", "1"], done.stderr
