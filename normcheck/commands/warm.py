"""What starts before torch is imported."""

from __future__ import annotations

from normcheck import driver


def warm(device: str, isolation: bool) -> None:
    """Let the server of worker processes import torch while this process does, where it will be needed."""
    if isolation:
        from normcheck import server

        server.warm(interpreted=device == "cpu" or (device == "auto" and not driver.present()))
