"""Runs a program that dies with its parent: `python -I -S parent_guard.py PARENT_PID PROGRAM ARGUMENT...`.

The kernel sends SIGKILL when the parent's spawning thread exits for whatever reason (prctl(2),
PR_SET_PDEATHSIG; the setting survives execve). This is a separate program because a `preexec_fn` may deadlock
in a process that has threads, and gRPC has some.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def exec_guarded() -> None:
    """Tie this process to its parent, then execute the program."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent exited before its child started")
    # Python ignores these two signals, and ignored signals stay ignored across execve.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")


if __name__ == "__main__":
    exec_guarded()
