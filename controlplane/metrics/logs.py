"""Logging setup: our log lines and those of libraries go to standard error, as text or as JSON."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from controlplane.config.settings import LogSettings

# Minimum levels for libraries that log too much.
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
    """Send all log lines of this process to `stream`, by default standard error. May be called repeatedly."""
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
    """Set the minimum level of log lines; `level` is a value of the setting `log.level`."""
    severity = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(severity)
    for name, min_level in _LIBRARY_MIN_LEVELS.items():
        logging.getLogger(name).setLevel(max(severity, min_level))


def _common_processors() -> list[structlog.typing.Processor]:
    """Return the processors for every line, which run before it is rendered."""
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
            # https://no-color.org: any value except the empty string disables colors.
            colors=is_terminal and not os.environ.get("NO_COLOR"),
            # The renderer's default prints the values of local variables, which may be secrets.
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _escape_unprintable(
    _logger: Any, _method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Escape control characters, so that foreign text can neither forge lines nor control the terminal."""
    for key, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[key] = "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return line


def _mask_secrets(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask the values of keys that are named like secrets, as an additional protection."""
    for key in line.keys() & _SECRET_KEYS:
        line[key] = "**********"
    return line
