"""A small case of a GPU's kernel: its tensors are on the CPU, and the kernel finds a copy of them on its device."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.errors import Broken
from normcheck.impls.implementation import Implementation
from normcheck.isolation import worker
from normcheck.isolation.client import Client
from normcheck.isolation.intact import Noted
from normcheck.isolation.messages import Inbox, Message, packed
from normcheck.isolation.remote_run import RemoteRun
from normcheck.isolation.replies import is_set
from normcheck.isolation.session import ProcessSession
from normcheck.isolation.shared_memory import MIRROR_BYTES, HostMemory, Mirror, Space, shared_bytes
from normcheck.runner.arena import Stray, Surroundings
from normcheck.runner.run import LocalRun
from normcheck.runner.session import copied
from tests.case_lines import case_of
from tests.plain_rmsnorm import CASE, backward, forward, plain


class Here:
    """In place of a client: the worker answers in this process. Its device is other memory of the CPU."""

    awaited, alive = 0, True
    strays: tuple[Stray, ...] = ()  # what the kernel allocates lies on its device

    def __init__(self, implementation: Implementation) -> None:
        self.memory = HostMemory()
        device = HostMemory()
        self.state = worker.State(
            self.memory,
            sandboxed=False,
            noted=Noted(),
            mirror=Mirror(self.memory, device),
            implementation=implementation,
        )
        self.far_from = self.memory.address, self.memory.address + (1 << 20)
        self.answers: list[Message] = []

    def space(self, first: int, device: str) -> Space:
        assert device == "cpu"
        return Space(self.memory, first, "cpu")

    def post(self, message: Message, space: Space | None = None) -> int:
        if space is not None:
            message |= {"first": space.first, "mirrored": True}
        inbox = Inbox()
        inbox.add(packed(message))
        received = inbox.next()
        assert received is not None
        self.answers.append(worker._answer(self.state, received))
        self.awaited += 1
        return self.awaited

    def collect(self) -> Message:
        return self.answers.pop()


def remote(implementation: Implementation) -> tuple[RemoteRun, Here, Inputs]:
    here = Here(implementation)
    run = RemoteRun(cast(Client, here), 1, Surroundings(), by_autograd=implementation.backward is None)
    return run, here, copied(make(CASE, OPS["rmsnorm"], "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("own_backward", [True, False])
def test_a_kernel_returns_what_it_does_without(own_backward: bool) -> None:
    implementation = plain() if own_backward else plain(forward=lambda *a, **k: forward(*a, **k)["y"], backward=None)
    run, _, given = remote(implementation)
    local, inputs = LocalRun(implementation, Surroundings()), make(CASE, OPS["rmsnorm"], "cpu")
    one, other = run.forward(CASE, given).result(), local.forward(CASE, inputs).result()
    assert one.outputs.keys() == other.outputs.keys()
    assert all(torch.equal(one.outputs[name], other.outputs[name]) for name in other.outputs)
    if own_backward:
        got, expected = (r.backward(CASE, i, one.outputs).result() for r, i in ((run, given), (local, inputs)))
    else:
        got, expected = one.by_autograd(given.cotangents), other.by_autograd(inputs.cotangents)
    assert got.keys() == expected.keys() == {"dx", "dw", "db"}
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert run.strays({}) == []


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_kernel_writes_to_its_inputs_comes_back(raises: bool) -> None:
    places = []

    def writes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> dict[str, Any]:
        places.append(x.data_ptr())
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(3.0)
        bias.zero_()
        if raises:
            raise ValueError("later")
        return forward(x, weight, bias, eps=eps)

    run, here, given = remote(plain(forward=writes))
    pending = run.forward(CASE, given)
    if raises:
        with pytest.raises(Broken, match="later"):
            pending.result()
    else:
        pending.result()
    assert not here.far_from[0] <= places[0] < here.far_from[1]  # the kernel saw the copy
    assert given.x.as_strided((1,), (1,), given.x.storage_offset() - 1).item() == 3.0
    assert given.bias is not None and not given.bias.any()


def test_strays_of_a_call_that_raised_are_asked_for() -> None:
    """What is known from the call before it says nothing of it."""

    def raises(*tensors: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
        own = torch.empty(4)
        own.as_strided((1,), (1,), own.storage_offset() - 1).fill_(3.0)
        raise ValueError("after that")

    run, _, given = remote(plain(backward=raises))
    outputs = run.forward(CASE, given).result().outputs
    assert run.strays({}) == []
    with pytest.raises(Broken, match="after that"):
        run.backward(CASE, given, outputs).result()
    assert [(stray.elements, stray.written) for stray in run.strays({})] == [(4, 1)]


class Flagged(Here):
    """As on a GPU: an answer says only whether there are strays, in a place of the shared memory."""

    def post(self, message: Message, space: Space | None = None) -> int:
        number = super().post(message, space)
        if message["do"] != "strays" and "strays" in self.answers[-1]:
            found = self.answers[-1].pop("strays")
            self.answers[-1]["clean"] = Space(self.memory, 1 << 25).copy_in_dense(torch.tensor(not found))
        return number


@pytest.mark.parametrize("writes", [False, True])
def test_strays_are_asked_for_if_and_only_if_there_are_any(writes: bool) -> None:
    def beside(*arguments: Any, eps: float) -> dict[str, torch.Tensor]:
        own = torch.empty(4)
        if writes:
            own.as_strided((1,), (1,), own.storage_offset() + 4).fill_(3.0)
        return backward(*arguments, eps=eps)

    here = Flagged(plain(backward=beside))
    run = RemoteRun(cast(Client, here), 1, Surroundings(), by_autograd=False)
    given = copied(make(CASE, OPS["rmsnorm"], "cpu"))
    run.backward(CASE, given, run.forward(CASE, given).result().outputs).result()
    asked = here.awaited
    assert [(stray.elements, stray.written) for stray in run.strays({})] == [(4, 1)] * writes
    assert here.awaited - asked == int(writes)


@pytest.mark.parametrize("place", [{}, {"at": -1}, "nowhere", None])
def test_a_flag_in_no_place_is_a_crash(place: Any) -> None:
    with pytest.raises(Broken, match="no sensible answer to strays"):
        is_set(Space(HostMemory()), place)


def test_a_graph_outlives_the_next_call() -> None:
    run, _, given = remote(plain(forward=lambda *a, **k: forward(*a, **k)["y"], backward=None))
    first = run.forward(CASE, given, others_first=True).result()
    run.forward(CASE, given.each(lambda t: t * 2), others_first=True).result()
    later = first.by_autograd(given.cotangents)
    alone, _, same = remote(plain(forward=lambda *a, **k: forward(*a, **k)["y"], backward=None))
    at_once = alone.forward(CASE, same).result().by_autograd(same.cotangents)
    assert all(torch.equal(later[name], at_once[name]) for name in ("dx", "dw", "db"))


def test_only_small_cases_of_a_gpu_stay_on_the_cpu() -> None:
    session = ProcessSession("kernel.py", "rmsnorm", "mine", "cuda", by_autograd=False)
    assert session.home(case_of("rmsnorm fp16 M=256 N=128"), "cuda") == "cpu"
    assert session.home(case_of("rmsnorm fp16 M=257 N=128"), "cuda") == "cuda"
    assert session.home(case_of("rmsnorm fp16 M=255 N=128 layout=strided gap=8"), "cuda") == "cuda"


@pytest.mark.parametrize("line", ["M=1 N=32768", "M=32768 N=1", "M=1 N=32760 layout=strided gap=8", "M=8 N=4096"])
def test_every_small_case_fits(line: str) -> None:
    """Twice: the graph of a forward may be kept while another call is made."""
    for op in ("layernorm_relu_bitmask lower_clip=0.0 upper_clip=6.0", "rmsnorm_llama"):
        name, *options = op.split()
        case = case_of(" ".join([name, "fp32", line, *options]))
        assert case.small and 2 * shared_bytes(case) < MIRROR_BYTES
