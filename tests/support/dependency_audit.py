"""Audits the locked packages: vulnerabilities, licenses, origins. `make audit`.

The known vulnerabilities of `advisories.json` need no network. Further checks use today's databases. A check
whose database cannot be reached is reported as SKIPPED, never as passed; `--strict` makes that a failure, and
also an old `advisories.json`.
"""

from __future__ import annotations

import argparse
import datetime
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

from tests.support.advisories import CRATES, PYPI, AdvisoryFile, read_lock

ROOT = Path(__file__).resolve().parents[2]
LOCKS = (ROOT / "requirements.lock", ROOT / "tests/support/clients/python/requirements.lock")
MANIFESTS = ("filters", "filters/fuzz", "bench/client", "tests/support/clients/rust")
CARGO_LOCKS = tuple(ROOT / directory / "Cargo.lock" for directory in MANIFESTS)
_CARGO_DENY_CONFIG = ROOT / "filters/deny.toml"
_CHECK_TIMEOUT_SECONDS = 60.0
_MAX_ADVISORY_AGE_DAYS = 31
_MAX_PARALLEL_CHECKS = 4  # Checks mostly wait for the network.

# Tidevoy may be redistributed under its own license together with packages of these licenses.
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
# License names that older packages use, with their names in ALLOWED_LICENSES.
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
    """Result of one check: its findings, and the reason if it was incomplete or its database is old."""

    check: str
    findings: tuple[str, ...] = ()
    skip_reason: str = ""
    old_reason: str = ""

    def lines(self) -> list[str]:
        """Return the lines to print."""
        reason = self.skip_reason or self.old_reason
        verdict = "SKIPPED" if self.skip_reason else "OLD" if self.old_reason else "ok"
        if self.findings:
            verdict = "FOUND"
        head = f"{verdict:8}{self.check}" + (f": {reason}" if reason else "")
        return [head] + [f"        {finding}" for finding in self.findings]


def has_failed(outcomes: Iterable[AuditResult], *, strict: bool) -> bool:
    """Return whether the audit as a whole fails."""
    return any(
        outcome.findings or (strict and (outcome.skip_reason or outcome.old_reason)) for outcome in outcomes
    )


# --- advisories.json ---


def check_advisories(ecosystem: str, locks: Sequence[Path], today: datetime.date) -> AuditResult:
    """Compare the locked versions with the advisories of `advisories.json`."""
    file = AdvisoryFile.read(ecosystem)
    packages = sorted({package for lock in locks for package in read_lock(lock)}, key=str)
    check = (
        f"advisories of {file.database.name} of {file.database.date} ({file.database.commit[:9]}):"
        f" {len(packages)} packages of {ecosystem}, {len(file.advisories)} advisories"
    )
    age = (today - datetime.date.fromisoformat(file.database.date)).days
    is_old, missing = age > _MAX_ADVISORY_AGE_DAYS, file.missing(packages)
    return AuditResult(
        check,
        tuple(file.findings(packages)),
        f"not in advisories.json, so run `make advisories`: {', '.join(missing)}" if missing else "",
        f"the copy is {age} days old; renew it with `make advisories`" if is_old else "",
    )


# --- Python ---


def check_vulnerabilities(lock: Path) -> AuditResult:
    """Check the locked versions for vulnerabilities known to PyPI."""
    name = f"vulnerabilities in {lock.relative_to(ROOT)}"
    result = _run(
        [
            *(sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes"),
            *("--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "10"),
        ]
    )
    try:
        return parse_pip_audit(name, json.loads(result.stdout))
    except json.JSONDecodeError:
        return AuditResult(name, skip_reason=f"PyPI did not answer: {_last_line(result.stderr)}")


def parse_pip_audit(name: str, report: Any) -> AuditResult:
    """Parse pip-audit's report, which skips packages without data."""
    packages = report["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    findings = tuple(
        f"{package['name']} {package['version']}: {vulnerability['id']}"
        + (f", fixed in {vulnerability['fix_versions'][0]}" if vulnerability["fix_versions"] else "")
        for package in packages
        for vulnerability in package.get("vulns", ())
    )
    shown = ", ".join(skipped[:3]) + (" ..." if len(skipped) > 3 else "")
    reason = f"no data for {len(skipped)} of {len(packages)} packages: {shown}" if skipped else ""
    return AuditResult(name, findings, reason)


def check_licenses() -> AuditResult:
    """Check the licenses of the packages installed with `tidevoy[bench]`, from their own metadata."""
    unknown = []
    for distribution in _installed_with("tidevoy", "bench"):
        metadata: Any = distribution.metadata
        license_name = license_expression(
            metadata.get("License-Expression"), metadata.get("License"), _classifiers(metadata)
        )
        if not is_allowed(license_name):
            unknown.append(
                f"{metadata['Name']} {distribution.version}: {license_name or 'no license in its metadata'}"
            )
    return AuditResult("licenses of Python packages", tuple(unknown))


def license_expression(expression: str | None, text: str | None, classifiers: Sequence[str]) -> str:
    """Return the license as an SPDX expression from one of three metadata fields; empty if there is none."""
    if expression:
        return expression
    if classifiers:
        return " OR ".join(_LICENSE_ALIASES.get(classifier, classifier) for classifier in classifiers)
    first_line = (text or "").strip().partition("\n")[0]
    return _LICENSE_ALIASES.get(first_line, first_line)


def is_allowed(expression: str) -> bool:
    """Return whether the expression has an alternative (OR) in which all licenses (AND) are allowed."""
    alternatives = re.split(r"\s+OR\s+", expression.strip("() "))
    return any(
        all(name.strip("() ") in ALLOWED_LICENSES for name in re.split(r"\s+AND\s+", alternative))
        for alternative in alternatives
    )


def _classifiers(metadata: Any) -> list[str]:
    classifiers = [text for text in metadata.get_all("Classifier") or () if text.startswith("License :: ")]
    return [classifier.rpartition(" :: ")[2] for classifier in classifiers]


def _installed_with(name: str, extra: str) -> list[importlib.metadata.Distribution]:
    """Return the transitive dependencies of a package with one of its extras, without the package itself."""
    distributions: dict[str, importlib.metadata.Distribution] = {}
    pending = [(name, extra)]
    while pending:
        package, package_extra = pending.pop()
        distribution = importlib.metadata.distribution(package)
        distributions[_normalize(distribution.metadata["Name"])] = distribution
        for text in distribution.requires or ():
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": package_extra})
            if applies and _normalize(requirement.name) not in distributions:
                pending.append((requirement.name, ""))
    del distributions[_normalize(name)]
    return list(distributions.values())


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- Rust ---


def check_crates(directory: str, checks: Sequence[str]) -> AuditResult:
    """Run cargo-deny with `filters/deny.toml`."""
    name = f"{', '.join(checks)} of the crates in {directory}"
    program = shutil.which("cargo-deny")
    if program is None:
        return AuditResult(name, skip_reason="cargo-deny is missing; cargo install --locked cargo-deny")
    manifest = str(ROOT / directory / "Cargo.toml")
    result = _run(
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
    return parse_cargo_deny(name, result.returncode, result.stderr)


def parse_cargo_deny(name: str, code: int, text: str) -> AuditResult:
    """Parse cargo-deny's output. cargo-deny also fails if it cannot fetch the vulnerability database."""
    if code == 0:
        return AuditResult(name)
    findings = tuple(re.findall(r"^error(?:\[[\w-]+\])?: .+$", text, re.MULTILINE))
    return AuditResult(name, findings) if findings else AuditResult(name, skip_reason=_last_line(text))


def _run(
    command: Sequence[str], timeout_seconds: float = _CHECK_TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a tool. If it takes too long, return a failure with this reason as the last line."""
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no result within {timeout_seconds:g} s")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def main() -> int:
    """Run all checks; return 1 if something was found."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail if a check was skipped")
    strict: bool = parser.parse_args().strict
    today = datetime.datetime.now(datetime.UTC).date()
    checks: list[Callable[[], AuditResult]] = [
        check_licenses,
        partial(check_advisories, CRATES, CARGO_LOCKS, today),
        partial(check_advisories, PYPI, LOCKS, today),
        *(partial(check_vulnerabilities, lock) for lock in LOCKS),
    ]
    for directory in MANIFESTS:
        checks += [
            partial(check_crates, directory, names)
            for names in (("bans", "licenses", "sources"), ("advisories",))
        ]
    with ThreadPoolExecutor(_MAX_PARALLEL_CHECKS) as pool:
        outcomes = list(pool.map(lambda check: check(), checks))
    print("\n".join(line for outcome in outcomes for line in outcome.lines()))
    return 1 if has_failed(outcomes, strict=strict) else 0


if __name__ == "__main__":
    sys.exit(main())
