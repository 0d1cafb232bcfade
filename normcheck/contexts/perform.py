"""A context performed: its steps, each with copies of what the kernel returned at that moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.inputs import Inputs
from normcheck.contexts import gpu, later, modes, profiler, threads
from normcheck.contexts.catalogue import PROFILER
from normcheck.contexts.kernel import Kernel, NotTried, Prevented, Step
from normcheck.errors import UnsupportedCase, error_text, one_line

_WORK: Mapping[str, Callable[[Kernel, Inputs, Inputs], Iterator[Step]]] = {
    "inference": modes.inference,
    "frozen": modes.frozen,
    "again": later.again,
    "thread": threads.thread,
    "threads": threads.threads,
    "autocast": modes.autocast,
    "compile": modes.inside_compile,
    "stream": gpu.stream,
    "device": gpu.device,
    PROFILER: profiler.profiler,
    "graph": gpu.graph,
}


@dataclass(frozen=True, slots=True)
class Performed:
    """The ``steps`` of a context that could be tried. ``not_tried``: why others could not, "" if all were;
    ``prevented``: whether the kernel prevents them.
    """

    steps: tuple[Step, ...] = ()
    not_tried: str = ""
    prevented: bool = False


def perform(name: str, kernel: Kernel, first: Inputs, second: Inputs) -> Performed:
    """What ``kernel`` does in the context ``name`` with the inputs ``first`` and ``second``, of one shape.

    Neither is written to. Raises Broken if a call of the kernel fails.
    """
    steps: list[Step] = []
    try:
        for step in _WORK[name](kernel, first, second):
            copies = {name: _copy(tensor) for name, tensor in step.outputs.items()}
            steps.append(replace(step, outputs=copies))
    except NotTried as why:
        return Performed(tuple(steps), one_line(str(why), 500), isinstance(why, Prevented))
    except UnsupportedCase as refused:
        return Performed(tuple(steps), one_line(error_text(refused), 500))
    return Performed(tuple(steps))


def _copy(tensor: Tensor) -> Tensor:
    """A copy of a plain tensor; one of another class, which may compute when it is looked at, as it is."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return tensor
    return tensor.detach().resolve_neg().clone()
