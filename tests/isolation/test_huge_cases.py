"""A huge case on a GPU: memory and a worker of its own for as long as it runs, in turn, and no copy too many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from normcheck.cases import case as cases
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.isolation import case_memory, spare
from normcheck.isolation.client import Client
from normcheck.isolation.messages import Message
from normcheck.isolation.session import ProcessSession
from normcheck.isolation.shared_memory import HostMemory, Space, shared_bytes
from normcheck.isolation.watched_memory import WatchedMemory
from tests.case_lines import case_of
from tests.command_line import Cli, KernelFile

USUAL = 1 << 26
SMALL, HUGE = case_of("rmsnorm fp16 M=3 N=16"), case_of("rmsnorm fp16 M=2049 N=16384")


class OnHost:
    """In place of a GPU's memory: ``allocated`` counts, ``handle`` says which it is."""

    made: list[OnHost]

    def __init__(self, size: int) -> None:
        self.size, self.handle, self.released = size, f"{size} bytes", False
        self._memory = HostMemory()
        self.device, self.address = "cpu", self._memory.address
        self.part = self._memory.part

    @classmethod
    def allocated(cls, size: int) -> OnHost:
        cls.made.append(cls(size))
        return cls.made[-1]

    def release(self) -> None:
        assert not any(worker.alive for worker in Silent.made if worker.opened == self.handle)
        self.released = True


class Silent:
    """In place of a worker: it answers nothing, and is done with everything."""

    made: list[Silent]
    of_this_server = True

    def __init__(self, sandbox: object, python: str) -> None:
        self.alive, self.opened, self.memory, self.idle_seconds = True, "", HostMemory(), 0.0
        self.watched = WatchedMemory(self.memory)
        self.made.append(self)

    def send(self, message: Message) -> None:
        self.opened = message.get("opened") or self.opened

    def receive(self, seconds: float, what: str) -> Message:
        return {}

    def ask(self, message: Message, seconds: float, what: str) -> Message:
        return {}

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client of a GPU's kernel, of which only the memory's sizes are real."""
    OnHost.made, Silent.made = [], []
    usual = OnHost(USUAL)
    monkeypatch.setattr(spare, "Worker", Silent)
    monkeypatch.setattr(case_memory, "DeviceMemory", OnHost)
    monkeypatch.setattr(case_memory, "_usual_bytes", lambda: USUAL)
    monkeypatch.setattr(case_memory, "_usual_memory", lambda: usual)
    monkeypatch.setattr(spare.forkserver, "sound", lambda python: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cases, "HUGE_ELEMENTS", 1 << 20)
    client = Client("kernel.py", "rmsnorm", "mine", "cuda", None)
    yield client
    client.end()


def opened(client: Client) -> Space:
    """The memory of a call on the GPU, which the worker opens."""
    found = client.space(0, "cuda")
    client.post({"do": "forward"}, found)
    client.collect()
    return found


def test_a_huge_case_has_memory_and_a_worker_of_its_own(client: Client) -> None:
    client.begin(SMALL, 9.0)
    assert (opened(client).memory.size, client.alone) == (USUAL, False)
    client.finish()  # nothing ends
    client.begin(HUGE, 9.0)
    assert client.alone and client.before == ()
    assert not OnHost.made  # only once a call needs it: what there is can be counted before
    assert opened(client).memory.size == shared_bytes(HUGE)
    client.finish()
    client.begin(SMALL, 9.0)
    assert (opened(client).memory.size, client.before) == (USUAL, ())
    assert [worker.opened for worker in Silent.made] == [f"{size} bytes" for size in (USUAL, shared_bytes(HUGE), USUAL)]
    assert [memory.released for memory in OnHost.made] == [True]


def test_a_worker_that_was_started_ahead_does_not_serve_it(client: Client) -> None:
    client.start()
    client.begin(HUGE, 9.0)
    opened(client)
    assert [worker.opened for worker in Silent.made] == ["", f"{shared_bytes(HUGE)} bytes"]
    assert [worker.alive for worker in Silent.made] == [False, True]
    client.close()  # as when it crashed
    opened(client)
    assert len(OnHost.made) == 1 and Silent.made[-1].opened == OnHost.made[0].handle
    client.finish()
    assert OnHost.made[0].released


def test_a_huge_case_that_fits_shares_the_memory(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_memory, "_usual_bytes", lambda: 1 << 40)
    client.begin(HUGE, 9.0)
    assert not client.alone


def test_inputs_that_are_held_are_their_own_copies(client: Client) -> None:
    client.begin(HUGE, 9.0)
    pristine = make(SMALL, OPS["rmsnorm"], "cpu")
    held = client.hold(pristine)
    for (name, before), (_, after) in zip(pristine.named(), held.named(), strict=True):
        assert (before.stride(), before.storage_offset()) == (after.stride(), after.storage_offset()), name
        assert torch.equal(before, after)
    first = client.space(0, "cpu").next
    space = client.space(0, "cpu")
    place, copy = space.copy_in(held.x)
    assert space.next == first and place["at"] < first  # nothing was copied
    copy.bring_back()
    assert torch.equal(held.x, pristine.x)
    space.copy_in(pristine.x)
    assert space.next > first


@pytest.mark.parametrize(
    "line",
    [
        "rmsnorm fp16 M=2049 N=64",
        "rmsnorm bf16 M=7 N=4099 layout=misaligned bias=none",
        "layernorm fp32 M=300 N=129 layout=strided gap=64",
        "rmsnorm fp16 M=900 N=8 layout=x_strided gap=4096",
        "rmsnorm_llama bf16 M=300 N=300 weight_dtype=fp32 bias=none",
        "layernorm_relu_bitmask fp16 M=1000 N=513 lower_clip=0.0 upper_clip=6.0",
        "layernorm fp16 M=0 N=24",
        "rmsnorm fp16 M=2 N=1048576",
    ],
)
def test_any_call_fits_into_the_bytes_that_are_counted(line: str) -> None:
    """A forward whose gradients come along, and a backward, each with its inputs and all that it returns."""
    case = case_of(line)
    op, inputs = OPS[case.op], make(case, OPS[case.op], "cpu")
    y = torch.empty(case.M, case.N, dtype=torch.float32 if case.op == "rmsnorm_llama" else inputs.x.dtype)
    saved = [y, *[torch.empty(case.M) for _ in op.statistics]]
    if op.clamped:
        saved.append(torch.empty(case.M, case.N, dtype=torch.bool))
    gradients = [torch.empty(case.M, case.N, dtype=inputs.x.dtype), inputs.weight, inputs.weight]
    memory = HostMemory()
    backward, forward = Space(memory), Space(memory)
    for _, tensor in inputs.named():
        backward.copy_in(tensor)
        forward.copy_in(tensor)
    for tensor in saved:
        backward.copy_in(tensor)
        forward.copy_in_dense(tensor)
    for tensor in gradients:
        backward.copy_in_dense(tensor)
        forward.copy_in_dense(tensor)
    needed = shared_bytes(case)
    assert max(backward.next, forward.next) <= needed
    assert needed <= max(backward.next, forward.next) * 1.02 + (3 << 24)


FILE = """
import torch
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    y = x.float() * rstd[..., None] * weight.float()
    {fault}
    return {{"y": (y if bias is None else y + bias.float()).to(x.dtype), "rstd": rstd}}

def backward(dy, x, weight, bias, saved, *, eps):
    g, rstd = dy.float(), saved["rstd"].reshape(*x.shape[:-1], 1)
    xhat, wd = x.float() * rstd, g * weight.float()
    dx = (wd - xhat * (xhat * wd).mean(-1, keepdim=True)) * rstd
    dims = tuple(range(x.dim() - 1))
    dw, db = (g * xhat).sum(dims), g.sum(dims)
    return {{"dx": dx.to(x.dtype), "dw": dw.to(weight.dtype), "db": db.to(weight.dtype)}}

IMPLEMENTATIONS = (Implementation(name="mine", op="rmsnorm", forward=forward, backward=backward, ranks=(2, 3)),)
"""
FAULTS = {
    "pass": None,
    "x.mul_(2)": "input_modified",
    "x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(3.0)": "out_of_bounds_write",
    "y = y * 1.5": "mismatch",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_is_judged_alike_on_held_inputs(
    cli: Cli, kernel_file: KernelFile, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Here every case holds its inputs, and goes through all probes."""
    monkeypatch.setattr(ProcessSession, "copies", lambda self, inputs: self._client.hold(inputs))
    path = str(kernel_file(FILE.format(fault=fault)))
    fields = ("--op", "rmsnorm", "--dtype", "fp16", "--device", "cpu", "--max-examples", "22", "--allow-thin")
    fields += ("--no-contexts",)  # which hold two at once, and are never tried on what is huge
    done = cli("verify", "--impl", path, *fields, "--report", "json:out.json")
    (verdict,) = json.loads(Path("out.json").read_text(encoding="utf-8"))["verdicts"]
    assert (done.code, verdict["failure"] and verdict["failure"]["kind"]) == (int(fault != "pass"), FAULTS[fault])
