"""Handshakes that gRPC refused, as warnings: each reason once.

gRPC tells nobody but its own log, on stderr, at a level that is off by default, and does not say
whose handshake it was. For a process that is a TLS server that level is on, and descriptor 2
goes through a pipe: a refused handshake becomes a warning, gRPC's other lines of that level are
dropped, everything else is passed on. What a crash writes in its last moment may be lost.
"""

import logging
import os
import re
import sys
import threading
import time

from baton.cluster.once import Once

_log = logging.getLogger(__name__)
_INFO = re.compile(r"I\d{4} \d\d:\d\d:\d\d\.\d+ |.*\blog\.cc:\d+\] Log level INFO is not")
_REFUSED = re.compile(r".*ssl_transport_security\S* Handshake failed .*OPENSSL_internal:(\w+)(.*)")
_MEANS = {
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS",
    "HTTP_REQUEST": "the peer does not speak TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer shows no certificate",
    "CERTIFICATE_VERIFY_FAILED": "the peer's certificate does not hold",
}


class CoreLog:
    """Reads what comes through the pipe until its other end is closed."""

    def __init__(self, source: int, passed_on: int) -> None:
        self._source = source
        self._passed_on = passed_on
        self._told = Once()

    def run(self) -> None:
        with os.fdopen(self._source, "rb") as lines:
            for line in lines:
                if not self.takes(line.decode(errors="replace").rstrip()):
                    os.write(self._passed_on, line)

    def takes(self, line: str) -> bool:
        """True for a line that nobody need see as it is."""
        refused = _REFUSED.match(line)
        if refused is not None:
            reason, detail = _MEANS.get(refused[1], refused[1]), refused[2].strip(": ")
            if self._told.first((reason, detail), time.monotonic()):
                _log.warning("a TLS handshake was refused: %s (%s)", reason, detail or refused[1])
        return refused is not None or _INFO.match(line) is not None


def listen() -> None:
    """Call it first in a process, before logging is configured and gRPC is used."""
    os.environ["GRPC_VERBOSITY"] = "info"  # gRPC keeps what it finds when it is first used
    stderr = os.dup(2)
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    # Not through the pipe: its reader writes here too.
    sys.stderr = os.fdopen(stderr, "w", buffering=1, errors="backslashreplace")
    threading.Thread(target=CoreLog(source, stderr).run, name="core-log", daemon=True).start()
