"""Replies of a worker, checked: tensors, stray writes, failures and refusals.

Outputs are copied out of shared memory, so that no later call can change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import OutOfMemoryError, Tensor

from normcheck.contexts.kernel import Launched, Step
from normcheck.contexts.perform import Performed
from normcheck.contexts.profiler import LONGEST_NAME
from normcheck.errors import Broken, ItselfFailed, UnsupportedCase, one_line
from normcheck.impls.kernels.configurations import Configuration, parts
from normcheck.isolation.messages import Message
from normcheck.isolation.shared_memory import HostMemory, Space, tensor_at
from normcheck.runner.arena import LATE, Stray

NOT_PLAIN = "expected a plain torch.Tensor"
"""The end of the message on a result of a class of the kernel's own, which may compute when it is looked at."""

NONSENSE = "its process gave no sensible answer to"
"""The beginning of the message on an answer that no worker gives."""

WITH_ITS_SERVER = "its process ended with the server that it came from"
"""Begins the message on a process for which nobody knows how it ended."""

ITSELF = "itself"
"""In place of the kind of a failure: normcheck's own, of which the kernel knows nothing."""

_MOST_KERNELS = 100  # of a call, whose names are kept
_MOST_BUILT = 1_000_000
_KINDS = ("exception", "missing", "shape", "unwritten", "not_repeatable", "input_modified")


def copied_out(space: Space, answer: Message, what: str) -> dict[str, Tensor]:
    """Copies of the tensors that ``what`` returned, as they were then, by name.

    Raises Broken if one has changed since, or if the answer is malformed; OutOfMemoryError.
    """
    still = "gradients" not in answer  # whose computation may overwrite what forward returned
    try:
        return {str(item["name"]): _received(space, item, still) for item in answer["returned"]}
    except OutOfMemoryError:  # a RuntimeError that says nothing of the answer
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        raise nonsense(what, answer) from None


def _received(space: Space, item: Mapping[str, Any], still: bool) -> Tensor:
    """A copy of a returned tensor. Raises Broken if it could not be shared, ValueError if its place is malformed.

    ``still``: where it lies, nothing may have been written since; Broken says that it was.
    """
    name, reason = str(item["name"]), item.get("unusable")
    if reason is not None:
        raise Broken("shape", name, str(reason))
    if item["device"] != space.device:
        there = f"expected {space.device}, where the inputs are"
        raise Broken("missing", name, f"{name}.device={str(item['device'])[:20]}: {there}")
    tensor = tensor_at(space.memory, item)
    if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != item["bytes"]:
        raise ValueError("expected packed elements")  # or there could be more of them than bytes
    copy = tensor.clone()
    if still and item.get("packed") is True and isinstance(space.memory, HostMemory):
        first, count = item["lies"], item["bytes"]
        if space.memory.read(first, first + count) != space.memory.read(item["at"], item["at"] + count):
            raise Broken("not_repeatable", name, f"{name} {LATE} when it was returned: its memory has changed since")
    return copy


def performed(space: Space, answer: Message) -> Performed:
    """What a context showed, with copies of its tensors. Raises Broken if the answer is malformed."""
    try:
        steps = [_step(space, item) for item in answer["steps"]]
        return Performed(tuple(steps), str(answer["not_tried"])[:1000], answer["prevented"] is True)
    except (KeyError, TypeError, ValueError):
        raise nonsense("within", answer) from None


def _step(space: Space, item: Mapping[str, Any]) -> Step:
    of, owed = tuple(map(int, item["of"])), tuple(str(name)[:100] for name in item["owed"])
    if not set(of) <= {0, 1}:
        raise ValueError(f"of={of}: expected numbers of the two inputs")
    outputs = copied_out(space, {"returned": item["returned"]}, "within")
    launched = item["launched"]
    return Step(str(item["words"])[:200], of, outputs, owed, bool(item["exact"]), launched and _launched(launched))


def _launched(item: Mapping[str, Any]) -> Launched:
    forward, backward = (
        tuple(one_line(str(name), LONGEST_NAME, keep_end=False) for name in item[what][:_MOST_KERNELS])
        for what in ("forward", "backward")
    )
    return Launched(forward, backward, item["expected"] is True, max(0, min(int(item["built"]), _MOST_BUILT)))


def configurations_of(answer: Message) -> tuple[Configuration, ...]:
    """The configurations of which an answer tells. Raises Broken if it is malformed."""
    try:
        return tuple(map(_configuration, answer["configurations"][:_MOST_CONFIGURATIONS]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise nonsense("configurations", answer) from None


_MOST_CONFIGURATIONS = 1000


def _configuration(item: Mapping[str, Any]) -> Configuration:
    text, why, kernel = (one_line(str(item[name]), 300) for name in ("text", "why", "kernel"))
    blocks, taken = tuple(min(max(int(block), 1), 1 << 20) for block in item["blocks"][:20]), item["taken"] is True
    made = Configuration(kernel=kernel, number=int(item["number"]), text=text, blocks=blocks, taken=taken, why=why)
    parts(made.name)
    return made


def count_of(answer: Message, name: str) -> int:
    """A number of which an answer may tell, 0 if it does not."""
    count = answer.get(name)
    return count if type(count) is int else 0


def is_set(space: Space, place: Mapping[str, Any]) -> bool:
    """Whether the bool at this place is true. Raises Broken if the place is malformed."""
    try:
        return bool(tensor_at(space.memory, place))
    except OutOfMemoryError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        raise nonsense("strays", {"clean": str(place)[:100]}) from None


def raise_failure(answer: Message) -> None:
    """Raise the refusal (UnsupportedCase) or the failure (Broken) that an answer reports, if any."""
    refused, broken = answer.get("refused"), answer.get("broken")
    if refused is not None:
        raise UnsupportedCase(str(refused))
    if broken is not None:
        raise broken_of(broken)


def broken_of(item: object) -> Broken | ItselfFailed:
    """The exception for a failure that a worker reports."""
    if isinstance(item, dict) and item.get("kind") == ITSELF:
        return ItselfFailed(str(item.get("message", ""))[:10_000])
    if not isinstance(item, dict) or item.get("kind") not in _KINDS:
        return nonsense("a call", {})
    frames = item.get("frames")
    lines = tuple(str(line)[:1000] for line in frames[:20]) if isinstance(frames, list) else ()
    return Broken(str(item["kind"]), str(item.get("output", ""))[:100], str(item.get("message", ""))[:100_000], lines)


def nonsense(what: str, answer: Message) -> Broken:
    """The exception for a malformed answer to ``what``."""
    return Broken("crash", "", f"{NONSENSE} {what}: {str(answer)[:200]}")


def stray(item: object) -> Stray:
    """The writes around one buffer, as ``arena.Arena.strays`` lists them. Raises Broken for anything else."""
    try:
        name, elements, bad, where = map(str, item if isinstance(item, list) else ())
        return Stray(name[:100], int(elements), int(bad), where[:200])
    except ValueError:
        raise nonsense("strays", {"stray": str(item)[:100]}) from None
