"""Whether each result of a kernel lies in memory of its own, while the result before it is still in use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from normcheck.errors import Broken

_KEPT_BYTES = 1 << 28  # the largest result that is kept to see whether the next one lies in the same memory


class Results:
    """The latest result of each name, kept, so that its memory is not free for the next one."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def require_own_memory(self, name: str, tensor: object, given: Mapping[str, Tensor]) -> None:
        """Raise Broken if a call that got the tensors ``given`` returned the memory of an earlier result."""
        before = self._last.pop(name, None)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not tensor.numel():
            return
        place = _place(tensor)
        if place is None or any(place == t.untyped_storage().data_ptr() for t in given.values()):
            return
        if before is not None and _place(before) == place:
            text = f"{name} of two calls lies in the same memory: the second call overwrote the result of the first"
            raise Broken("not_repeatable", name, text)
        if tensor.untyped_storage().nbytes() <= _KEPT_BYTES:
            self._last[name] = tensor.detach()


def _place(result: Tensor) -> int | None:
    """The address of a result; None if it has none, as a class of its own may, or if nobody can use it any more.

    So it is after a later call of what torch.compile puts into graphs of its own: torch raises then.
    """
    try:
        return result.untyped_storage().data_ptr()
    except RuntimeError:
        return None
