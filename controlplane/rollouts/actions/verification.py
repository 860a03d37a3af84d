"""Compares an upgraded node with an old one: replays captured reads on both, with `tidevoy-replay`."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from controlplane.aio import ThreadPool
from controlplane.config.rollouts import VerificationSettings
from controlplane.model.comparison import VerificationReport
from controlplane.rollouts.actions.command_action import run_command
from controlplane.rollouts.observation import VerificationResult
from controlplane.verification.comparison_file import InvalidComparison, parse_comparison
from controlplane.verification.replay_program import (
    ReplayProgramMissing,
    compare_arguments,
    find_replay_program,
)
from controlplane.verification.verdict import confirm, judge, needs_confirmation, shorten_report

_COMPARE_TIMEOUT_SECONDS = 600.0
_THREADS = ThreadPool("verification files", 1)
_BASELINE_NODE_FILE = "node"
# If more of the reads fail on the old node, the comparison says nothing.
_MAX_FAILED_SHARE = 0.5


class VerificationFailed(Exception):
    """There is no comparison. The message is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """Which nodes are compared, and how."""

    node: str
    baseline: str | None  # the old node; None: compare with the last results of an old node
    group: str  # of both
    capture: str
    max_ratio: float
    directory: Path  # for the results; one for each rollout
    find_change: Callable[[], str]
    """Returns which of the nodes is another process since the request, as a sentence, or an empty string."""


async def run_verification(
    request: VerificationRequest, settings: VerificationSettings, now: float
) -> VerificationResult:
    """Replay on both nodes at the same time, and compare. Cancellation ends the replays."""
    try:
        return VerificationResult(report=await _verify(request, settings, now))
    except (VerificationFailed, ReplayProgramMissing, InvalidComparison) as error:
        return VerificationResult(problem=str(error))
    except OSError as error:
        return VerificationResult(problem=f"{error.filename or request.directory}: {error.strerror}")


def find_verification_problem(capture: str, settings: VerificationSettings) -> str:
    """Return why this control plane cannot verify nodes with a capture; an empty string if it can.

    Without a directory in the settings, it has no problem to report here: `run_preflight` names that one.
    """
    try:
        find_replay_program()
    except ReplayProgramMissing as error:
        return str(error)
    directory = settings.directory
    try:
        has_capture = directory is None or (directory / capture).is_dir()
    except OSError as error:
        return f"{error.filename} cannot be read on the machine of this control plane: {error.strerror}"
    if not has_capture:
        return f"{directory} has no capture named {capture} on the machine of this control plane"
    return ""


def remove_results(directory: Path, rollout_ids: Sequence[str]) -> None:
    """Delete the results of all rollouts but these, as far as possible."""
    kept = {quote(rollout_id, safe="") for rollout_id in rollout_ids}
    with suppress(OSError):
        for entry in directory.iterdir() if directory.is_dir() else ():
            if entry.name not in kept:
                shutil.rmtree(entry, ignore_errors=True)


async def _verify(
    request: VerificationRequest, settings: VerificationSettings, now: float
) -> VerificationReport:
    """Compare the nodes. If digests are slower and nothing else is worse, compare them once more."""
    report = await _compare(request, settings, now)
    if needs_confirmation(report.findings):
        first = report.findings
        report = await _compare(request, settings, now)
        report = replace(report, findings=confirm(first, report.findings))
    return shorten_report(report)


async def _compare(
    request: VerificationRequest, settings: VerificationSettings, now: float
) -> VerificationReport:
    program = find_replay_program()
    if settings.directory is None:
        raise VerificationFailed("rollouts.verification.directory is not set any more")
    capture = settings.directory / request.capture
    node_results = request.directory / "new"
    old_results = request.directory / f"old-{quote(request.group, safe='')}"
    pending_old_results = old_results.with_name(f"{old_results.name}.fresh")
    await _THREADS.run(_prepare, request.directory, node_results, pending_old_results)
    outputs = {request.node: node_results}
    if request.baseline is not None:
        outputs[request.baseline] = pending_old_results
    elif not old_results.is_dir():
        raise VerificationFailed(
            "no old node of its group is in service, and there are no results of an old node of this rollout"
        )
    try:
        await _replay(program, capture, outputs, settings)
        if change := request.find_change():
            raise VerificationFailed(f"{change}, so the replays cannot be compared")
        if request.baseline is not None:
            await _THREADS.run(_replace_results, pending_old_results, old_results, request.baseline)
        baseline = await _THREADS.run((old_results / _BASELINE_NODE_FILE).read_text)
        file = request.directory / "comparison.json"
        arguments = compare_arguments(old_results, node_results, file)
        problem = await _run(program, arguments, _COMPARE_TIMEOUT_SECONDS)
        if problem:
            raise VerificationFailed(f"the comparison with {baseline} {problem}")
        return await _THREADS.run(_judge, request, settings, baseline, file, now)
    finally:
        await _THREADS.run(_remove, node_results, pending_old_results)


async def _replay(
    program: Path, capture: Path, outputs: Mapping[str, Path], settings: VerificationSettings
) -> None:
    """Replay on all targets at the same time. Raises VerificationFailed; then the others are ended, too."""

    async def replay(target: str, output: Path) -> None:
        arguments = _replay_arguments(capture, target, output, settings)
        if problem := await _run(program, arguments, settings.timeout):
            raise VerificationFailed(f"the replay of {capture.name} on {target} {problem}")

    replays = [asyncio.create_task(replay(target, output)) for target, output in outputs.items()]
    try:
        for ended in asyncio.as_completed(replays):
            await ended
    finally:
        for each in replays:
            each.cancel()
        await asyncio.gather(*replays, return_exceptions=True)


async def _run(program: Path, arguments: Sequence[str], timeout: float) -> str:
    """Run the program; return how it failed, as in "ended with exit code 1: ...", or an empty string."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
    return await run_command([str(program), *arguments], inherited, timeout)


def _replay_arguments(capture: Path, target: str, output: Path, settings: VerificationSettings) -> list[str]:
    arguments = [
        "run",
        str(capture),
        "--target",
        target,
        "--output",
        str(output),
        "--user",
        settings.user or "",
    ]
    if settings.password_file is not None:
        arguments += ["--password-file", str(settings.password_file)]
    if settings.ca is not None:
        arguments += ["--ca-file", str(settings.ca)]
    arguments += ["--max-connections", str(settings.max_connections), "--warm-up", str(settings.warm_up)]
    arguments += ["--max-running", str(settings.max_running)]
    return [*arguments, "--reads-only", "--unbounded"]


def _judge(
    request: VerificationRequest, settings: VerificationSettings, baseline: str, file: Path, now: float
) -> VerificationReport:
    comparison = parse_comparison(file.read_bytes())
    if not comparison.totals.pairs:
        after_warm_up = f" after a warm-up of {settings.warm_up} records" if settings.warm_up else ""
        raise VerificationFailed(
            f"no read of {request.capture} ran on both nodes{after_warm_up}; capture for a longer time"
            + (", or lower rollouts.verification.warm_up" if settings.warm_up else "")
        )
    if comparison.totals.old.errors > _MAX_FAILED_SHARE * comparison.totals.pairs:
        raise VerificationFailed(
            f"{comparison.totals.old.errors} of {comparison.totals.pairs} reads failed on {baseline};"
            f" check the privileges of the user {settings.user}, and the age of the capture"
        )
    findings = judge(comparison, request.max_ratio, is_same_replay=True)
    return VerificationReport(
        request.node, baseline, now, request.capture, request.max_ratio, comparison, findings
    )


def _prepare(directory: Path, *outputs: Path) -> None:
    _remove(*outputs)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _remove(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _replace_results(pending: Path, results: Path, node: str) -> None:
    (pending / _BASELINE_NODE_FILE).write_text(node)
    _remove(results)
    pending.rename(results)
