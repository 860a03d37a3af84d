"""The files of a CA in one directory. A file is replaced only when its successor is complete on disk."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from cli.certificate_authority import names
from cli.certificate_authority.issuing import CertificateAuthority, is_issued_by, is_key_of
from cli.errors import CliError, UsageError

CA_FILE, CA_KEY_FILE, NEW_CA_KEY_FILE = "ca.pem", "ca.key", "ca-new.key"
_CERTIFICATE_MODE, _KEY_MODE, _DIRECTORY_MODE = 0o644, 0o600, 0o700


@dataclass(frozen=True, slots=True)
class Leaf:
    """The certificate of the control planes or of an Envoy."""

    stem: str
    certificate: x509.Certificate
    is_foreign: bool = False  # issued by no CA in ca.pem
    is_mismatched: bool = False  # the key is not that of the certificate

    @property
    def is_control_plane(self) -> bool:
        return self.stem == names.CONTROL_PLANE_STEM


class CertificateDirectory:
    """Reads and writes the files. All methods raise CliError or UsageError, which name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @contextmanager
    def locked(self, *, create: bool = False) -> Iterator[None]:
        """Prevent that two commands change the directory at the same time. With `create`, make it first."""
        try:
            if create:
                self.path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
            raise UsageError(self._missing(error)) from None
        except OSError as error:
            raise CliError(f"{self.path} cannot be used: {error.strerror}") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CliError(
                    f"another `tidevoy certificates` is changing {self.path}; try again later"
                ) from None
            yield
        finally:
            os.close(descriptor)

    def read_authorities(self) -> list[x509.Certificate]:
        """Return the certificates in ca.pem; empty if there is no such file."""
        raw = self._read(CA_FILE)
        return [] if raw is None else self._parse_certificates(CA_FILE, raw)

    def read_key(self, file: str) -> EllipticCurvePrivateKey | None:
        """Return the key in a file, or None if there is no such file."""
        raw = self._read(file)
        if raw is None:
            return None
        try:
            key = load_pem_private_key(raw, password=None)
        except TypeError:
            raise CliError(
                f"{self.path / file} has a passphrase; remove it from this copy of the key"
            ) from None
        except ValueError:
            raise CliError(f"{self.path / file} is not a private key in PEM format") from None
        if not isinstance(key, EllipticCurvePrivateKey):
            raise CliError(
                f"{self.path / file} is not an EC key; only keys that `tidevoy certificates` made can be used"
            )
        return key

    def read_leaves(self, authorities: list[x509.Certificate]) -> list[Leaf]:
        """Return the certificates of the control planes and of all Envoys, in this order."""
        try:
            stems = sorted(file.stem for file in self.path.iterdir() if file.suffix == ".pem")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(self._missing(error)) from None
        except OSError as error:
            raise CliError(f"{self.path} cannot be read: {error.strerror}") from None
        envoys = [stem for stem in stems if names.envoy_id(stem) is not None]
        control_plane = [names.CONTROL_PLANE_STEM] if names.CONTROL_PLANE_STEM in stems else []
        return [self._read_leaf(stem, authorities) for stem in (*control_plane, *envoys)]

    def _read_leaf(self, stem: str, authorities: list[x509.Certificate]) -> Leaf:
        file = certificate_file(stem)
        certificate = self._parse_certificates(file, self._read(file) or b"")[0]
        # A missing key is no mismatch: the only copy may be on the machine of the Envoy.
        key = self.read_key(key_file(stem))
        return Leaf(
            stem,
            certificate,
            is_foreign=not any(is_issued_by(certificate, authority) for authority in authorities),
            is_mismatched=key is not None and not is_key_of(key.public_key(), certificate),
        )

    def exists(self, file: str) -> bool:
        return (self.path / file).exists()

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write files, or replace them, in this order. First all contents are made durable under other names.

        A replaced file keeps its owner and its permissions, so that its readers can read the new one. If the
        disk is full, all files are as before.
        """
        pending = {file: self.path / f".{file}.new" for file in contents}
        file = ""
        try:
            for file, content in contents.items():
                self._write_temporary(pending[file], file, content)
            for file in contents:
                os.replace(pending[file], self.path / file)
                del pending[file]
            self._sync()
        except OSError as error:
            raise CliError(
                f"{self.path / file} cannot be written: {error.strerror}; what was complete before stays"
                " valid, and the same command continues from there"
            ) from None
        finally:
            for temporary in pending.values():
                with suppress(OSError):
                    temporary.unlink()

    def rename(self, old: str, new: str) -> None:
        """Replace a file by another one."""
        try:
            os.replace(self.path / old, self.path / new)
            self._sync()
        except OSError as error:
            raise CliError(f"{self.path / new} cannot be written: {error.strerror}") from None

    def _write_temporary(self, temporary: Path, file: str, content: bytes) -> None:
        with suppress(FileNotFoundError):
            temporary.unlink()  # left by a command that was killed
        mode = _KEY_MODE if file.endswith(".key") else _CERTIFICATE_MODE
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _KEY_MODE)
        with os.fdopen(descriptor, "wb") as stream:
            try:
                replaced = (self.path / file).stat()
            except FileNotFoundError:
                pass
            else:
                mode = replaced.st_mode & 0o777
                if (replaced.st_uid, replaced.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
            os.fchmod(descriptor, mode)
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)

    def _sync(self) -> None:
        """Make renames durable, see fsync(2)."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, file: str) -> bytes | None:
        try:
            return (self.path / file).read_bytes()
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise UsageError(self._missing(error)) from None
        except OSError as error:
            raise CliError(f"{self.path / file} cannot be read: {error.strerror}") from None

    def _parse_certificates(self, file: str, raw: bytes) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(raw)
        except (ValueError, x509.InvalidVersion):
            raise CliError(f"{self.path / file} is not a certificate in PEM format") from None

    def _missing(self, error: OSError) -> str:
        if isinstance(error, FileNotFoundError):
            return f"there is no directory {self.path}; `tidevoy certificates init` makes one"
        return f"{self.path} is not a directory; name a directory for the certificates"


def certificate_file(stem: str) -> str:
    return f"{stem}.pem"


def key_file(stem: str) -> str:
    return f"{stem}.key"


def find_authority(
    authorities: list[x509.Certificate], key: EllipticCurvePrivateKey | None
) -> CertificateAuthority | None:
    """Return the CA whose key this is, or None if there is no key or no such CA."""
    if key is None:
        return None
    for certificate in authorities:
        if is_key_of(key.public_key(), certificate):
            return CertificateAuthority(certificate, key)
    return None
