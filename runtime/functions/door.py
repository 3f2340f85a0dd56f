"""The only way out of a sandbox without a network: one address of this machine. Standard library only.

The process in the sandbox listens at that address and hands the socket out. A process outside accepts its connections,
and passes their bytes on to the same address there.
"""

import os
import socket
import threading
from contextlib import suppress
from typing import Final

from runtime.util.descendants import set_parent_death_signal

MAX_CONNECTIONS: Final = 64  # at a time; a further one waits
CONNECT_S: Final = 10.0  # for the address outside to accept a connection
PART_BYTES: Final = 65_536


class Door:
    """One address that a sandbox reaches.

    Args:
        host: of the address, as a number.
        port: of the address.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._inside, self._outside = socket.socketpair()

    def open_inside(self) -> None:
        """Listen at the address, in the network of this process, and hand the socket out.

        Raises:
            OSError: the address is not of this network.
        """
        with self._inside, socket.socket(self._family, socket.SOCK_STREAM) as listener:
            listener.bind(self._address)
            listener.listen(MAX_CONNECTIONS)
            socket.send_fds(self._inside, [b"\0"], [listener.fileno()])
        self._outside.close()

    def start_outside(self) -> int:
        """Fork the process that passes bytes on; return its id. Call this before the sandbox is made."""
        keeper = os.getpid()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                set_parent_death_signal(9)
                if os.getppid() == keeper:
                    self._inside.close()
                    self._pass_on()
                code = 0
            finally:
                os._exit(code)
        return child

    def close(self) -> None:
        """Close the ends that this process has; those that it forked keep theirs."""
        self._inside.close()
        self._outside.close()

    def _pass_on(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._outside, 1, 1)
        if not descriptors:
            return  # the sandbox was not made
        places = threading.Semaphore(MAX_CONNECTIONS)
        with socket.socket(fileno=descriptors[0]) as listener:
            while True:
                places.acquire()
                accepted, _ = listener.accept()
                threading.Thread(target=self._serve, args=(accepted, places), daemon=True).start()

    def _serve(self, accepted: socket.socket, places: threading.Semaphore) -> None:
        try:
            with accepted, suppress(OSError), socket.create_connection(self._address, CONNECT_S) as outside:
                outside.settimeout(None)
                for one in (accepted, outside):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=_copy, args=(outside, accepted), daemon=True)
                back.start()
                _copy(accepted, outside)
                back.join()
        finally:
            places.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until their end, which is passed on too. If either side breaks off, both are ended."""
    try:
        while part := source.recv(PART_BYTES):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
