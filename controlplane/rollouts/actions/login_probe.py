"""The login probe of a returned node: opens a session and runs a statement."""

from __future__ import annotations

import pymysql

from controlplane.aio import ThreadPool
from controlplane.config.rollouts import LoginProbeSettings
from controlplane.observe.health.login import NotMySql, UnusableLogin, run_statement
from controlplane.observe.health.probes import printable

_THREADS = ThreadPool("login probe", 8)


async def probe_login(endpoint: str, host: str, probe: LoginProbeSettings, *, proxy_protocol: bool) -> str:
    """Open a session at `endpoint` (ip:port), run the statement; return why this failed, or an empty string.

    The reason is a clause about the node. `host` is the name in the node's certificate.
    """
    try:
        await run_statement(_THREADS, endpoint, host, probe, probe.timeout, proxy_protocol=proxy_protocol)
    except UnusableLogin as error:
        return f"cannot be probed: {error}"
    except (pymysql.MySQLError, OSError, RuntimeError, NotMySql) as error:
        return f"failed the login probe: {printable(str(error))}"
    return ""
