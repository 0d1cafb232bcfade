"""The calls of a kernel in its own process, on tensors in memory that the process shares with its parent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.guard_bands import PATTERNS
from normcheck.cases.inputs import COTANGENTS, inputs_of
from normcheck.errors import Broken, UsageError
from normcheck.impls.implementation import Implementation
from normcheck.isolation.intact import Noted
from normcheck.isolation.messages import Message
from normcheck.isolation.replies import NOT_PLAIN
from normcheck.isolation.shared_memory import (
    MIRROR_BYTES,
    DeviceMemory,
    HostMemory,
    Mirror,
    Space,
    tensor_at,
)
from normcheck.isolation.watched_memory import Region, in_region
from normcheck.runner import call
from normcheck.runner.arena import Surroundings
from normcheck.runner.own_memory import Results
from normcheck.runner.run import Forward, LocalRun

_KEPT_RUNS = 3  # and as many graphs: later requests may still need them


@dataclass
class State:
    """State of the worker: its implementation, the shared memory, and the runs that later requests may need.

    ``shared``: device memory of the parent; ``mirror``: device memory in which the kernel finds what ``memory`` has.
    ``regions``: where the latest call, the last one, and earlier ones allocated. ``noted``: what code under test may
    not replace, as it was before.
    """

    memory: HostMemory
    sandboxed: bool
    noted: Noted
    shared: DeviceMemory | None = None
    mirror: Mirror | None = None
    found: tuple[Implementation, ...] = ()
    implementation: Implementation | None = None
    runs: deque[tuple[int, LocalRun]] = field(default_factory=lambda: deque(maxlen=_KEPT_RUNS))
    returned: dict[str, Tensor] = field(default_factory=dict)
    forwards: deque[tuple[int, Forward]] = field(default_factory=lambda: deque(maxlen=_KEPT_RUNS))
    results: Results = field(default_factory=Results)
    regions: list[Region] = field(default_factory=list)
    calls: int = 0

    @property
    def chosen(self) -> Implementation:
        """The implementation that is called."""
        if self.implementation is None:
            raise UsageError("expected an implementation to be chosen first")
        return self.implementation


def held(state: State, error: BaseException) -> str:
    """What the sandbox has to do with ``error``, in words; "" if nothing."""
    if not (state.sandboxed and isinstance(error.__cause__, PermissionError)):
        return ""
    return "; a kernel's process writes only to its own temporary folder here: --no-sandbox lets it do what you may"


def failure(state: State, broken: Broken) -> Message:
    """``broken`` for the parent, no longer than it reads."""
    frames = [frame[:1000] for frame in broken.frames]
    message = broken.message if len(broken.message) <= 100_000 else broken.message[:100_000] + " [cut]"
    message += held(state, broken)
    return {"kind": broken.kind, "output": broken.output, "message": message, "frames": frames}


def _forward(state: State, message: Message) -> Message:
    """Call forward -> its outputs and, if dy is given and y has a graph, the gradients through y."""
    with _space(state, message) as space:
        given = _given(space, message["given"])
        x, run = given["x"], _run(state, message)
        inputs = inputs_of(given)
        with call.poisoned_memory():
            forward = run.forward(_plain_case(message, x), inputs, mode=message["mode"]).result()
        answer = _returned(state, space, message, given, forward.outputs)
        if not message["graph"]:
            return answer  # the strays come with the answer to backward
        if "y" in forward.outputs and forward.outputs["y"].requires_grad:
            answer["joined"] = forward.joined()
            state.calls += 1
            answer["graph"] = state.calls
            if "dy" in given:
                answer["gradients"] = _early_gradients(state, space, message, given, forward)
            else:
                state.forwards.append((state.calls, forward))
        return {**answer, **_seen_around(state, run, space)}


def _early_gradients(
    state: State, space: Space, message: Message, given: Mapping[str, Tensor], forward: Forward
) -> Message:
    """The gradients through y, or their failure, which the parent raises when it needs them."""
    try:
        return _by_autograd(state, space, message, given, forward)
    except Broken as broken:
        return {"broken": failure(state, broken)}


def _within(state: State, message: Message) -> Message:
    """Perform a context -> its steps, and why the others could not be tried."""
    with _space(state, message) as space:
        first, second = (inputs_of(_given(space, message[name])) for name in ("given", "saved"))
        case, run = _plain_case(message, first.x), _run(state, message)
        with call.poisoned_memory():
            done = run.within(message["context"], case, (first, second)).result()
        steps: list[Message] = []
        with call.without_modes():
            for step in done.steps:
                places = [_shared(space, name, tensor) for name, tensor in step.outputs.items()]
                described = {"words": step.words, "of": step.of, "owed": step.owed, "exact": step.exact}
                described["launched"] = step.launched and asdict(step.launched)
                steps.append({**described, "returned": places})
        said = {"not_tried": done.not_tried, "prevented": done.prevented}
        return {"steps": steps, **said, "returned": [p for s in steps for p in s["returned"]]}


def _backward(state: State, message: Message) -> Message:
    with _space(state, message) as space:
        given, saved = _given(space, message["given"]), _given(space, message["saved"])
        x, run = given["x"], _run(state, message)
        inputs = inputs_of(given)
        with call.poisoned_memory():
            returned = run.backward(_plain_case(message, x), inputs, saved).result()
        return {**_returned(state, space, message, {**saved, **given}, returned), **_seen_around(state, run, space)}


def _gradients(state: State, message: Message) -> Message:
    """Gradients through the y of an earlier forward."""
    with _space(state, message) as space:
        given = _given(space, message["given"])
        forward, *_ = [forward for number, forward in state.forwards if number == message["graph"]]
        answer = _by_autograd(state, space, message, given, forward)
        return {**answer, **_seen_around(state, _run(state, message), space)}


def _by_autograd(
    state: State, space: Space, message: Message, given: Mapping[str, Tensor], forward: Forward
) -> Message:
    state.memory.in_autograd = True
    with call.poisoned_memory():
        cotangents = {name: tensor for name, tensor in given.items() if name in COTANGENTS}
        gradients = forward.by_autograd(cotangents)
    return _returned(state, space, message, given, gradients)


def _strays_of(state: State, message: Message) -> Message:
    return {
        "strays": [stray for number, run in state.runs if number == message["run"] for stray in _strays(state, run)]
    }


def _seen_around(state: State, run: LocalRun, space: Space) -> Message:
    """What is known of the strays of a run. On a GPU only whether there are any, which is not waited for here."""
    if space.memory.device != "cuda":
        return {"strays": _strays(state, run)}
    clean = run.clean()
    return {"strays": []} if clean is None else {"clean": space.copy_in_dense(clean)}


def _strays(state: State, run: LocalRun) -> list[list[Any]]:
    return [list(stray) for stray in run.strays(state.returned)]


@contextmanager
def _space(state: State, message: Message) -> Iterator[Space]:
    """The memory with the tensors of a call, free from the byte that ``message`` says on.

    What is mirrored comes to the device before the call; what is there after it goes back, whatever it raised.
    """
    if message.get("opened"):
        state.shared = DeviceMemory.opened(message["opened"])
    if not message.get("mirrored"):
        yield Space(state.shared or state.memory, message["out"])
        if state.shared is not None:
            torch.cuda.synchronize()
        return
    if state.mirror is None:
        state.mirror = Mirror(state.memory, DeviceMemory(torch.empty(MIRROR_BYTES, dtype=torch.uint8, device="cuda")))
    space = Space(state.mirror, message["out"])
    state.mirror.bring(message["first"], message["out"])
    try:
        yield space
    except BaseException:
        with suppress(Exception):  # a lost context copies nothing, and the first error is the one to report
            state.mirror.take_back(message["first"], message["out"])
        raise
    state.mirror.take_back(message["first"], space.next)


def _given(space: Space, places: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor_at(space.memory, place) for name, place in places.items()}


def _plain_case(message: Message, x: Tensor) -> Case:
    """The case as far as a call may know it: without its seed and its kinds of data."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    options = tuple(sorted(message["options"].items()))
    return Case(op=message["op"], dtype=message["dtype"], M=rows, N=columns, eps=message["eps"], options=options)


def _run(state: State, message: Message) -> LocalRun:
    """The run to which a call belongs, which begins with its first call; what it allocates is placed in its region."""
    region = state.regions[-1] if message.get("region") else Region(state.memory, 0, 0, tuple(state.regions))
    for number, run in state.runs:
        if number == message["run"]:
            run.place(region)
            return run
    inputs, fresh, allocated = (PATTERNS[name] for name in message["surroundings"])
    run = LocalRun(state.chosen, Surroundings(inputs, fresh, allocated))
    run.place(region)
    state.runs.append((message["run"], run))
    state.returned.clear()
    return run


def _returned(
    state: State,
    space: Space,
    message: Message,
    given: Mapping[str, Tensor],
    returned: Mapping[str, Tensor],
) -> Message:
    """Copy what a call returned to shared memory, at once: what is judged is what was there on return.

    Raises Broken if an input got another shape, strides or storage.
    """
    for name, place in {**message["saved"], **message["given"]}.items():
        now = given[name]
        geometry = (list(now.shape), list(now.stride()), now.storage_offset(), now.untyped_storage().nbytes())
        if geometry != (place["shape"], place["stride"], place["offset"], place["bytes"]):
            text = f"{name} was modified: its shape, strides or storage; inputs belong to the caller"
            raise Broken("input_modified", name, text)
    with call.without_modes():
        places = [_shared(space, name, tensor) for name, tensor in returned.items()]
    state.returned.update({name: t for name, t in returned.items() if t.layout == torch.strided})
    for name, tensor in returned.items():
        state.results.require_own_memory(name, tensor, given)
    return {"returned": places}


def _shared(space: Space, name: str, tensor: Tensor) -> Message:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return {"name": name, "unusable": f"{name} is a {type(tensor).__name__}: {NOT_PLAIN}"}
    if tensor.layout != torch.strided:
        return {"name": name, "unusable": f"{name}.layout={tensor.layout}: expected a dense tensor"}
    described: Message = {"name": name, "device": tensor.device.type}
    if tensor.device.type != space.memory.device:
        return described
    lies = in_region(space.memory, tensor)
    if lies is not None:
        described |= {"lies": lies, "packed": tensor.is_contiguous() and not tensor.is_neg()}
    return {**described, **space.copy_in_dense(tensor)}


CALLS: Mapping[str, Callable[[State, Message], Message]] = {
    "forward": _forward,
    "backward": _backward,
    "gradients": _gradients,
    "within": _within,
    "strays": _strays_of,
}
"""Name of a request -> what answers it."""
