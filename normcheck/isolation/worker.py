"""The process in which an implementation's code runs: it calls forward and backward on request, and does nothing else.

It knows no reference, no bound, no seed and no kind of data. Its standard output and error go to its parent, which
keeps the end of them. It has a session of its own, so that it can be killed with the processes that it started.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.declared import rules
from normcheck.cases.guard_bands import PATTERNS
from normcheck.cases.inputs import COTANGENTS, inputs_of, make
from normcheck.cases.ops import OPS
from normcheck.errors import (
    Broken,
    ImportFailed,
    ItselfFailed,
    UnsupportedCase,
    UsageError,
    error_text,
    itself_failed,
)
from normcheck.impls import discovery, source_location
from normcheck.impls.implementation import Implementation
from normcheck.isolation.ground import Plot, on_plot
from normcheck.isolation.intact import WATCHED, torch_as_it_is, watched
from normcheck.isolation.messages import Inbox, Message, packed, received
from normcheck.isolation.replies import ITSELF, NOT_PLAIN
from normcheck.isolation.sandbox import Reach, Sandbox, open_memory
from normcheck.isolation.settling import close_all_but, settle
from normcheck.isolation.shared_memory import (
    MIRROR_BYTES,
    DeviceMemory,
    HostMemory,
    Mirror,
    Space,
    tensor_at,
)
from normcheck.runner import call, compiled, nvidia_driver
from normcheck.runner.arena import Surroundings
from normcheck.runner.device import device_for
from normcheck.runner.kernel_errors import has_part_in
from normcheck.runner.own_memory import Results
from normcheck.runner.run import Forward, LocalRun

_KEPT_RUNS = 3  # and as many graphs: later requests may still need them


@dataclass
class _State:
    """State of the worker: its implementation, the shared memory, and the runs that later requests may need.

    ``shared``: device memory of the parent; ``mirror``: device memory in which the kernel finds what ``memory`` has.
    ``plots``: where the latest call, the last one, and earlier ones allocated. ``touched``: what has been replaced of
    torch since, see ``intact``.
    """

    memory: HostMemory
    sandboxed: bool
    shared: DeviceMemory | None = None
    mirror: Mirror | None = None
    found: tuple[Implementation, ...] = ()
    implementation: Implementation | None = None
    runs: deque[tuple[int, LocalRun]] = field(default_factory=lambda: deque(maxlen=_KEPT_RUNS))
    returned: dict[str, Tensor] = field(default_factory=dict)
    forwards: deque[tuple[int, Forward]] = field(default_factory=lambda: deque(maxlen=_KEPT_RUNS))
    results: Results = field(default_factory=Results)
    plots: list[Plot] = field(default_factory=list)
    calls: int = 0
    touched: Callable[[], str] = field(default_factory=torch_as_it_is)

    @property
    def chosen(self) -> Implementation:
        """The implementation that is called."""
        if self.implementation is None:
            raise UsageError("expected an implementation to be chosen first")
        return self.implementation


def serve(control: socket.socket) -> None:
    """Answer requests until the parent is gone.

    The first message has the sandbox of this process, or None, and two files: shared memory, and a pipe for output.
    """
    inbox = Inbox()
    begun, (memory, output), _, _ = socket.recv_fds(control, 1 << 16, 2)
    inbox.add(begun)
    told = received(control, inbox)
    settle(output)
    sandbox = None if told is None else told["sandbox"]
    state = _State(HostMemory(memory), sandbox is not None)
    close_all_but(control.fileno())
    if sandbox is None:
        open_memory()
    else:
        Sandbox.told(sandbox).enter()
    replaced = watched()
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    while (message := received(control, inbox)) is not None:
        if message.get("plot"):
            first, end = message["plot"]
            state.plots.append(Plot(state.memory, first, end, tuple(state.plots)))
        answer = _answer(state, message)
        if own := replaced():
            text = f"replaced {own}{WATCHED}"
            answer = {"broken": {"kind": "exception", "output": "", "message": text, "frames": []}}
        if message.get("plot"):
            answer["plot"] = _allocated(state)
        if eager := compiled.eager_calls():
            answer["eager"] = eager
        control.sendall(packed({**answer, "number": message.get("number")}))


def _answer(state: _State, message: Message) -> Message:
    """Answer one request. Never raises, whatever code under test does."""
    state.memory.in_autograd = False
    try:
        return _REQUESTS[message["do"]](state, message)
    except UnsupportedCase as refused:
        return {"refused": str(refused)[:10_000] or "its library gave no reason"}
    except UsageError as error:
        said = str(error)[:10_000] + _held(state, error)
        return {"usage": said, "import": isinstance(error, ImportFailed)}
    except Broken as broken:
        return {"broken": _failure(state, broken)}
    except BaseException as error:  # code under test may raise anything, KeyboardInterrupt too
        own = isinstance(error, ItselfFailed) or not has_part_in(error)
        text = itself_failed(error) if own else f"raised {error_text(error)}"
        return {"broken": {"kind": ITSELF if own else "exception", "output": "", "message": text, "frames": []}}


def _allocated(state: _State) -> Message:
    """What the call took of its plot, and what is still in use of this one and those of earlier calls."""
    kept = [block for plot in state.plots for block in plot.kept]
    blocks = state.plots[-1].blocks
    state.plots = [plot for plot in state.plots if plot.kept]
    return {"blocks": blocks, "kept": kept}


def _held(state: _State, error: BaseException) -> str:
    """What the sandbox has to do with ``error``, in words; "" if nothing."""
    if not (state.sandboxed and isinstance(error.__cause__, PermissionError)):
        return ""
    return "; a kernel's process writes only to its own temporary folder here: --no-sandbox lets it do what you may"


def _failure(state: _State, broken: Broken) -> Message:
    frames = [frame[:1000] for frame in broken.frames]
    message = broken.message if len(broken.message) <= 100_000 else broken.message[:100_000] + " [cut]"
    message += _held(state, broken)
    return {"kind": broken.kind, "output": broken.output, "message": message, "frames": frames}


def _load(state: _State, message: Message) -> Message:
    """Import what a spec names, and describe it."""
    if message["device"] == "cuda":
        nvidia_driver.wait_yielding()
    device = device_for(message["device"])
    state.found = discovery.select(message["spec"], tuple(message["ops"]))
    return {"found": [_described(i, device) for i in state.found]}


def _described(i: Implementation, device: str) -> Message:
    place = source_location.of(i)
    return {
        **{name: getattr(i, name) for name in rules(type(i))},
        "name": i.name,
        "op": i.op,
        "unavailable": call.unavailable(i, device),
        "model": None if callable(i.model) else dict(i.model),
        "backward": i.backward is not None,
        "supports": i.supports is not None,
        "place": [place.file, place.line],
    }


def _reach(state: _State, message: Message) -> Message:
    """What this process can do to others, for those who ask what the sandbox holds here."""
    return asdict(Reach.tried(message["file"], message["judge"]))


def _choose(state: _State, message: Message) -> Message:
    for i in state.found:
        if (i.name, i.op) == (message["name"], message["op"]):
            state.implementation = i
            return {}
    raise UsageError(f"impl={message['name']}: expected it in the file, as when the run began; run it again")


def _supports(state: _State, message: Message) -> Message:
    return {"value": call.supports(state.chosen, parsed(message["case"]))}


def _model(state: _State, message: Message) -> Message:
    return {"value": dict(call.model(state.chosen, parsed(message["case"])))}


def _forward(state: _State, message: Message) -> Message:
    """Call forward -> its outputs and, if dy is given and y has a graph, the gradients through y."""
    with _space(state, message) as space:
        given = _given(space, message["given"])
        x, run = given["x"], _run(state, message)
        inputs = inputs_of(given)
        with call.poisoned_memory():
            forward = run.forward(_plain_case(message, x), inputs).result()
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
    state: _State, space: Space, message: Message, given: Mapping[str, Tensor], forward: Forward
) -> Message:
    """The gradients through y, or their failure, which the parent raises when it needs them."""
    try:
        return _by_autograd(state, space, message, given, forward)
    except Broken as broken:
        return {"broken": _failure(state, broken)}


def _warm(state: _State, message: Message) -> Message:
    """Call forward and backward once, on tensors made here, for what that leaves in a compiler's cache."""
    case, device = parsed(message["case"]), device_for(message["device"])
    inputs, run = make(case, OPS[case.op], device), LocalRun(state.chosen, Surroundings())
    forward = run.forward(case, inputs).result()
    if OPS[case.op].quantises:
        return {}
    if state.chosen.backward is None:
        forward.by_autograd(inputs.cotangents)
    else:
        run.backward(case, inputs, forward.outputs).result()
    return {}


def _within(state: _State, message: Message) -> Message:
    """Perform a context -> its steps, and why the others could not be tried."""
    with _space(state, message) as space:
        first, second = (inputs_of(_given(space, message[name])) for name in ("given", "saved"))
        case, run = _plain_case(message, first.x), _run(state, message)
        with call.poisoned_memory():
            done = run.within(message["context"], case, (first, second), asked=message["asked"]).result()
        steps: list[Message] = []
        with call.without_modes():
            for step in done.steps:
                places = [_shared(space, name, tensor) for name, tensor in step.outputs.items()]
                described = {"words": step.words, "of": step.of, "owed": step.owed, "exact": step.exact}
                steps.append({**described, "returned": places})
        return {"steps": steps, "not_tried": done.not_tried, "returned": [p for s in steps for p in s["returned"]]}


def _backward(state: _State, message: Message) -> Message:
    with _space(state, message) as space:
        given, saved = _given(space, message["given"]), _given(space, message["saved"])
        x, run = given["x"], _run(state, message)
        inputs = inputs_of(given)
        with call.poisoned_memory():
            returned = run.backward(_plain_case(message, x), inputs, saved).result()
        return {**_returned(state, space, message, {**saved, **given}, returned), **_seen_around(state, run, space)}


def _gradients(state: _State, message: Message) -> Message:
    """Gradients through the y of an earlier forward."""
    with _space(state, message) as space:
        given = _given(space, message["given"])
        forward, *_ = [forward for number, forward in state.forwards if number == message["graph"]]
        answer = _by_autograd(state, space, message, given, forward)
        return {**answer, **_seen_around(state, _run(state, message), space)}


def _by_autograd(
    state: _State, space: Space, message: Message, given: Mapping[str, Tensor], forward: Forward
) -> Message:
    state.memory.in_autograd = True
    with call.poisoned_memory():
        cotangents = {name: tensor for name, tensor in given.items() if name in COTANGENTS}
        gradients = forward.by_autograd(cotangents)
    return _returned(state, space, message, given, gradients)


def _strays_of(state: _State, message: Message) -> Message:
    return {
        "strays": [stray for number, run in state.runs if number == message["run"] for stray in _strays(state, run)]
    }


def _seen_around(state: _State, run: LocalRun, space: Space) -> Message:
    """What is known of the strays of a run. On a GPU only whether there are any, which is not waited for here."""
    if space.memory.device != "cuda":
        return {"strays": _strays(state, run)}
    clean = run.clean()
    return {"strays": []} if clean is None else {"clean": space.copy_in_dense(clean)}


def _strays(state: _State, run: LocalRun) -> list[list[Any]]:
    return [list(stray) for stray in run.strays(state.returned)]


@contextmanager
def _space(state: _State, message: Message) -> Iterator[Space]:
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


def _run(state: _State, message: Message) -> LocalRun:
    """The run to which a call belongs, which begins with its first call; what it allocates is placed on its plot."""
    plot = state.plots[-1] if message.get("plot") else Plot(state.memory, 0, 0, tuple(state.plots))
    for number, run in state.runs:
        if number == message["run"]:
            run.place(plot)
            return run
    inputs, fresh, allocated = (PATTERNS[name] for name in message["surroundings"])
    run = LocalRun(state.chosen, Surroundings(inputs, fresh, allocated))
    run.place(plot)
    state.runs.append((message["run"], run))
    state.returned.clear()
    return run


def _returned(
    state: _State,
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
    lies = on_plot(space.memory, tensor)
    if lies is not None:
        described |= {"lies": lies, "packed": tensor.is_contiguous() and not tensor.is_neg()}
    return {**described, **space.copy_in_dense(tensor)}


_REQUESTS: Mapping[str, Callable[[_State, Message], Message]] = {
    "load": _load,
    "reach": _reach,
    "choose": _choose,
    "touched": lambda state, message: {"value": state.touched()},
    "supports": _supports,
    "model": _model,
    "forward": _forward,
    "backward": _backward,
    "gradients": _gradients,
    "within": _within,
    "strays": _strays_of,
    "warm": _warm,
}
