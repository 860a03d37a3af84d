"""The third probe of a node: a login, and a statement that must end in time."""

from __future__ import annotations

import asyncio
import errno
import ssl

import pymysql
from pymysql.constants import CR, ER

from controlplane.aio import ThreadPool
from controlplane.config.settings import StatementCheckSettings
from controlplane.model.health import CheckStatus
from controlplane.observe.health.login import ConnectTimeout, NotMySql, UnusableLogin, run_statement
from controlplane.observe.health.probes import (
    LocalResourceError,
    Probe,
    ProbeResult,
    describe_error,
    printable,
)

MAX_CONCURRENT_PROBES = 64
"""Each login blocks a thread, usually for a few milliseconds, but at a hanging node until its timeout. Other
logins wait until a thread is free, and their timeout begins then."""
_THREADS = ThreadPool("statement check", MAX_CONCURRENT_PROBES)

# TiDB does not notice that a session has ended while it waits for a token, and a session takes 200 kB.
_HANGING_NODE_INTERVAL_SECONDS = 30.0

_FULL = frozenset({ER.CON_COUNT_ERROR, ER.TOO_MANY_USER_CONNECTIONS, ER.USER_LIMIT_REACHED})
# A node with any other error fails: for example, it has lost PD (9001) or a region of TiKV (9005).
_MISCONFIGURED = frozenset(
    {
        # The user: unknown, wrong password, not allowed from this host, or without the privilege.
        ER.ACCESS_DENIED_ERROR,
        ER.DBACCESS_DENIED_ERROR,
        ER.HOST_NOT_PRIVILEGED,
        ER.TABLEACCESS_DENIED_ERROR,
        ER.COLUMNACCESS_DENIED_ERROR,
        ER.SPECIFIC_ACCESS_DENIED_ERROR,
        1370,  # ER_PROCACCESS_DENIED_ERROR
        1698,  # ER_ACCESS_DENIED_NO_PASSWORD_ERROR
        1820,  # ER_MUST_CHANGE_PASSWORD
        1862,  # ER_MUST_CHANGE_PASSWORD_LOGIN
        3118,  # ER_ACCOUNT_HAS_BEEN_LOCKED
        # TLS or the authentication plugin.
        3159,  # ER_SECURE_TRANSPORT_REQUIRED
        CR.CR_SSL_CONNECTION_ERROR,
        CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
        CR.CR_AUTH_PLUGIN_ERR,
        # The statement.
        ER.PARSE_ERROR,
        ER.NO_DB_ERROR,
        ER.BAD_DB_ERROR,
        ER.NO_SUCH_TABLE,
        ER.BAD_FIELD_ERROR,
        ER.EMPTY_QUERY,
        ER.UNKNOWN_TABLE,
        ER.UNKNOWN_SYSTEM_VARIABLE,
        ER.SP_DOES_NOT_EXIST,
        ER.VIEW_INVALID,
    }
)
_FIRST_CLIENT_ERROR, _LAST_CLIENT_ERROR = 2000, 2999  # PyMySQL's own errors, about connections


class StatementProbe(Probe):
    """Logs in to one node and runs a statement, in a new session each time.

    A TiDB server may greet and answer `GET /status`, but run no statements: for example, if all tokens of
    `token-limit` are in use (pingcap/tidb pkg/server/conn.go). An open session would be cheaper, but it does
    not show whether clients can log in, and it would count as a connection all the time.
    """

    def __init__(
        self, endpoint: str, host: str, settings: StatementCheckSettings, *, proxy_protocol: bool
    ) -> None:
        """`host`: the name in the node's certificate."""
        super().__init__(endpoint, f"the SQL port {endpoint}")
        self._endpoint, self._host, self._settings = endpoint, host, settings
        self._proxy_protocol = proxy_protocol
        self._timeouts = 0  # in a row

    async def run(self, timeout: float) -> ProbeResult:
        """Probe once, within `timeout` seconds. Raises LocalResourceError if this machine cannot probe.

        A node that keeps hanging is probed less often, because each probe leaves a session on it.
        """
        timeouts, self._timeouts, self.min_interval = self._timeouts, 0, 0.0
        loop = asyncio.get_running_loop()

        def on_start() -> None:
            self.started_at = loop.time()

        on_start()
        try:
            await run_statement(
                _THREADS,
                self._endpoint,
                self._host,
                self._settings,
                timeout,
                proxy_protocol=self._proxy_protocol,
                on_start=on_start,
            )
        except UnusableLogin as error:
            return ProbeResult(CheckStatus.MISCONFIGURED, f"health.statement is unusable: {error}")
        except pymysql.MySQLError as error:
            return self._evaluate_error(error)
        except ConnectTimeout as error:
            failure = str(error)
        except TimeoutError:
            self._timeouts = timeouts + 1
            if self._timeouts >= self._settings.fall:
                self.min_interval = _HANGING_NODE_INTERVAL_SECONDS
            failure = f"does not run a statement within {timeout:g} s"
        except NotMySql as error:
            failure = f"fails the statement check: {error}"
        except RuntimeError as error:  # no thread can start, or a library is missing
            raise LocalResourceError(self._port_name, OSError(errno.EAGAIN, str(error))) from None
        except OSError as error:
            failure = describe_error(error, self._port_name)
        else:
            return ProbeResult(CheckStatus.PASS, f"{self._port_name} runs statements")
        return ProbeResult(CheckStatus.FAIL, f"{self._port_name} {failure}")

    def _evaluate_error(self, error: pymysql.MySQLError) -> ProbeResult:
        code = error.args[0] if error.args else None
        text = printable(str(error.args[-1] if error.args else error))
        cause = getattr(error, "original_exception", None)
        if code in _MISCONFIGURED or isinstance(cause, ssl.SSLCertVerificationError):
            reason = f"{self._port_name} rejects the login or statement of health.statement: {code}, {text}"
            return ProbeResult(CheckStatus.MISCONFIGURED, reason)
        status = CheckStatus.FULL if code in _FULL else CheckStatus.FAIL
        if isinstance(code, int) and not _FIRST_CLIENT_ERROR <= code <= _LAST_CLIENT_ERROR:
            text = f"error {code}, {text}"
        return ProbeResult(status, f"{self._port_name} fails the statement check: {text}")
