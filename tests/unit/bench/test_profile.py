"""Profiles: parsing of `perf script`, classification of CPU time, flame graphs and the page."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.machine import Machine, MachineCondition
from bench.profiling.call_stacks import (
    AREAS,
    OTHER_KERNEL_AREA,
    USER_AREA,
    CallStack,
    area_shares,
    classify_stack,
    fold_stacks,
)
from bench.profiling.flame_graph import flame_graph_svg
from bench.profiling.page import Profile, profiles_as_markdown, write_profiles

MACHINE = Machine("a CPU", 2, 1024, "Linux 6.1", "3.11.7", "1.40.0", "3.4.23")
QUIET = MachineCondition("2026-01-01 00:00:00Z", 0.5, 0.02)
SVG = "{http://www.w3.org/2000/svg}"

# Shortened output of `perf script` 6.1.
PRINTED = """\
wrk:worker_0 
\tffffffff81e2fb7e sock_def_readable ([kernel.kallsyms])
\tffffffff820313e2 tcp_v4_rcv ([kernel.kallsyms])
\tffffffff8200b81b tcp_sendmsg ([kernel.kallsyms])
\tffffffff821ea011 do_syscall_64 ([kernel.kallsyms])
\t          10aba4 __send (/usr/lib/x86_64-linux-gnu/libc.so.6)
\t    7faeb09f8d30 [unknown] ([unknown])

wrk:worker_0 
\t         2e573d1 [unknown] (/opt/envoy/bin/envoy)
\t         2e57400 [unknown] (/opt/envoy/bin/envoy)
\t           593c0 start_thread (/usr/lib/x86_64-linux-gnu/libc.so.6)

wrk:worker_0 
\t           1a2b3 <module::Socket as module::Read>::read (/opt/lib module.so (deleted))

"""  # noqa: W291 - perf ends a thread's name with a space

SEND: CallStack = ("t", "__send", "do_syscall_64_[k]", "tcp_sendmsg_[k]")


def test_parses_stacks_from_thread_to_function() -> None:
    assert fold_stacks(PRINTED * 2) == Counter(
        {
            (
                *("wrk:worker_0", "__send", "do_syscall_64_[k]", "tcp_sendmsg_[k]"),
                *("tcp_v4_rcv_[k]", "sock_def_readable_[k]"),
            ): 2,
            ("wrk:worker_0", "start_thread", "envoy"): 2,
            ("wrk:worker_0", "<module::Socket as module::Read>::read"): 2,
        }
    )


def test_empty_output_has_no_stacks() -> None:
    assert fold_stacks("") == fold_stacks("\n") == Counter()
    with pytest.raises(ValueError, match="no samples"):
        area_shares(fold_stacks(""))


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (["tcp_sendmsg", "tcp_v4_rcv", "sock_def_readable", "_raw_spin_unlock_irqrestore"], "wake-ups"),
        (["tcp_sendmsg", "net_rx_action", "tcp_ack", "kfree"], "TCP receive"),
        (["__x64_sys_recvfrom", "fdget"], "TCP receive"),
        (["tcp_sendmsg", "tcp_sendmsg_locked", "_copy_from_iter"], "TCP send"),
        (["do_writev", "security_file_permission"], "TCP send"),
        (["do_epoll_wait", "ep_send_events", "tcp_poll"], "epoll"),
        (["do_epoll_wait", "schedule", "__schedule", "finish_task_switch.isra.0"], "task switches"),
        (["exit_to_user_mode_loop", "schedule", "__schedule"], "task switches"),
        (["x64_sys_call"], "system call entry and exit"),
        ([], "system call entry and exit"),
        (["__x64_sys_clock_gettime", "ktime_get"], OTHER_KERNEL_AREA),
        (["asm_sysvec_apic_timer_interrupt", "update_wall_time"], "interrupts"),
    ],
)
def test_innermost_known_function_decides_the_area(functions: list[str], expected: str) -> None:
    kernel = ["entry_SYSCALL_64_after_hwframe", "do_syscall_64", *functions]
    assert classify_stack(("thread", "main", *(f"{name}_[k]" for name in kernel))) == expected


def test_user_functions_never_match_kernel_areas() -> None:
    assert classify_stack(("thread", "main", "tcp_sendmsg")) == USER_AREA
    assert classify_stack(("thread", "main", "exc_page_fault_[k]")) == OTHER_KERNEL_AREA


def test_area_shares_sum_to_one() -> None:
    parts = area_shares({SEND: 3, ("t", "main"): 1})
    assert list(parts) == list(AREAS)
    assert (parts["TCP send"], parts[USER_AREA], sum(parts.values())) == (0.75, 0.25, 1.0)


def boxes(picture: str) -> dict[str, float]:
    """Return the box widths of a flame graph by title."""
    widths = {}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        title, box = group.find(f"{SVG}title"), group.find(f"{SVG}path")
        if title is not None and box is not None:
            corners = [float(x) for x in re.findall(r"[ML] (\S+)", box.attrib["d"])]
            widths[title.text or ""] = max(corners) - min(corners)
    return widths


def test_box_width_is_the_share_of_samples() -> None:
    picture = flame_graph_svg({SEND: 300, ("t", "main", "<read>"): 100}, "a & b")
    widths = boxes(picture)
    assert list(widths) == [
        *("t: 100.0%", "__send: 75.0%", "do_syscall_64: 75.0%", "tcp_sendmsg: 75.0%"),
        *("main: 25.0%", "<read>: 25.0%"),
    ]
    assert widths["__send: 75.0%"] / widths["main: 25.0%"] == pytest.approx(3, abs=0.02)
    assert "400 samples" in picture
    assert picture == flame_graph_svg({SEND: 300, ("t", "main", "<read>"): 100}, "a & b")


def test_narrow_boxes_are_omitted() -> None:
    many: dict[CallStack, int] = {("t", f"function_{number}", "deep"): 1 for number in range(300)}
    assert list(boxes(flame_graph_svg({**many, ("t", "main"): 100}, "x"))) == ["t: 100.0%", "main: 25.0%"]


def test_boxes_have_text_only_if_it_fits() -> None:
    picture = flame_graph_svg({("t", "a_long_name"): 4, ("t", "another_long_name"): 996}, "x")
    texts = [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert "another_long_name" in texts
    assert "a_long_name" not in texts
    assert set(AREAS) <= set(texts)
    with pytest.raises(ValueError, match="no samples"):
        flame_graph_svg({}, "x")


LOAD = "point select, 4 clients"
BUSY = MachineCondition("2026-01-01 00:01:00Z", 4.0, 0.6)
PROFILES = [
    Profile(LOAD, "HAProxy", "2.0.1", QUIET, 50.0, 9_000.0, {SEND: 75, ("t", "main"): 25}),
    Profile(LOAD, "Tidevoy", "0.1.0", BUSY, 40.0, 8_000.0, {SEND: 100}),
]


def test_page_splits_the_cpu_time_per_query() -> None:
    page = profiles_as_markdown(PROFILES, MACHINE)
    assert "## Point select, 4 clients" in page
    assert "|  | HAProxy 2.0.1 | Tidevoy 0.1.0 |" in page
    assert "| user code | 12.5 (25.0%) | 0.0 (0.0%) |" in page
    assert "| TCP send | 37.5 (75.0%) | 40.0 (100.0%) |" in page
    assert "| all | 50.0 | 40.0 |" in page
    assert "| queries/s | 9,000 | 8,000 |" in page
    assert "| samples | 100 | 100 |" in page


def test_page_reports_the_busiest_condition() -> None:
    page = profiles_as_markdown(PROFILES, MACHINE)
    assert "60% of the machine was busy with other things" in page
    assert "other programs affected" in page


def test_page_shows_every_flame_graph(tmp_path: Path) -> None:
    page, *pictures = write_profiles(PROFILES, MACHINE, tmp_path)
    assert page == tmp_path / "profiles.md"
    assert len(pictures) == len(PROFILES)
    for picture, profile in zip(pictures, PROFILES, strict=True):
        assert f"({picture.relative_to(tmp_path)})" in page.read_text()
        assert profile.proxy in (ElementTree.fromstring(picture.read_text()).findtext(f"{SVG}title") or "")
