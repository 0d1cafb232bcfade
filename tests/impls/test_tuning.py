"""A Triton autotuner times briefly in a process that judges kernels, and as ever in the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from normcheck.impls.kernels import configurations, interpreter
from tests.command_line import Cli

if not torch.cuda.is_available():
    interpreter.enable()

import triton
from triton.runtime.autotuner import Autotuner


class Event:
    """What torch.cuda.Event is here: the calls so far take 2 ms each but the last, which takes 1."""

    calls = 0

    def __init__(self, **_: Any) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = Event.calls

    def elapsed_time(self, other: Event) -> float:
        return 1.0 if other.at == 6 else 2.0


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run = Autotuner.run
    monkeypatch.setattr(configurations, "_STATE", configurations.SimpleNamespace(**vars(configurations._STATE)))
    monkeypatch.setattr(configurations._STATE, "interpreted", False)
    monkeypatch.setattr(Event, "calls", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(Autotuner, "run", getattr(run, "__wrapped__", run))
    yield
    Autotuner.run = run


def _kernel(X: Any, N: Any, BLOCK: Any) -> None:
    Event.calls += 1


def tuner(**more: Any) -> Autotuner:
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
    made = triton.autotune(configs=configs, key=["N"], **more)(triton.jit(_kernel))
    assert isinstance(made, Autotuner)
    made.fn.run = lambda *args, **kwargs: _kernel(*args[:2], None)
    return made


def called(tuned: Autotuner) -> int:
    """How often its kernel ran for the first call with a new N, of both configurations."""
    Event.calls = 0
    tuned.run(None, 8, grid=(1,), warmup=False)
    return Event.calls


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("more", [{}, {"warmup": 5, "rep": 20}])
@pytest.mark.filterwarnings("ignore:warmup, rep:DeprecationWarning")
def test_each_configuration_of_a_new_shape_is_called_six_times(more: dict[str, int]) -> None:
    configurations.tune_briefly()
    configurations.ask("")
    tuned = tuner(**more)
    assert called(tuned) == 2 * 6 + 1 and called(tuned) == 1
    assert tuned.cache_results is False


@pytest.mark.usefixtures("brief")
def test_a_function_of_the_user_times_as_it_does() -> None:
    def twice(call: Callable[[], None], quantiles: Any) -> list[float]:
        call(), call()
        return [1.0, 1.0, 1.0]

    configurations.tune_briefly()
    configurations.ask("")
    assert called(tuner(do_bench=twice)) == 2 * 2 + 1


@pytest.mark.usefixtures("brief")
def test_in_the_process_of_the_user_nothing_changes() -> None:
    configurations.ask("")
    assert not hasattr(Autotuner.run, "__wrapped__")


@pytest.mark.usefixtures("brief")
def test_the_fastest_call_counts() -> None:
    def call() -> None:
        Event.calls += 1

    assert configurations._time_of(call, (0.5, 0.2)) == [1.0, 1.0]
    assert configurations._time_of(call) == 2.0  # the sixth call is behind it


KERNEL = """
import torch
from normcheck.impls.kernels import configurations

def rmsnorm(x, weight, bias, eps):
    assert configurations._STATE.brief
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias).to(x.dtype)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("isolation", "code"), [("--isolation", 5), ("--no-isolation", 1)])
def test_a_process_of_kernels_tunes_briefly(isolation: str, code: int, cli: Cli) -> None:
    """A case of it passes, which is no core; in this process it asserts in vain."""
    Path("mine.py").write_text(KERNEL, encoding="utf-8")
    options = ("--impl", "mine.py", "--dtype", "fp32", "--device", "cpu", "--max-examples", "1")
    assert cli("verify", *options, isolation).code == code
