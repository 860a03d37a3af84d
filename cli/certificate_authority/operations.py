"""The work of `tidevoy certificates`. Each change is yielded when it is complete on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509

from cli.certificate_authority import names
from cli.certificate_authority.directory import (
    CA_FILE,
    CA_KEY_FILE,
    NEW_CA_KEY_FILE,
    CertificateDirectory,
    Leaf,
    certificate_file,
    find_authority,
    key_file,
)
from cli.certificate_authority.issuing import (
    CertificateAuthority,
    certificates_pem,
    expiry,
    issue,
    key_pem,
    make_authority,
    new_key,
)
from cli.certificate_authority.renewal import Rollover, due_leaves, next_rollover
from cli.errors import CliError, UsageError


@dataclass(frozen=True, slots=True)
class FileResult:
    """What was done with a file."""

    file: str
    action: str
    certificate: x509.Certificate | None = None  # None: the file is a key


@dataclass(frozen=True, slots=True)
class Validity:
    leaf: timedelta
    authority: timedelta


class Initialization:
    """Creates the CA, and the certificates of control planes and Envoys that do not exist yet."""

    def __init__(self, directory: CertificateDirectory, now: datetime, validity: Validity) -> None:
        self._directory, self._now, self._validity = directory, now, validity

    def run(self, hosts: Sequence[str], envoy_ids: Sequence[str]) -> Iterator[FileResult]:
        """Raises UsageError before any change if the names are unusable."""
        host_names = names.control_plane_names(hosts)
        wanted = {
            names.CONTROL_PLANE_STEM: host_names,
            **{names.envoy_stem(envoy): [names.envoy_name(envoy)] for envoy in envoy_ids},
        }
        authorities = self._directory.read_authorities()
        leaves = {leaf.stem: leaf for leaf in self._directory.read_leaves(authorities)}
        _check_issuer(self._directory, list(leaves.values()))
        control_plane = leaves.get(names.CONTROL_PLANE_STEM)
        self._check_control_plane(control_plane, hosts, host_names)
        known_names = names.names_of(control_plane.certificate) if control_plane is not None else []
        names.check_ids_are_no_control_planes(
            [*envoy_ids, *(envoy for stem in leaves if (envoy := names.envoy_id(stem)) is not None)],
            [*hosts, *names.format_names(known_names)],
        )

        authority, is_new = self._authority(authorities)
        action = "created" if is_new else "kept"
        yield FileResult(CA_KEY_FILE, action)
        yield FileResult(CA_FILE, action, authority.certificate)
        for stem, stem_names in wanted.items():
            if stem in leaves:
                if self._directory.exists(key_file(stem)):
                    yield FileResult(key_file(stem), "kept")
                yield FileResult(certificate_file(stem), "kept", leaves[stem].certificate)
            else:
                yield from self._create(authority, stem, stem_names)

    def _check_control_plane(
        self, existing: Leaf | None, hosts: Sequence[str], host_names: Sequence[x509.GeneralName]
    ) -> None:
        if existing is None:
            if not hosts:
                raise UsageError(
                    "name the hosts to which Envoys connect, with --control-plane for each control plane"
                )
            return
        present = set(names.names_of(existing.certificate))
        missing = names.format_names([each for each in host_names if each not in present])
        if missing:
            file = self._directory.path / certificate_file(existing.stem)
            raise UsageError(
                f"{file} exists and does not contain {', '.join(missing)}; to replace it, remove it and its"
                " key, and run this command again with the hosts of all control planes"
            )

    def _authority(self, authorities: list[x509.Certificate]) -> tuple[CertificateAuthority, bool]:
        """Return the CA and whether it is new. A key without a certificate is left by an interrupted call."""
        if authorities:
            authority = _current_authority(self._directory, authorities)
            if authority.certificate.not_valid_after_utc <= self._now:
                raise CliError(
                    f"the CA in {self._directory.path / CA_FILE} has expired; `tidevoy certificates renew`"
                    " makes a new one"
                )
            return authority, False
        existing_key = self._directory.read_key(CA_KEY_FILE)
        authority = make_authority(existing_key or new_key(), self._now, self._validity.authority)
        key_content = {} if existing_key is not None else {CA_KEY_FILE: key_pem(authority.key)}
        self._directory.write({**key_content, CA_FILE: certificates_pem([authority.certificate])})
        return authority, True

    def _create(
        self, authority: CertificateAuthority, stem: str, stem_names: Sequence[x509.GeneralName]
    ) -> Iterator[FileResult]:
        existing_key = self._directory.read_key(key_file(stem))
        key = existing_key or new_key()
        certificate = issue(
            authority,
            stem_names,
            key.public_key(),
            self._now,
            self._validity.leaf,
            is_server=stem == names.CONTROL_PLANE_STEM,
        )
        key_content = {} if existing_key is not None else {key_file(stem): key_pem(key)}
        self._directory.write({**key_content, certificate_file(stem): certificates_pem([certificate])})
        yield FileResult(key_file(stem), "kept" if existing_key is not None else "created")
        yield FileResult(certificate_file(stem), "created", certificate)


class Renewal:
    """Replaces certificates that expire soon. `rollover` says, after the run, what was done about the CA."""

    def __init__(self, directory: CertificateDirectory, now: datetime, validity: Validity) -> None:
        self._directory, self._now, self._validity = directory, now, validity
        self.rollover = Rollover.NONE

    def run(self, within: timedelta, *, renew_all: bool, use_new_ca: bool) -> Iterator[FileResult]:
        authorities = self._directory.read_authorities()
        leaves = self._directory.read_leaves(authorities)
        if not authorities:
            raise UsageError(
                f"{self._directory.path} has no {CA_FILE}; `tidevoy certificates init` makes one"
            )
        _check_issuer(self._directory, leaves)
        authority = _current_authority(self._directory, authorities)
        new_authority = find_authority(authorities, self._directory.read_key(NEW_CA_KEY_FILE))
        self.rollover = next_rollover(
            authority.certificate.not_valid_after_utc,
            self._now,
            within,
            has_new_ca=new_authority is not None,
            use_new_ca=use_new_ca,
        )
        is_switch = self.rollover is Rollover.USE_NEW_CA
        if new_authority is None and (is_switch or self.rollover is Rollover.MAKE_NEW_CA):
            new_authority = self._add_authority(authorities)
            yield FileResult(NEW_CA_KEY_FILE, "created")
            yield FileResult(CA_FILE, "added", new_authority.certificate)
        issuer = new_authority if is_switch and new_authority is not None else authority
        new_expiry = expiry(issuer.certificate, self._now, self._validity.leaf)
        for leaf in due_leaves(leaves, self._now, within, new_expiry, renew_all=renew_all or is_switch):
            yield from self._renew(issuer, leaf)
        if is_switch:
            # Last: if this run is interrupted before, the next one issues all certificates again.
            self._directory.rename(NEW_CA_KEY_FILE, CA_KEY_FILE)
            yield FileResult(CA_KEY_FILE, "replaced")
        yield from self._remove_expired(authorities, issuer)

    def _add_authority(self, authorities: list[x509.Certificate]) -> CertificateAuthority:
        """Create the next CA and add it to the list. Its key may be left by an interrupted call."""
        existing_key = self._directory.read_key(NEW_CA_KEY_FILE)
        added = make_authority(existing_key or new_key(), self._now, self._validity.authority)
        authorities.append(added.certificate)
        key_content = {} if existing_key is not None else {NEW_CA_KEY_FILE: key_pem(added.key)}
        self._directory.write({**key_content, CA_FILE: certificates_pem(authorities)})
        return added

    def _renew(self, issuer: CertificateAuthority, leaf: Leaf) -> Iterator[FileResult]:
        key = new_key()
        certificate = issue(
            issuer,
            names.names_of(leaf.certificate) or [names.envoy_name(names.common_name(leaf.certificate))],
            key.public_key(),
            self._now,
            self._validity.leaf,
            is_server=leaf.is_control_plane,
        )
        contents = {
            key_file(leaf.stem): key_pem(key),
            certificate_file(leaf.stem): certificates_pem([certificate]),
        }
        self._directory.write(contents)
        yield FileResult(key_file(leaf.stem), "renewed")
        yield FileResult(certificate_file(leaf.stem), "renewed", certificate)

    def _remove_expired(
        self, authorities: list[x509.Certificate], issuer: CertificateAuthority
    ) -> Iterator[FileResult]:
        """Remove CAs from ca.pem that verify nothing any more."""
        valid = [
            each for each in authorities if each.not_valid_after_utc > self._now or each == issuer.certificate
        ]
        if len(valid) < len(authorities):
            self._directory.write({CA_FILE: certificates_pem(valid)})
        for each in authorities:
            if each not in valid:
                yield FileResult(CA_FILE, "removed", each)


def _current_authority(
    directory: CertificateDirectory, authorities: list[x509.Certificate]
) -> CertificateAuthority:
    """Return the CA that issues certificates."""
    key = directory.read_key(CA_KEY_FILE)
    if key is None:
        raise CliError(
            f"{directory.path / CA_KEY_FILE} is missing; restore it, because without it nothing can be issued"
        )
    if (authority := find_authority(authorities, key)) is None:
        raise CliError(
            f"{directory.path / CA_KEY_FILE} is not the key of a CA in {CA_FILE}; restore the matching file"
        )
    return authority


def _check_issuer(directory: CertificateDirectory, leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if leaf.is_foreign:
            raise CliError(
                f"{directory.path / certificate_file(leaf.stem)} was not issued by a CA in {CA_FILE}; move it"
                " to another directory"
            )
