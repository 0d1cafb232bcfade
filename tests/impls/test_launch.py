"""A launch that is like an earlier one goes to its compilation, one that differs in what Triton looks at does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normcheck.impls.kernels import launch as module
from normcheck.impls.kernels.launch import launch


class Resident(torch.Tensor):
    """A tensor of the CPU that says it is on the first GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


class Second(Resident):
    """One that says it is on the second GPU."""

    device = torch.device("cuda", 1)


class Current:
    """Which GPU is current, as torch tells and sets it."""

    index = 0

    @contextmanager
    def device(self, wanted: torch.device) -> Iterator[None]:
        before, self.index = self.index, wanted.index
        yield
        self.index = before


class Kernel:
    """Answers as a Triton kernel does: called, it gives a compilation, and remembers who was called with what."""

    arg_names = ("x_ptr", "w_ptr", "N", "eps", "BLOCK", "EVEN")

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.on: list[int] = []
        self.launched: list[tuple[Any, ...]] = []

    def fn(self) -> None:
        """What a kernel is told apart by."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ask(*arguments: Any, **constants: Any) -> Any:
            self.asked.append((grid, arguments, constants))
            self.on.append(torch.cuda.current_device())
            return self

        compiled = SimpleNamespace(run=lambda *arguments: self.launched.append((grid, arguments)))
        return compiled.run if len(grid) == 3 else ask


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Current:
    current = Current()
    monkeypatch.setattr(module, "_known", {})
    if request.node.get_closest_marker("gpu"):
        return current
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.index)
    monkeypatch.setattr(torch.cuda, "device", current.device)
    return current


def x_of(dtype: torch.dtype = torch.float16, *, offset: int = 0) -> torch.Tensor:
    """Aligned to 16 bytes but for the ``offset``, in elements."""
    memory = torch.zeros(64, dtype=dtype)
    start = -(memory.data_ptr() // memory.element_size()) % (16 // memory.element_size())
    return memory[start + offset : start + offset + 16].as_subclass(Resident)


def test_a_call_like_another_goes_to_its_compilation() -> None:
    kernel = Kernel()
    x, w, again = x_of(), x_of(torch.float32), x_of()
    launch(kernel, (7,), x, w, 16, 1e-5, BLOCK=16, EVEN=True, num_warps=4)
    launch(kernel, (9, 2), again, w, 48, 1e-6, BLOCK=16, EVEN=True, num_warps=4)
    assert len(kernel.asked) == 1
    ((grid, arguments),) = kernel.launched
    assert grid == (9, 2, 1)
    assert arguments[0] is again and arguments[1:] == (w, 48, 1e-6, 16, True)


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"x": x_of(torch.bfloat16)},
    "alignment": {"x": x_of(offset=1)},
    "none": {"w": None},
    "one": {"n": 1},
    "multiple": {"n": 17},
    "width": {"n": 2**31},
    "constant": {"BLOCK": 32},
    "option": {"num_warps": 8},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_asks_anew(change: str) -> None:
    kernel = Kernel()
    own: dict[str, Any] = {"x": x_of(), "w": x_of(torch.float32), "n": 16, "BLOCK": 16, "num_warps": 4}
    for facts in (own, own | CHANGES[change]):
        launch(kernel, (7,), facts["x"], facts["w"], facts["n"], 1e-5,
               BLOCK=facts["BLOCK"], EVEN=True, num_warps=facts["num_warps"])  # fmt: skip
    assert len(kernel.asked) == 2 and not kernel.launched


def test_another_kernel_asks_anew() -> None:
    first, second = Kernel(), Kernel()
    for kernel in (first, second):
        launch(kernel, (7,), x_of(), None, 16, 1e-5, BLOCK=16, EVEN=True)
    assert (len(first.asked), len(second.asked)) == (1, 1)


def test_a_kernel_is_launched_on_the_gpu_of_its_tensors_and_compiled_for_each(current: Current) -> None:
    """Triton launches on the current GPU, where nothing waits for a kernel that writes to another."""
    kernel = Kernel()
    for x in (x_of(), x_of().as_subclass(Second), x_of(), x_of().as_subclass(Second)):
        launch(kernel, (7,), x, None, 16, 1e-5, BLOCK=16, EVEN=True)
    assert kernel.on == [0, 1]
    assert len(kernel.launched) == 2 and current.index == 0


def test_a_tensor_of_the_cpu_goes_to_the_kernel_each_time() -> None:
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (7,), torch.zeros(16), None, 16, 1e-5, BLOCK=16, EVEN=True)
    assert len(kernel.asked) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_misaligned_rows_after_aligned_ones_give_the_same_bits() -> None:
    from normcheck.impls.kernels.forward import forward

    memory = torch.randn(8 * 1024 + 1, device="cuda").half()
    weight = torch.randn(1024, device="cuda").half()
    odd = memory[1:].view(8, 1024)
    for x in (odd.clone(), odd, odd.clone(), odd):
        outputs = forward(x, weight, None, eps=1e-5)
        expected = torch.nn.functional.layer_norm(x.double(), (1024,), weight.double(), None, 1e-5)
        assert torch.allclose(outputs["y"].double(), expected, rtol=2e-3, atol=2e-3)
