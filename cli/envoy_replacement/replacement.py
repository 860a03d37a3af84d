"""Replace one Envoy by another: start, check, close, watch, end; each step is repeatable.

Until the old Envoy closes its listeners it serves as before, whatever fails. Envoy cannot reopen listeners,
so all checks come before that. The progress is visible in the two Envoys themselves, so an interrupted
replacement continues where it stopped when the command runs again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from cli.envoy_replacement import compatibility
from cli.envoy_replacement.child_command import ChildCommand, run_command
from cli.envoy_replacement.envoy_admin import EnvoyAdmin
from cli.envoy_replacement.model import EnvoyState, ProgressMessage, RegisteredEnvoy, ReplacementSpec
from cli.errors import CliError

_POLL_SECONDS = 0.25
_END_TIMEOUT_SECONDS = 30.0  # for an Envoy to stop, or for a command that stops one
_DRAIN_TIMEOUT_SECONDS = 10.0  # until all workers have closed their ports
_FORGET_TIMEOUT_SECONDS = 10.0  # until the control plane notices that an Envoy is disconnected
_UNRESPONSIVE_TIMEOUT_SECONDS = 60.0  # how long an Envoy may be too busy to answer
_MAX_FAILED_POLLS = 2  # consecutive polls that may find no Envoy before it counts as gone
_ROLLBACK_WAIT_SECONDS = 5.0  # time for short sessions to leave a new Envoy that cannot take over
_TCP_MIGRATE_REQ = Path("/proc/sys/net/ipv4/tcp_migrate_req")

ReportProgress = Callable[[ProgressMessage], None]


class ControlPlaneApi(Protocol):
    """The control plane calls that a replacement needs. Each may raise CliError."""

    def envoys(self) -> Mapping[str, RegisteredEnvoy]:
        """Return all registered Envoys by id."""
        ...

    def forget(self, envoy: str) -> None:
        """Remove an Envoy that has stopped for good."""
        ...


class EnvoyReplacement:
    """One replacement: `run` performs it, `dry_run` reports what it would do."""

    def __init__(self, spec: ReplacementSpec, control_plane: ControlPlaneApi, report: ReportProgress) -> None:
        """Raises CliError (usage) if the specification is invalid."""
        self._spec = spec
        self._old_admin, self._new_admin = EnvoyAdmin(spec.old_admin), EnvoyAdmin(spec.new_admin)
        if self._old_admin.address == self._new_admin.address:
            raise CliError("--old-admin and --new-admin name the same port", 2)
        self._control_plane = control_plane
        self._report = report

    def dry_run(self) -> None:
        """Check both Envoys and report what would be done. Raises CliError if `run` would be rejected now."""
        old, new = self._check_pair()
        if old is None:
            return
        for step in compatibility.describe_steps(self._spec, old, new):
            self._emit("check", f"would {step}")
        if new is not None and (
            blockers := compatibility.takeover_blockers(
                old, new, self._control_plane.envoys(), self._spec.optional_listeners
            )
        ):
            raise CliError("the replacement would be rejected now: " + "; ".join(blockers))

    def run(self) -> None:
        """Replace the old Envoy. Raises CliError, whose text says which Envoys still run."""
        old, new = self._check_pair()
        if old is None:
            return
        if old.has_stopped_accepting:
            self._emit("close", f"{old.id} already accepts no new sessions", sessions=old.sessions)
        # A closed old Envoy cannot serve again, so then any running new Envoy is good enough.
        if not old.has_stopped_accepting or (new is None and self._spec.start_command):
            self._bring_up_new(old, new)
        if not old.has_stopped_accepting:
            self._close_old(old)
        is_running = self._wait_until_empty(old)
        self._end_old(old.id, is_running=is_running)

    # --- before any change to the old Envoy ---

    def _check_pair(self) -> tuple[EnvoyState | None, EnvoyState | None]:
        """Return both states. Without an old Envoy, report that there is nothing to do. Raises CliError."""
        old, new = self._old_admin.fetch_state(), self._new_admin.fetch_state()
        if old is None:
            if new is None:
                raise CliError(
                    f"no Envoy answers at {self._old_admin.address} or {self._new_admin.address}: set"
                    " --old-admin"
                    " to the admin port of the Envoy to replace"
                )
            self._emit(
                "done",
                f"nothing to do: no Envoy runs at {self._old_admin.address} any more, and {new.id} runs",
                new=new.id,
            )
            return None, new
        if new is not None and (problems := compatibility.permanent_problems(old, new)):
            raise CliError("; ".join(problems))
        if new is None and not self._spec.start_command and not old.has_stopped_accepting:
            raise CliError(
                f"no Envoy answers at {self._new_admin.address}: start the new Envoy first, or set --start"
            )
        message = f"replacing {old.id} at {self._old_admin.address}: Envoy {old.version}"
        self._emit("check", message, old=old.id, sessions=old.sessions, listeners=dict(old.listeners))
        self._warn(old, new, kernel_migrates=_kernel_migrates())
        return old, new

    def _bring_up_new(self, old: EnvoyState, new: EnvoyState | None) -> None:
        """Start the new Envoy if needed, and wait until it is ready.

        Raises CliError; the old Envoy is then unchanged.
        """
        self._control_plane.envoys()  # fail before the start: no check works without the control plane
        old_status = (
            f"{old.id} accepts no new sessions" if old.has_stopped_accepting else f"{old.id} keeps serving"
        )
        command = None
        try:
            if new is None:
                self._emit("start", f"starting the new Envoy: {' '.join(self._spec.start_command)}")
                command = ChildCommand(self._spec.start_command)
            ready = self._await_ready(old, command)
        except CliError as error:
            new_status = "and the new Envoy is left unchanged"
            if command is not None and not old.has_stopped_accepting:
                new_status = self._roll_back_new(command)
            elif command is not None:
                command.detach()
            raise CliError(f"{error}; {old_status}, {new_status}", error.exit_code) from None
        except KeyboardInterrupt:
            log = command.detach() if command is not None else None
            log_note = f" (its output is in {log})" if log else ""
            raise CliError(
                f"interrupted; {old_status}, and the new Envoy is left unchanged{log_note}: run the command"
                " again"
                " to continue"
            ) from None
        log = command.detach() if command is not None else None
        log_note = f"; its output is in {log}" if log else ""
        listen_addresses = ", ".join(sorted(ready.listeners.values()))
        self._emit(
            "ready",
            f"{ready.id} is ready at {listen_addresses}: Envoy {ready.version}{log_note}",
            new=ready.id,
        )
        if new is None:  # else `_check_pair` has reported these warnings
            self._warn(old, ready, kernel_migrates=None)

    def _await_ready(self, old: EnvoyState, command: ChildCommand | None) -> EnvoyState:
        """Return the new Envoy's state once nothing blocks the takeover. Raises CliError, also on timeout."""
        deadline, last_reasons = time.monotonic() + self._spec.start_timeout, ""
        while True:
            new = self._new_admin.fetch_state()
            if new is not None and (problems := compatibility.permanent_problems(old, new)):
                raise CliError("; ".join(problems))
            blockers = compatibility.takeover_blockers(
                old, new, self._control_plane.envoys(), self._spec.optional_listeners
            )
            if new is not None and not blockers:
                return new
            if command is not None and (failure := command.exit_failure()) is not None:
                raise failure
            reasons = "; ".join(blockers)
            if time.monotonic() > deadline:
                raise CliError(
                    f"the new Envoy cannot take over after {self._spec.start_timeout:g} s: {reasons}"
                )
            if reasons != last_reasons:
                self._emit("start", f"waiting: {reasons}")
                last_reasons = reasons
            time.sleep(_POLL_SECONDS)

    def _roll_back_new(self, command: ChildCommand) -> str:
        """Stop a new Envoy that cannot take over. Returns its final state as a clause."""
        sessions = self._drain_new()
        if sessions:
            log = command.detach()
            log_note = f", its output is in {log}" if log else ""
            return (
                f"and the new Envoy accepts no more sessions, but has {sessions}, so it is left"
                f" running{log_note}"
                ": stop it when they have ended"
            )
        try:
            was_ours = command.is_running or command.exit_failure() is not None
            command.terminate()
            if self._spec.undo_command:
                run_command(self._spec.undo_command, _END_TIMEOUT_SECONDS)
            elif self._new_admin.fetch_state() is not None:
                self._new_admin.quit()
            elif not was_ours:
                return "and the new Envoy may still start: check it, or set --undo"
        except CliError as error:
            return f"and the new Envoy could not be stopped ({error}): stop it yourself"
        finally:
            command.detach()
        if self._wait_until_gone(
            self._new_admin, _END_TIMEOUT_SECONDS if self._spec.undo_command else 2 * _POLL_SECONDS
        ):
            return "and the new Envoy is stopped again"
        return f"but an Envoy still answers at {self._new_admin.address}: stop it yourself, or set --undo"

    def _drain_new(self) -> int:
        """Make the new Envoy stop accepting, wait for short sessions, and return how many are left."""
        deadline = time.monotonic() + _ROLLBACK_WAIT_SECONDS
        try:
            if (new := self._new_admin.fetch_state()) is None:
                return 0
            self._new_admin.drain_listeners()
            while (
                (new := self._new_admin.fetch_state()) is not None
                and new.sessions
                and time.monotonic() < deadline
            ):
                time.sleep(_POLL_SECONDS)
        except CliError:
            return 0  # an Envoy with a failing admin port serves no clients
        return new.sessions if new is not None else 0

    # --- from here on the replacement is irreversible ---

    def _close_old(self, old: EnvoyState) -> None:
        try:
            self._old_admin.drain_listeners()
        except CliError as error:
            raise CliError(f"{error}; both Envoys run: run the command again") from None
        deadline = time.monotonic() + _DRAIN_TIMEOUT_SECONDS
        while (state := self._old_admin.fetch_state()) is not None and not state.has_stopped_accepting:
            if time.monotonic() > deadline:
                raise CliError(
                    f"{old.id} did not stop accepting sessions within {_DRAIN_TIMEOUT_SECONDS:g} s: run the"
                    " command again"
                )
            time.sleep(_POLL_SECONDS)
        sessions = state.sessions if state is not None else 0
        self._emit("close", f"{old.id} accepts no new sessions", sessions=sessions)

    def _wait_until_empty(self, old: EnvoyState) -> bool:
        """Wait until the old Envoy has no session. Returns False if it has stopped. Raises CliError."""
        start = time.monotonic()
        deadline, previous, is_new_down = start + self._spec.deadline, old, False
        try:
            while (state := self._poll(self._old_admin)) is not None:
                if not state.has_stopped_accepting or not compatibility.is_same_process(previous, state):
                    raise CliError(
                        f"the Envoy at {self._old_admin.address} was restarted meanwhile, and accepts"
                        " sessions:"
                        " find out what restarts it, then run the command again"
                    )
                previous = state
                self._emit(
                    "watch",
                    f"sessions left at {state.id}: {state.sessions}",
                    sessions=state.sessions,
                    seconds=compatibility.seconds_left(deadline, time.monotonic()),
                )
                if state.sessions == 0:
                    return True
                is_new_down = self._report_new_serving(is_new_down)
                if time.monotonic() >= deadline:
                    self._handle_deadline(state)
                    return True
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            raise CliError(
                f"stopped waiting; {previous.id} accepts no new sessions and keeps its {previous.sessions}"
                " sessions: run the command again to continue"
            ) from None
        if previous.sessions:
            raise CliError(
                f"{old.id} has stopped on its own; it had {previous.sessions} sessions at the last check"
            )
        return False

    def _poll(self, admin: EnvoyAdmin) -> EnvoyState | None:
        """Return the Envoy's state, or None once it is certainly gone; wait while it is too busy to answer.

        Raises CliError if it does not answer within _UNRESPONSIVE_TIMEOUT_SECONDS.
        """
        deadline, failed_polls = time.monotonic() + _UNRESPONSIVE_TIMEOUT_SECONDS, 0
        while True:
            try:
                if (state := admin.fetch_state()) is not None or failed_polls == _MAX_FAILED_POLLS:
                    return state
                failed_polls += 1
            except CliError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def _handle_deadline(self, state: EnvoyState) -> None:
        """Return if the sessions are to be cut. Raises CliError if they are to stay."""
        problem = f"the deadline has passed and {state.id} still has sessions ({state.sessions})"
        if self._spec.on_deadline == "keep":
            raise CliError(
                f"{problem}; they stay open, and no new ones start: run the command again to keep waiting,"
                " or with"
                " --on-deadline cut"
            )
        if not self._is_new_serving():
            raise CliError(
                f"{problem}; they are not cut, because the new Envoy at {self._new_admin.address} does not"
                " serve"
            )
        self._emit("end", f"{problem}, which are cut now", sessions=state.sessions)

    def _is_new_serving(self) -> bool:
        """Return whether the new Envoy certainly accepts sessions."""
        try:
            return _is_accepting(self._poll(self._new_admin))
        except CliError:
            return False

    def _report_new_serving(self, was_down: bool) -> bool:
        """Return whether the new Envoy does not serve, and report when that changes."""
        try:
            is_down = not _is_accepting(self._new_admin.fetch_state())
        except CliError:
            return was_down  # busy
        if is_down and not was_down:
            self._emit(
                "watch",
                f"nobody accepts new sessions: the new Envoy at {self._new_admin.address} does not serve",
            )
        elif was_down and not is_down:
            self._emit("watch", f"the new Envoy at {self._new_admin.address} serves")
        return is_down

    def _end_old(self, envoy: str, *, is_running: bool) -> None:
        if is_running:
            self._emit("end", f"stopping {envoy}")
            if self._spec.stop_command:
                run_command(self._spec.stop_command, _END_TIMEOUT_SECONDS)
            else:
                self._old_admin.quit()
            if not self._wait_until_gone(self._old_admin, _END_TIMEOUT_SECONDS):
                raise CliError(
                    f"an Envoy still answers at {self._old_admin.address} after {_END_TIMEOUT_SECONDS:g} s:"
                    " find out"
                    " what restarts it, and set --stop to the command that stops it"
                )
        self._forget_old(envoy)
        self._emit("done", "the old Envoy has stopped")

    def _forget_old(self, envoy: str) -> None:
        """Remove the old Envoy from the control plane, so that no drain waits for its sessions.

        A failure is harmless: the control plane removes the Envoy later by itself.
        """
        deadline = time.monotonic() + _FORGET_TIMEOUT_SECONDS
        while True:
            try:
                self._control_plane.forget(envoy)
            except CliError as error:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                self._emit("forget", f"{envoy} could not be removed from the control plane: {error}")
            return

    def _wait_until_gone(self, admin: EnvoyAdmin, seconds: float) -> bool:
        """Return whether no Envoy answers any more, in three consecutive polls."""
        deadline, failed_polls = time.monotonic() + seconds, 0
        while failed_polls < 3:
            try:
                failed_polls = failed_polls + 1 if admin.fetch_state() is None else 0
            except CliError:
                failed_polls = 0  # it is busy, maybe while it stops
            if time.monotonic() > deadline:
                return failed_polls > 0
            time.sleep(_POLL_SECONDS)
        return True

    def _warn(self, old: EnvoyState, new: EnvoyState | None, *, kernel_migrates: bool | None) -> None:
        for warning in compatibility.warnings(old, new, kernel_migrates=kernel_migrates):
            self._emit("check", f"warning: {warning}", caution=warning)

    def _emit(self, step: str, message: str, **data: object) -> None:
        self._report(ProgressMessage(step, message, data))


def _is_accepting(state: EnvoyState | None) -> bool:
    return state is not None and state.is_live and not state.has_stopped_accepting


def _kernel_migrates() -> bool | None:
    try:
        return _TCP_MIGRATE_REQ.read_text().strip() != "0"
    except OSError:
        return None  # a Linux kernel before 5.14, or another system
