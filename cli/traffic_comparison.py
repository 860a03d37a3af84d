"""The command `tidevoy traffic compare`, and how comparisons are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from cli.comparison_tables import (
    DIGEST_HEADERS,
    ERROR_HEADERS,
    describe_totals,
    digest_rows,
    error_rows,
    verdict_lines,
)
from cli.errors import CliError
from cli.options import AsJson, require_finite
from cli.output import format_time, print_note, print_result, sanitize, show_json, show_table
from cli.replay_program import run_replay_program
from controlplane.model.comparison import DEFAULT_MAX_RATIO, Comparison, Finding, FindingKind
from controlplane.verification.comparison_file import parse_comparison
from controlplane.verification.replay_program import compare_arguments
from controlplane.verification.verdict import judge

_DEFAULT_ROWS = 30

MaxRatio = Annotated[
    float | None,
    typer.Option(
        "--max-ratio",
        min=1.0,
        callback=require_finite,
        help="A statement is slower if it takes at least this many times as long and the interval of the"
        " ratio is above 1; default 1.5. With this option, the exit code is 1 if a statement is slower or has"
        " a new error.",
        show_default=False,
    ),
]


def compare(
    old: Annotated[
        Path, typer.Argument(metavar="OLD", help="The results of the old server: of a replay, or a capture.")
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The results of the new server.")],
    max_ratio: MaxRatio = None,
    results_must_match: Annotated[
        bool, typer.Option("--results-must-match", help="With --max-ratio: differing results count, too.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="The highest number of statements.")] = _DEFAULT_ROWS,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two replays, or a capture and its replay: errors, latencies and results of each statement."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "comparison.json"
        code, _ = run_replay_program(compare_arguments(old, new, file))
        if code:
            raise typer.Exit(code)
        text = file.read_text()
    comparison = parse_comparison(text)
    ratio = DEFAULT_MAX_RATIO if max_ratio is None else max_ratio
    findings = judge(comparison, ratio, results_must_match=results_must_match)
    if html is not None:
        write_page(html, f"{old} and {new}", comparison, findings, ratio)
    if as_json:
        show_json(json.loads(text))
    else:
        show_comparison(comparison, findings, limit)
    if max_ratio is not None and any(finding.is_blocking for finding in findings):
        raise typer.Exit(1)


def show_verification(answer: Mapping[str, Any], html: Path | None, *, as_json: bool) -> bool:
    """Show the answer of a verification's REST call, and return whether the node has passed."""
    comparison = parse_comparison(json.dumps(answer))
    findings = [
        Finding(FindingKind(each["kind"]), each["digest"], each["message"], each["is_blocking"])
        for each in answer["findings"]
    ]
    if html is not None:
        title = f"{answer['baseline']} (old) and {answer['node']} (new)"
        write_page(html, title, comparison, findings, answer["max_ratio"], answer["digest_count"])
    if as_json:
        show_json(answer)
    else:
        nodes = f"{answer['node']} compared with {answer['baseline']}"
        time = format_time(answer["at"])
        print_result(sanitize(f"{nodes}, on reads of the capture {answer['capture']}, {time}"))
        print_result("")
        show_comparison(comparison, findings)
    return bool(answer["has_passed"])


def show_comparison(comparison: Comparison, findings: Sequence[Finding], limit: int = _DEFAULT_ROWS) -> None:
    """Print the tables of a comparison, and the verdict."""
    if errors := error_rows(comparison):
        show_table(ERROR_HEADERS, errors[:limit])
        print_result("")
    rows = digest_rows(comparison)
    show_table(DIGEST_HEADERS, rows[:limit])
    print_result("")
    for line in verdict_lines(findings):
        print_result(sanitize(line))
    shown = f"; {limit} of {len(rows)} digests are shown" if limit < len(rows) else ""
    print_note(f"{describe_totals(comparison)}{shown}")


def write_page(
    path: Path,
    title: str,
    comparison: Comparison,
    findings: Sequence[Finding],
    max_ratio: float,
    digest_count: int = 0,
) -> None:
    """Write a comparison as a page that needs no other file. Raises CliError."""
    from api.console.comparison_charts import comparison_values
    from api.console.pages import render_file

    values = comparison_values(comparison, findings, max_ratio, digest_count)
    try:
        path.write_text(render_file("comparison_file.html", title=f"Comparison of {title}", **values))
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from None
