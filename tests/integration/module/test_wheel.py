"""The wheel carries the module for Envoy, and Envoy can load it wherever the wheel says that it fits."""

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
# Ours without what would show this checkout to an installed package.
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIDEVOY_"))}

# The first build of all takes minutes where `make` has not built the module before.
pytestmark = pytest.mark.timeout(900)


def build(directory: Path, kind: str = "standard", **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel of this checkout into `directory`. Cargo works in filters/target, as `make` does."""
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", f"wheel:{kind}", "--directory", directory],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def only_wheel(directory: Path) -> Path:
    (wheel,) = directory.glob("*.whl")
    return wheel


def tags(wheel: Path) -> tuple[str, str]:
    """Whether the archive says that it is for any machine, and for which it is."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        said = Parser().parsestr(archive.read(name).decode())
    return said["Root-Is-Purelib"], said["Tag"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that everybody gets who builds one with cargo there."""
    directory = tmp_path_factory.mktemp("wheel")
    built = build(directory)
    assert built.returncode == 0, built.stderr
    return only_wheel(directory)


@pytest.fixture(scope="module")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> hatch_build.Module:
    """The facts about the module in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return hatch_build.read(Path(archive.extract(MODULE, tmp_path_factory.mktemp("module"))))


def test_the_wheel_is_for_the_machines_that_can_load_its_module(
    wheel: Path, module: hatch_build.Module
) -> None:
    major, minor = module.glibc
    assert (major, minor) <= (2, 34)
    platform = f"manylinux_{major}_{minor}_{os.uname().machine}"
    assert tags(wheel) == ("false", f"py3-none-{platform}")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")


def test_the_module_is_found_by_its_name_and_brings_all_but_the_usual_libraries(
    module: hatch_build.Module,
) -> None:
    assert module.soname == "libtidevoy.so"
    assert {"libc.so.6"} <= module.libraries <= hatch_build.LIBRARIES


def test_envoy_has_every_callback_that_the_module_calls(module: hatch_build.Module) -> None:
    """Envoy binds them all when it loads a module, and refuses one that names another."""
    assert module.imported
    assert {name for name in module.imported if not name.startswith(CALLBACK)} == set()
    assert module.imported - hatch_build.read(envoy_binary()).exported == set()


def test_the_module_exports_hooks_and_nothing_else(module: hatch_build.Module) -> None:
    assert "envoy_dynamic_module_on_program_init" in module.exported
    strangers = {name for name in module.exported if not name.startswith("envoy_dynamic_module_on_")}
    assert strangers == set()


def test_an_installed_wheel_brings_the_module_and_an_envoy_that_loads_it(wheel: Path, tmp_path: Path) -> None:
    """Where nothing else of this checkout is: an environment of its own."""

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=BARE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    uv, python = Path(sys.executable).with_name("uv"), tmp_path / "venv/bin/python"
    run(uv, "venv", "--python", sys.executable, "venv")
    locked = ("--constraint", ROOT / "requirements.lock")
    run(uv, "pip", "install", "--python", python, *locked, f"{wheel}[sandbox]")
    printed = run(
        *(python.with_name("tidevoy"), "bootstrap", "--module", "auto", "--id", "envoy-1"),
        *("--control-plane", "127.0.0.1:18000"),
    )
    (extension,) = yaml.safe_load(printed)["bootstrap_extensions"]
    named = Path(extension["typed_config"]["dynamic_module_config"]["module"]["local"]["filename"])
    assert named.is_relative_to(tmp_path / "venv")
    assert named.name == "libtidevoy.so"
    (tmp_path / "bootstrap.yaml").write_text(printed)
    envoy = run(python, "-c", "from sandbox.envoy import envoy_binary; print(envoy_binary())").strip()
    assert Path(envoy).is_relative_to(tmp_path / "venv")
    run(envoy, "--mode", "validate", "--config-path", "bootstrap.yaml")


@pytest.mark.parametrize(
    "environment", [{"PATH": "/nowhere"}, {"TIDEVOY_MODULE": "skip"}], ids=["without cargo", "left out"]
)
def test_without_the_module_a_wheel_is_for_every_machine(environment: dict[str, str], tmp_path: Path) -> None:
    built = build(tmp_path, **environment)
    assert built.returncode == 0, built.stderr
    plain = only_wheel(tmp_path)
    assert tags(plain) == ("true", "py3-none-any")
    with zipfile.ZipFile(plain) as archive:
        assert MODULE not in archive.namelist()


def test_an_editable_install_builds_no_module(tmp_path: Path) -> None:
    cargo = tmp_path / "cargo"
    cargo.symlink_to("/bin/false")
    built = build(tmp_path, "editable", PATH=str(tmp_path))
    assert built.returncode == 0, built.stderr
    assert tags(only_wheel(tmp_path)) == ("true", "py3-none-any")


def test_a_module_that_cannot_be_built_makes_no_wheel(tmp_path: Path) -> None:
    cargo = tmp_path / "cargo"
    cargo.symlink_to("/bin/false")
    built = build(tmp_path, PATH=str(tmp_path))
    assert built.returncode != 0
    assert "cargo could not build libtidevoy.so" in built.stderr
    assert "TIDEVOY_MODULE=skip" in built.stderr
    assert list(tmp_path.glob("*.whl")) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"glibc": (2, 35)}, "asks for glibc 2.35, but must do with 2.34"),
        ({"libraries": frozenset({"libc.so.6", "libssl.so.3"})}, "asks for libssl.so.3"),
        ({"soname": ""}, "the SONAME is '' and not libtidevoy.so"),
        (
            {"exported": frozenset({"envoy_dynamic_module_on_program_init", "main"})},
            "no hook of Envoy's: main",
        ),
    ],
)
def test_a_module_that_does_not_fit_is_refused(
    module: hatch_build.Module, change: dict[str, object], complaint: str
) -> None:
    module.check()
    with pytest.raises(hatch_build.ModuleRefused, match=complaint):
        dataclasses.replace(module, **change).check()  # type: ignore[arg-type]


def test_module_and_control_plane_have_one_version() -> None:
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    rust = tomllib.loads((ROOT / "filters/Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert rust == python


def test_what_is_generated_is_written_only_if_it_has_changed(tmp_path: Path) -> None:
    """Programs that run from this checkout may import it at that moment."""
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
