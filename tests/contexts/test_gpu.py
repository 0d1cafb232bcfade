"""Contexts of a GPU: on one if there is one, and their order of events on a CPU, with fakes of torch.cuda.

``pytest -m gpu tests/contexts -n 0`` shows all of them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import normcheck
from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.contexts import gpu
from normcheck.contexts.kernel import Called, NotTried, Step
from normcheck.contexts.perform import perform
from normcheck.errors import Broken
from normcheck.result import CONTEXT, Verdict
from tests.command_line import Cli
from tests.quality import context_kernels
from tests.quality import gpu_context_kernels as kernels

CASE = "rmsnorm fp16 M={m} N={n} eps=1e-05 rows=blend dy=normal layout=contiguous seed=3 bias=none"
SMALL, FILLING = CASE.format(m=40, n=33), CASE.format(m=1151, n=1024)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")


def judged(kernel: Callable[..., Tensor], context: str, case: str) -> Verdict:
    (verdict,) = normcheck.verify(kernel, op="rmsnorm", case=case, device="cuda", context=(context,))
    return verdict


def there(context: str) -> None:
    if context == "device" and torch.cuda.device_count() < 2:
        pytest.skip("it takes two GPUs")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [SMALL, FILLING])
@pytest.mark.parametrize("name", kernels.WRONG)
def test_what_is_wrong_in_a_context_of_a_gpu_is_found(name: str, case: str) -> None:
    kernel, context, output = kernels.WRONG[name]
    there(context)
    found = judged(kernel, context, case).failure
    assert found is not None and (found.kind, found.check, found.output) == (CONTEXT, context, output)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [SMALL, FILLING])
@pytest.mark.parametrize("context", ["stream", "graph", "device", "inference", "frozen", "again", "thread", "profiler"])
@pytest.mark.parametrize("name", kernels.RIGHT)
def test_a_right_kernel_is_right_in_every_context_of_a_gpu(name: str, context: str, case: str) -> None:
    there(context)
    verdict = judged(kernels.RIGHT[name], context, case)
    assert verdict.status == "pass", verdict.detail
    assert verdict.contexts[context].status == "held"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_known_kernel_in_its_own_process_is_right_in_every_context_of_a_gpu(cli: Cli, impl: str) -> None:
    contexts = [word for name in ("stream", "graph", "thread", "again") for word in ("--context", name)]
    done = cli("repro", impl, *contexts, FILLING, "--device", "cuda")
    assert done.code == 0, done.out
    assert "context graph: held" in done.out and "context stream: held" in done.out


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize(("name", "code"), [("another_when_compiled", 1), ("plain_when_compiled", 0), ("right", 0)])
def test_what_is_wrong_inside_torch_compile_alone_is_found_on_a_gpu(cli: Cli, name: str, code: int) -> None:
    within = ("--context", "compile", FILLING, "--device", "cuda", "--timeout", "300")
    done = cli("repro", f"{context_kernels.__file__}:{name}", *within)
    assert done.code == code and ("context compile: held" in done.out) == (code == 0), done.out


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_that_waits_cannot_be_captured_which_is_told_with_its_line(cli: Cli) -> None:
    done = cli("repro", f"{kernels.__file__}:waits", "--context", "graph", FILLING, "--device", "cuda")
    assert done.code == 0, done.out
    said = " ".join(done.out.split())
    assert "context graph: not tried; it cannot be captured" in said and "gpu_context_kernels.py" in said


@dataclass
class Gpu:
    """A GPU in Python: what a kernel launches while a graph is captured runs at each replay."""

    capturing: list[Callable[[], None]] | None = None

    def launch(self, work: Callable[[], None]) -> None:
        """Run ``work`` now, or at each replay of the graph that is captured."""
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)


@dataclass
class Graph:
    """In place of torch.cuda.CUDAGraph."""

    work: list[Callable[[], None]] = field(default_factory=list)

    def replay(self) -> None:
        for each in self.work:
            each()


@dataclass
class Scaled:
    """A kernel, y = x * weight, on a fake GPU. ``fault``: what it does wrong while a graph is captured."""

    gpu: Gpu
    fault: str = ""
    by_autograd: bool = False
    one_at_a_time: str = ""
    shared: Tensor | None = None
    expects: str = ""
    was_built: int = 0

    def forward(self, inputs: Inputs, *, wanted: Collection[str] | None = None, waits: bool = True) -> Called:
        captured = self.gpu.capturing is not None
        y = torch.zeros_like(inputs.x)
        if self.fault == "shares y" and captured:
            y = self.shared = y if self.shared is None else self.shared
        weight = inputs.weight.clone() if self.fault == "keeps the weight" else inputs.weight
        if self.fault == "raises" and captured:
            raise Broken("exception", "", "forward raised RuntimeError: not permitted", ('  File "mine.py", line 7',))
        self.gpu.launch(lambda: y.copy_(inputs.x * weight))
        return Called({"y": y}, inputs)

    def backward(self, called: Called, *, retain: bool = False, waits: bool = True) -> dict[str, Tensor]:
        inputs, dx = called.inputs, torch.zeros_like(called.inputs.dy)
        if not (self.fault == "not recorded" and self.gpu.capturing is not None):
            self.gpu.launch(lambda: dx.copy_(inputs.dy * inputs.weight))
        return {"dx": dx}

    def is_compiled(self) -> bool:
        return False

    def built(self) -> int:
        return self.was_built

    def compiled(self) -> Scaled:
        return self

    def accumulated(self, batches: Collection[Inputs]) -> dict[str, Tensor]:
        return {}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    device = Gpu()

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        device.capturing = graph.work
        try:
            yield
        finally:
            device.capturing = None

    @contextmanager
    def current(stream: object) -> Iterator[None]:
        yield

    for name, value in {"CUDAGraph": Graph, "graph": capture, "stream": current, "Stream": SimpleNamespace}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    return device


def steps_of(context: str, kernel: Scaled) -> tuple[tuple[Step, ...], tuple[Mapping[str, Tensor], ...]]:
    case = parsed(SMALL)
    inputs = [make(parsed(SMALL.replace("seed=3", f"seed={seed}")), OPS[case.op], "cpu") for seed in (3, 4)]
    eager = tuple({"y": each.x * each.weight, "dx": each.dy * each.weight} for each in inputs)  # type: ignore[operator]
    return perform(context, kernel, inputs[0], inputs[1]).steps, eager


def wrong_steps(kernel: Scaled) -> list[tuple[str, str]]:
    """(words, output) of the results in a graph that have other bits than those in eager mode."""
    steps, eager = steps_of("graph", kernel)
    assert len(steps) == 5
    return [(s.words, n) for s in steps for n, t in s.outputs.items() if not torch.equal(t, eager[s.of[0]][n])]


def test_replays_of_a_right_kernel_have_the_results_of_their_inputs(fake: Gpu) -> None:
    assert wrong_steps(Scaled(fake)) == []


def test_a_backward_that_no_graph_records_leaves_the_poison(fake: Gpu) -> None:
    found = wrong_steps(Scaled(fake, "not recorded"))
    assert {output for _, output in found} == {"dx"} and len(found) == 4


def test_a_weight_of_the_capture_shows_in_a_replay_with_another(fake: Gpu) -> None:
    found = wrong_steps(Scaled(fake, "keeps the weight"))
    assert found[0] == ("in a replay of a CUDA graph of forward, with other inputs", "y")


def test_two_graphs_that_write_to_the_same_memory_show_when_they_are_replayed_in_turn(fake: Gpu) -> None:
    assert wrong_steps(Scaled(fake, "shares y")) == [("after the replay of another CUDA graph of the same kernel", "y")]


def test_a_capture_that_fails_is_told_with_the_operation_and_its_line(fake: Gpu) -> None:
    done = perform("graph", Scaled(fake, "raises"), *(2 * [make(parsed(SMALL), OPS["rmsnorm"], "cpu")]))
    assert not done.steps
    assert done.not_tried.startswith("it cannot be captured: forward raised RuntimeError: not permitted (File")


def test_a_stream_gets_inputs_that_were_poison_before(fake: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append, raising=False)
    (step,), eager = steps_of("stream", Scaled(fake))
    late = gpu._LATE_CYCLES
    assert slept == [late, *[2 * late] * 32, late, *[2 * late] * 32], "the streams of all are busy for longer"
    assert all(torch.equal(step.outputs[name], eager[0][name]) for name in ("y", "dx"))


def test_another_device_takes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given: Any = make(parsed(SMALL), OPS["rmsnorm"], "cpu")
    with pytest.raises(NotTried, match="two GPUs"):
        next(gpu.device(Scaled(Gpu()), given, given))
