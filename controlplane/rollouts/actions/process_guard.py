"""Runs a program that dies with its parent, and all it started: `python -I -S process_guard.py PROGRAM ARG...`.

Standard input is a pipe that the parent holds open. When the parent ends, however it ends, the pipe is
closed, and the keeper kills its whole process group. The program's end is the keeper's: with its exit code,
or 128 and the number of the signal that ended it, as a shell has it. Only the standard library is at hand.
"""

import os
import select
import signal
import sys

_NOT_RUNNABLE_EXIT_CODE = 127  # as a shell has it


def main() -> int:
    """Start the program, wait for its end or the parent's, and tell how it ended."""
    # A signal to the group is for the program; the keeper has to see what comes of it. A handler, for what
    # is ignored stays so across execve.
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
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # Python ignores these two, and what is ignored stays so across execve.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - this is what it is for
    except OSError as problem:
        os.write(2, f"{command[0]}: {problem.strerror}\n".encode())
        os._exit(_NOT_RUNNABLE_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main())
