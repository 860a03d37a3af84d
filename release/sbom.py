"""The bill of materials in CycloneDX's format: Python packages and Rust crates, without Envoy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from release.programs import run

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_MODULE_PACKAGES = ("tidevoy-module", "tidevoy-envoy", "tidevoy-replay", "statement-rules")


def build_bill_of_materials(root: Path, requirements: str, version: str, directory: Path) -> Path:
    """Write the bill of materials. `requirements`: the locked packages of the control plane, with hashes."""
    # Nothing in it depends on the time or the machine of the build, so that two builds are equal.
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"tidevoy-{version}-{os.environ['SOURCE_DATE_EPOCH']}"))
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    bom.metadata.component = Component(
        name="tidevoy",
        bom_ref="tidevoy",
        version=version,
        type=ComponentType.APPLICATION,
        licenses=[LicenseExpression("Apache-2.0")],
    )
    bom.components.update(_python_components(requirements))
    bom.components.update(_rust_components(root))
    bom.register_dependency(bom.metadata.component, bom.components)
    target = directory / f"tidevoy-{version}.cdx.json"
    JsonV1Dot6(bom).output_to_file(str(target), allow_overwrite=True, indent=1)
    return target


def _python_components(requirements: str) -> Iterator[Component]:
    for block in re.split(r"\n(?=\S)", requirements):
        if match := _REQUIREMENT.match(block):
            name, version = match["name"], match["version"]
            yield Component(
                name=name,
                version=version,
                type=ComponentType.LIBRARY,
                bom_ref=f"pypi/{name}@{version}",
                purl=PackageURL("pypi", None, name.lower().replace("_", "-"), version),
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=found) for found in _HASH.findall(block)],
            )


def _rust_components(root: Path) -> Iterator[Component]:
    """Yield the crates that are compiled into the module and the supervisor."""
    manifest = str(root / "filters/Cargo.toml")
    metadata = json.loads(
        run(
            ["cargo", "metadata", "--format-version=1", "--locked", "--manifest-path", manifest],
            "install Rust, for example with rustup",
        )
    )
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    pending = [id_ for id_, package in packages.items() if package["name"] in _MODULE_PACKAGES]
    seen = set(pending)
    while pending:
        for dependency in nodes[pending.pop()]["deps"]:
            # Dependencies of kind "dev" are only for tests, those of kind "build" are part of the build.
            kinds = {kind["kind"] for kind in dependency["dep_kinds"]}
            if kinds != {"dev"} and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                pending.append(dependency["pkg"])
    for package in sorted((packages[id_] for id_ in seen), key=lambda package: package["name"]):
        licence = package["license"]
        yield Component(
            name=package["name"],
            version=package["version"],
            type=ComponentType.LIBRARY,
            bom_ref=f"cargo/{package['name']}@{package['version']}",
            purl=PackageURL("cargo", None, package["name"], package["version"]),
            licenses=[LicenseExpression(licence.replace("/", " OR "))] if licence else [],
        )
