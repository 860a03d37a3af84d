"""Runs a program whose process group dies with the parent: `python -I -S process_guard.py PROGRAM ARG...`.

Standard input is a pipe that the parent holds open. When the parent ends for any reason, the pipe closes, and
the guard kills its whole process group. When the program ends, the guard ends with its exit code, or with 128
plus the signal number as a shell does. Only the standard library is available.
"""

import os
import select
import signal
import sys

_NOT_RUNNABLE_EXIT_CODE = 127  # as in a shell


def main() -> int:
    """Start the program, wait for its end or the parent's, and return its exit code."""
    # A signal to the group is meant for the program, and the guard must survive to report its effect. Use a
    # handler, because an ignored signal stays ignored across execve.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = os.fork()
    if child == 0:
        _exec_program(sys.argv[1:])
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        for ready, _ in poll.poll():
            if ready == descriptor:
                _, status = os.waitpid(child, 0)
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            os.killpg(0, signal.SIGKILL)


def _exec_program(command: list[str]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # Python ignores these two signals, and ignored signals stay ignored across execve.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - running a program is its purpose
    except OSError as problem:
        os.write(2, f"{command[0]}: {problem.strerror}\n".encode())
        os._exit(_NOT_RUNNABLE_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main())
