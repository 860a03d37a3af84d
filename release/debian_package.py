"""Packs a directory tree into a Debian package, with dpkg-deb.

Packages are reproducible: the same tree, version and SOURCE_DATE_EPOCH give the same bytes.
"""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from release.programs import run

MAINTAINER_SCRIPTS = ("preinst", "postinst", "prerm", "postrm")


@dataclass(frozen=True, slots=True)
class ControlFields:
    """The fields of a package's control file (Debian policy, chapter 5).

    `description`: a short first line, and a text.
    """

    package: str
    version: str
    architecture: str
    depends: tuple[str, ...]
    description: str
    recommends: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    section: str = "net"

    def render(self, installed_kibibytes: int) -> str:
        """Return the text of the control file."""
        short, *long = self.description.splitlines()
        values = {
            "Package": self.package,
            "Version": self.version,
            "Architecture": self.architecture,
            "Maintainer": "The Tidevoy team <maintainers@tidevoy.invalid>",
            "Installed-Size": str(installed_kibibytes),
            "Depends": ", ".join(self.depends),
            "Recommends": ", ".join(self.recommends),
            "Conflicts": ", ".join(self.conflicts),
            "Provides": ", ".join(self.provides),
            "Section": self.section,
            "Priority": "optional",
            "Description": "\n ".join([short, *(line or "." for line in long)]),
        }
        return "".join(f"{name}: {value}\n" for name, value in values.items() if value)


@dataclass(slots=True)
class PackageTree:
    """The files of a package below `root`, and which of them are configuration files that users change."""

    root: Path
    conffiles: list[str] = field(default_factory=list)

    def add_file(self, source: Path, target: str, mode: int = 0o644) -> None:
        """Copy a file to an absolute path of the package."""
        path = self._path(target)
        shutil.copyfile(source, path)
        path.chmod(mode)

    def add_text(self, text: str, target: str, mode: int = 0o644) -> None:
        """Write a file at an absolute path of the package."""
        path = self._path(target)
        path.write_text(text)
        path.chmod(mode)

    def add_conffile(self, source: Path, target: str, mode: int = 0o644) -> None:
        """Copy a file that dpkg does not overwrite if the user has changed it."""
        self.add_file(source, target, mode)
        self.conffiles.append(target)

    def add_link(self, target: str, link: str) -> None:
        """Create a symbolic link at the absolute path `link` of the package."""
        self._path(link).symlink_to(target)

    def add_documents(self, package: str, licence: Path, changelog: Path) -> None:
        """Add what each Debian package has in /usr/share/doc."""
        directory = f"/usr/share/doc/{package}"
        self.add_file(licence, f"{directory}/copyright")
        path = self._path(f"{directory}/changelog.gz")
        path.write_bytes(gzip.compress(changelog.read_bytes(), mtime=0))

    def _path(self, target: str) -> Path:
        path = self.root / target.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def build_package(tree: PackageTree, fields: ControlFields, scripts: Path, directory: Path) -> Path:
    """Build the package from a tree and the maintainer scripts in `scripts`, and return its path.

    Raises ReleaseError if dpkg-deb is missing or fails.
    """
    size = sum(path.lstat().st_size for path in tree.root.rglob("*") if path.is_file()) // 1024
    control = tree.root / "DEBIAN"
    control.mkdir()
    (control / "control").write_text(fields.render(size))
    (control / "conffiles").write_text("".join(f"{name}\n" for name in tree.conffiles))
    for name in MAINTAINER_SCRIPTS:
        if (scripts / name).exists():
            shutil.copyfile(scripts / name, control / name)
            (control / name).chmod(0o755)
    for path in (tree.root, *tree.root.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    target = directory / f"{fields.package}_{fields.version}_{fields.architecture}.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "-z3", "--build", str(tree.root), str(target)]
    run(command, "install the Debian package dpkg")
    return target
