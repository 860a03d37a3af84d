"""Runs a program that dies with its parent: `python -I -S process_guard.py PARENT_PID SCOPE PROGRAM ARG...`.

SCOPE `process`: the program replaces the guard, and the kernel kills it when the parent's spawning thread
ends (prctl(2), PR_SET_PDEATHSIG; the setting survives execve). SCOPE `group`: the guard stays beside the
program, kills its own process group when the parent ends, and exits in the same way as the program.

This is a separate program because a `preexec_fn` may deadlock in a process with threads (gRPC has some).
"""

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_RUNNABLE_EXIT_CODE = 127  # as in a shell


def main() -> None:
    """Tie this process to its parent, and run the program."""
    parent, scope, *command = sys.argv[1:]
    if scope == "process":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    parent_descriptor = os.pidfd_open(int(parent))
    if os.getppid() != int(parent):
        sys.exit("the parent exited before its child started")
    if scope == "group":
        # A signal to the group is meant for the program. The guard must survive to report how the program
        # ends. Use a handler, because the program would inherit an ignored signal across execve.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        if child := os.fork():
            _guard_group(child, parent_descriptor)
    # Python ignores these two signals, and ignored signals stay ignored across execve.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - running a program is its purpose
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_RUNNABLE_EXIT_CODE)


def _guard_group(child: int, parent_descriptor: int) -> None:
    child_descriptor = os.pidfd_open(child)
    ready, _, _ = select.select([child_descriptor, parent_descriptor], [], [])
    if parent_descriptor in ready:
        os.killpg(0, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0 and -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
