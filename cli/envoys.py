"""Envoy commands: envoys, envoys ready, not-ready, drain, set, replace, forget."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from cli.client import ControlPlaneClient
from cli.envoy_replacement.child_command import split_command
from cli.envoy_replacement.envoy_admin import EnvoyAdmin
from cli.envoy_replacement.replacement import EnvoyReplacement
from cli.errors import CliError
from cli.options import DEFAULT_URL, AsJson, Url, duration_option
from cli.output import format_count, format_time, print_note, print_result, sanitize, show_json, show_table
from cli.progress_display import ProgressDisplay

EnvoyId = Annotated[str, typer.Argument(metavar="ID", help="Id of the Envoy.", show_default=False)]
Switch = Literal["on", "off", "default"]

app = typer.Typer(help="Show the Envoys, change one, or replace one.", invoke_without_command=True)


@app.callback()
def show_envoys(context: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the Envoys, and whether each is up to date."""
    if context.invoked_subcommand is not None:
        os.environ["TIDEVOY_URL"] = url  # the default of the subcommand's --url
        return
    with ControlPlaneClient(url) as client:
        answer = client.get("/v1/envoys")
    if as_json:
        show_json(answer)
        return
    show_table(
        ("ID", "ADDRESS", "VERSION", "FILTER", "SESSIONS", "CONNECTED SINCE", "STATE"),
        [_envoy_row(envoy) for envoy in answer["envoys"]],
    )
    for envoy in answer["envoys"]:
        if nack := envoy["last_nack"]:
            print_note(
                f"{envoy['id']} rejected {nack['type_url']} at {format_time(nack['at'])}: {nack['message']}"
            )
        if rejection := envoy["config_rejection"]:
            at, extension = format_time(rejection["at"]), rejection["extension"]
            print_note(
                f"{envoy['id']}: its module rejected the configuration of `{extension}` at {at}:"
                f" {rejection['text']}"
            )
        if switched_off := describe_switched_off(envoy):
            print_note(f"{envoy['id']}: {switched_off}")
        if envoy.get("streams", 1) > 1:  # an older control plane does not report it
            print_note(
                f"{envoy['id']}: {envoy['streams']} Envoys may be connected under this id; give each a unique"
                " one (`tidevoy bootstrap --id`, or TIDEVOY_NODE_ID in the image)"
            )
        if envoy["problem"]:
            print_note(f"{envoy['id']}: {envoy['problem']}")
        if envoy["stale_resources"]:
            outdated = ", ".join(envoy.get("stale_settings") or envoy["stale_resources"])
            print_note(
                f"{envoy['id']} uses older settings until that Envoy restarts: {outdated};"
                " `tidevoy envoys replace` on its machine applies them without cutting a session"
            )


def _admin_option(name: str, text: str) -> Any:
    return typer.Option(name, metavar="HOST:PORT", help=f"Admin port of the Envoy {text}.")


def _command_option(text: str) -> Any:
    return typer.Option(metavar="COMMAND", help=text, show_default=False)


@app.command("replace")
def replace_envoy(
    old_admin: Annotated[str, _admin_option("--old-admin", "to replace")] = "127.0.0.1:9901",
    new_admin: Annotated[str, _admin_option("--new-admin", "that takes over")] = "127.0.0.1:9902",
    start: Annotated[
        str,
        _command_option(
            "Command that starts the new Envoy if it does not run yet: it returns, or it is the Envoy itself."
        ),
    ] = "",
    undo: Annotated[
        str,
        _command_option(
            "Command that stops the new Envoy if it cannot take over; default: stop it through its admin"
            " port."
        ),
    ] = "",
    stop: Annotated[
        str,
        _command_option(
            "Command that stops the old Envoy when it has no sessions left; default: stop it through its"
            " admin port."
        ),
    ] = "",
    start_timeout: Annotated[
        float, duration_option("Time for the new Envoy to become ready to take over.")
    ] = "1m",  # type: ignore[assignment]
    deadline: Annotated[
        float, duration_option("Time for the sessions of the old Envoy to end: 600, 10m, 1h30m.")
    ] = "1h",  # type: ignore[assignment]
    on_deadline: Annotated[
        Literal["keep", "close"],
        typer.Option(
            help="What happens to sessions that are left at the deadline: keep them and fail, or close them."
        ),
    ] = "keep",
    optional_listeners: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="LISTENER",
            help="A listener of the old Envoy that the new one does not need; repeatable.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and show what would be done.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Replace an Envoy on this machine by another one without cutting a session.

    Starts the new Envoy beside the old one and checks it; then the old Envoy stops accepting sessions, and
    stops when it has none left. If an earlier step fails, the old Envoy keeps serving. Run the command again
    to continue.
    """
    with ControlPlaneClient(url) as client, ProgressDisplay(as_json=as_json) as display:
        replacement = EnvoyReplacement(
            client,
            display,
            EnvoyAdmin(old_admin),
            EnvoyAdmin(new_admin),
            start_command=split_command("--start", start),
            undo_command=split_command("--undo", undo),
            stop_command=split_command("--stop", stop),
            start_timeout=start_timeout,
            deadline=deadline,
            on_deadline=on_deadline,
            optional_listeners=frozenset(optional_listeners or ()),
        )
        try:
            if dry_run:
                replacement.dry_run()
            else:
                replacement.run()
        except KeyboardInterrupt:
            raise CliError("interrupted; run the command again to continue") from None


def _switch_option(help_text: str) -> Any:
    return typer.Option(help=f"{help_text} default: the settings apply.", show_default=False)


@app.command("set")
def set_switches(
    envoy: EnvoyId,
    offload: Annotated[
        Switch | None,
        _switch_option("Whether the module handles the events of established sessions instead of Envoy."),
    ] = None,
    migration: Annotated[Switch | None, _switch_option("Whether sessions of this Envoy migrate.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Switch parts of an Envoy's module off or on, if you suspect one of them.

    It takes effect at once and closes no session. The settings `module.offload` and `module.migration` do the
    same for all Envoys.
    """
    options = {"offload": offload, "migration": migration}
    body = {
        name: None if value == "default" else value for name, value in options.items() if value is not None
    }
    if not body:
        raise typer.BadParameter("name --offload or --migration")
    answer = _change_envoy(envoy, body, url)
    if as_json:
        show_json(answer)
        return
    print_result(sanitize(f"{envoy}: {describe_switched_off(answer) or 'nothing is switched off'}"))


@app.command("not-ready")
def set_not_ready(envoy: EnvoyId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let load balancers send new clients to other Envoys: `/readyz` of this Envoy answers 503.

    Its sessions continue, and clients that still connect to it are served. `ready` reverts it.
    """
    _set_readiness(envoy, {"ready": "off"}, url, as_json, f"{envoy} is not ready for new clients")


@app.command("drain")
def drain_envoy(envoy: EnvoyId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """End the sessions of an Envoy gracefully, as SIGTERM does with its supervisor; the Envoy keeps running.

    It is not ready first. After `end.wait` it refuses new clients, and each session ends when it is idle and
    has no transaction; those that are left after `end.timeout` are closed. `ready` reverts it.
    """
    _set_readiness(envoy, {"drain": "on"}, url, as_json, f"{envoy} drains")


@app.command("ready")
def set_ready(envoy: EnvoyId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let an Envoy get new clients again, after `not-ready` or `drain`."""
    changes: dict[str, str | None] = {"ready": None, "drain": None}
    _set_readiness(envoy, changes, url, as_json, f"{envoy} is ready for new clients again")


def _change_envoy(envoy: str, changes: dict[str, Any], url: str) -> Any:
    """Change switches of an Envoy. Return the Envoy after the change."""
    with ControlPlaneClient(url) as client:
        return client.patch(f"/v1/envoys/{quote(envoy, safe='')}", changes)


def _set_readiness(envoy: str, changes: dict[str, str | None], url: str, as_json: bool, message: str) -> None:
    answer = _change_envoy(envoy, changes, url)
    if as_json:
        show_json(answer)
        return
    print_result(sanitize(message))
    if answer["filter"] != "module":
        print_note(sanitize(f"{envoy} does not use Tidevoy's module, so this has no effect"))


@app.command("forget")
def forget_envoy(
    envoy: EnvoyId,
    url: Url = DEFAULT_URL,
) -> None:
    """Remove an Envoy that has stopped permanently, so that no drain waits for its sessions."""
    with ControlPlaneClient(url) as client:
        client.delete(f"/v1/envoys/{quote(envoy, safe='')}")
    print_result(sanitize(f"{envoy} is removed"))


def describe_switched_off(envoy: dict[str, Any]) -> str:
    """Return which parts of an Envoy's module are switched off, and by what; empty if none is."""

    def cause(part: str) -> str:
        if part in envoy["runtime_off"]:
            return "Envoy's runtime"
        return "the settings" if envoy["overrides"][part] is None else "an operator"

    parts = [part for part in ("offload", "migration") if envoy[part] == "off"]
    return "; ".join(f"{part} is switched off by {cause(part)}" for part in parts)


def _envoy_row(envoy: dict[str, Any]) -> tuple[str, ...]:
    return (
        envoy["id"],
        envoy["address"],
        envoy["version"],
        envoy["filter"],
        format_count(envoy["sessions"]),
        format_time(envoy["connected_since"]),
        describe_state(envoy),
    )


def describe_state(envoy: dict[str, Any]) -> str:
    """Return whether an Envoy is connected and runs the published version, as text."""
    if envoy["connected_since"] is None:
        return f"disconnected since {format_time(envoy['last_seen'])}"
    if not envoy["published_version"]:
        return "waiting for the first plan"
    # A control plane of an earlier version does not know these two.
    if envoy["overrides"].get("drain") == "on":
        readiness = "; drain requested by an operator"
    elif envoy["overrides"].get("ready") == "off":
        readiness = "; not ready (set by an operator)"
    else:
        readiness = ""
    if envoy["acked_version"] == envoy["published_version"]:
        return f"up to date ({envoy['acked_version']}){readiness}"
    return f"at {envoy['acked_version'] or 'nothing'}, published {envoy['published_version']}{readiness}"
