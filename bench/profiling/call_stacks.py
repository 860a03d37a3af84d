"""Parse the call stacks that `perf script` prints, and assign their CPU time to areas such as `TCP send`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

# The thread's name, then the functions, the outermost first. Kernel functions end in KERNEL_SUFFIX.
CallStack = tuple[str, ...]

PERF_FIELDS = "comm,ip,sym,dso"  # the fields of `perf script` that `fold_stacks` needs
KERNEL_SUFFIX = "_[k]"  # the mark that other flame graph tools use

USER_AREA = "user code"
OTHER_KERNEL_AREA = "other kernel"

# The first pattern that matches a function name decides its area.
_AREAS = (
    (
        "wake-ups",
        r"sock_def_(readable|write_space)|sk_stream_write_space|ep_poll_callback|_*wake_up\w*|try_to_wake_up"
        r"|ttwu_\w+|autoremove_wake_function",
    ),
    ("task switches", r"_*schedule(_\w+)?|finish_task_switch|schedule_hrtimeout\w*"),
    ("epoll", r"_*(do_|x64_sys_|do_sys_)*epoll_\w+|ep_\w+"),
    (
        "TCP receive",
        r"net_rx_action|process_backlog|_*napi_poll|_*netif_receive_skb\w*|ip_rcv\w*|ip_local_deliver\w*"
        r"|ip_protocol_deliver_rcu|tcp_v[46]_(do_)?rcv|tcp_rcv_\w+|_*tcp_ack\w*|tcp_data_\w+|tcp_recvmsg\w*"
        r"|sock_(recvmsg|read_iter)|_*(x64_sys_|sys_)(recv\w+|readv?)|do_readv|vfs_readv?|ksys_read",
    ),
    (
        "TCP send",
        r"tcp_sendmsg\w*|_*tcp_push\w*|tcp_write_xmit|_*tcp_transmit_skb|_*ip_queue_xmit|ip_output|ip_finish_output2"
        r"|_*dev_queue_xmit|dev_hard_start_xmit|loopback_xmit|sock_(sendmsg|write_iter)"
        r"|_*(x64_sys_|sys_)(send\w+|writev?)|do_writev|vfs_writev?|ksys_write",
    ),
    ("interrupts", r"asm_\w+|_*sysvec_\w+"),
    (
        "system call entry and exit",
        r"entry_SYSCALL\w*|do_syscall_64|x64_sys_call|syscall_\w+|exit_to_user_mode\w*",
    ),
    (OTHER_KERNEL_AREA, r"_*(x64|ia32|do)_sys_\w+"),
)
_AREA_PATTERNS = tuple((area, re.compile(rf"(?:{pattern})(?:\.[\w.]+)?")) for area, pattern in _AREAS)

AREAS = (USER_AREA, *(area for area, _ in _AREA_PATTERNS if area != OTHER_KERNEL_AREA), OTHER_KERNEL_AREA)

_UNKNOWN = "[unknown]"
_FRAME_PATTERN = re.compile(r"[0-9a-f]+ (?P<name>.+) \((?P<file>[^()]*)(?: \(deleted\))?\)")


def fold_stacks(output: str) -> Counter[CallStack]:
    """Count the samples of each stack in the output of `perf script -F PERF_FIELDS`.

    A function without a symbol gets the name of its file. Consecutive equal frames are merged, so that a
    stripped program appears as one frame. Addresses outside any file are left out.
    """
    stacks: Counter[CallStack] = Counter()
    for sample in re.split(r"\n\s*\n", output.strip("\n")):
        thread, *lines = sample.splitlines() or [""]
        frames = [frame for line in reversed(lines) if (frame := _parse_frame(line))]
        if frames:
            stacks[(thread.strip(), *_without_repeats(frames))] += 1
    return stacks


def classify_stack(stack: Sequence[str]) -> str:
    """Return the area of a stack: that of the innermost kernel function that a pattern matches."""
    for function in reversed(stack):
        if not function.endswith(KERNEL_SUFFIX):
            break
        for name, pattern in _AREA_PATTERNS:
            if pattern.fullmatch(function.removesuffix(KERNEL_SUFFIX)):
                return name
    return OTHER_KERNEL_AREA if stack[-1].endswith(KERNEL_SUFFIX) else USER_AREA


def area_shares(stacks: Mapping[CallStack, int]) -> dict[str, float]:
    """Return the fraction of all samples in each of AREAS. Raises ValueError without samples."""
    total = sum(stacks.values())
    if not total:
        raise ValueError("there are no samples")
    samples_by_area: Counter[str] = Counter()
    for stack, samples in stacks.items():
        samples_by_area[classify_stack(stack)] += samples
    return {area: samples_by_area[area] / total for area in AREAS}


def _parse_frame(line: str) -> str | None:
    """Return the function in a line like `  ffffffff8200b81b tcp_sendmsg ([kernel.kallsyms])`."""
    parts = _FRAME_PATTERN.fullmatch(line.strip())
    if parts is None or parts["file"] == _UNKNOWN:
        return None
    name, file = parts["name"], parts["file"]
    if name == _UNKNOWN:
        name = PurePath(file).name
    return name + KERNEL_SUFFIX if file.startswith("[") and file != "[vdso]" else name


def _without_repeats(frames: Sequence[str]) -> Iterator[str]:
    for index, frame in enumerate(frames):
        if index == 0 or frame != frames[index - 1]:
            yield frame
