"""Socket of a server, bound before its model loads, without the modules that serve."""

from __future__ import annotations

import errno
import socket

from weft.arguments import check_int


def bound(host: str, port: int) -> socket.socket:
    """Socket at an address that no other can have, which does not listen yet.

    ValueError in one line where there can be none.
    """
    check_int("--port", port, 0, 65535)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}; pass an address of this machine") from None
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # A server that has just ended leaves connections on the port for a minute, which only a shared one passes over.
            share(listener)
            listener.bind(address)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise not_bound(host, port, error) from None
    return listener


def share(end: socket.socket) -> None:
    """Let the port be bound again, past its connections, which the next server need not wait for."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def not_bound(host: str, port: int, error: OSError) -> ValueError:
    return ValueError(f"--port {port} on {host}: {error.strerror}; pass another, or 0 for a free one")


def url(at: socket.socket) -> str:
    """URL of the server at a socket."""
    host, port = at.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
