"""The contexts by name. Quick to import, so that any command can list them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    """``summary``: what is done; ``devices``: on which kernels it can be tried.

    ``one_weight``: both inputs of the context have the same weight and bias; ``unused``: the second has no gradient
    of y, or of residual_out. ``told``: what is wrong is a note unless somebody asks for the context. ``anew``:
    torch.compile compiles a function for it anew. ``seconds``: after which a kernel is taken to hang, if that is
    less than what a case may take; 0 for no limit of its own. ``filling``: it takes a case that has work for
    several threads. ``asked_for``: it is tried only if somebody asks for it. ``by_size``: it takes a case of each
    class of sizes, and tells what ran.
    """

    name: str
    summary: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    one_weight: bool = False
    unused: bool = False
    told: bool = False
    anew: bool = False
    seconds: float = 0.0
    filling: bool = False
    asked_for: bool = False
    by_size: bool = False


PROFILER = "profiler"
"""The context that says what ran."""

CONTEXTS = {
    context.name: context
    for context in (
        Context(
            "inference",
            "forward under torch.no_grad(), torch.inference_mode() and with no input that wants a gradient",
            anew=True,
        ),
        Context(
            "frozen",
            "gradients of some inputs, as with a frozen weight; after an optimizer's step; y or residual_out unused",
            anew=True,
            unused=True,
        ),
        Context(
            "again",
            "backward twice through one graph; two micro-batches; a result, and a backward, after many further calls",
            one_weight=True,
        ),
        Context("thread", "two threads at once, ten times, with different inputs of one shape", seconds=30.0),
        Context("threads", "called from another thread, with one torch thread and with three", ("cpu",), filling=True),
        Context("autocast", "forward under torch.autocast", told=True, anew=True),
        Context("compile", "inside torch.compile(fullgraph=False, dynamic=True)", asked_for=True),
        Context("stream", "on a side stream behind slow work, with inputs that become ready late", ("cuda",)),
        Context("device", "tensors on a GPU that is not the current one", ("cuda",)),
        Context(PROFILER, "under torch's profiler, which says what ran", ("cuda",), by_size=True),
        Context("graph", "captured in a CUDA graph, and replayed with other inputs in the same memory", ("cuda",)),
    )
}
"""Name -> context, in the order in which they are tried: what may spoil a process comes last."""


def contexts_on(device: str) -> tuple[str, ...]:
    """The names of the contexts that a kernel on ``device`` ("cpu" or "cuda") is tried in, whoever asks."""
    return tuple(name for name, context in CONTEXTS.items() if device in context.devices and not context.asked_for)
