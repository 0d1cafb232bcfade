"""A small case of a GPU's kernel in this process: its tensors are on the CPU, and other memory stands for the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from normcheck.audit import catalogue
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.checks.check import Result, check
from normcheck.errors import Broken
from normcheck.impls.implementation import Implementation
from normcheck.runner.arena import Surroundings
from normcheck.runner.carried import CARRIER, CarriedRun, Carrier
from normcheck.runner.run import LocalRun
from normcheck.runner.session import LocalSession, copied
from tests.case_lines import case_of
from tests.plain_rmsnorm import CASE, forward, plain
from tests.some import some

FAULTS = ("mA03", "mR01", "mW05", "mD02", "mF04", "X07", "X15", "P02", "P11")


def by_autograd(**more: Any) -> Implementation:
    return plain(**{"forward": lambda *a, **k: forward(*a, **k)["y"], "backward": None, **more})


@pytest.fixture(name="carrier")
def carrier_of_the_case() -> Iterator[Carrier]:
    carrier = Carrier()
    carrier.begin("cpu")
    yield carrier
    carrier.begin("")


def carried(implementation: Implementation, carrier: Carrier) -> tuple[CarriedRun, Inputs]:
    return CarriedRun(implementation, Surroundings(), carrier), copied(make(CASE, OPS["rmsnorm"], "cpu"))


@pytest.mark.parametrize("implementation", [plain(), by_autograd()], ids=["own backward", "autograd"])
def test_a_kernel_returns_what_it_does_without(implementation: Implementation, carrier: Carrier) -> None:
    run, given = carried(implementation, carrier)
    local, inputs = LocalRun(implementation, Surroundings()), make(CASE, OPS["rmsnorm"], "cpu")
    one, other = run.forward(CASE, given).result(), local.forward(CASE, inputs).result()
    assert one.outputs.keys() == other.outputs.keys()
    assert all(torch.equal(one.outputs[name], other.outputs[name]) for name in other.outputs)
    if implementation.backward is not None:
        got, expected = (r.backward(CASE, i, one.outputs).result() for r, i in ((run, given), (local, inputs)))
    else:
        got, expected = one.by_autograd(given.cotangents), other.by_autograd(inputs.cotangents)
    assert got.keys() == expected.keys() == {"dx", "dw", "db"}
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert run.strays({}) == []


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_kernel_writes_to_its_inputs_comes_back(raises: bool, carrier: Carrier) -> None:
    places = []

    def writes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> dict[str, Any]:
        places.append(x.data_ptr())
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(3.0)
        bias.zero_()
        if raises:
            raise ValueError("later")
        return forward(x, weight, bias, eps=eps)

    run, given = carried(plain(forward=writes), carrier)
    for _ in range(2):
        pending = run.forward(CASE, given)
        if raises:
            with pytest.raises(Broken, match="later"):
                pending.result()
        else:
            pending.result()
    assert places[0] == places[1] != given.x.data_ptr()  # the kernel saw the copy, in the same place each time
    assert given.x.as_strided((1,), (1,), given.x.storage_offset() - 1).item() == 3.0
    assert given.bias is not None and not given.bias.any()


def test_an_input_with_another_geometry_is_modified(carrier: Carrier) -> None:
    def resized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> dict[str, Any]:
        returned = forward(x, weight, bias, eps=eps)
        weight.untyped_storage().resize_(8)
        return returned

    run, given = carried(plain(forward=resized), carrier)
    with pytest.raises(Broken, match="weight was modified: its shape, strides or storage") as broken:
        run.forward(CASE, given).result()
    assert broken.value.kind == "input_modified"


def test_a_result_in_the_memory_of_the_one_before_is_told(carrier: Carrier) -> None:
    own = torch.empty(5, 24, dtype=torch.float16)
    run, given = carried(plain(forward=lambda x, *a, **k: own.copy_(forward(x, *a, **k)["y"])), carrier)
    run.forward(CASE, given).result()
    with pytest.raises(Broken, match="y of two calls lies in the same memory"):
        run.forward(CASE, given).result()


def test_strays_are_named(carrier: Carrier) -> None:
    def beside(x: torch.Tensor, *others: Any, eps: float) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=x.dtype).copy_(forward(x, *others, eps=eps)["y"])
        y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(3.0)
        return y

    run, given = carried(plain(forward=beside), carrier)
    run.forward(CASE, given).result()
    assert [(stray.name, stray.elements, stray.written) for stray in run.strays({})] == [("y", 120, 1)]


def test_a_graph_outlives_the_next_call(carrier: Carrier) -> None:
    run, given = carried(by_autograd(), carrier)
    first = run.forward(CASE, given, others_first=True).result()
    run.forward(CASE, given.each(lambda t: t * 2), others_first=True).result()
    later = first.by_autograd(given.cotangents)
    alone, same = carried(by_autograd(), carrier)
    at_once = alone.forward(CASE, same).result().by_autograd(same.cotangents)
    assert all(torch.equal(later[name], at_once[name]) for name in ("dx", "dw", "db"))


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_case_has_the_same_result(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def carries(self: Carrier, case: Case, device: str) -> str:
        self.begin("cpu")
        return device

    def findings() -> list[Result]:
        made = catalogue.mutants()[fault].make("layernorm") if fault else None
        case = case_of("layernorm fp32 M=6 N=40 layout=rank3_strided gap=3 seed=2 rows=shifted")
        return [check(made, OPS["layernorm"], case, "cpu") if made else check(plain(), OPS["rmsnorm"], CASE, "cpu")]

    expected = findings()
    monkeypatch.setattr(Carrier, "home", carries)
    got = findings()
    CARRIER.begin("")
    for one, other in some(zip(got, expected, strict=True)):
        assert [(c.output, c.check, c.comparison.ratio) for c in one.checked] == [
            (c.output, c.check, c.comparison.ratio) for c in other.checked
        ]
        assert [(p.kind, p.output) for p in one.problems] == [(p.kind, p.output) for p in other.problems]


def test_only_small_cases_are_carried_until_they_end() -> None:
    session = LocalSession(plain())
    with session.case(CASE, 10.0):
        assert session.home(case_of("rmsnorm fp16 M=257 N=128"), "cuda") == "cuda"
        assert isinstance(session.run(Surroundings()), LocalRun)
        assert session.home(CASE, "cpu") == "cpu"
        assert isinstance(session.run(Surroundings()), LocalRun)
        assert session.home(CASE, "cuda") == "cpu"
        assert isinstance(session.run(Surroundings()), CarriedRun)
    assert isinstance(session.run(Surroundings()), LocalRun)


def test_a_marked_result_is_taken_as_it_reads(carrier: Carrier) -> None:
    """Torch may negate, or conjugate, a result only when it is read, and refuses a view of its bytes."""
    memory = torch.tensor([1.0, -2.0])
    marked = [torch._neg_view(memory), torch._neg_view(memory).expand(3, 2), torch.tensor([1j, 2.0]).conj()]
    taken = carrier.take_back([], marked)
    assert [result.tolist() for result in taken] == [result.tolist() for result in marked]
