"""Commands that start processes: serve (the control plane) and bootstrap (an Envoy's configuration)."""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import UsageError
from cli.options import ConfigFile
from cli.output import print_note, print_result
from cli.systemd import notify_ready
from controlplane import address as addresses
from controlplane.errors import TidevoyError

if TYPE_CHECKING:
    from controlplane.config.settings import Settings
    from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls

app = typer.Typer()

# Wildcard addresses, and how a process of this machine reaches a port that is bound to one.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound


@app.command()
def serve(
    config: ConfigFile = None,
    with_envoy: Annotated[
        bool,
        typer.Option("--with-envoy", help="Also run an Envoy on this machine; the rest is for this Envoy."),
    ] = False,
    envoy: Annotated[str, typer.Option(metavar="PROGRAM", help="Envoy.")] = "envoy",
    envoy_id: Annotated[
        str | None, typer.Option(help="Id of the Envoy.", show_default="the host name")
    ] = None,
    envoy_admin: Annotated[str, typer.Option(help="Loopback address of its admin port.")] = "127.0.0.1:9901",
    envoy_certificates: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Where `tidevoy certificates init` has written the certificates; needed if xds.tls is set.",
        ),
    ] = None,
    envoy_zone: Annotated[str, typer.Option(help="Its zone; it prefers nodes of that zone.")] = "",
    envoy_group: Annotated[
        str, typer.Option(help="The only node group that it serves, on sql.listen. Default: all groups.")
    ] = "",
) -> None:
    """Run the control plane. SIGINT or SIGTERM stops it, SIGHUP reloads the configuration."""
    import asyncio

    from controlplane.config.loader import read_settings

    def load_settings() -> Settings:
        return read_settings(config, os.environ)

    settings = load_settings()
    if with_envoy:
        node_id = envoy_id or socket.gethostname()
        options = EnvoyOptions(envoy, node_id, envoy_admin, envoy_certificates, envoy_zone, envoy_group)
        raise typer.Exit(asyncio.run(_serve_with_envoy(config, options, load_settings)))
    _serve(settings, load_settings)


def _serve(settings: Settings, load_settings: Callable[[], Settings]) -> None:
    import asyncio

    import structlog

    from api.server import serve as run
    from controlplane.config.loader import startup_warnings
    from controlplane.metrics import logs

    logs.configure(settings.log)
    _raise_descriptor_limit()
    for warning in startup_warnings(settings):
        structlog.get_logger("tidevoy.serve").warning(warning)
    asyncio.run(run(settings, load_settings, _on_ready, handle_signals=True))


@dataclass(frozen=True, slots=True)
class EnvoyOptions:
    """The Envoy of `tidevoy serve --with-envoy`."""

    program: str
    id: str
    admin: str
    certificates: Path | None
    zone: str
    group: str

    def tls(self) -> ControlPlaneTls | None:
        """Return how the Envoy connects to the control plane; None: without TLS."""
        from cli.certificate_authority.directory import CA_FILE, certificate_file, key_file
        from cli.certificate_authority.names import envoy_stem
        from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls

        if self.certificates is None:
            return None
        stem = envoy_stem(self.id)
        files = [
            self.certificates.absolute() / file for file in (CA_FILE, certificate_file(stem), key_file(stem))
        ]
        for file in files:
            if not file.exists():
                raise UsageError(
                    f"there is no file {file}; `tidevoy certificates init {self.certificates}"
                    f" --envoy {self.id}` makes it"
                )
        ca, cert, key = map(str, files)
        return ControlPlaneTls(ca, None, cert, key)


async def _serve_with_envoy(
    config: Path | None, options: EnvoyOptions, load_settings: Callable[[], Settings]
) -> int:
    """Run the control plane and an Envoy as two child processes. Return the exit code. Raises CliError."""
    from cli.with_envoy import EnvoyFiles, find_programs, run_with_envoy
    from controlplane.xds.bootstrap.bootstrap import render_bootstrap

    settings = load_settings()
    if settings.xds.tls is not None and options.certificates is None:
        raise UsageError("xds.tls is set, so the Envoy must connect with TLS; set --envoy-certificates")
    host, port = addresses.split(settings.xds.listen)
    xds_address = addresses.join(_LOOPBACK.get(host, host), port)
    bootstrap_file = settings.state_dir.absolute() / "envoy-bootstrap.yaml"
    files = EnvoyFiles(*find_programs(options.program), bootstrap_file)

    has_started = False

    def write_bootstrap() -> None:
        nonlocal has_started
        try:
            _check_admin_address(options.admin)
            text = render_bootstrap(
                load_settings(),
                control_planes=[xds_address],
                node_id=options.id,
                admin=options.admin,
                tls=options.tls(),
                module=_find_local_module(),
                group=options.group,
                zone=options.zone,
            )
            new = bootstrap_file.with_suffix(".new")
            new.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(bootstrap_file)
        except (TidevoyError, ValueError, OSError) as error:
            if not has_started:
                raise UsageError(str(error)) from None
            print_note(f"the Envoy starts with its last bootstrap, {bootstrap_file}: {error}")
        has_started = True

    # With this interpreter, even if no script `tidevoy` is installed.
    command = [sys.executable, "-P", "-c", "from cli.main import main; main()", "serve"]
    if config is not None:
        command += ["--config", str(config)]
    return await run_with_envoy(command, xds_address, files, write_bootstrap)


def _on_ready() -> None:
    notify_ready()
    _freeze_garbage_collection()


def _freeze_garbage_collection() -> None:
    """Exclude all objects that exist now, such as modules and the API, from later garbage collections.

    They live until the process ends. Scanning them takes about 100 ms, during which nothing else runs.
    """
    gc.collect()
    gc.freeze()


def _raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors to its maximum.

    Health checks use two or more descriptors per node, and the default limit is often 1024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@app.command()
def bootstrap(
    config: ConfigFile = None,
    control_plane: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="xDS address of a control plane; repeatable. Default: xds.listen.",
        ),
    ] = None,
    node_id: Annotated[
        str | None,
        typer.Option("--id", help="Id of the Envoy; without it, start Envoy with `--service-node ID`."),
    ] = None,
    admin: Annotated[str, typer.Option(help="Loopback address of the Envoy's admin port.")] = (
        "127.0.0.1:9901"
    ),
    health: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address at which the Envoy tells load balancers its health; default: envoy_health.listen.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Path of Tidevoy's module, libtidevoy.so of this version; `auto`: the one on this machine.",
        ),
    ] = None,
    delta: Annotated[bool, typer.Option("--delta", help="Use incremental (delta) xDS.")] = False,
    group: Annotated[
        str,
        typer.Option(help="The only node group that the Envoy serves, on sql.listen. Default: all groups."),
    ] = "",
    zone: Annotated[str, typer.Option(help="Zone of the Envoy; it prefers nodes of that zone.")] = "",
    ca: Annotated[
        str | None,
        typer.Option(
            help="CA file for the control plane's certificate; with it, the Envoy connects with TLS."
        ),
    ] = None,
    server_name: Annotated[
        str | None,
        typer.Option(
            help="Name in the certificates of all control planes; default: the host of any of them."
        ),
    ] = None,
    cert: Annotated[str | None, typer.Option(help="The Envoy's certificate file, for mutual TLS.")] = None,
    key: Annotated[str | None, typer.Option(help="Key file of that certificate.")] = None,
) -> None:
    """Print a bootstrap configuration for an Envoy. Paths are paths on the Envoy's machine."""
    from controlplane.config.loader import read_settings
    from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap

    if (cert is None) != (key is None) or (cert is not None and ca is None):
        raise UsageError("--cert and --key must be set together, and need --ca")
    settings = read_settings(config, os.environ)
    tls_settings = settings.xds.tls
    if tls_settings is not None and ca is None:
        raise UsageError("xds.tls is set, so Envoys must connect with TLS; name the CA file with --ca")
    if tls_settings is not None and tls_settings.client_ca is not None and cert is None:
        raise UsageError(
            "xds.tls.client_ca is set, so Envoys need a certificate; name its files with --cert and --key"
        )
    control_planes = control_plane or [settings.xds.listen]
    try:
        for address in control_planes:
            if addresses.split(address)[0] in _LOOPBACK:
                raise ValueError(f"no Envoy can connect to {address}; name an address with --control-plane")
        tls = ControlPlaneTls(ca, server_name, cert, key) if ca is not None else None
        text = render_bootstrap(
            settings,
            control_planes=control_planes,
            node_id=node_id,
            admin=admin,
            tls=tls,
            module=_find_local_module() if module == "auto" else module,
            delta=delta,
            group=group,
            zone=zone,
            health=health,
        )
        _check_admin_address(admin)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print_result(text.rstrip())


def _check_admin_address(admin: str) -> None:
    """Raise ValueError unless this is a loopback address. Envoy does not resolve names here."""
    from controlplane.config.types import literal_host

    if literal_host(admin) is None or not addresses.is_loopback(admin):
        raise ValueError(
            f"{admin} is not a valid admin address: anyone who reaches Envoy's admin port controls Envoy; use"
            " a loopback address, such as 127.0.0.1:9901"
        )


def _find_local_module() -> str:
    from controlplane.xds.bootstrap.module_path import MODULE_FILE_NAME, find_module

    if (file := find_module()) is None:
        raise ValueError(
            f"there is no {MODULE_FILE_NAME} on this machine; build it with `cargo build --release` in"
            " filters/, or name its path on the Envoy's machine"
        )
    return str(file)
