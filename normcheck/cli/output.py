"""Standard output and standard error that outlive their readers, as in ``normcheck verify ... | head -1``."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, TextIO


class _Lasting(io.FileIO):
    """A file descriptor that leads nowhere once nobody reads it any more; ``left`` is called then."""

    def __init__(self, descriptor: int, left: Callable[[], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._left = left

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self._left()
            return super().write(data)


def lasting(stream: TextIO, left: Callable[[], None] = lambda: None) -> TextIO:
    """``stream``, which goes on when its reader has gone: what follows is dropped, and ``left`` is called once.

    So a run has the exit code of its verdict, and the reports that are files. What has no file descriptor is returned.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        raw = _Lasting(stream.fileno(), left)
    except OSError:
        return stream
    stream.flush()
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
