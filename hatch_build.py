"""Build hook: what a wheel has beside the sources that are in git.

* The `..._pb2.py` of our own `.proto` files, for editable installs too. They are generated code of the
  protobuf release that is installed, so they are made where they are used.
* `controlplane/libtidevoy.so`, the module for Envoy, where there is cargo to build it. The wheel is then for
  this kind of processor and a C library that is new enough; without it, it is for every machine.
  TIDEVOY_MODULE=skip leaves it out. An editable install goes without: there, `make` builds it.
"""

# No `from __future__ import annotations`: hatchling runs this file without a place in sys.modules, where a
# dataclass would look for what its annotations mean.
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
    "controlplane/observe/envoy_reports/telemetry.proto",
    "controlplane/replicas/peer_feed.proto",
)
GENERATED = tuple(proto.replace(".proto", "_pb2.py") for proto in PROTOS)

S = TypeVar("S")

SONAME = "libtidevoy.so"
SHIPPED = f"controlplane/{SONAME}"
HOOKS = "envoy_dynamic_module_on_"
# Of Red Hat 9, the oldest of the systems that are in use; Envoy's image (Ubuntu 22.04) has 2.35.
NEWEST_GLIBC = (2, 34)
# What every such system has, Envoy's image too.
LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


class ModuleRefused(RuntimeError):
    """A module that must not be shipped; the text says why and what to do."""


@dataclass(frozen=True)
class Module:
    """What decides whether and where a shared object can be loaded (ELF: `man 5 elf`)."""

    machine: str  # as `uname -m` has it
    soname: str
    libraries: frozenset[str]
    glibc: tuple[int, int]  # the newest version of the C library that a symbol asks for
    exported: frozenset[str]
    imported: frozenset[str]  # without those that name their library by a version

    @property
    def tag(self) -> str:
        """The platform tag of a wheel with it (PEP 600)."""
        return f"manylinux_{self.glibc[0]}_{self.glibc[1]}_{self.machine}"

    def check(self) -> None:
        """ModuleRefused unless an Envoy can load it wherever the C library is NEWEST_GLIBC."""
        if self.glibc > NEWEST_GLIBC:
            raise ModuleRefused(
                f"{SONAME} asks for glibc {_dotted(self.glibc)}, but must do with {_dotted(NEWEST_GLIBC)}:"
                " build it on an older system, or a wheel without it (TIDEVOY_MODULE=skip)"
            )
        if unknown := self.libraries - LIBRARIES:
            raise ModuleRefused(f"{SONAME} asks for {', '.join(sorted(unknown))}: link that into it")
        if self.soname != SONAME:
            raise ModuleRefused(
                f"the SONAME is {self.soname!r} and not {SONAME}, by which Envoy finds what it has loaded:"
                " see filters/module/build.rs"
            )
        if strange := {name for name in self.exported if not name.startswith(HOOKS)}:
            raise ModuleRefused(f"{SONAME} exports what is no hook of Envoy's: {', '.join(sorted(strange))}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _section(elf: ELFFile, name: str, kind: type[S]) -> S:
    section = elf.get_section_by_name(name)
    if not isinstance(section, kind):
        raise ELFError(f"not a shared object: it has no {name}")
    return section


def read(path: Path) -> Module:
    """The facts about a shared object. ELFError when the file is none, OSError when it cannot be read."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        tags: list[Any] = list(_section(elf, ".dynamic", DynamicSection).iter_tags())
        versions = _section(elf, ".gnu.version", GNUVerSymSection)
        exported: set[str] = set()
        imported: set[str] = set()
        for number, symbol in enumerate(_section(elf, ".dynsym", SymbolTableSection).iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                exported.add(symbol.name)
            # A weak one may stay without a definition; a number stands for a version in one of the libraries.
            elif symbol["st_info"]["bind"] == "STB_GLOBAL" and isinstance(
                versions.get_symbol(number)["ndx"], str
            ):
                imported.add(symbol.name)
        asked = [
            re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
            for _, all_of_a_library in _section(elf, ".gnu.version_r", GNUVerNeedSection).iter_versions()
            for version in all_of_a_library
        ]
        return Module(
            machine={"x64": "x86_64", "AArch64": "aarch64"}[elf.get_machine_arch()],
            soname=next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), ""),
            libraries=frozenset(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
            glibc=max((int(found[1]), int(found[2])) for found in asked if found),
            exported=frozenset(exported),
            imported=frozenset(imported),
        )


def build(root: Path) -> Path | None:
    """The module, built by cargo as `make` does it; None where it is not to be built, or there is no cargo.

    ModuleRefused when cargo fails (it has said why), or when Envoy could not load what it built.
    """
    if os.environ.get("TIDEVOY_MODULE") == "skip" or sys.platform != "linux" or shutil.which("cargo") is None:
        return None
    target = root / "filters/target"
    command = [
        *("cargo", "build", "--quiet", "--release", "--locked", "--package", "module"),
        *("--manifest-path", str(root / "filters/Cargo.toml"), "--target-dir", str(target)),
    ]
    if subprocess.run(command, check=False).returncode != 0:
        raise ModuleRefused(
            f"cargo could not build {SONAME}; its message stands above."
            " TIDEVOY_MODULE=skip makes a wheel without it"
        )
    return target / "release" / SONAME


def generate(root: Path) -> None:
    """Write the generated modules under `root`. RuntimeError when protoc refuses (it has said why).

    Each is replaced as a whole, and only by other contents: programs of this checkout may be importing them.
    """
    sources = [str(root / proto) for proto in PROTOS]
    with tempfile.TemporaryDirectory(prefix=".protoc-", dir=root) as made:
        if protoc.main(["protoc", f"-I{root}", f"--python_out={made}", *sources]) != 0:
            raise RuntimeError(f"protoc could not compile {', '.join(PROTOS)}; its message stands above")
        for name in GENERATED:
            new, present = Path(made, name), root / name
            if not present.exists() or present.read_bytes() != new.read_bytes():
                new.replace(present)


class BuildHook(BuildHookInterface[Any]):
    """What hatchling runs before it packs anything."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate, build, and ship what git ignores. `version` is hatchling's kind of build: `editable` or
        `standard`."""
        root = Path(self.root)
        generate(root)
        build_data["artifacts"].extend(GENERATED)
        if self.target_name == "wheel" and version == "standard" and (built := build(root)) is not None:
            module = read(built)
            module.check()
            build_data["force_include"][str(built)] = SHIPPED
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{module.tag}"


if __name__ == "__main__":
    generate(Path(__file__).parent)
