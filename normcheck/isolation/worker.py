"""The process in which an implementation's code runs: it calls forward and backward on request, and does nothing else.

It knows no reference, no bound, no seed and no kind of data. Its standard output and error go to its parent, which
keeps the end of them. It has a session of its own, so that it can be killed with the processes that it started.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from normcheck.cases.case_line import parsed
from normcheck.cases.declared import rules
from normcheck.contexts.later import note_state
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
from normcheck.impls.kernels import configurations
from normcheck.isolation.calls import CALLS, State, failure, held
from normcheck.isolation.intact import WATCHED, Noted
from normcheck.isolation.messages import Inbox, Message, packed, received
from normcheck.isolation.replies import ITSELF
from normcheck.isolation.sandbox import Reach, Sandbox, open_memory
from normcheck.isolation.settling import close_all_but, settle
from normcheck.isolation.shared_memory import (
    HostMemory,
)
from normcheck.isolation.watched_memory import Region
from normcheck.runner import call, compiled, nvidia_driver
from normcheck.runner.device import device_for
from normcheck.runner.kernel_errors import has_part_in

serving = False
"""Whether this process is a kernel's."""


def serve(control: socket.socket, noted: Noted) -> None:
    """Answer requests until the parent is gone. ``noted``: the functions before any code under test ran.

    The first message has the sandbox of this process, or None, and two files: shared memory, and a pipe for output.
    """
    global serving
    serving = True
    inbox = Inbox()
    begun, (memory, output), _, _ = socket.recv_fds(control, 1 << 16, 2)
    inbox.add(begun)
    told = received(control, inbox)
    settle(output)
    sandbox = None if told is None else told["sandbox"]
    state = State(HostMemory(memory), sandbox is not None, noted)
    close_all_but(control.fileno())
    if sandbox is None:
        open_memory()
    else:
        Sandbox.told(sandbox).enter()
    configurations.tune_briefly()
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    while (message := received(control, inbox)) is not None:
        if message.get("region"):
            first, end = message["region"]
            state.regions.append(Region(state.memory, first, end, tuple(state.regions)))
        answer = _answer(state, message)
        if own := noted.replaced():
            text = f"replaced {own}{WATCHED}"
            answer = {"broken": {"kind": "exception", "output": "", "message": text, "frames": []}}
        if message.get("region"):
            answer["region"] = _allocated(state)
        if message.get("configuration"):
            answer["configurations"] = configurations.told()
        if eager := compiled.eager_calls():
            answer["eager"] = eager
        if graphs := compiled.graphs():
            answer["graphs"] = graphs
        control.sendall(packed({**answer, "number": message.get("number")}))


def _answer(state: State, message: Message) -> Message:
    """Answer one request. Never raises, whatever code under test does."""
    state.memory.in_autograd = False
    try:
        configurations.ask(message.get("configuration", ""))
        return _REQUESTS[message["do"]](state, message)
    except UnsupportedCase as refused:
        return {"refused": str(refused)[:10_000] or "its library gave no reason"}
    except UsageError as error:
        said = str(error)[:10_000] + held(state, error)
        return {"usage": said, "import": isinstance(error, ImportFailed)}
    except Broken as broken:
        return {"broken": failure(state, broken)}
    except BaseException as error:  # code under test may raise anything, KeyboardInterrupt too
        own = isinstance(error, ItselfFailed) or not has_part_in(error)
        text = itself_failed(error) if own else f"raised {error_text(error)}"
        return {"broken": {"kind": ITSELF if own else "exception", "output": "", "message": text, "frames": []}}


def _allocated(state: State) -> Message:
    """What the call took of its region, and what is still in use of this one and those of earlier calls."""
    kept = [block for region in state.regions for block in region.kept]
    blocks = state.regions[-1].blocks
    state.regions = [region for region in state.regions if region.kept]
    return {"blocks": blocks, "kept": kept}


def _load(state: State, message: Message) -> Message:
    """Import what a spec names, and describe it."""
    if message["device"] == "cuda":
        nvidia_driver.wait_yielding()
    device = device_for(message["device"])
    os.environ.update(message["environment"])
    state.found = discovery.select(message["spec"], tuple(message["ops"]))
    return {"found": [_described(i, device) for i in state.found]}


def _described(i: Implementation, device: str) -> Message:
    place, of_backward = source_location.of(i), source_location.defined(i.backward)
    return {
        **{name: getattr(i, name) for name in rules(type(i))},
        "name": i.name,
        "op": i.op,
        "unavailable": call.unavailable(i, device),
        "model": None if callable(i.model) else dict(i.model),
        "backward": i.backward is not None,
        "supports": i.supports is not None,
        "place": [place.file, place.line],
        "backward_place": [of_backward.file, of_backward.line],
    }


def _reach(state: State, message: Message) -> Message:
    """What this process can do to others, for those who ask what the sandbox holds here."""
    return asdict(Reach.tried(message["file"], message["judge"]))


def _choose(state: State, message: Message) -> Message:
    for i in state.found:
        if (i.name, i.op) == (message["name"], message["op"]):
            state.implementation = i
            note_state()
            return {}
    raise UsageError(f"impl={message['name']}: expected it in the file, as when the run began; run it again")


def _supports(state: State, message: Message) -> Message:
    return {"value": call.supports(state.chosen, parsed(message["case"]))}


def _model(state: State, message: Message) -> Message:
    return {"value": dict(call.model(state.chosen, parsed(message["case"])))}


_REQUESTS: Mapping[str, Callable[[State, Message], Message]] = {
    "load": _load,
    "reach": _reach,
    "choose": _choose,
    "touched": lambda state, message: {"value": state.noted.touched()},
    "supports": _supports,
    "model": _model,
    **CALLS,
}
