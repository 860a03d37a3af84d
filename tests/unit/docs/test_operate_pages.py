"""Pages for operators name only metrics, settings, commands, events and files that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app
from controlplane.config.schema import format_path, iter_settings
from controlplane.config.settings import Settings
from sandbox.child_process import find_program
from tests.support.promql import alert_rules, check_query, check_syntax, exported_series

ROOT = Path(__file__).resolve().parents[3]
OPERATE = ROOT / "docs/operate"
PAGES = ("sizing", "tuning", "is-it-the-proxy", "measure")
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
_COMMAND = re.compile(r"(?<![\w./=-])tidevoy (?=[a-z-])([^|;#&)`\n]*)")
_SETTING_SECTIONS = frozenset(Settings.model_fields)


@cache
def page_text(page: str) -> str:
    return (OPERATE / f"{page}.md").read_text()


def code_blocks(page: str, *languages: str) -> Iterator[str]:
    """Yield the code blocks in these languages, with continued lines joined."""
    for language, code in _FENCE.findall(page_text(page)):
        if language in languages:
            yield re.sub(r"\\\n\s*", "", code)


def code_spans(page: str) -> Iterator[str]:
    """Yield the code within lines of text and tables."""
    for span in re.findall(r"`([^`]+)`", _FENCE.sub("", page_text(page))):
        yield re.sub(r"\s+", " ", span.replace("\\|", "|"))


def queries(page: str) -> Iterator[str]:
    """Yield the PromQL expressions that use Tidevoy's series."""
    for block in code_blocks(page, "promql"):
        code = re.sub(r"^#.*\n", "", block, flags=re.M)
        # A line with an indent continues the one before.
        yield from filter(None, re.split(r"\n+(?=\S)", code.strip()))
    yield from (span for span in code_spans(page) if re.search(r"\btidevoy_\w|^ALERTS\b", span))


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of each `tidevoy` command."""
    for code in (*code_blocks(page, "sh", "ini", ""), *code_spans(page)):
        for arguments in _COMMAND.findall(code):
            yield shlex.split(arguments)


def dotted_names(page: str) -> Iterator[str]:
    """Yield names such as `sql.max_connections` and `node.state`."""
    for span in code_spans(page):
        yield from re.findall(r"^([a-z_]+(?:\.[a-z_*]+)+)(?=$|[: ])", span)


@cache
def setting_names() -> frozenset[str]:
    """Return the names of all settings and sections."""
    paths = [path for path, _ in iter_settings(Settings)]
    return frozenset(format_path(path[:length]) for path in paths for length in range(1, len(path) + 1))


@cache
def event_kinds() -> frozenset[str]:
    text = (ROOT / "docs/reference/events.md").read_text()
    return frozenset(re.findall(r"`([a-z_]+\.[a-z_*]+)`", text))


@cache
def module_names() -> frozenset[str]:
    """Return the module's metrics and runtime keys, as Envoy's admin port names them."""
    sources = {path: path.read_text() for path in (ROOT / "filters/module/src").glob("*.rs")}
    metrics = re.findall(
        r"metrics\.(?:gauge|counter)\(\"(\w+)\"", sources[ROOT / "filters/module/src/telemetry.rs"]
    )
    keys = [key for text in sources.values() for key in re.findall(r"\"(tidevoy\.\w+)\"", text)]
    return frozenset({*(f"tidevoy.{name}" for name in metrics), *keys})


def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text()), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def check_command(arguments: list[str]) -> None:
    """Check that the subcommands and options exist."""
    command: Any = typer.main.get_command(app)
    path = ["tidevoy"]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("-"):
            known = {
                option
                for parameter in command.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
            assert name in known | {"--help"}, f"{' '.join(path)} has no option {name}"
        elif hasattr(command, "commands"):
            context = typer.Context(command, info_name=path[-1])
            subcommand = command.get_command(context, name)
            assert subcommand is not None, f"{' '.join(path)} has no command {name}"
            command = subcommand
            path.append(name)


@pytest.mark.parametrize("page", PAGES)
def test_page_is_listed_and_short(page: str) -> None:
    assert f"(operate/{page}.md)" in (ROOT / "docs/README.md").read_text()
    lines = page_text(page).splitlines()
    assert len(lines) <= 300
    assert lines[2].startswith("This page shows ")
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES)
def test_queries_use_exported_series(page: str, tmp_path: Path) -> None:
    expressions = list(queries(page))
    assert expressions
    for expression in expressions:
        check_query(expression)
    check_syntax(expressions, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_named_series_are_exported(page: str) -> None:
    for name in re.findall(r"\btidevoy_\w+", page_text(page)):
        assert name in exported_series(), name


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    for arguments in commands(page):
        check_command(arguments)


def test_all_commands_are_found() -> None:
    found = [" ".join(arguments[:2]) for page in PAGES for arguments in commands(page)]
    assert {"nodes --explain", "envoys set", "rollout start", "bootstrap --config", "drain --wait"} <= set(
        found
    )


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("node", "tidevoy has no command node"),
        ("envoys stop envoy-1", "tidevoy envoys has no command stop"),
        ("nodes --explian", "tidevoy nodes has no option --explian"),
    ],
)
def test_unknown_commands_and_options_are_detected(command: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_command(command.split())


@pytest.mark.parametrize("page", PAGES)
def test_settings_events_and_module_names_exist(page: str) -> None:
    event_subjects = {kind.partition(".")[0] for kind in event_kinds()}
    for name in dotted_names(page):
        first = name.partition(".")[0]
        if first == "tidevoy":
            assert name in module_names(), name
        elif first in _SETTING_SECTIONS | event_subjects:
            known = setting_names() | event_kinds()
            assert any(fnmatch(other, name) for other in known), f"{name} is no setting and no event"


def test_names_on_all_pages_are_found() -> None:
    found = {name for page in PAGES for name in dotted_names(page)}
    assert {
        "sql.max_connections",
        "health.*.timeout",
        "node.state",
        "intent.*",
        "tidevoy.states_bytes",
    } <= found


@pytest.mark.parametrize("page", PAGES)
def test_runtime_keys_exist(page: str) -> None:
    for name in re.findall(r"[?&](tidevoy\.\w+)=", page_text(page)):
        assert name in module_names(), name


@pytest.mark.parametrize("page", PAGES)
def test_alerts_exist(page: str) -> None:
    for name in re.findall(r"\bTidevoy[A-Z]\w+", page_text(page)):
        assert name in alert_rules(), name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_headings(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", _FENCE.sub("", page_text(page))):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (OPERATE / target).resolve() if target else OPERATE / f"{page}.md"
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_repository_exist(page: str) -> None:
    for name in re.findall(r"\bdeploy/[\w./@-]*\w", page_text(page)):
        assert (ROOT / name).exists(), name


def test_sysbench_has_the_options() -> None:
    sysbench = find_program("sysbench", "sysbench")
    known = "".join(
        subprocess.run([sysbench, *arguments], capture_output=True, text=True, check=True).stdout
        for arguments in (["--help"], ["oltp_read_only", "help"])
    )
    code = [code for code in (*code_blocks("measure", "sh"), *code_spans("measure")) if "--" in code]
    options = {
        option.replace("-", "_").lstrip("_")
        for line in code
        if "tidevoy" not in line or "sysbench" in line
        for command in line.splitlines()
        if not re.search(r"\b(apt-get|tidevoy (rollout|drain)|openssl)\b", command)
        for option in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", command)
    }
    assert {"mysql_ssl", "db_ps_mode", "rate", "range_size"} <= options
    for option in options:
        assert re.search(rf"--{option.replace('_', '[-_]')}\b", known), option


@pytest.mark.parametrize("database", ["mariadb", "tidb"])
def test_cpu_of_statements_is_that_of_the_benchmark(database: str) -> None:
    """`sizing.md` has rounded figures, so newer results may differ a little."""
    results = json.loads((ROOT / f"bench/results/proxies-{database}.json").read_text())
    measured = {
        comparison["workload"]: comparison["reference_value"] * comparison["ratio"]["value"]
        for comparison in results["comparisons"]
        if comparison["figure"] == "cpu" and comparison["contender"] == "Tidevoy"
    }
    workloads = {
        "point select, at full speed, 16 clients": "point select, 16 clients",
        "point select, at full speed, 64 clients": "point select, 64 clients",
        "point select, at full speed, 16 clients, TLS to clients": "TLS to clients",
        "point select, at full speed, 16 clients, TLS on both sides": "TLS to clients and server",
        "1,000 rows, 300/s, TLS to clients": "TLS to clients, 1,000 rows, 300/s",
    }
    rows = re.findall(r"^\| (.+?) \| ([\d,.]+) \| ([\d,.]+) \| ([\d,]+) \|$", page_text("sizing"), re.M)
    assert len(rows) == 10
    for workload, mariadb, tidb, per_core in rows:
        figures = {"mariadb": float(mariadb.replace(",", "")), "tidb": float(tidb.replace(",", ""))}
        assert figures[database] == pytest.approx(measured[workloads.get(workload, workload)], rel=0.1), (
            workload
        )
        assert float(per_core.replace(",", "")) == pytest.approx(1e6 / max(figures.values()), rel=0.02), (
            workload
        )
