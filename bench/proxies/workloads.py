"""The workloads under which proxies are compared.

Statements that return several rows run at a fixed rate. At full speed, their figures depend on the kernel's
choice of cores, which lasts for seconds: two processes of one build differed by up to 8 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from bench.sysbench import DATABASE

ROWS = 100_000  # in the table that all workloads read
_TABLE = f"{DATABASE}.sbtest1"
POINT_SELECT = f"SELECT c FROM {_TABLE} WHERE id={{}}"
_POINT_UPDATE = f"UPDATE {_TABLE} SET k=k+1 WHERE id={{}}"
_BACKGROUND_STATEMENTS_PER_SECOND = 2_000.0


class Encryption(StrEnum):
    """The connections that use TLS."""

    NONE = "none"
    CLIENTS = "clients"  # from clients to the proxy
    BOTH = "both"  # also from the proxy to the server


@dataclass(frozen=True, slots=True)
class ProxyWorkload:
    """`clients` connections that send `statement` repeatedly, with a random row id in place of `{}`.

    Several statements, one per line, take turns.

    `rate`: statements per second of all clients; None: each client sends its next statement at once.
    `new_connections`: additional connections per second, each with one statement. `seconds`: duration of a
    slice. `in_short_form`: whether the short form includes the workload. `figures`: the keys of
    `bench.proxies.interleaving.FIGURES` to compare.
    """

    name: str
    clients: int
    statement: str = POINT_SELECT
    rate: float | None = None
    new_connections: float | None = None
    encryption: Encryption = Encryption.NONE
    seconds: float = 0.03
    in_short_form: bool = True
    figures: Sequence[str] = ("cpu", "mean", "p95", "new_connection")

    @property
    def highest_id(self) -> int:
        """The upper limit of random ids, low enough that all rows of a range exist."""
        return ROWS // 2


def _select_rows(count: int) -> str:
    return f"SELECT c FROM {_TABLE} WHERE id BETWEEN {{}} AND {{}}+{count - 1}"


WORKLOADS = (
    ProxyWorkload("point select, 1 client", 1, in_short_form=False),
    ProxyWorkload("point select, 16 clients", 16),
    ProxyWorkload("point select, 64 clients", 64),
    ProxyWorkload("point select, 4,000/s", 16, rate=4_000.0),
    ProxyWorkload(
        "read and write, 2,000/s",
        16,
        "\n".join([POINT_SELECT, _select_rows(10), _POINT_UPDATE, POINT_SELECT]),
        rate=2_000.0,
        in_short_form=False,
    ),
    ProxyWorkload("10 rows, 2,000/s", 16, _select_rows(10), rate=2_000.0, in_short_form=False),
    ProxyWorkload("100 rows, 1,000/s", 16, _select_rows(100), rate=1_000.0),
    ProxyWorkload("1,000 rows, 300/s", 16, _select_rows(1_000), rate=300.0, seconds=0.05),
    ProxyWorkload("10,000 rows, 40/s", 16, _select_rows(10_000), rate=40.0, seconds=0.1, in_short_form=False),
    ProxyWorkload("100 new connections/s", 16, rate=_BACKGROUND_STATEMENTS_PER_SECOND, new_connections=100.0),
    ProxyWorkload("300 new connections/s", 16, rate=_BACKGROUND_STATEMENTS_PER_SECOND, new_connections=300.0),
    ProxyWorkload("TLS to clients", 16, encryption=Encryption.CLIENTS),
    ProxyWorkload(
        "TLS to clients, 1,000 rows, 300/s",
        16,
        _select_rows(1_000),
        rate=300.0,
        seconds=0.05,
        encryption=Encryption.CLIENTS,
        in_short_form=False,
    ),
    ProxyWorkload(
        "TLS to clients and server", 16, encryption=Encryption.BOTH, in_short_form=False, figures=("cpu",)
    ),
)


OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", help="Only workloads whose name contains this text.")
]


def select_workloads(only: Sequence[str], *, whole: bool) -> list[ProxyWorkload]:
    """Return the workloads of the short or whole form, or those whose names contain any text of `only`.

    Raises BadParameter if there is no such workload.
    """
    if not only:
        return [workload for workload in WORKLOADS if whole or workload.in_short_form]
    selected = [
        workload for workload in WORKLOADS if any(part.lower() in workload.name.lower() for part in only)
    ]
    if not selected:
        names = "; ".join(workload.name for workload in WORKLOADS)
        raise typer.BadParameter(f"--only selects no workload; there are: {names}")
    return selected
