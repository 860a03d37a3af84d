"""The commands `tidevoy rules ...`: the rules that block, limit, rewrite or log statements."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.client import ControlPlaneClient
from cli.errors import CliError, UsageError
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import format_count, print_note, print_result, sanitize, show_json, show_table
from controlplane.config.yaml_loader import parse_yaml_value
from controlplane.model.rules import describe_conditions

app = typer.Typer(
    help="Show and set the rules that block, limit, rewrite or log statements.", invoke_without_command=True
)

_File = Annotated[str, typer.Argument(metavar="FILE", help="A file of YAML or JSON; `-` is standard input.")]


@app.callback()
def show_rules(context: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show and set the rules that block, limit, rewrite or log statements. Without a command, list them."""
    if context.invoked_subcommand is not None:
        os.environ["TIDEVOY_URL"] = url  # the default of the subcommand's --url
        return
    list_rules(url, as_json)


@app.command("list")
def list_rules(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the rules in the order in which they apply, and how often each applied."""
    with ControlPlaneClient(url) as client:
        _show_rules(client.get("/v1/rules"), as_json=as_json)


@app.command("set")
def set_rules(file: _File, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Replace all rules but those of the settings. The file has a list of rules."""
    with ControlPlaneClient(url) as client:
        _show_rules(client.put("/v1/rules", {"rules": _read_rules(file)}), as_json=as_json)


@app.command("add")
def add_rule(
    file: _File,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="NAME", help="Add it before this rule; default: at the end."),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Add one rule."""
    rules = _read_rules(file)
    if len(rules) != 1:
        raise UsageError(f"{file} has {len(rules)} rules, and `tidevoy rules add` adds one")
    body = {"rule": rules[0]} | ({"before": before} if before is not None else {})
    with ControlPlaneClient(url) as client:
        _show_rules(client.post("/v1/rules", body), as_json=as_json)


@app.command("remove")
def remove_rule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the rule.")],
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Remove a rule that is not one of the settings."""
    with ControlPlaneClient(url) as client:
        _show_rules(client.delete(f"/v1/rules/{quote(name, safe='')}"), as_json=as_json)


@app.command("check")
def check(
    statement: Annotated[
        str, typer.Argument(metavar="STATEMENT", help="The text of one or several statements.")
    ],
    user: Annotated[str, typer.Option(help="The user.")] = "",
    database: Annotated[str, typer.Option(help="The current database.")] = "",
    client_address: Annotated[str | None, typer.Option("--client", help="The client's address.")] = None,
    group: Annotated[str, typer.Option(help="The group of nodes.")] = "",
    command: Annotated[str, typer.Option(help="How it runs: query, prepare, or execute.")] = "query",
    file: Annotated[
        str | None, typer.Option("--file", help="A file with other rules than those in force.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show what the rules would do to a statement. Nothing runs. Exit code 1: it would be blocked."""
    body: dict[str, Any] = {
        "statement": statement,
        "user": user,
        "database": database,
        "group": group,
        "command": command,
        **({"client": client_address} if client_address is not None else {}),
        **({"rules": _read_rules(file)} if file is not None else {}),
    }
    with ControlPlaneClient(url) as client:
        answer = client.post("/v1/rules/check", body)
    if as_json:
        show_json(answer)
    else:
        for line in _describe_check(answer):
            print_result(sanitize(line))
    if answer["error"] is not None:
        raise typer.Exit(1)


def _describe_check(answer: dict[str, Any]) -> list[str]:
    lines = []
    for one in answer["statements"]:
        lines += [
            f"text        {one['text']}",
            f"normalized  {one['normalized']}",
            f"digest      {one['digest']}",
        ]
    hits = [hit["rule"] + (" (dry run)" if hit["dry_run"] else "") for hit in answer["hits"]]
    lines.append(f"rules       {', '.join(hits) or 'none applies'}")
    if (error := answer["error"]) is not None:
        return [*lines, f"client gets ERROR {error['code']} ({error['state']}): {error['message']}"]
    if answer["limits"]:
        lines.append(f"limits      {', '.join(answer['limits'])}")
    if answer["must_log"]:
        lines.append("log         in any case")
    return [*lines, "node gets   " + ("the same text" if answer["text"] is None else answer["text"])]


def _show_rules(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    show_table(
        ("RULE", "FROM", "ACTION", "STATE", "HITS", "CONDITIONS"),
        [_rule_row(rule) for rule in answer["rules"]],
    )
    if not answer["rules"]:
        print_note("there are no rules; `tidevoy rules add FILE` adds one")


def _rule_row(details: dict[str, Any]) -> tuple[str, ...]:
    state = "dry run" if details["dry_run"] else "on"
    hits = details["dry_run_hits"] if details["dry_run"] else details["hits"]
    return (
        details["name"],
        details["source"],
        details["action"],
        state if details["enabled"] else "off",
        format_count(hits),
        describe_conditions(details["rule"]),
    )


def _read_rules(file: str) -> list[Any]:
    """Return the rules in a file: a list, a mapping with the key `rules`, or one rule. Raises ConfigError."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file} cannot be read: {error}") from None
    name = "standard input" if file == "-" else file
    content = parse_yaml_value(text, name)[0]
    if isinstance(content, dict):
        statements = content.get("statements", content)
        content = statements["rules"] if isinstance(statements, dict) and "rules" in statements else [content]
    if not isinstance(content, list):
        raise UsageError(f"{name} contains no rules; write a list of rules, or one rule")
    return content
