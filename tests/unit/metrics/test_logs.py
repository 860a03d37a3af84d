"""Logging setup: one stream, format and level for our own and the libraries' lines, and no secrets."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from controlplane.config.settings import LogSettings
from controlplane.metrics import logs

log = structlog.get_logger("tidevoy.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():  # restores `warnings.showwarning`, which captureWarnings replaces
        yield
        logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def parse_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_line_is_json_with_time_level_and_logger() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format="auto"), stream=stream)
    log.info("the configuration was reloaded", kind="config.reloaded")
    (line,) = parse_lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    assert line == {
        "event": "the configuration was reloaded",
        "kind": "config.reloaded",
        "level": "info",
        "logger": "tidevoy.test",
    }


@pytest.mark.parametrize(
    ("name", "emit"),
    [
        ("uvicorn.error", lambda logger: logger.error("up on port %d", 3080)),
        ("grpc", lambda logger: logger.warning("up on port %d", 3080)),
        ("asyncio", lambda logger: logger.error("up on port %d", 3080)),
    ],
)
def test_libraries_use_the_same_stream_and_format(name: str, emit: Callable[[logging.Logger], None]) -> None:
    logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler(io.StringIO()))
    stream = io.StringIO()
    logs.configure(LogSettings(format="json"), stream=stream)
    emit(logging.getLogger(name))
    (line,) = parse_lines(stream)
    assert (line["event"], line["logger"]) == ("up on port 3080", name)


def test_level_changes_at_run_time() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(level="warning"), stream=stream)
    log.info("below the level")
    logs.set_level("debug")
    log.debug("logged")
    logging.getLogger("asyncio").debug("noise")
    logging.getLogger("uvicorn.access").info("GET /healthz")
    logs.set_level("error")
    log.warning("below the level")
    logging.getLogger("grpc").warning("below the level")
    assert [line["event"] for line in parse_lines(stream)] == ["logged"]


def test_second_configuration_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure(LogSettings(), stream=first)
    log.info("one")
    logs.configure(LogSettings(), stream=second)
    log.info("two")
    assert [[line["event"] for line in parse_lines(stream)] for stream in (first, second)] == [
        ["one"],
        ["two"],
    ]


@pytest.mark.parametrize(
    ("stream", "log_format", "no_color", "colors"),
    [
        (Terminal(), "auto", "", True),
        (Terminal(), "auto", "1", False),
        (Terminal(), "console", "", True),
        (io.StringIO(), "console", "", False),
    ],
)
def test_colors_need_a_terminal_and_an_unset_no_color_variable(
    stream: io.StringIO, log_format: Any, no_color: str, colors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    logs.configure(LogSettings(format=log_format), stream=stream)
    log.info("hello", node="tidb-0:4000")
    assert "hello" in stream.getvalue()
    assert ("\x1b[" in stream.getvalue()) is colors


def test_json_on_a_terminal_if_configured() -> None:
    stream = Terminal()
    logs.configure(LogSettings(format="json"), stream=stream)
    log.info("hello")
    assert parse_lines(stream)[0]["event"] == "hello"


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_secrets_are_masked(log_format: Any) -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format=log_format), stream=stream)
    log.info("login", user="root", password="hunter2", token="hunter2")
    try:
        password = "hunter" + "2"
        raise RuntimeError(f"rejected after {len(password)} bytes")
    except RuntimeError:
        log.exception("login failed")
        logging.getLogger("uvicorn.error").exception("login failed")
    assert stream.getvalue().count("rejected after 7 bytes") == 2
    assert "hunter2" not in stream.getvalue()


def test_external_text_cannot_forge_a_json_line() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format="json"), stream=stream)
    log.warning("a NACK was received", message='bad\n{"event": "forged"}')
    (line,) = parse_lines(stream)
    assert line["message"] == 'bad\n{"event": "forged"}'


def test_external_text_cannot_forge_a_console_line() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format="console"), stream=stream)
    log.warning("a NACK was received: bad\nforged \x1b[31mred, schön", message="bad\nforged")
    assert "bad\\nforged \\x1b[31mred, schön" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


def test_python_warnings_are_logged() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(), stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("that is old", DeprecationWarning, stacklevel=1)
    (line,) = parse_lines(stream)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "that is old" in line["event"]
