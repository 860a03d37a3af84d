"""How older releases of TiDB differ from the simulated server, which behaves like the newest release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox.tidb_binaries import TidbRelease
from sandbox.tidb_sim.packets import Capability

_COLUMN = (
    b"\x1f\x00\x00\x02\x03def\x00\x00\x00\tsleep(30)\x00\x0c?\x00\x15\x00\x00\x00\x08\x80\x00\x00\x00\x00"
)
_COLUMN_WITH_ORIGINAL_NAME = (
    b"(\x00\x00\x02\x03def\x00\x00\x00\tsleep(30)\tsleep(30)\x0c?\x00\x15\x00\x00\x00\x08\x80\x00\x00\x00\x00"
)
_ANSWER_TO_A_KILLED_SLEEP = (
    b"\x01\x00\x00\x01\x01"
    + _COLUMN
    + b"\x05\x00\x00\x03\xfe\x00\x00\x02\x00\x02\x00\x00\x04\x011\x05\x00\x00\x05\xfe\x00\x00\x02\x00"
)
"""A column, an EOF packet, a row with the value 1, and an EOF packet."""
_QUERY_INTERRUPTED = b"\x28\x00\x00\x01\xff\x25\x05#70100Query execution was interrupted"
_OK = b"\x00\x00\x00\x02\x00\x00\x00"
_OK_WITH_A_WARNING = b"\x00\x00\x00\x02\x00\x01\x00"
_DEPRECATION_WARNING = {
    "level": "Warning",
    "msg": "tidb_enable_exchange_partition is always turned on, this variable has been deprecated and will be"
    " removed in the future releases",
}


@dataclass(frozen=True, slots=True)
class ReleaseDifference:
    """`behavior`: the name of the function in `tidb_behaviors`. `text`: in Markdown.

    `first_release`: the first tested release without the difference, such as (8, 5). Each of `older_results`
    returns what older releases may do from what the next newer release does.
    """

    behavior: str
    first_release: tuple[int, int]
    text: str
    older_results: tuple[Callable[[Any], Any], ...]

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


def _older_interrupted_kill(result: tuple[Any, tuple[bytes, str]]) -> tuple[Any, tuple[bytes, str]]:
    answer, (received, end) = result
    return answer, (_QUERY_INTERRUPTED + received, end)


def _with_original_name(result: tuple[Any, tuple[bytes, str]]) -> tuple[Any, tuple[bytes, str]]:
    answer, (received, end) = result
    return answer, (received.replace(_COLUMN, _COLUMN_WITH_ORIGINAL_NAME), end)


DIFFERENCES = (
    ReleaseDifference(
        "status_page",
        (8, 5),
        "`/status` lacks `status.init_stats_percentage`; `/info` has `binlog_status`",
        (_older_status_page,),
    ),
    ReleaseDifference(
        "kill_of_a_busy_session",
        (8, 5),
        "`KILL` of a session during `SLEEP()` ends the sleep with a result, or sometimes with error 1317,"
        " before it disconnects",
        (_older_kill, _older_interrupted_kill),
    ),
    ReleaseDifference(
        "kill_of_a_busy_session",
        (7, 5),
        "result columns that are expressions have an original name",
        (_with_original_name,),
    ),
    ReleaseDifference(
        "greeting",
        (7, 5),
        "the server does not offer compression",
        (lambda greeting: {**greeting, "capabilities": greeting["capabilities"] & ~Capability.COMPRESS},),
    ),
    ReleaseDifference(
        "kill_of_an_unknown_session",
        (7, 5),
        "`KILL` of an unknown session has a warning",
        (lambda answers: [answer.replace(_OK, _OK_WITH_A_WARNING) for answer in answers],),
    ),
    ReleaseDifference(
        "states",
        (7, 1),
        "a new session has a warning about a deprecated variable",
        (lambda states: {**states, "fresh": {**states["fresh"], "warnings": [_DEPRECATION_WARNING]}},),
    ),
    ReleaseDifference(
        "graceful_shutdown",
        (7, 1),
        "after the graceful wait, idle sessions end at once, and not together with the last transaction",
        (lambda effects: {**effects, "idle": ((b"", "FIN"), effects["idle"][1])},),
    ),
)
"""Those of newer releases come first."""


def possible_results(behavior: str, release: TidbRelease, result: Any) -> list[Any]:
    """Return what `release` may do, from the result of the simulated server."""
    results = [result]
    for difference in DIFFERENCES:
        if difference.behavior == behavior and difference.applies_to(release):
            results = [older(newer) for newer in results for older in difference.older_results]
    return results


def differences_of(release: TidbRelease) -> list[str]:
    """Return the texts of the differences of a release."""
    return [difference.text for difference in DIFFERENCES if difference.applies_to(release)]
