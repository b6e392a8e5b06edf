"""How a child process is tied to its parent, so that none outlives it.

On Linux the kernel kills the child when the parent's main thread ends, SIGKILL included; on
other systems only an orderly exit of the parent ends its children. Knows nothing of what runs.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`; make it in the parent's main thread, right before the child."""
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def before_exec() -> None:
        # A background job of a shell inherits "SIGINT ignored"; the child decides for itself.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the call above
                os._exit(1)

    return before_exec
