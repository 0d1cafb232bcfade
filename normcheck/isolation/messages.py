"""Messages between a worker and its parent: length-prefixed JSON on a socket, read as nothing but data.

multiprocessing.connection would not do: its ``recv`` blocks on half a message, and unpickles what it receives.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_HEADER = struct.Struct("!I")
LONGEST = 1 << 24
"""Bytes of the longest message that is accepted."""

Message = dict[str, Any]


def packed(message: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    body = json.dumps(message).encode()
    return _HEADER.pack(len(body)) + body


class Garbled(Exception):
    """The received bytes are no message."""


class Inbox:
    """Turns received bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, received: bytes) -> None:
        """Append received bytes."""
        self._bytes += received

    def next(self) -> Message | None:
        """The next message, or None if it is not complete yet. Raises Garbled."""
        if len(self._bytes) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._bytes)
        if length > LONGEST:
            raise Garbled
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise Garbled from None
        if not isinstance(message, dict):
            raise Garbled
        return message


def received(connection: socket.socket, inbox: Inbox) -> Message | None:
    """Wait for the next message; None if the other side has closed the connection."""
    while (message := inbox.next()) is None:
        chunk = connection.recv(1 << 16)
        if not chunk:
            return None
        inbox.add(chunk)
    return message
