"""Commands that start things: serve, bootstrap."""

from __future__ import annotations

import gc
import ipaddress
import os
import resource
from typing import Annotated

import typer

from cli.errors import EXIT_USAGE, CliError
from cli.options import ConfigFile
from cli.output import print_result
from controlplane import address as addresses

_WILDCARD_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - what is not bound here but refused


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("serve")(serve)
    app.command("bootstrap")(bootstrap)


def serve(config: ConfigFile = None) -> None:
    """Run the control plane. SIGINT or SIGTERM ends it, SIGHUP reloads the configuration."""
    import asyncio

    import structlog

    from api.server import serve as run
    from controlplane.config.loader import read_settings, startup_warnings
    from controlplane.config.settings import Settings
    from controlplane.metrics import logs

    def load_settings() -> Settings:
        return read_settings(config, os.environ)

    settings = load_settings()
    logs.configure(settings.log)
    _raise_descriptor_limit()
    for caution in startup_warnings(settings):
        structlog.get_logger("tidevoy.serve").warning(caution)
    asyncio.run(run(settings, load_settings, _freeze_garbage_collection, handle_signals=True))


def _freeze_garbage_collection() -> None:
    """Exclude all objects that exist now, such as modules and the API, from later garbage collections.

    They live until the end. To search them takes some 100 ms, in which nothing else runs.
    """
    gc.collect()
    gc.freeze()


def _raise_descriptor_limit() -> None:
    """Take all descriptors that we may: checks use up to two a node, and the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bootstrap(
    config: ConfigFile = None,
    control_plane: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="xDS address of a control plane; may be given again. Default: xds.listen.",
        ),
    ] = None,
    node_id: Annotated[
        str | None,
        typer.Option("--id", help="Name of the Envoy; without it, start Envoy with `--service-node NAME`."),
    ] = None,
    admin: Annotated[str, typer.Option(help="Loopback address of the Envoy's admin port.")] = (
        "127.0.0.1:9901"
    ),
    module: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Tidevoy's module, libtidevoy.so of this version; `auto`: the one on this machine.",
        ),
    ] = None,
    delta: Annotated[bool, typer.Option("--delta", help="Use the incremental form of xDS.")] = False,
    group: Annotated[
        str,
        typer.Option(help="The only group of nodes that the Envoy is to serve, on sql.listen. Default: all."),
    ] = "",
    zone: Annotated[str, typer.Option(help="Where the Envoy is; it prefers nodes of that zone.")] = "",
    ca: Annotated[
        str | None,
        typer.Option(help="CA file for the control plane's certificate; with it the Envoy connects by TLS."),
    ] = None,
    server_name: Annotated[
        str | None,
        typer.Option(
            help="Name that the certificates of all control planes hold; default: the host of any of them."
        ),
    ] = None,
    cert: Annotated[str | None, typer.Option(help="The Envoy's certificate file, for mutual TLS.")] = None,
    key: Annotated[str | None, typer.Option(help="The key file of that certificate.")] = None,
) -> None:
    """Print a bootstrap configuration for an Envoy. Paths are those on the Envoy's machine."""
    from controlplane.config.loader import read_settings
    from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap

    if (cert is None) != (key is None) or (cert is not None and ca is None):
        raise CliError("--cert and --key go together, and with --ca", EXIT_USAGE)
    settings = read_settings(config, os.environ)
    tls_settings = settings.xds.tls
    if tls_settings is not None and ca is None:
        raise CliError(
            "xds.tls is set, so an Envoy connects by TLS alone; name its CA file with --ca", EXIT_USAGE
        )
    if tls_settings is not None and tls_settings.client_ca is not None and cert is None:
        raise CliError(
            "xds.tls.client_ca is set, so an Envoy needs a certificate; name its files with --cert and --key",
            EXIT_USAGE,
        )
    control_planes = control_plane or [settings.xds.listen]
    try:
        for address in control_planes:
            if addresses.split(address)[0] in _WILDCARD_ADDRESSES:
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
        )
        if not _is_loopback(admin):
            raise ValueError(
                f"{admin} can be no admin address: Envoy's admin port obeys whoever reaches it; "
                "name a loopback address, such as 127.0.0.1:9901"
            )
    except ValueError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    print_result(text.rstrip())


def _find_local_module() -> str:
    from controlplane.xds.bootstrap.module_path import MODULE_FILE_NAME, find_module

    if (file := find_module()) is None:
        raise ValueError(
            f"there is no {MODULE_FILE_NAME} on this machine; build it with `cargo build --release` in filters/,"
            " or name the path that it has on the Envoy's machine"
        )
    return str(file)


def _is_loopback(address: str) -> bool:
    from controlplane.config.types import literal_host

    ip = literal_host(address)
    return ip is not None and ipaddress.ip_address(ip).is_loopback
