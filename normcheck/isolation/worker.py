"""The process in which an implementation's code runs: it calls forward and backward when it is asked to, nothing else.

It knows no reference, no bound, no seed and no kind of data. Its standard output and error go to its parent, which
keeps the end of them. It has a session of its own, so that it can be killed with whatever it started.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.case import Case, parse
from normcheck.cases.data_kinds import DY_KINDS, ROW_KINDS, WEIGHT_KINDS
from normcheck.cases.guard_bands import PATTERNS
from normcheck.cases.inputs import Inputs
from normcheck.errors import Broken, UnsupportedCase, UsageError, told
from normcheck.impls import discovery, source_location
from normcheck.impls.implementation import Implementation
from normcheck.isolation.messages import Inbox, Message, packed, received
from normcheck.isolation.sandbox import close_all_but, settle
from normcheck.isolation.shared_memory import DeviceMemory, HostMemory, Memory, Space, taken
from normcheck.runner import call
from normcheck.runner.arena import Arena, Surroundings
from normcheck.runner.device import device_for
from normcheck.runner.graph import joined

_KEPT = 3  # runs and graphs that may still be asked about
_LARGEST_KEPT = 1 << 28  # bytes of a result that is kept to see whether the next one lies in the same memory


@dataclass
class _State:
    """What the process knows: whose calls it makes, where tensors cross, and what may still be asked about."""

    memory: Memory
    found: tuple[Implementation, ...] = ()
    implementation: Implementation | None = None
    arenas: deque[tuple[int, Arena]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    returned: dict[str, Tensor] = field(default_factory=dict)
    graphs: deque[tuple[int, Mapping[str, Tensor], Inputs]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0

    @property
    def chosen(self) -> Implementation:
        """The implementation that is called."""
        if self.implementation is None:
            raise UsageError("expected an implementation to be chosen first")
        return self.implementation


def serve(control: socket.socket) -> None:
    """Answer requests until the parent is gone. Two files come first: shared memory, and where output goes."""
    _, (memory, output), _, _ = socket.recv_fds(control, 1, 2)
    settle(output)
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    state, inbox = _State(HostMemory(memory)), Inbox()
    close_all_but(control.fileno())
    while (message := received(control, inbox)) is not None:
        control.sendall(packed({**_answer(state, message), "number": message.get("number")}))


def _answer(state: _State, message: Message) -> Message:
    """What a request comes to; never raises, whatever code under test does."""
    try:
        return _REQUESTS[message["do"]](state, message)
    except UnsupportedCase as refused:
        return {"refused": str(refused)[:10_000] or "its library gave no reason"}
    except UsageError as error:
        return {"usage": str(error)[:10_000]}
    except Broken as broken:
        return {"broken": _told(broken)}
    except BaseException as error:  # KeyboardInterrupt and what else code under test may raise
        text = f"raised {told(error)}"
        return {"broken": {"kind": "exception", "output": "", "message": text, "frames": []}}


def _told(broken: Broken) -> Message:
    frames = [frame[:1000] for frame in broken.frames]
    message = broken.message if len(broken.message) <= 100_000 else broken.message[:100_000] + " [cut]"
    return {"kind": broken.kind, "output": broken.output, "message": message, "frames": frames}


def _load(state: _State, message: Message) -> Message:
    """Import what a spec names, and describe it."""
    device = device_for(message["device"])
    if message.get("memory"):
        state.memory = DeviceMemory.opened(message["memory"])
    state.found = discovery.select(message["spec"], tuple(message["ops"]))
    return {"found": [_described(i, device) for i in state.found]}


def _described(i: Implementation, device: str) -> Message:
    place = source_location.of(i)
    return {
        "name": i.name,
        "op": i.op,
        "dtypes": list(i.dtypes),
        "ranks": list(i.ranks),
        "biases": list(i.biases),
        "strided": i.strided,
        "weight_dtypes": list(i.weight_dtypes),
        "overwrites": list(i.overwrites),
        "shapes": None if i.shapes is None else [list(shape) for shape in i.shapes],
        "deterministic": i.deterministic,
        "batch_invariant": i.batch_invariant,
        "source": str(i.source),
        "unavailable": call.unavailable(i, device),
        "model": None if callable(i.model) else dict(i.model),
        "backward": i.backward is not None,
        "supports": i.supports is not None,
        "place": [place.file, place.line],
    }


def _choose(state: _State, message: Message) -> Message:
    for i in state.found:
        if (i.name, i.op) == (message["name"], message["op"]):
            state.implementation = i
            return {}
    raise UsageError(f"impl={message['name']}: expected it in the file, as when the run began; run it again")


def _supports(state: _State, message: Message) -> Message:
    return {"value": call.supports(state.chosen, _case(message["case"]))}


def _model(state: _State, message: Message) -> Message:
    return {"value": dict(call.model(state.chosen, _case(message["case"])))}


def _case(line: str) -> Case:
    options = {name: op.options for name, op in discovery.ops().items()}
    return parse(line, options=options, kinds={"rows": ROW_KINDS, "dy": DY_KINDS, "weights": WEIGHT_KINDS})


def _forward(state: _State, message: Message) -> Message:
    """Outputs; with dy among what is given, also the gradients."""
    given = _given(state, message["given"])
    x, arena = given["x"], _arena(state, message)
    inputs = Inputs(x, given["weight"], given.get("bias"), given.get("dy", x))
    leaves = call.differentiable(inputs) if message["graph"] else inputs
    with call.poisoned_memory():
        returned = call.forward(state.chosen, _plain_case(message, x), leaves, arena)
    space = Space(state.memory, message["out"])
    answer = _returned(state, space, message, given, returned)
    if message["graph"] and returned["y"].requires_grad:
        state.calls += 1
        state.graphs.append((state.calls, returned, leaves))
        answer["graph"] = state.calls
        answer["joined"] = joined(returned["y"], leaves.x) if message["dtype"] != "fp32" else 0
        if "dy" in given:
            answer["gradients"] = _at_once(state, space, message, given)
    return {**answer, "strays": _strays(state, arena)} if message["graph"] else answer  # backward will tell


def _at_once(state: _State, space: Space, message: Message, given: Mapping[str, Tensor]) -> Message:
    """The gradients of the latest graph, or how that broke, which is told when they are asked for."""
    _, returned, leaves = state.graphs.pop()
    try:
        return _by_autograd(state, space, message, given, returned, leaves)
    except Broken as broken:
        return {"broken": _told(broken)}


def _backward(state: _State, message: Message) -> Message:
    given, saved = _given(state, message["given"]), _given(state, message["saved"])
    x, arena = given["x"], _arena(state, message)
    inputs = Inputs(x, given["weight"], given.get("bias"), given["dy"])
    with call.poisoned_memory():
        returned = call.backward(state.chosen, _plain_case(message, x), inputs, saved, arena)
    space = Space(state.memory, message["out"])
    return {**_returned(state, space, message, {**saved, **given}, returned), "strays": _strays(state, arena)}


def _gradients(state: _State, message: Message) -> Message:
    """Of a graph that an earlier forward left."""
    given = _given(state, message["given"])
    (returned, leaves), *_ = [(r, i) for number, r, i in state.graphs if number == message["graph"]]
    answer = _by_autograd(
        state, Space(state.memory, message["out"]), message, given, returned, replace(leaves, dy=given["dy"])
    )
    return {**answer, "strays": _strays(state, _arena(state, message))}


def _by_autograd(
    state: _State,
    space: Space,
    message: Message,
    given: Mapping[str, Tensor],
    returned: Mapping[str, Tensor],
    leaves: Inputs,
) -> Message:
    with call.poisoned_memory():
        gradients = call.autograd(returned, leaves, _arena(state, message))
    return _returned(state, space, message, given, gradients)


def _strays_of(state: _State, message: Message) -> Message:
    return {"strays": [stray for n, arena in state.arenas if n == message["run"] for stray in _strays(state, arena)]}


def _strays(state: _State, arena: Arena) -> list[list[Any]]:
    return [list(stray) for stray in arena.strays(state.returned)]


def _given(state: _State, places: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: taken(state.memory, place) for name, place in places.items()}


def _plain_case(message: Message, x: Tensor) -> Case:
    """What a call is told: no seed, and no kind of data."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    options = tuple(sorted(message["options"].items()))
    return Case(op=message["op"], dtype=message["dtype"], M=rows, N=columns, eps=message["eps"], options=options)


def _arena(state: _State, message: Message) -> Arena:
    """The arena of a run, which all its calls share."""
    for number, arena in state.arenas:
        if number == message["run"]:
            return arena
    inputs, fresh, allocated = (PATTERNS[name] for name in message["surroundings"])
    arena = Arena(Surroundings(inputs, fresh, allocated))
    state.arenas.append((message["run"], arena))
    state.returned.clear()
    return arena


def _returned(
    state: _State, space: Space, message: Message, given: Mapping[str, Tensor], returned: Mapping[str, Tensor]
) -> Message:
    """Lay what a call returned into shared memory, once it is known that the inputs are still where they were."""
    for name, place in {**message["saved"], **message["given"]}.items():
        now = given[name]
        geometry = (list(now.shape), list(now.stride()), now.storage_offset(), now.untyped_storage().nbytes())
        if geometry != (place["shape"], place["stride"], place["offset"], place["bytes"]):
            text = f"{name} was modified: its shape, strides or storage; inputs belong to the caller"
            raise Broken("input_modified", name, text)
    state.returned.update({name: t for name, t in returned.items() if t.layout == torch.strided})
    laid = [_laid(space, name, tensor) for name, tensor in returned.items()]
    for name, tensor in returned.items():
        _own_memory(state, name, tensor, given)
    return {"returned": laid}


def _laid(space: Space, name: str, tensor: Tensor) -> Message:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return {"name": name, "unusable": f"{name} is a {type(tensor).__name__}: expected a plain torch.Tensor"}
    if tensor.layout != torch.strided:
        return {"name": name, "unusable": f"{name}.layout={tensor.layout}: expected a dense tensor"}
    about = {"name": name, "device": tensor.device.type}
    if tensor.device.type != space.memory.device:
        return about
    placed = space.lay_dense(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return {**about, **placed}


def _own_memory(state: _State, name: str, tensor: Tensor, given: Mapping[str, Tensor]) -> None:
    """Each call returns memory of its own: what an earlier one returned is still in use, as it is kept here."""
    before = state.last.pop(name, None)
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not tensor.numel():
        return
    place = tensor.untyped_storage().data_ptr()
    if any(place == t.untyped_storage().data_ptr() for t in given.values()):
        return
    if before is not None and before.untyped_storage().data_ptr() == place:
        text = f"{name} of two calls lies in the same memory: the second call overwrote the result of the first"
        raise Broken("not_repeatable", name, text)
    if tensor.untyped_storage().nbytes() <= _LARGEST_KEPT:
        state.last[name] = tensor.detach()


_REQUESTS: Mapping[str, Callable[[_State, Message], Message]] = {
    "load": _load,
    "choose": _choose,
    "supports": _supports,
    "model": _model,
    "forward": _forward,
    "backward": _backward,
    "gradients": _gradients,
    "strays": _strays_of,
}
