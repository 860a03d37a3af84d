"""Log lines: one stream, one form, one level for our own and the libraries' lines; no secrets."""

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
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():  # what captures warnings replaces how they are shown
        yield
        logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_time_level_and_name() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format="auto"), stream=stream)
    log.info("the configuration was read again", kind="config.reloaded")
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    assert line == {
        "event": "the configuration was read again",
        "kind": "config.reloaded",
        "level": "info",
        "logger": "tidevoy.test",
    }


@pytest.mark.parametrize(
    ("name", "say"),
    [
        ("uvicorn.error", lambda logger: logger.error("up on port %d", 3080)),
        ("grpc", lambda logger: logger.warning("up on port %d", 3080)),
        ("asyncio", lambda logger: logger.error("up on port %d", 3080)),
    ],
)
def test_libraries_use_the_same_stream_and_form(name: str, say: Callable[[logging.Logger], None]) -> None:
    logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler(io.StringIO()))
    stream = io.StringIO()
    logs.configure(LogSettings(format="json"), stream=stream)
    say(logging.getLogger(name))
    (line,) = lines(stream)
    assert (line["event"], line["logger"]) == ("up on port 3080", name)


def test_the_level_changes_at_run_time() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(level="warning"), stream=stream)
    log.info("too quiet")
    logs.set_level("debug")
    log.debug("heard")
    logging.getLogger("asyncio").debug("noise")
    logging.getLogger("uvicorn.access").info("GET /healthz")
    logs.set_level("error")
    log.warning("too quiet again")
    logging.getLogger("grpc").warning("too quiet again")
    assert [line["event"] for line in lines(stream)] == ["heard"]


def test_a_second_set_up_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure(LogSettings(), stream=first)
    log.info("one")
    logs.configure(LogSettings(), stream=second)
    log.info("two")
    assert [[line["event"] for line in lines(stream)] for stream in (first, second)] == [["one"], ["two"]]


@pytest.mark.parametrize(
    ("stream", "form", "no_color", "colours"),
    [
        (Terminal(), "auto", "", True),
        (Terminal(), "auto", "1", False),
        (Terminal(), "console", "", True),
        (io.StringIO(), "console", "", False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    stream: io.StringIO, form: Any, no_color: str, colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    logs.configure(LogSettings(format=form), stream=stream)
    log.info("hello", node="tidb-0:4000")
    assert "hello" in stream.getvalue()
    assert ("\x1b[" in stream.getvalue()) is colours


def test_json_on_a_terminal_when_it_is_asked_for() -> None:
    stream = Terminal()
    logs.configure(LogSettings(format="json"), stream=stream)
    log.info("hello")
    assert lines(stream)[0]["event"] == "hello"


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_secret_is_written(form: Any) -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format=form), stream=stream)
    log.info("login", user="root", password="hunter2", token="hunter2")
    try:
        password = "hunter" + "2"
        raise RuntimeError(f"login failed after {len(password)} bytes")
    except RuntimeError:
        log.exception("trouble")
        logging.getLogger("uvicorn.error").exception("trouble")
    assert stream.getvalue().count("login failed after 7 bytes") == 2
    assert "hunter2" not in stream.getvalue()


def test_text_from_outside_cannot_forge_a_json_line() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format="json"), stream=stream)
    log.warning("a NACK came", message='bad\n{"event": "forged"}')
    (line,) = lines(stream)
    assert line["message"] == 'bad\n{"event": "forged"}'


def test_text_from_outside_cannot_forge_a_line_of_text() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(format="console"), stream=stream)
    log.warning("a NACK came: bad\nforged \x1b[31mred, schön", message="bad\nforged")
    assert "bad\\nforged \\x1b[31mred, schön" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


def test_warnings_are_lines_too() -> None:
    stream = io.StringIO()
    logs.configure(LogSettings(), stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("that is old", DeprecationWarning, stacklevel=1)
    (line,) = lines(stream)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "that is old" in line["event"]
