"""Small cases of a GPU's kernel in this process: its tensors are on the CPU, and the kernel gets copies on its device.

A copy has all that lies around its tensor, and goes back after each call, so that a write to it or around it shows.
What the kernel allocates stays on the device, and its arena looks for strays there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.guard_bands import buffer_of
from normcheck.cases.inputs import Inputs, inputs_of
from normcheck.contexts.perform import Performed
from normcheck.errors import Broken, UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.runner.arena import Stray, Surroundings
from normcheck.runner.own_memory import Results
from normcheck.runner.run import Forward, LocalRun, Pending


@dataclass(frozen=True, slots=True)
class _Twin:
    """The whole buffer behind a tensor, and its copy on the device: both uint8, one dimension."""

    here: Tensor
    there: Tensor


class Carrier(threading.local):
    """Carries tensors of a thread's present case to a device and back. ``device``: "" if the case is not carried.

    A tensor is at the same place on the device in every call of the case, in which no other tensor has been.
    """

    def __init__(self) -> None:
        self.device = ""
        self.results = Results()
        self._twins: dict[int, _Twin] = {}

    def home(self, case: Case, device: str) -> str:
        """Begin a case: the device on which it is made and judged, if the kernel runs on ``device``."""
        self.begin(device if device != "cpu" and case.small else "")
        return "cpu" if self.device else device

    def begin(self, device: str) -> None:
        """Begin a case whose tensors are carried to ``device``; ""; to none."""
        self._twins.clear()
        self.device = device

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of ``tensors`` on the device, each with a storage of its own that holds what lies around it."""
        twins = [self._twin(buffer_of(tensor)) for tensor in tensors]
        block = torch.cat([twin.here for twin in twins]).to(self.device)
        for twin, part in zip(twins, torch.split(block, [len(twin.here) for twin in twins]), strict=True):
            twin.there.copy_(part)
        there = []
        for tensor, twin in zip(tensors, twins, strict=True):
            plain = torch.empty(0, dtype=tensor.dtype, device=self.device)  # no view: it has a version of its own
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            there.append(plain.set_(twin.there.untyped_storage(), *place))
        return there

    def take_back(self, tensors: Sequence[Tensor], results: Sequence[Tensor] = ()) -> list[Tensor]:
        """Copy all that lies around ``tensors`` back from the device; return packed copies of ``results`` from it."""
        twins = [self._twin(buffer_of(tensor)) for tensor in tensors]
        twins = [twin for twin in twins if twin.there.untyped_storage().nbytes() == len(twin.here)]  # not resized
        plain = [result.detach().resolve_neg().resolve_conj() for result in results]
        packed = [result.reshape(-1).contiguous().view(torch.uint8) for result in plain]
        parts = [*(twin.there for twin in twins), *packed]
        if not parts:
            return []
        back = torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])
        for twin, part in zip(twins, back[: len(twins)], strict=True):
            twin.here.copy_(part)
        found = zip(results, back[len(twins) :], strict=True)
        return [part.clone().view(result.dtype).view(result.shape) for result, part in found]

    def _twin(self, here: Tensor) -> _Twin:
        """The copy of a buffer. It holds that as well, so that no other tensor gets its address."""
        twin = self._twins.get(here.data_ptr())
        if twin is None or len(twin.here) != len(here):
            twin = _Twin(here, torch.empty(len(here), dtype=torch.uint8, device=self.device))
            self._twins[here.data_ptr()] = twin
        return twin


CARRIER = Carrier()
"""The carrier of this process: each of its threads works on one case at a time."""


class CarriedRun:
    """A run in this process, see ``run.Run``. Tensors on the CPU are carried."""

    def __init__(self, implementation: Implementation, surroundings: Surroundings, carrier: Carrier) -> None:
        self._local, self._carrier = LocalRun(implementation, surroundings), carrier
        self._returned: dict[str, Tensor] = {}  # on the device

    def forward(self, case: Case, inputs: Inputs, *, others_first: bool = False, mode: str = "") -> Pending[Forward]:
        """See ``Run``."""
        return Pending(lambda: self._forward(case, inputs, mode))

    def _forward(self, case: Case, inputs: Inputs, mode: str) -> Forward:
        given = dict(inputs.named())
        there = dict(zip(given, self._carrier.bring([*given.values()]), strict=True))
        with self._called(given, there):
            forward = self._local.forward(case, inputs_of(there), mode=mode).result()
        outputs = self._brought_back(given, there, forward.outputs)

        def by_autograd(cotangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
            used = {**given, **cotangents}
            brought = dict(zip(cotangents, self._carrier.bring([*cotangents.values()]), strict=True))
            there.update(brought)
            with self._called(used, there):
                gradients = forward.by_autograd(brought)
            return self._brought_back(used, there, gradients)

        return Forward(outputs, by_autograd, forward.joined)

    def backward(self, case: Case, inputs: Inputs, saved: Mapping[str, Tensor]) -> Pending[dict[str, Tensor]]:
        """See ``Run``."""
        return Pending(lambda: self._backward(case, inputs, saved))

    def _backward(self, case: Case, inputs: Inputs, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = {**saved, **dict(inputs.named())}  # an output of an op is not named like an input
        there = dict(zip(given, self._carrier.bring([*given.values()]), strict=True))
        with self._called(given, there):
            saved_there = {name: there[name] for name in saved}
            gradients = self._local.backward(case, inputs_of(there), saved_there).result()
        return self._brought_back(given, there, gradients)

    def within(self, context: str, case: Case, inputs: tuple[Inputs, Inputs]) -> Pending[Performed]:
        """See ``Run``. Inputs are copied as they are: what lies around them is watched in other calls."""
        there = tuple(each.each(lambda tensor: tensor.to(self._carrier.device)) for each in inputs)
        pending = self._local.within(context, case, (there[0], there[1]))
        return Pending(lambda: _here(pending.result()))

    def strays(self, named: Mapping[str, Tensor]) -> list[Stray]:
        """See ``Run``; ``named`` is not needed: the results on the device are known here."""
        return self._local.strays(self._returned)

    @contextmanager
    def _called(self, given: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> Iterator[None]:
        """Make a call in the block. If it fails, what it wrote to the tensors ``there`` comes back."""
        try:
            yield
        except (Broken, UnsupportedCase):
            with suppress(Exception):  # a lost context copies nothing, and the first error is the one to report
                self._carrier.take_back([*given.values()])
            raise

    def _brought_back(
        self, given: Mapping[str, Tensor], there: Mapping[str, Tensor], returned: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What a call returned, on the CPU. What it wrote to ``there`` comes back to the tensors ``given``."""
        device = there["x"].device.type
        dense = {name: t for name, t in returned.items() if t.layout == torch.strided}
        self._returned.update(dense)
        elsewhere = [name for name, t in dense.items() if t.device.type != device]
        taken = [] if elsewhere else [*dense.values()]
        results = self._carrier.take_back([*given.values()], taken)
        for name, tensor in given.items():
            _require_same_geometry(name, tensor, there[name])
        for name in elsewhere[:1]:
            where = f"{name}.device={dense[name].device.type}: expected {device}, where the inputs are"
            raise Broken("missing", name, where)
        for name, tensor in dense.items():
            self._carrier.results.require_own_memory(name, tensor, there)
        return {**returned, **dict(zip(dense, results, strict=True))}


def _here(performed: Performed) -> Performed:
    """What was ``performed`` on the device, on the CPU."""
    steps = [replace(step, outputs={n: t.cpu() for n, t in step.outputs.items()}) for step in performed.steps]
    return replace(performed, steps=tuple(steps))


def _require_same_geometry(name: str, before: Tensor, after: Tensor) -> None:
    """Raise Broken if a call has given an input another shape, strides or storage."""
    size = before.untyped_storage().nbytes(), after.untyped_storage().nbytes()
    place = [(t.shape, t.stride(), t.storage_offset()) for t in (before, after)]
    if place[0] != place[1] or size[0] != size[1]:
        text = f"{name} was modified: its shape, strides or storage; inputs belong to the caller"
        raise Broken("input_modified", name, text)
