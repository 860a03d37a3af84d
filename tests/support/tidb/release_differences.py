"""How older releases of TiDB differ from the simulated server, which behaves like the newest release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox.tidb_binaries import TidbRelease

_ANSWER_TO_A_KILLED_SLEEP = (
    b"\x01\x00\x00\x01\x01"
    b"\x1f\x00\x00\x02\x03def\x00\x00\x00\tsleep(30)\x00\x0c?\x00\x15\x00\x00\x00\x08\x80\x00\x00\x00\x00"
    b"\x05\x00\x00\x03\xfe\x00\x00\x02\x00"
    b"\x02\x00\x00\x04\x011"
    b"\x05\x00\x00\x05\xfe\x00\x00\x02\x00"
)
"""A column, an EOF packet, a row with the value 1, and an EOF packet."""


@dataclass(frozen=True, slots=True)
class ReleaseDifference:
    """`first_release`: the first tested release without the difference, such as (8, 5). `text`: in Markdown.

    `older_result` returns what older releases do from what the simulated server does.
    """

    first_release: tuple[int, int]
    text: str
    older_result: Callable[[Any], Any]

    def applies_to(self, release: TidbRelease) -> bool:
        """Return whether a release has the difference."""
        return release.number < self.first_release


def _older_status_page(page: dict[str, Any]) -> dict[str, Any]:
    code, content_type, status = page["status"]
    older_status = {key: value for key, value in status.items() if key != "status"}
    older_info = dict(sorted({**page["info"], "binlog_status": "str"}.items()))
    return {**page, "status": (code, content_type, older_status), "info": older_info}


def _older_kill(result: tuple[Any, tuple[bytes, str]]) -> tuple[Any, tuple[bytes, str]]:
    answer, (received, end) = result
    return answer, (_ANSWER_TO_A_KILLED_SLEEP + received, end)


DIFFERENCES: Mapping[str, ReleaseDifference] = {
    "status_page": ReleaseDifference(
        (8, 5),
        "`/status` lacks `status.init_stats_percentage`; `/info` has `binlog_status`",
        _older_status_page,
    ),
    "kill_of_a_busy_session": ReleaseDifference(
        (8, 5),
        "`KILL` of a session during `SLEEP()` ends the sleep with a result before it disconnects",
        _older_kill,
    ),
}
"""By name of the behavior in `tidb_behaviors`."""


def differences_of(release: TidbRelease) -> list[str]:
    """Return the texts of the differences of a release."""
    return [difference.text for difference in DIFFERENCES.values() if difference.applies_to(release)]
