"""A ``runner.run.Run`` of a kernel whose code is in a worker process.

Inputs are copied into shared memory, with the memory around them, and back after each call, so that the caller sees
what was written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.contexts.perform import Performed
from normcheck.isolation.client import Client
from normcheck.isolation.messages import Message
from normcheck.isolation.replies import broken_of, copied_out, is_set, performed, raise_failure, stray
from normcheck.isolation.shared_memory import SharedCopy, Space
from normcheck.runner.arena import Stray, Surroundings
from normcheck.runner.run import SERVING, Forward, Pending

T = TypeVar("T")


@dataclass(frozen=True)
class _Posted:
    """A request that was sent: its number, the shared memory of its tensors, and the copies to bring back."""

    number: int
    space: Space
    copies: list[SharedCopy]


class RemoteRun:
    """A run in a worker, which makes each call as soon as it is asked for.

    A request costs two switches between processes. To save some, forward also answers with the gradients, if they come
    from autograd and will be needed, and every answer says what ``strays`` would find so far.
    """

    def __init__(self, client: Client, number: int, surroundings: Surroundings, *, by_autograd: bool) -> None:
        self._client, self._number, self._by_autograd = client, number, by_autograd
        self._floor = 0  # shared memory below this byte belongs to a graph that is still needed
        self._strays: list[Stray] | None = None  # as the worker tells them
        self._found: list[Stray] = []  # by this process, in memory that it has laid
        self._surroundings = [p.name for p in (surroundings.inputs, surroundings.fresh, surroundings.allocated)]

    def forward(self, case: Case, inputs: Inputs, *, others_first: bool = False, mode: str = "") -> Pending[Forward]:
        """See ``runner.run.Run``."""
        tensors, cotangents = dict(inputs.named()), inputs.cotangents
        if not self._by_autograd or others_first or mode in SERVING:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in cotangents}
        return self._pending(partial(self._post_forward, case, tensors, mode), self._read_forward)

    def _post_forward(self, case: Case, tensors: Mapping[str, Tensor], mode: str) -> _Posted:
        has_graph = self._by_autograd and mode not in SERVING
        posted = self._post("forward", case, tensors, {}, graph=has_graph, mode=mode)
        if has_graph:
            self._floor = posted.space.next
        return posted

    def _read_forward(self, answer: Message, space: Space) -> Forward:
        outputs = copied_out(space, answer, "forward")
        graph, gradients, joined = answer.get("graph"), answer.get("gradients"), answer.get("joined")
        early: dict[str, Tensor] | Exception | None = None if isinstance(graph, int) else {}  # None: to be asked for
        if isinstance(graph, int) and isinstance(gradients, dict):
            broken = "broken" in gradients
            early = broken_of(gradients["broken"]) if broken else copied_out(space, gradients, "gradients")

        def by_autograd(cotangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
            if early is None:
                return self._gradients(cotangents, graph)
            if isinstance(early, Exception):
                raise early
            return early

        return Forward(outputs, by_autograd, lambda: joined if isinstance(joined, int) else 0)

    def backward(self, case: Case, inputs: Inputs, saved: Mapping[str, Tensor]) -> Pending[dict[str, Tensor]]:
        """See ``runner.run.Run``."""
        post = partial(self._post, "backward", case, dict(inputs.named()), saved)
        return self._pending(post, lambda answer, space: copied_out(space, answer, "backward"))

    def within(self, context: str, case: Case, inputs: tuple[Inputs, Inputs]) -> Pending[Performed]:
        """See ``runner.run.Run``."""
        first, second = (dict(each.named()) for each in inputs)
        post = partial(self._post, "within", case, first, second, context=context)
        return self._pending(post, lambda answer, space: performed(space, answer))

    def _gradients(self, cotangents: Mapping[str, Tensor], graph: object) -> dict[str, Tensor]:
        """Ask for gradients through a y whose graph the worker has kept."""
        answer, space = self._collect(self._post("gradients", None, cotangents, {}, graph=graph))
        return copied_out(space, answer, "gradients")

    def strays(self, named: Mapping[str, Tensor]) -> list[Stray]:
        """See ``runner.run.Run``; ``named`` is not needed: what was returned has told where it lies."""
        if self._strays is None and self._client.alive:
            self._client.post({"do": "strays", "run": self._number})
            answer = self._client.collect()
            raise_failure(answer)
            self._note_strays(answer)
        return [*self._found, *(self._strays or [])]

    def _note_strays(self, answer: Message, space: Space | None = None) -> None:
        found = answer.get("strays")
        self._strays = [stray(item) for item in found] if isinstance(found, list) else None
        if space is not None and "clean" in answer and is_set(space, answer["clean"]):
            self._strays = []

    def _pending(self, post: Callable[[], _Posted], read: Callable[[Message, Space], T]) -> Pending[T]:
        """Post a request now, and read its answer when it is collected; if it was given up by then, post it again."""
        posted = post()

        def collect() -> T:
            return read(*self._collect(posted if posted.number == self._client.awaited else post()))

        return Pending(collect)

    def _post(
        self,
        what: str,
        case: Case | None,
        given: Mapping[str, Tensor],
        saved: Mapping[str, Tensor],
        **more: object,
    ) -> _Posted:
        device = next(iter(given.values())).device.type
        space = self._client.space(self._floor, device)
        given_places: dict[str, Message] = {}
        saved_places: dict[str, Message] = {}
        copies: list[SharedCopy] = []
        for group, group_places in ((given, given_places), (saved, saved_places)):
            for name, tensor in group.items():
                group_places[name], copy = space.copy_in(tensor)
                copies.append(copy)
        if device == "cuda":
            torch.cuda.synchronize()
        message: Message = {
            "do": what,
            "run": self._number,
            "surroundings": self._surroundings,
            "given": given_places,
            "saved": saved_places,
            "out": space.next,
            **more,
        }
        if case is not None:
            message |= {"op": case.op, "dtype": case.dtype, "eps": case.eps, "options": dict(case.option_values)}
        return _Posted(self._client.post(message, space), space, copies)

    def _collect(self, posted: _Posted) -> tuple[Message, Space]:
        """The answer to the latest request. What the call wrote to its inputs is copied back."""
        try:
            answer = self._client.collect()
        finally:
            for copy in posted.copies:
                copy.bring_back()
        self._found += self._client.strays
        self._note_strays(answer, posted.space)
        raise_failure(answer)
        return answer, posted.space
