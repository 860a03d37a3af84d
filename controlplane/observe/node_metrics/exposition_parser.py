"""The few series that we use out of what `GET /metrics` of a TiDB server answers. Pure.

That is Prometheus's text format (prometheus.io/docs/instrumenting/exposition_formats), hundreds of kilobytes
of which some ten lines are of use. So it is read as it comes, part by part, and a line that does not begin
with one of our names is not looked at. Measured on one core: 2 ms for a megabyte in 9,500
lines, and 4 ms with all that it takes to get it over HTTP.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from controlplane.model.node_metrics import Sample


class Series(NamedTuple):
    """A series as TiDB names it: where it goes in a `Sample`, and which `type` it must have, if any."""

    part: str
    name: str
    kind: str = ""


SERIES = (
    Series("cpu_seconds", "process_cpu_seconds_total"),
    Series("cpu_quota", "tidb_server_maxprocs"),
    Series("memory_bytes", "process_resident_memory_bytes"),
    Series("memory_quota_bytes", "tidb_server_memory_quota_bytes"),
    Series("pd_requests", "pd_client_cmd_handle_cmds_duration_seconds_count", "tso"),
    Series("pd_failures", "pd_client_cmd_handle_failed_cmds_duration_seconds_count", "tso"),
    Series("tikv_requests", "tidb_tikvclient_request_seconds_count"),
    Series("tikv_failures", "tidb_tikvclient_backoff_seconds_count", "tikvRPC"),
)

_WANTED = {
    series.name.encode(): (series.part, b'"%b"' % series.kind.encode() if series.kind else b"")
    for series in SERIES
}
_BEGINNINGS = tuple(_WANTED)
_LONGEST_LINE = 64 * 1024

# What repeats is never given back (`*+`): a long line that is no series must not take seconds.
_NAME, _TEXT = rb"[a-zA-Z_][a-zA-Z0-9_]*", rb'"(?:[^"\\]|\\.)*"'
_PAIR = _NAME + rb"[ \t]*=[ \t]*" + _TEXT + rb"[ \t]*+"
_LINE = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*"
    rb"(?:\{[ \t]*((?:" + _PAIR + rb"(?:,[ \t]*" + _PAIR + rb")*,?[ \t]*)?)\}[ \t]*)?"
    rb"(?<=[ \t}])(\+?(?:[0-9]++\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    rb"(?:[ \t]+-?[0-9]+)?[ \t\r]*"
)
_LABEL = re.compile(rb"(" + _NAME + rb")[ \t]*=[ \t]*(" + _TEXT + rb")")


class MetricsText:
    """One answer of `GET /metrics`, fed as it comes. Series with several sets of labels are added up.

    A value that is no plain number (NaN, Inf), or that none of these series can have (below zero), is not
    there; nor is a line that is not whole when the answer ends.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._is_overlong = False
        self._sums: dict[str, float] = {}

    def feed(self, part: bytes) -> None:
        """The next bytes, cut anywhere."""
        *lines, rest = (self._rest + part).split(b"\n")
        if lines and self._is_overlong:
            del lines[0]
            self._is_overlong = False
        for line in lines:
            if line.startswith(_BEGINNINGS):
                self._take(line)
        if self._is_overlong or len(rest) > _LONGEST_LINE:
            self._is_overlong, rest = True, b""
        self._rest = rest

    def sample(self, at: float) -> Sample | None:
        """What was found, as of that time; None: nothing of it."""
        found = {part: total for part, total in self._sums.items() if math.isfinite(total)}
        return Sample(at, **found) if found else None

    def _take(self, line: bytes) -> None:
        matched = _LINE.fullmatch(line)
        if matched is None or matched[1] not in _WANTED:
            return
        part, kind = _WANTED[matched[1]]
        if kind and (b"type", kind) not in _LABEL.findall(matched[2] or b""):
            return
        value = float(matched[3])
        if math.isfinite(value):
            self._sums[part] = self._sums.get(part, 0.0) + value
