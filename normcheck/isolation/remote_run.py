"""A run of an implementation whose code is in another process, seen from this one.

Inputs are laid into shared memory, with all that lies around them, and are copied back after each call, so that what
was written to them shows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.errors import Broken
from normcheck.isolation.messages import Message
from normcheck.isolation.replies import Returned, broken_of, complain, copied_out, stray
from normcheck.isolation.shared_memory import Laid, Space
from normcheck.runner.arena import Stray, Surroundings


class Link(Protocol):
    """The way to a process, which is started when it is needed."""

    @property
    def alive(self) -> bool:
        """Whether a process is there."""
        ...

    def post(self, message: Message) -> int:
        """Send a request, which gets a number. One that is still unanswered is then given up."""
        ...

    @property
    def awaited(self) -> int:
        """The number of the request whose answer has not been collected, 0 where there is none."""
        ...

    def collect(self) -> Message:
        """What the process answers. Raises Broken where it dies, takes too long or talks nonsense."""
        ...

    def limit(self, seconds: float, case: Case) -> None:
        """Begin a case, which may take this long."""
        ...

    @property
    def before(self) -> tuple[Case, ...]:
        """The cases that the process of the present case began before it, in their order."""
        ...

    def begin(self) -> None:
        """Start the next process, without waiting for it."""
        ...

    def ready(self) -> None:
        """Wait until the process is there."""
        ...

    def close(self) -> None:
        """End the process; the next request starts another."""
        ...

    def renew(self) -> None:
        """End the process; the next request starts another from a new server, that nobody has had a hand in."""
        ...

    def end(self) -> None:
        """End the process, and the next one as well."""
        ...

    def space(self, first: int) -> Space:
        """Shared memory from byte ``first`` on, which a request that is still unanswered is given up for."""
        ...

    def run(self, surroundings: Surroundings) -> RemoteRun:
        """A new run."""
        ...


@dataclass(frozen=True)
class _Posted:
    """A request on its way: its number, the memory behind what was sent, and what is copied back from where."""

    what: str
    number: int
    space: Space
    back: list[Laid]


class RemoteRun:
    """The calls of one run in given surroundings, as ``arena.Arena`` is for code in this process.

    Each request is two switches between processes. So forward answers with the gradients as well, where they come from
    autograd and will be asked for, and every answer says what was written around allocated memory by then.
    """

    def __init__(self, link: Link, number: int, surroundings: Surroundings) -> None:
        self._link, self._number = link, number
        self._floor = 0  # below it lies what a graph still needs
        self._strays: list[Stray] | None = None
        self._begun: _Posted | None = None
        self._surroundings = [p.name for p in (surroundings.inputs, surroundings.fresh, surroundings.allocated)]

    def begin(self, case: Case, inputs: Inputs, *, graph: bool, deferred: bool = False) -> None:
        """Send what ``forward`` will then collect, for the same arguments: this process need not wait meanwhile."""
        tensors = {"x": inputs.x, "weight": inputs.weight, "bias": inputs.bias}
        if graph and not deferred:
            tensors["dy"] = inputs.dy
        self._begun = self._posted("forward", case, tensors, {}, graph=graph)
        if graph:
            self._floor = self._begun.space.next

    def begin_backward(self, case: Case, inputs: Inputs, saved: Mapping[str, Tensor]) -> None:
        """As ``begin``, for ``backward``."""
        tensors = {"dy": inputs.dy, "x": inputs.x, "weight": inputs.weight, "bias": inputs.bias}
        self._begun = self._posted("backward", case, tensors, saved)

    def forward(self, case: Case, inputs: Inputs, *, graph: bool, deferred: bool) -> Returned:
        """See ``call.forward``; ``graph``: gradients by autograd may be asked for, ``deferred``: after other calls."""
        if not self._has_begun("forward"):
            self.begin(case, inputs, graph=graph, deferred=deferred)
        answer, space = self._collected()
        returned = copied_out(space, answer, "forward")
        number = answer.get("graph")
        returned.graph = number if isinstance(number, int) else None
        joined = answer.get("joined")
        returned.joined = joined if isinstance(joined, int) else 0
        told = answer.get("gradients")
        if isinstance(told, dict):
            returned.gradients = broken_of(told["broken"]) if "broken" in told else copied_out(space, told, "gradients")
        return returned

    def backward(self, case: Case, inputs: Inputs, saved: Mapping[str, Tensor]) -> Returned:
        """See ``call.backward``."""
        if not self._has_begun("backward"):
            self.begin_backward(case, inputs, saved)
        answer, space = self._collected()
        return copied_out(space, answer, "backward")

    def gradients(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """See ``call.autograd``."""
        if not isinstance(outputs, Returned) or outputs.graph is None:
            return {}
        if isinstance(outputs.gradients, Broken):
            raise outputs.gradients
        if outputs.gradients is not None:
            return outputs.gradients
        self._begun = self._posted("gradients", None, {"dy": inputs.dy}, {}, graph=outputs.graph)
        answer, space = self._collected()
        return copied_out(space, answer, "gradients")

    def strays(self, named: Mapping[str, Tensor]) -> list[Stray]:
        """See ``arena.Arena.strays``; the other process knows what it returned."""
        if self._strays is None and self._link.alive:
            self._link.post({"do": "strays", "run": self._number})
            self._told(self._link.collect())
        return self._strays or []

    def _told(self, answer: Message) -> None:
        told = answer.get("strays")
        self._strays = [stray(item) for item in told] if isinstance(told, list) else None

    def _posted(
        self,
        what: str,
        case: Case | None,
        tensors: Mapping[str, Tensor | None],
        saved: Mapping[str, Tensor],
        **more: object,
    ) -> _Posted:
        given = {name: t for name, t in tensors.items() if t is not None}
        space = self._link.space(self._floor)
        places: dict[str, Message] = {}
        kept: dict[str, Message] = {}
        back: list[Laid] = []
        for tensors_of, laid in ((given, places), (saved, kept)):
            for name, tensor in tensors_of.items():
                laid[name], copy = space.lay(tensor)
                back.append(copy)
        if next(iter(given.values())).is_cuda:
            torch.cuda.synchronize()
        message: Message = {
            "do": what,
            "run": self._number,
            "surroundings": self._surroundings,
            "given": places,
            "saved": kept,
            "out": space.next,
            **more,
        }
        if case is not None:
            message |= {"op": case.op, "dtype": case.dtype, "eps": case.eps, "options": dict(case.option_values)}
        return _Posted(what, self._link.post(message), space, back)

    def _has_begun(self, what: str) -> bool:
        """Whether ``what`` is what was begun last, and has not been given up for another request since."""
        return self._begun is not None and (self._begun.what, self._begun.number) == (what, self._link.awaited)

    def _collected(self) -> tuple[Message, Space]:
        """The answer to what was begun."""
        assert self._begun is not None
        posted, self._begun = self._begun, None
        space = posted.space
        try:
            answer = self._link.collect()
        finally:
            for laid in posted.back:
                laid.bring_back()
        self._told(answer)
        complain(answer)
        return answer, space
