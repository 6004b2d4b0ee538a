"""A steady stream of datagrams that shares links with the collectives."""

import socket
import time
from typing import Final

from perfmodel.units import BytesPerSecond

#: Fits one frame of ``wiring.MTU_BYTES``.
_PAYLOAD_BYTES: Final = 8900
#: Ethernet, IP and UDP headers, which the shaper counts too.
_HEADER_BYTES: Final = 14 + 20 + 8
_PORT: Final = 9999
_PERIOD_S: Final = 0.002

#: ``SO_SNDBUFFORCE``, which Python does not name: beyond the system's limit. With less than the queue of a
#: shaper the stream would yield to TCP, and not be steady.
_SEND_BUFFER_FORCE: Final = 32
_SEND_BUFFER_BYTES: Final = 8_388_608


def send(address: str, rate: BytesPerSecond) -> None:
    """Send for ever at a rate, headers included."""
    payload = bytes(_PAYLOAD_BYTES)
    interval_s = (_PAYLOAD_BYTES + _HEADER_BYTES) / rate
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, _SEND_BUFFER_FORCE, _SEND_BUFFER_BYTES)
        started_s = time.perf_counter()
        num_sent = 0
        while True:
            due = int((time.perf_counter() - started_s) / interval_s) + 1
            for _ in range(due - num_sent):
                sender.sendto(payload, (address, _PORT))
            num_sent = due
            time.sleep(max(_PERIOD_S, interval_s))


def swallow() -> None:
    """Receive and forget for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("", _PORT))
        while True:
            receiver.recv(2 * _PAYLOAD_BYTES)
