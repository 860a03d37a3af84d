"""Logging: one set-up for our own lines and those of the libraries, to standard error, as text or as JSON."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from controlplane.config.settings import LogSettings

# Libraries that tell more than their users want: their floor, whatever our own level is.
_LIBRARY_MIN_LEVELS: Mapping[str, int] = {
    "asyncio": logging.INFO,
    "grpc": logging.INFO,
    "hpack": logging.INFO,
    "httpcore2": logging.INFO,
    "httpx2": logging.WARNING,
    "uvicorn.access": logging.WARNING,
}
_SECRET_KEYS = frozenset({"authorization", "cookie", "passphrase", "passwd", "password", "secret", "token"})


def configure(log: LogSettings, *, stream: TextIO | None = None) -> None:
    """Sends every log line of this process to `stream`, by default standard error. May be called again."""
    out = stream or sys.stderr
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_common_processors(),
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering_processors(log.format, out),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_common_processors(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    set_level(log.level)


def set_level(level: str) -> None:
    """The least severe line that is written from now on, as `log.level` names it."""
    severity = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(severity)
    for name, min_level in _LIBRARY_MIN_LEVELS.items():
        logging.getLogger(name).setLevel(max(severity, min_level))


def _common_processors() -> list[structlog.typing.Processor]:
    """What is done to every line, ours or a library's, before it is rendered."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _mask_secrets,
    ]


def _rendering_processors(log_format: str, out: TextIO) -> list[structlog.typing.Processor]:
    is_terminal = out.isatty()
    if log_format == "json" or (log_format == "auto" and not is_terminal):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(sort_keys=False)]
    return [
        _escape_unprintable,
        structlog.dev.ConsoleRenderer(
            # https://no-color.org: set to anything but nothing, it asks for none.
            colors=is_terminal and not os.environ.get("NO_COLOR"),
            # The renderer's default shows the values of local variables, and those may be secrets.
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _escape_unprintable(
    _logger: Any, _method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Text of others (an Envoy's refusal, a key in etcd) shall neither forge lines nor steer the terminal."""
    for key, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[key] = "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return line


def _mask_secrets(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A last guard: what has the name of a secret is not written, whoever passed it."""
    for key in line.keys() & _SECRET_KEYS:
        line[key] = "**********"
    return line
