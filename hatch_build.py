"""Build hook: add the generated files to a wheel.

* The `..._pb2.py` of our own `.proto` files, also for editable installs. They must match the installed
  protobuf release, so they are generated where they are used.
* `controlplane/libtidevoy.so`, the module for Envoy, and the programs `tidevoy-envoy`, the supervisor of
  an Envoy, `tidevoy-rules`, which checks rules for statements, and `tidevoy-replay`, which replays
  captured traffic, if cargo is available to build them. The wheel is then limited to this processor
  architecture and a new enough C library; without them it fits every machine. TIDEVOY_MODULE=skip leaves
  all of them out. An editable install never contains them: `make` builds them.
"""

# No `from __future__ import annotations`: hatchling runs this file without an entry in sys.modules, where a
# dataclass would resolve its annotations.
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection
from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTOS = (
    "controlplane/etcd/rpc.proto",
    "controlplane/observe/envoy_reports/statements.proto",
    "controlplane/observe/envoy_reports/telemetry.proto",
    "controlplane/replicas/peer_feed.proto",
    "controlplane/sessions/commands.proto",
)
GENERATED = tuple(proto.replace(".proto", "_pb2.py") for proto in PROTOS)

S = TypeVar("S")

SONAME = "libtidevoy.so"
SHIPPED = f"controlplane/{SONAME}"
PROGRAMS = ("tidevoy-envoy", "tidevoy-replay", "tidevoy-rules")
PACKAGES = ("tidevoy-module", "tidevoy-envoy", "tidevoy-replay", "statement-rules")
HOOKS = "envoy_dynamic_module_on_"
# The glibc version of Red Hat 9, the oldest supported system; Envoy's image (Ubuntu 22.04) has 2.35.
NEWEST_GLIBC = (2, 34)
# The libraries that every supported system and Envoy's image have.
LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


class ModuleRefused(RuntimeError):
    """The module must not be shipped; the message says why and what to do."""


@dataclass(frozen=True)
class Binary:
    """The ELF properties that decide whether and where a file can be loaded (`man 5 elf`)."""

    name: str
    machine: str  # as `uname -m` prints it
    soname: str
    libraries: frozenset[str]
    glibc: tuple[int, int]  # the newest glibc version that a symbol requires
    exported: frozenset[str]
    imported: frozenset[str]  # without symbols that name a version of a library

    @property
    def tag(self) -> str:
        """The platform tag of a wheel that contains the file (PEP 600)."""
        return f"manylinux_{self.glibc[0]}_{self.glibc[1]}_{self.machine}"

    def check(self) -> None:
        """Raise ModuleRefused unless it can be loaded on a system with glibc NEWEST_GLIBC."""
        if self.glibc > NEWEST_GLIBC:
            raise ModuleRefused(
                f"{self.name} needs glibc {_dotted(self.glibc)}, but may need at most"
                f" {_dotted(NEWEST_GLIBC)}: build it on an older system, or build a wheel without it"
                " (TIDEVOY_MODULE=skip)"
            )
        if unknown := self.libraries - LIBRARIES:
            raise ModuleRefused(
                f"{self.name} needs {', '.join(sorted(unknown))}, which may be missing: link that statically"
            )

    def check_as_module(self) -> None:
        """Raise ModuleRefused unless an Envoy can load it on a system with glibc NEWEST_GLIBC."""
        self.check()
        if self.soname != SONAME:
            raise ModuleRefused(
                f"the SONAME is {self.soname!r} and not {SONAME}, by which Envoy finds a loaded module:"
                " see filters/module/build.rs"
            )
        if unexpected := {name for name in self.exported if not name.startswith(HOOKS)}:
            raise ModuleRefused(
                f"{SONAME} exports symbols that are no Envoy hooks: {', '.join(sorted(unexpected))}"
            )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _section(elf: ELFFile, name: str, kind: type[S]) -> S:
    section = elf.get_section_by_name(name)
    if not isinstance(section, kind):
        raise ELFError(f"not a shared object: section {name} is missing")
    return section


def read(path: Path) -> Binary:
    """Read an ELF file's properties. Raises ELFError if it is none, OSError if it cannot be read."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        tags: list[Any] = list(_section(elf, ".dynamic", DynamicSection).iter_tags())
        versions = _section(elf, ".gnu.version", GNUVerSymSection)
        exported: set[str] = set()
        imported: set[str] = set()
        for number, symbol in enumerate(_section(elf, ".dynsym", SymbolTableSection).iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                exported.add(symbol.name)
            # Weak symbols may stay undefined. Symbols with a numeric version index belong to a library.
            elif symbol["st_info"]["bind"] == "STB_GLOBAL" and isinstance(
                versions.get_symbol(number)["ndx"], str
            ):
                imported.add(symbol.name)
        glibc_versions = [
            re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
            for _, library_versions in _section(elf, ".gnu.version_r", GNUVerNeedSection).iter_versions()
            for version in library_versions
        ]
        return Binary(
            name=path.name,
            machine={"x64": "x86_64", "AArch64": "aarch64"}[elf.get_machine_arch()],
            soname=next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), ""),
            libraries=frozenset(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
            glibc=max((int(match[1]), int(match[2])) for match in glibc_versions if match),
            exported=frozenset(exported),
            imported=frozenset(imported),
        )


def build(root: Path) -> Path | None:
    """Build module and programs with cargo as `make` does. Return their directory.

    Returns None if they are skipped or there is no cargo.

    Raises ModuleRefused if cargo fails (it has printed why).
    """
    if os.environ.get("TIDEVOY_MODULE") == "skip" or sys.platform != "linux" or shutil.which("cargo") is None:
        return None
    target = root / "filters/target"
    command = [
        *("cargo", "build", "--quiet", "--release", "--locked"),
        *(option for package in PACKAGES for option in ("--package", package)),
        *("--manifest-path", str(root / "filters/Cargo.toml"), "--target-dir", str(target)),
    ]
    if subprocess.run(command, check=False).returncode != 0:
        raise ModuleRefused(
            f"cargo could not build {SONAME}; see its message above."
            " TIDEVOY_MODULE=skip builds a wheel without it"
        )
    return target / "release"


def generate(root: Path) -> None:
    """Write the generated modules under `root`. Raises RuntimeError if protoc fails (it has printed why).

    Files are replaced atomically, and only if they differ: programs of this checkout may be importing them.
    """
    sources = [str(root / proto) for proto in PROTOS]
    with tempfile.TemporaryDirectory(prefix=".protoc-", dir=root) as output:
        if protoc.main(["protoc", f"-I{root}", f"--python_out={output}", *sources]) != 0:
            raise RuntimeError(f"protoc could not compile {', '.join(PROTOS)}; see its message above")
        for name in GENERATED:
            new, current = Path(output, name), root / name
            if not current.exists() or current.read_bytes() != new.read_bytes():
                new.replace(current)


class BuildHook(BuildHookInterface[Any]):
    """The hook that hatchling runs before it packs files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate, build and ship the files that git ignores.

        `version` is hatchling's kind of build: `editable` or `standard`.
        """
        root = Path(self.root)
        generate(root)
        build_data["artifacts"].extend(GENERATED)
        if self.target_name == "wheel" and version == "standard" and (built := build(root)) is not None:
            module, programs = read(built / SONAME), [read(built / name) for name in PROGRAMS]
            module.check_as_module()
            build_data["force_include"][str(built / SONAME)] = SHIPPED
            for program in programs:
                program.check()
                build_data["shared_scripts"][str(built / program.name)] = program.name
            build_data["pure_python"] = False
            newest = max(module, *programs, key=lambda binary: binary.glibc)
            build_data["tag"] = f"py3-none-{newest.tag}"


if __name__ == "__main__":
    generate(Path(__file__).parent)
