"""How much memory there is, as what plans a case sees it."""

from __future__ import annotations

import pytest
import torch

from normcheck.runner.environment import memory_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "reserved", "used", "share", "expected"),
    [
        (70, 0, 0, 1.0, 70),
        (60, 10, 4, 1.0, 66),  # what torch has cached counts, what is in use does not
        (60, 10, 4, 0.25, 16),
        (2, 10, 4, 0.25, 8),
    ],
)
def test_memory_that_this_process_can_still_use(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, used: int, share: float, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
    stats = {"reserved_bytes": reserved * GIB, "allocated_bytes": used * GIB}
    nested = {name: {"all": {"current": value}} for name, value in stats.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: nested)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: share)
    assert memory_bytes("cuda") == expected * GIB
