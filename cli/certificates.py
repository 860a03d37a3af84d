"""Certificate commands: certificates init, renew, show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import AsJson, duration_option
from cli.output import format_time, print_result, sanitize, show_json, show_table

if TYPE_CHECKING:  # `cryptography` takes long to import, and other commands do not need it
    from cryptography import x509

    from cli.certificate_authority.directory import CertificateDirectory, Leaf
    from cli.certificate_authority.operations import FileResult
    from cli.certificate_authority.renewal import Rollover

_MAX_DAYS = 36_500
_DAY = timedelta(days=1)

app = typer.Typer(
    help="Issue and renew the certificates of control planes and Envoys, by a private CA.",
    no_args_is_help=True,
)

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory of the CA and its certificates.", show_default=False),
]
Days = Annotated[int, typer.Option(min=1, max=_MAX_DAYS, help="How long new certificates are valid.")]
CaDays = Annotated[int, typer.Option(min=1, max=_MAX_DAYS, help="How long a new CA is valid.")]


@app.command()
def init(
    directory: Directory,
    control_plane: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="DNS name or IP address to which Envoys connect; repeatable. All control planes share one"
            " certificate.",
        ),
    ] = None,
    envoy: Annotated[list[str] | None, typer.Option(metavar="ID", help="Id of an Envoy; repeatable.")] = None,
    days: Days = 365,
    ca_days: CaDays = 3650,
    as_json: AsJson = False,
) -> None:
    """Create a CA, a certificate for the control planes, and one for each Envoy.

    Existing files are kept, so run it again to add an Envoy.
    """
    from cli.certificate_authority.directory import CertificateDirectory
    from cli.certificate_authority.operations import Initialization, Validity

    files = CertificateDirectory(directory)
    validity = Validity(timedelta(days=days), timedelta(days=ca_days))
    initialization = Initialization(files, datetime.now(UTC), validity)
    with files.locked(create=True):
        results = _run_and_print(initialization.run(control_plane or [], envoy or []), as_json=as_json)
        usage = _ConfigSnippets(files)
    if as_json:
        show_json({"files": results, **usage.as_json()})
    else:
        print_result(usage.as_text())


@app.command()
def renew(
    directory: Directory,
    within: Annotated[
        float, duration_option("Renew what expires within this time, such as 30d.", _MAX_DAYS)
    ] = "30d",  # type: ignore[assignment]
    renew_all: Annotated[
        bool, typer.Option("--all", help="Renew all certificates of control planes and Envoys.")
    ] = False,
    new_ca: Annotated[
        bool,
        typer.Option(
            "--use-new-ca",
            help="Issue all certificates with the new CA that an earlier call created because the old one"
            " expires. First copy ca.pem to all machines.",
        ),
    ] = False,
    days: Days = 365,
    ca_days: CaDays = 3650,
    as_json: AsJson = False,
) -> None:
    """Replace certificates that expire soon. Prints nothing if there is nothing to do.

    Also makes a new CA if the CA expires within the time.
    """
    from cli.certificate_authority.directory import CertificateDirectory
    from cli.certificate_authority.operations import Renewal, Validity

    files = CertificateDirectory(directory)
    validity = Validity(timedelta(days=days), timedelta(days=ca_days))
    renewal = Renewal(files, datetime.now(UTC), validity)
    with files.locked():
        renewing = renewal.run(timedelta(seconds=within), renew_all=renew_all, use_new_ca=new_ca)
        results = _run_and_print(renewing, as_json=as_json)
    steps = _next_steps(results, renewal.rollover, files)
    if as_json:
        show_json({"files": results, "steps": steps})
    elif steps:
        print_result("\n".join(["# What to do now:", *(sanitize(f"* {step}") for step in steps)]))


@app.command()
def show(directory: Directory, as_json: AsJson = False) -> None:
    """List the certificates and when they expire."""
    from cli.certificate_authority.directory import CA_FILE, CertificateDirectory, certificate_file
    from cli.certificate_authority.names import common_name, format_names, names_of

    files = CertificateDirectory(directory)
    now = datetime.now(UTC)
    authorities = files.read_authorities()
    rows = [_row(CA_FILE, [common_name(each)], each, "", now) for each in authorities]
    for leaf in files.read_leaves(authorities):
        leaf_names = format_names(names_of(leaf.certificate))
        rows.append(_row(certificate_file(leaf.stem), leaf_names, leaf.certificate, _problem(leaf), now))
    if as_json:
        show_json({"certificates": rows})
        return
    show_table(
        ("FILE", "NAMES", "EXPIRES", "DAYS LEFT", "PROBLEM"),
        (
            (
                row["file"],
                ", ".join(row["names"]),
                format_time(row["expires_at"]),
                str(row["days_left"]),
                row["problem"] or "-",
            )
            for row in rows
        ),
    )


def _row(
    file: str, names: list[str], certificate: x509.Certificate, problem: str, now: datetime
) -> dict[str, Any]:
    expires_at = certificate.not_valid_after_utc
    return {
        "file": file,
        "names": names,
        "expires_at": expires_at.isoformat(),
        "days_left": math.floor((expires_at - now) / _DAY),
        "problem": problem or ("expired" if expires_at <= now else ""),
    }


def _problem(leaf: Leaf) -> str:
    if leaf.is_foreign:
        return "not issued by a CA in ca.pem"
    return "the key does not match; `tidevoy certificates renew` replaces both" if leaf.is_mismatched else ""


def _run_and_print(results: Iterable[FileResult], *, as_json: bool) -> list[dict[str, Any]]:
    """Run the operation and return what it did. Print each file as soon as it is complete."""
    from cli.certificate_authority.names import common_name, format_names, names_of

    done = []
    for result in results:
        entry: dict[str, Any] = {"file": result.file, "action": result.action}
        text = f"{result.action:<8} {result.file}"
        if (certificate := result.certificate) is not None:
            names = format_names(names_of(certificate)) or [common_name(certificate)]
            entry |= {"names": names, "expires_at": certificate.not_valid_after_utc.isoformat()}
            text += f": {', '.join(names)}, until {certificate.not_valid_after_utc:%Y-%m-%d}"
        done.append(entry)
        if not as_json:
            print_result(sanitize(text))
    return done


def _next_steps(
    results: Sequence[dict[str, Any]], rollover: Rollover, files: CertificateDirectory
) -> list[str]:
    """Return what the operator does after a renewal; empty if nothing was done and nothing is due."""
    from cli.certificate_authority.directory import CA_FILE
    from cli.certificate_authority.names import CONTROL_PLANE_STEM, envoy_id
    from cli.certificate_authority.renewal import Rollover

    steps = []
    stems = dict.fromkeys(each["file"].rpartition(".")[0] for each in results if each["action"] == "renewed")
    if CONTROL_PLANE_STEM in stems:
        steps.append(
            "control planes: nothing, if xds.tls names the files in this directory; else copy"
            f" {CONTROL_PLANE_STEM}.key, then {CONTROL_PLANE_STEM}.pem to their machines. They load new files"
            " by themselves."
        )
    envoys = [envoy for stem in stems if (envoy := envoy_id(stem)) is not None]
    if envoys:
        steps.append(
            f"Envoys ({', '.join(envoys)}): copy the new files to the machine of each. An Envoy reads them"
            " only when it starts, so replace it (`tidevoy envoys replace`) or restart it."
        )
    if rollover in (Rollover.MAKE_NEW_CA, Rollover.WAIT):
        command = shlex.join(["tidevoy", "certificates", "renew", str(files.path), "--use-new-ca"])
        steps.append(
            f"The CA expires soon, and {CA_FILE} contains its successor, which is not used yet. Copy"
            f" {CA_FILE} to the machines of all control planes and Envoys, replace or restart each Envoy, and"
            f" then run `{command}`."
        )
    return steps


class _ConfigSnippets:
    """How control planes and Envoys use the files."""

    def __init__(self, files: CertificateDirectory) -> None:
        from cli.certificate_authority.directory import CA_FILE, certificate_file, key_file
        from cli.certificate_authority.names import CONTROL_PLANE_STEM, envoy_id

        ca = str(files.path / CA_FILE)

        def pair(stem: str) -> dict[str, str]:
            return {
                "cert": str(files.path / certificate_file(stem)),
                "key": str(files.path / key_file(stem)),
            }

        self._xds_tls = {**pair(CONTROL_PLANE_STEM), "client_ca": ca}
        leaves = files.read_leaves(files.read_authorities())
        self._envoys = {
            envoy: {"ca": ca, **pair(leaf.stem)}
            for leaf in leaves
            if (envoy := envoy_id(leaf.stem)) is not None
        }

    def as_json(self) -> dict[str, Any]:
        return {"xds": {"tls": self._xds_tls}, "bootstrap": self._envoys}

    def as_text(self) -> str:
        import yaml

        lines = ["# For the configuration of the control planes:"]
        lines += yaml.safe_dump({"xds": {"tls": self._xds_tls}}, sort_keys=False).splitlines()
        lines.append("# For the bootstraps; the paths are those on the machine of the Envoy:")
        for envoy, options in self._envoys.items():
            arguments = [
                text for name, value in {"id": envoy, **options}.items() for text in (f"--{name}", value)
            ]
            lines.append(sanitize(shlex.join(["tidevoy", "bootstrap", *arguments])))
        return "\n".join(lines)
