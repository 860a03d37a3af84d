"""`tidevoy run`: run a whole cluster on this machine until the command is stopped."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from controlplane.config.loader import read_settings
from controlplane.errors import TidevoyError
from controlplane.xds.bootstrap import module_path
from sandbox import etcd, mariadb
from sandbox.child_process import ProgramMissing, find_program
from sandbox.envoy import envoy_binary
from sandbox.local_cluster import AdvertisedPorts, LocalCluster
from sandbox.ports import Ports, PortTaken
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_binaries import (
    BINARIES_FOLDER_VARIABLE,
    NO_BINARIES_MESSAGE,
    STORE_VARIABLE,
    TidbBinaries,
    find_binaries,
)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULT_API_PORT = 3080


class RunError(TidevoyError):
    """The cluster cannot start, for a reason that the user can fix."""


class FilterChoice(StrEnum):
    """The MySQL filter between clients and nodes in Envoy."""

    AUTO = "auto"
    MODULE = "module"
    NONE = "none"


def register(app: typer.Typer) -> None:
    """Add the command to `app` (entry point group `tidevoy.commands`)."""
    app.command("run")(run)


def run(
    nodes: Annotated[int, typer.Option(help="How many TiDB servers.", min=1, max=50)] = 3,
    port: Annotated[int, typer.Option(help="Port for SQL clients.", min=1, max=65535)] = 6000,
    api_port: Annotated[
        int, typer.Option(help="Port of the REST API.", min=1, max=65535)
    ] = _DEFAULT_API_PORT,
    xds_port: Annotated[
        int, typer.Option(help="Port of the xDS server that configures Envoy.", min=1, max=65535)
    ] = 18000,
    admin_port: Annotated[int, typer.Option(help="Envoy's admin port.", min=1, max=65535)] = 9901,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Directory for data and logs; default: a temporary directory, removed at the end."
        ),
    ] = None,
    graceful_wait: Annotated[
        float, typer.Option(help="Seconds from a node's SIGTERM until it closes its SQL port.", min=0)
    ] = 5.0,
    filter: Annotated[
        FilterChoice,
        typer.Option(
            help="MySQL filter in Envoy: Tidevoy's module if it is built (auto), required (module), or none.",
        ),
    ] = FilterChoice.AUTO,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Additional settings (YAML), merged over the cluster's own, for example a section tls."
        ),
    ] = None,
    tidb_bin: Annotated[
        Path | None,
        typer.Option(
            help="Use real servers: a folder with tidb-server, pd-server and tikv-server;"
            f" default: {BINARIES_FOLDER_VARIABLE} in the environment, else TiUP's newest release, if any."
        ),
    ] = None,
    tidb_store: Annotated[
        str | None,
        typer.Option(
            help="With real servers, a store other than tikv-server: its program, or its whole command with"
            " {address}, {status_address}, {pd}, {data} and {log};"
            f" default: {STORE_VARIABLE} in the environment."
        ),
    ] = None,
    fake_tidb: Annotated[
        bool,
        typer.Option("--fake-tidb", help="Use simulated TiDB servers, even if real servers are installed."),
    ] = False,
) -> None:
    """Run a whole cluster until Ctrl-C: PD, TiDB servers (real or simulated), control plane, Envoy."""
    binaries = _find_binaries(tidb_bin, tidb_store, fake_tidb)
    if binaries is None:
        _require_programs()
    envoy_binary()
    advertised = AdvertisedPorts(sql=port, api=api_port, xds=xds_port, admin=admin_port)
    settings = {} if config is None else read_settings(config, {}).model_dump(mode="json", exclude_unset=True)
    module = _find_module(filter)
    with Ports() as ports, _locked_directory(directory) as run_directory:
        _claim_ports(ports, advertised)
        start = partial(
            LocalCluster.start,
            run_directory,
            nodes=nodes,
            ports=ports,
            advertised=advertised,
            graceful_wait=graceful_wait,
            # A cluster of real servers creates its own certificate.
            node_arguments=()
            if binaries
            else SessionCertificate.load_or_create(run_directory / "session-certificate").arguments,
            tidb_bin=binaries,
            settings=settings,
            module=module,
        )
        asyncio.run(_run_until_signal(_supervise(start)))


async def _supervise(start: Callable[..., AbstractAsyncContextManager[LocalCluster]]) -> NoReturn:
    """Start everything, print how to use it, and wait until a part exits. Raises ProcessFailed."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    with console.status("Starting") as status:

        def on_progress(text: str) -> None:
            if console.is_terminal:
                status.update(f"{text} ...")
                status.start()
            else:
                console.print(f"{text} ...")

        async with start(on_progress=on_progress) as cluster:
            status.stop()
            console.print(_ready_message(cluster))
            raise await cluster.wait_for_first_failure()


def _ready_message(cluster: LocalCluster) -> str:
    ports = cluster.advertised
    url_option = "" if ports.api == _DEFAULT_API_PORT else f"--url http://127.0.0.1:{ports.api} "
    first_node = cluster.tidb[0].address
    rows = (
        ("SQL", f"mysql -h127.0.0.1 -P{ports.sql} -uroot"),
        ("nodes", f"{_command_name()} {url_option}nodes"),
        ("drain one", f"{_command_name()} {url_option}drain {first_node} --wait"),
        ("console", f"http://127.0.0.1:{ports.api}/"),
        ("REST API", f"http://127.0.0.1:{ports.api}/openapi.json"),
        ("Envoy admin", f"http://127.0.0.1:{ports.admin}"),
        ("logs", f"{cluster.directory}/*.log"),
    )
    lines = "\n".join(f"  {name:<12} {value}" for name, value in rows)
    node_count = len(cluster.tidb)
    return (
        f"Ready: {node_count} {'node' if node_count == 1 else 'nodes'} behind one port.\n\n{lines}\n\n"
        "Press Ctrl-C to stop."
    )


def _command_name() -> str:
    """Return how the user calls `tidevoy`, which is not on the PATH in a checkout."""
    if shutil.which("tidevoy"):
        return "tidevoy"
    relative = os.path.relpath(sys.argv[0])
    return os.path.abspath(sys.argv[0]) if relative.startswith("..") else relative


async def _run_until_signal(coroutine: Coroutine[None, None, NoReturn]) -> None:
    """Run `coroutine`. On the first stop signal, cancel it and wait for its cleanup; ignore more signals."""
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(coroutine)

    def stop() -> None:
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, lambda: None)
        work.cancel()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    with suppress(asyncio.CancelledError):
        await work


def _find_binaries(folder: Path | None, store: str | None, fake_tidb: bool) -> TidbBinaries | None:
    """Return the programs of real servers; None for a simulated cluster. Raises TidevoyError."""
    if fake_tidb:
        if folder is not None or store is not None:
            raise typer.BadParameter("--fake-tidb excludes --tidb-bin and --tidb-store")
        return None
    binaries = find_binaries(folder, store)
    if binaries is None and store is not None:
        raise RunError(f"--tidb-store requires real servers, but {NO_BINARIES_MESSAGE}")
    return binaries


def _require_programs() -> None:
    """Raise RunError, which names all packages to install, if programs of simulated clusters are missing."""
    missing: dict[str, str] = {}
    for program, package in (
        ("etcd", etcd.PACKAGE),
        ("mariadbd", mariadb.PACKAGE),
        ("mariadb-install-db", mariadb.PACKAGE),
    ):
        try:
            find_program(program, package)
        except ProgramMissing:
            missing[program] = package
    if missing:
        packages = " ".join(dict.fromkeys(missing.values()))
        raise RunError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            f"on Debian and Ubuntu: apt-get install --no-install-recommends {packages}"
        )


def _find_module(choice: FilterChoice) -> Path | None:
    """Return the module's file. Raises RunError if it is required and missing."""
    file = module_path.find_module() if choice is not FilterChoice.NONE else None
    if file is None and choice is FilterChoice.MODULE:
        raise RunError(
            f"{module_path.MODULE_FILE_NAME} is missing; build it with `cargo build --release` in filters/,"
            " or run with --filter auto"
        )
    return file


def _claim_ports(ports: Ports, advertised: AdvertisedPorts) -> None:
    """Claim the advertised ports. Raises RunError, which names the option to change, if a port is taken."""
    for number, purpose, option in (
        (advertised.sql, "SQL clients", "--port"),
        (advertised.api, "the REST API", "--api-port"),
        (advertised.xds, "xDS", "--xds-port"),
        (advertised.admin, "Envoy's admin page", "--admin-port"),
    ):
        try:
            ports.claim(number)
        except PortTaken:
            raise RunError(
                f"port {number} for {purpose} is taken; free it, or choose another with {option}"
            ) from None


@contextmanager
def _locked_directory(directory: Path | None) -> Iterator[Path]:
    """Yield a directory for data and logs: `directory`, which is locked, or a temporary one if it is None."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="tidevoy-", ignore_cleanup_errors=True) as path:
            yield Path(path)
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RunError(
            f"--dir {directory} cannot be used: {(error.strerror or str(error)).lower()}"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"--dir {directory} is in use by another `tidevoy run`; choose another") from None
        yield directory.absolute()
    finally:
        os.close(handle)
