"""Builds of Tidevoy next to this checkout: the previous one, and one as the next release may be."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.revisions import ModuleBuild, build_module, build_revision, prepare_control_plane
from tests.support.cache import cache_directory
from tests.support.module.bootstrap import require_module

_ROOT = Path(__file__).parents[3]
_BUILDS = cache_directory("builds")
_TARGET = _BUILDS / "target"
_PACKAGES = ("controlplane", "api", "cli", "envoy")
_PACKAGE_VERSION = re.compile(r'^version = "(\d+)\.(\d+)\.\d+"$', re.MULTILINE)
# Only the packages of this repository have no source.
_LOCKED_VERSION = re.compile(r'^version = "(\d+)\.(\d+)\.\d+"$(?!\nsource)', re.MULTILINE)
_NOT_COPIED = shutil.ignore_patterns("target", "fuzz", "__pycache__")

_PRINT_SCHEMAS = """
import json
from controlplane.storage.file_formats import Intents, Rollout, SavedPlan
from pydantic import TypeAdapter
print(json.dumps([TypeAdapter(kind).json_schema() for kind in (Intents, Rollout, SavedPlan)]))
"""
_TEXTS = {"title", "description", "default"}


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Two builds, of which operators replace the first by the second, or go back."""

    older: ModuleBuild
    newer: ModuleBuild

    @property
    def modules_are_compatible(self) -> bool:
        """Whether the module of one build works with the control plane of the other."""
        return minor_version(self.older) == minor_version(self.newer)

    @property
    def changes_formats(self) -> bool:
        """Whether the older build rejects what the newer one saves, because it has other fields."""
        return _saved_fields(self.older) != _saved_fields(self.newer)


def version_of(build: ModuleBuild) -> str:
    pyproject = (build.checkout or _ROOT) / "pyproject.toml"
    version: str = tomllib.loads(pyproject.read_text())["project"]["version"]
    return version


@cache
def _saved_fields(build: ModuleBuild) -> object:
    """Return the names and types of all fields that a build saves, as JSON schemas without texts."""
    command = [sys.executable, "-P", "-c", _PRINT_SCHEMAS]
    environment = build.environment(os.environ)
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return _without_texts(json.loads(result.stdout))


def _without_texts(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_texts(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        # In these objects, the keys are names of fields and types.
        key: {name: _without_texts(part) for name, part in value.items()}
        if key in ("properties", "$defs")
        else _without_texts(value)
        for key, value in schema.items()
        if key not in _TEXTS
    }


def minor_version(build: ModuleBuild) -> str:
    """Return the first two numbers of a build's version."""
    return ".".join(version_of(build).split(".")[:2])


def current_build() -> ModuleBuild:
    """Return the build of this checkout."""
    return ModuleBuild(require_module())


async def previous_build() -> ModuleBuild:
    """Return the build in TIDEVOY_PREVIOUS_CHECKOUT, or build the revision TIDEVOY_PREVIOUS_REV."""
    if checkout := os.environ.get("TIDEVOY_PREVIOUS_CHECKOUT"):
        return ModuleBuild.of_checkout(_ROOT / checkout)
    commit = _commit_of(os.environ.get("TIDEVOY_PREVIOUS_REV") or "6cb331b")
    directory = _BUILDS / commit
    async with _locked_builds():
        if not (build := ModuleBuild.of_checkout(directory / "checkout")).is_complete:
            shutil.rmtree(directory, ignore_errors=True)
            await build_revision(commit, directory, _TARGET)
    return build


async def next_build(root: Path) -> ModuleBuild:
    """Build this checkout with the next minor version, and with new fields in all that builds exchange.

    These are the intents, the plan, rollouts, and what a replica reports about its Envoys. `root` gets the
    code of the control plane.
    """
    for name in _PACKAGES:
        _copy(_ROOT / name, root / name)
    shutil.copyfile(_ROOT / "pyproject.toml", root / "pyproject.toml")
    _raise_version(root / "pyproject.toml", _PACKAGE_VERSION)
    _add_fields(root / "controlplane")
    prepare_control_plane("next", root)
    checkout = _BUILDS / f"next-{_checksum_of_module()}" / "checkout"
    async with _locked_builds():
        if not (build := ModuleBuild.of_checkout(checkout)).is_complete:
            shutil.rmtree(checkout.parent, ignore_errors=True)
            _copy(_ROOT / "filters", checkout / "filters")
            _raise_version(checkout / "filters" / "Cargo.toml", _PACKAGE_VERSION)
            _raise_version(checkout / "filters" / "Cargo.lock", _LOCKED_VERSION)
            await build_module(checkout, _TARGET)
    return ModuleBuild(build.module, root)


@asynccontextmanager
async def _locked_builds() -> AsyncIterator[None]:
    """Wait until no other run of the tests builds anything: all share the build directory."""
    _BUILDS.mkdir(parents=True, exist_ok=True)
    with (_BUILDS / "lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield


def _commit_of(revision: str) -> str:
    command = ["git", "-C", str(_ROOT), "rev-parse", "--verify", f"{revision}^{{commit}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _copy(source: Path, target: Path) -> None:
    # Without the times of the files: see `build_revision`.
    shutil.copytree(source, target, ignore=_NOT_COPIED, copy_function=shutil.copyfile)


def _raise_version(file: Path, pattern: re.Pattern[str]) -> None:
    _substitute(file, pattern, lambda match: f'version = "{match[1]}.{int(match[2]) + 1}.0"')


def _add_fields(controlplane: Path) -> None:
    """Add a text field to the dataclasses and messages, after an existing last field."""
    model = controlplane / "model"
    for file, last_field in (
        (model / "intents.py", r"    switch_overrides: Mapping\[str, SwitchOverrides\] = .*\n"),
        (model / "plan.py", r"    limits: Mapping\[str, LimitPlan\] = .*\n"),
        (model / "rollout.py", r"    forced: bool = False .*\n"),
        (model / "envoys.py", r"    certificate_expires_at: float \| None = None.*\n"),
    ):
        _substitute(file, re.compile(last_field), lambda match: match[0] + '    note: str = "new"\n')
    _substitute(
        controlplane / "replicas" / "peer_feed.proto",
        re.compile(r"  optional double certificate_expires_at = (\d+);.*\n"),
        lambda match: match[0] + f"  string note = {int(match[1]) + 1};\n",
    )


def _substitute(file: Path, pattern: re.Pattern[str], new: Callable[[re.Match[str]], str]) -> None:
    text, matches = pattern.subn(new, file.read_text())
    assert matches > 0, f"{file} has no {pattern.pattern}"
    file.write_text(text)


def _checksum_of_module() -> str:
    checksum = hashlib.sha256()
    for directory, names, files in os.walk(_ROOT / "filters"):
        ignored = _NOT_COPIED(directory, names)
        names[:] = sorted(name for name in names if name not in ignored)
        for file in sorted(files):
            checksum.update(file.encode() + Path(directory, file).read_bytes())
    return checksum.hexdigest()[:16]
