"""Local images with the names of the real images, so that docker-compose.yml needs no change and no registry.

debootstrap creates their file systems once and keeps them in the user's cache directory. `fake_images/` has
the Dockerfile of each image, and the programs that replace real servers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from sandbox.child_process import find_program
from sandbox.envoy import envoy_binary
from sandbox.tidb_binaries import TidbBinaries
from tests.support.compose.commands import CommandFailed, run_command
from tests.support.compose.docker_daemon import Docker

REPOSITORY = Path(__file__).resolve().parents[3]
_HERE = Path(__file__).resolve().parent
_SUITE = "bookworm"
# Compiling the module takes two minutes on an idle machine.
_BUILD_TIMEOUT_SECONDS = 1200.0

_RUST = ("ca-certificates", "gcc", "libc6-dev")
_PYTHON = ("ca-certificates", "python3", "python3-venv", "python3-pip")
# The tools of the real images, and the programs that replace the real servers.
_SERVERS = ("python3", "curl", "wget", "etcd-server", "mariadb-server-core", "mariadb-client-core")

# Arguments: the new archive, an empty directory, and a command that fills the directory. The directory is in
# memory, because dpkg waits for the disk after every file.
_BUILD_ARCHIVE_SCRIPT = """
archive=$1 root=$2
shift 2
mount -t tmpfs none "$root"
"$@"
rm -r "$root/var/cache/apt" "$root/var/lib/apt/lists"
tar --one-file-system --numeric-owner -C "$root" -cf "$archive" .
"""

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")

_FAKE_IMAGES = {
    "pingcap/pd": "pd",
    "pingcap/tikv": "tikv",
    "pingcap/tidb": "tidb",
    "prom/prometheus": "monitoring",
    "grafana/grafana": "monitoring",
}


def services() -> dict[str, Any]:
    """Return the services of docker-compose.yml."""
    parsed: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    return parsed


async def build_all(docker: Docker, cache: Path, servers: TidbBinaries | None = None) -> None:
    """Build every image of docker-compose.yml: ours from their Dockerfiles, the others as fakes.

    With `servers`, the images of PD, TiKV and TiDB contain these programs instead of fakes.
    """
    await build_base_images(docker, cache)
    index = await package_index()
    await docker.compose(
        *("--file", "docker-compose.yml", "--file", str(_HERE / "build.yml"), "build"),
        project=REPOSITORY,
        timeout=_BUILD_TIMEOUT_SECONDS,
        env=index,
    )
    for image in {service["image"] for service in services().values()}:
        fake = _FAKE_IMAGES.get(image.partition(":")[0])
        if fake in ("pd", "tikv", "tidb") and servers is not None:
            await _build_real(docker, fake, image, servers)
        elif fake == "tidb":
            await _build(docker, fake, image, {"requirements.lock": REPOSITORY / "requirements.lock"}, index)
        elif fake is not None:
            await _build(docker, fake, image, {})


async def build_base_images(docker: Docker, cache: Path) -> None:
    """Build the images that our Dockerfiles begin with, and those that the fake servers need."""
    for name, packages in (("debian-python", _PYTHON), ("debian-servers", _SERVERS), ("debian-rust", _RUST)):
        archive = await debian_archive(cache, name, packages)
        await docker("import", str(archive), f"local/{name}", timeout=_BUILD_TIMEOUT_SECONDS)
    certificates = {"ca-certificates.crt": _certificates()}
    _, python, _ = _base_images("controlplane")
    await _build(docker, "python", python, certificates)
    rust, envoy = _base_images("envoy")
    async with _toolchain() as archive:
        await _build(docker, "rust", rust, {**certificates, "toolchain.tar": archive})
    await _build(docker, "envoy", envoy, {"envoy": envoy_binary()})


async def _build_real(docker: Docker, fake: str, image: str, servers: TidbBinaries) -> None:
    """Build `image` with a program of `servers` instead of the one in `fake_images/<fake>`."""
    store = servers.store
    if fake == "tikv" and not store.is_tikv:
        with tempfile.TemporaryDirectory() as directory:
            command = Path(directory) / "store.json"
            command.write_text(json.dumps(["/store", *store.command_template[1:]]))
            launcher = _HERE / "fake_images" / "tikv" / "tikv_server.py"
            files = {"store": store.program, "store.json": command, "tikv_server.py": launcher}
            await _build(docker, "store", image, files)
    else:
        program = {"pd": servers.pd, "tikv": store.program, "tidb": servers.tidb}[fake]
        await _build(docker, "server", image, {"server": program})


async def _build(
    docker: Docker,
    fake: str,
    image: str,
    files: Mapping[str, Path],
    index: Mapping[str, str] | None = None,
) -> None:
    """Build `fake_images/<fake>` as `image`, with `files` (name: source) added to its directory.

    `index`: build arguments that name the package index. Without `index`, the build has no network.
    """
    network = ["--network=none"]
    if index is not None:
        proxies = {name: os.environ[name] for name in _PROXIES if name in os.environ}
        arguments = (f"--build-arg={name}={value}" for name, value in {**proxies, **index}.items())
        network = ["--network=host", *arguments]
    with tempfile.TemporaryDirectory() as directory:
        context = Path(directory) / "context"
        shutil.copytree(_HERE / "fake_images" / fake, context)
        for name, source in files.items():
            shutil.copyfile(source, context / name)
        await docker("build", *network, "--tag", image, str(context), timeout=_BUILD_TIMEOUT_SECONDS)


def _base_images(directory: str) -> list[str]:
    """Return the base images of the stages of our Dockerfile in `directory`."""
    text = (REPOSITORY / directory / "Dockerfile").read_text()
    return re.findall(r"^FROM (\S+)", text, re.MULTILINE)


@asynccontextmanager
async def _toolchain() -> AsyncIterator[Path]:
    """Yield a tar archive of this machine's Rust toolchain, as rustup installs it."""
    root = Path(
        (await run_command(find_program("rustc", "rustup"), "--print", "sysroot", timeout=60.0)).strip()
    )
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "toolchain.tar"
        await run_command(
            "tar",
            "-C",
            str(root),
            "-cf",
            str(archive),
            *_toolchain_files(root),
            timeout=_BUILD_TIMEOUT_SECONDS,
        )
        yield archive


def _toolchain_files(root: Path) -> list[str]:
    """Return the files that cargo needs. The documentation, the largest part, is not among them."""
    libraries = (root / "lib").glob("lib*.so*")
    return ["bin/cargo", "bin/rustc", "lib/rustlib", *(str(path.relative_to(root)) for path in libraries)]


async def debian_archive(cache: Path, name: str, packages: tuple[str, ...]) -> Path:
    """Return a tar archive of a minimal Debian with `packages`: cached, or built in half a minute."""
    key = hashlib.sha256(" ".join((_SUITE, *packages)).encode()).hexdigest()[:12]
    archive = cache / f"{name}-{key}.tar"
    if archive.exists():
        return archive
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as directory:
        root, new_archive = Path(directory) / "root", Path(directory) / "new.tar"
        root.mkdir()
        # The command has its own mount name space, so that its mounts vanish even if it fails.
        await run_command(
            *(find_program("unshare", "util-linux"), "--mount"),
            *("sh", "-euc", _BUILD_ARCHIVE_SCRIPT, "sh", str(new_archive), str(root)),
            *(find_program("debootstrap", "debootstrap"), "--variant=minbase"),
            f"--include={','.join(packages)}",
            *(_SUITE, str(root), *await _mirror()),
            timeout=_BUILD_TIMEOUT_SECONDS,
        )
        new_archive.rename(archive)
    return archive


async def _mirror() -> list[str]:
    """Return the mirror of _SUITE that apt uses here, or nothing, so that debootstrap uses its default."""
    if shutil.which("apt-get") is None:
        return []
    targets = await run_command("apt-get", "indextargets", "--format", "$(RELEASE) $(SITE)", timeout=60.0)
    for line in targets.splitlines():
        release, _, site = line.partition(" ")
        if release == _SUITE:
            return [site]
    return []


def _certificates() -> Path:
    """Return the certificate authorities of this machine. A private package index may require them."""
    return Path(ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt")


async def package_index() -> dict[str, str]:
    """Return build arguments with the package index that pip uses here, none if it is the public index."""
    try:
        settings = await run_command(sys.executable, "-m", "pip", "config", "list", timeout=60.0)
    except CommandFailed:  # pip is not installed.
        settings = ""
    match = re.search(r"^(?:global|install|:env:)\.index-url='(.*)'$", settings, re.MULTILINE)
    url = os.environ.get("PIP_INDEX_URL") or (match[1] if match else None)
    return {"PIP_INDEX_URL": url, "UV_DEFAULT_INDEX": url} if url else {}
