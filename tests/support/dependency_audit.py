"""What is known against the packages that are locked: weaknesses, licences, origins. `make audit`.

A check whose list cannot be reached is told as SKIPPED, and never as passed; `--strict` makes that a failure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = (ROOT / "requirements.lock", ROOT / "tests/support/clients/python/requirements.lock")
MANIFESTS = ("filters", "filters/fuzz", "bench/client", "tests/clients/rust")
_CARGO_DENY_CONFIG = ROOT / "filters/deny.toml"
_CHECK_TIMEOUT_SECONDS = 60.0  # seconds for one check
_MAX_PARALLEL_CHECKS = 4  # they wait for the network most of the time

# With what is installed beside it Tidevoy may be given on under its own licence.
ALLOWED_LICENSES = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Unicode-3.0",
        "Zlib",
    }
)
# How older packages write them.
_LICENSE_ALIASES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Of one check: what it found, and, if it could not look everywhere, why not."""

    check: str
    findings: tuple[str, ...] = ()
    skip_reason: str = ""

    def lines(self) -> list[str]:
        """As it is printed."""
        verdict = "FOUND" if self.findings else "SKIPPED" if self.skip_reason else "ok"
        told = [f"{verdict:8}{self.check}" + (f": {self.skip_reason}" if self.skip_reason else "")]
        return told + [f"        {each}" for each in self.findings]


def has_failed(outcomes: Iterable[AuditResult], *, strict: bool) -> bool:
    """Whether the audit as a whole fails."""
    return any(outcome.findings or (strict and outcome.skip_reason) for outcome in outcomes)


# --- Python ---


def check_vulnerabilities(lock: Path) -> AuditResult:
    """Known weaknesses of the locked versions, by PyPI's list."""
    name = f"weaknesses in {lock.relative_to(ROOT)}"
    done = _run(
        [
            *(sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes"),
            *("--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "10"),
        ]
    )
    try:
        return parse_pip_audit(name, json.loads(done.stdout))
    except json.JSONDecodeError:
        return AuditResult(name, skip_reason=f"PyPI cannot be asked: {_last_line(done.stderr)}")


def parse_pip_audit(name: str, report: Any) -> AuditResult:
    """What pip-audit's report says. Packages that its list does not have it leaves out."""
    packages = report["dependencies"]
    left_out = [each["name"] for each in packages if "skip_reason" in each]
    found = tuple(
        f"{each['name']} {each['version']}: {weakness['id']}"
        + (f", mended in {weakness['fix_versions'][0]}" if weakness["fix_versions"] else "")
        for each in packages
        for weakness in each.get("vulns", ())
    )
    shown = ", ".join(left_out[:3]) + (" ..." if len(left_out) > 3 else "")
    why = f"the list has nothing on {len(left_out)} of {len(packages)} packages: {shown}" if left_out else ""
    return AuditResult(name, found, why)


def check_licenses() -> AuditResult:
    """Licences of what is installed with `tidevoy[bench]`, as the packages themselves tell them."""
    unknown = []
    for distribution in _installed_with("tidevoy", "bench"):
        metadata: Any = distribution.metadata
        told = license_expression(
            metadata.get("License-Expression"), metadata.get("License"), _classifiers(metadata)
        )
        if not is_allowed(told):
            unknown.append(f"{metadata['Name']} {distribution.version}: {told or 'it tells no licence'}")
    return AuditResult("licences of Python packages", tuple(unknown))


def license_expression(expression: str | None, text: str | None, classifiers: Sequence[str]) -> str:
    """The licence as an expression of SPDX; a package has it in one of three places. Empty: in none."""
    if expression:
        return expression
    if classifiers:
        return " OR ".join(_LICENSE_ALIASES.get(each, each) for each in classifiers)
    first = (text or "").strip().partition("\n")[0]
    return _LICENSE_ALIASES.get(first, first)


def is_allowed(expression: str) -> bool:
    """Whether every licence that has to be kept is allowed, of those between OR at least one."""
    either = re.split(r"\s+OR\s+", expression.strip("() "))
    return any(
        all(each.strip("() ") in ALLOWED_LICENSES for each in re.split(r"\s+AND\s+", one)) for one in either
    )


def _classifiers(metadata: Any) -> list[str]:
    every = [each for each in metadata.get_all("Classifier") or () if each.startswith("License :: ")]
    return [each.rpartition(" :: ")[2] for each in every]


def _installed_with(name: str, extra: str) -> list[importlib.metadata.Distribution]:
    """What a package needs with one of its extras, and what that needs, without the package itself."""
    found: dict[str, importlib.metadata.Distribution] = {}
    ahead = [(name, extra)]
    while ahead:
        needing, wished = ahead.pop()
        distribution = importlib.metadata.distribution(needing)
        found[_normalize(distribution.metadata["Name"])] = distribution
        for text in distribution.requires or ():
            needed = Requirement(text)
            wanted = needed.marker is None or needed.marker.evaluate({"extra": wished})
            if wanted and _normalize(needed.name) not in found:
                ahead.append((needed.name, ""))
    del found[_normalize(name)]
    return list(found.values())


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- Rust ---


def check_crates(directory: str, checks: Sequence[str]) -> AuditResult:
    """What cargo-deny finds by `filters/deny.toml`."""
    name = f"{', '.join(checks)} of the crates in {directory}"
    program = shutil.which("cargo-deny")
    if program is None:
        return AuditResult(name, skip_reason="there is no cargo-deny; cargo install --locked cargo-deny")
    manifest = str(ROOT / directory / "Cargo.toml")
    done = _run(
        [
            *(
                program,
                "--manifest-path",
                manifest,
                "--config",
                str(_CARGO_DENY_CONFIG),
                "--locked",
                "--color",
                "never",
            ),
            *("check", "--hide-inclusion-graph", *checks),
        ]
    )
    return parse_cargo_deny(name, done.returncode, done.stderr)


def parse_cargo_deny(name: str, code: int, text: str) -> AuditResult:
    """What cargo-deny says. It ends with an error too when the list of weaknesses cannot be fetched."""
    if code == 0:
        return AuditResult(name)
    found = tuple(re.findall(r"^error(?:\[[\w-]+\])?: .+$", text, re.MULTILINE))
    return AuditResult(name, found) if found else AuditResult(name, skip_reason=_last_line(text))


def _run(
    command: Sequence[str], timeout_seconds: float = _CHECK_TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """What a tool says; one that takes too long fails with that as its last line."""
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {timeout_seconds:g} s")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"


def main() -> int:
    """Runs all checks; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail when a check could not be made")
    strict: bool = parser.parse_args().strict
    checks: list[Callable[[], AuditResult]] = [
        check_licenses,
        *(partial(check_vulnerabilities, lock) for lock in LOCKS),
    ]
    for directory in MANIFESTS:
        checks += [
            partial(check_crates, directory, each)
            for each in (("bans", "licenses", "sources"), ("advisories",))
        ]
    with ThreadPoolExecutor(_MAX_PARALLEL_CHECKS) as pool:
        outcomes = list(pool.map(lambda check: check(), checks))
    print("\n".join(line for outcome in outcomes for line in outcome.lines()))
    return 1 if has_failed(outcomes, strict=strict) else 0


if __name__ == "__main__":
    sys.exit(main())
