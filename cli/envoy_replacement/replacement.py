"""One Envoy takes over from another: start, check, close, watch, end; each step may be repeated.

Until the old Envoy is closed it serves as before, whatever fails. Envoy cannot take that back, so all that
can be checked comes first. What was done shows in the two Envoys themselves, and so a recycle that was
interrupted goes on where it was when it is run again.
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

_POLL_SECONDS = 0.25  # seconds
_END_TIMEOUT_SECONDS = 30.0  # seconds that an Envoy, or a command that ends one, may take
_DRAIN_TIMEOUT_SECONDS = 10.0  # seconds until all workers have closed their ports
_FORGET_TIMEOUT_SECONDS = 10.0  # seconds within which the control plane notices that an Envoy is gone
_UNRESPONSIVE_TIMEOUT_SECONDS = 60.0  # seconds that an Envoy may be too busy to answer
_MAX_FAILED_POLLS = (
    2  # times in a row that an admin port may turn a look away before its Envoy counts as gone
)
_ROLLBACK_WAIT_SECONDS = 5.0  # seconds in which short sessions leave an Envoy that is of no use
_TCP_MIGRATE_REQ = Path("/proc/sys/net/ipv4/tcp_migrate_req")

ReportProgress = Callable[[ProgressMessage], None]


class ControlPlaneApi(Protocol):
    """What a recycle needs of one. Each call may raise Failure."""

    def envoys(self) -> Mapping[str, RegisteredEnvoy]:
        """All Envoys that it knows, by id."""
        ...

    def forget(self, envoy: str) -> None:
        """It has ended for good."""
        ...


class EnvoyReplacement:
    """One recycle; `run` it, or ask `rehearse` what it would do."""

    def __init__(self, spec: ReplacementSpec, control_plane: ControlPlaneApi, report: ReportProgress) -> None:
        """Failure (usage) when the order makes no sense."""
        self._spec = spec
        self._old_admin, self._new_admin = EnvoyAdmin(spec.old_admin), EnvoyAdmin(spec.new_admin)
        if self._old_admin.address == self._new_admin.address:
            raise CliError("--old-admin and --new-admin name the same port", 2)
        self._control_plane = control_plane
        self._report = report

    def dry_run(self) -> None:
        """Check what can be checked, and tell what would be done. Failure when it would be refused."""
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
            raise CliError("it would be refused now: " + "; ".join(blockers))

    def run(self) -> None:
        """Do it. Failure, and then what is left as it is stands in it."""
        old, new = self._check_pair()
        if old is None:
            return
        if old.has_stopped_accepting:
            self._emit("close", f"{old.id} accepts no new sessions already", sessions=old.sessions)
        # An old one that is closed cannot go back, so that there is a new one at all is enough then.
        if not old.has_stopped_accepting or (new is None and self._spec.start_command):
            self._bring_up_new(old, new)
        if not old.has_stopped_accepting:
            self._close_old(old)
        is_there = self._wait_until_empty(old)
        self._end_old(old.id, is_running=is_there)

    # --- before the old one is touched ---

    def _check_pair(self) -> tuple[EnvoyState | None, EnvoyState | None]:
        """Both as they are; no old one: there is nothing to do, and that is told. Failure."""
        old, new = self._old_admin.fetch_state(), self._new_admin.fetch_state()
        if old is None:
            if new is None:
                raise CliError(
                    f"no Envoy answers at {self._old_admin.address}, nor at {self._new_admin.address}: name the admin"
                    " port of the Envoy that is to be replaced with --old-admin"
                )
            self._emit(
                "done",
                f"nothing to do: no Envoy is left at {self._old_admin.address}, and {new.id} runs",
                new=new.id,
            )
            return None, new
        if new is not None and (problems := compatibility.permanent_problems(old, new)):
            raise CliError("; ".join(problems))
        if new is None and not self._spec.start_command and not old.has_stopped_accepting:
            raise CliError(
                f"no Envoy answers at {self._new_admin.address}: start the new one first, or say how with --start"
            )
        message = f"{old.id} at {self._old_admin.address} is to be replaced: Envoy {old.version}"
        self._emit("check", message, old=old.id, sessions=old.sessions, listeners=dict(old.listeners))
        self._warn(old, new, kernel_migrates=_kernel_migrates())
        return old, new

    def _bring_up_new(self, old: EnvoyState, new: EnvoyState | None) -> None:
        """Bring the new one up to serving. Failure: the old one is as it was."""
        self._control_plane.envoys()  # without it no Envoy can be checked, so none need be started
        old_status = (
            f"{old.id} accepts no new sessions" if old.has_stopped_accepting else f"{old.id} serves on"
        )
        command = None
        try:
            if new is None:
                self._emit("start", f"starting the new Envoy: {' '.join(self._spec.start_command)}")
                command = ChildCommand(self._spec.start_command)
            ready = self._await_ready(old, command)
        except CliError as failure:
            new_status = "and the new Envoy is left as it is"
            if command is not None and not old.has_stopped_accepting:
                new_status = self._roll_back_new(command)
            elif command is not None:
                command.detach()
            raise CliError(f"{failure}; {old_status}, {new_status}", failure.exit_code) from None
        except KeyboardInterrupt:
            log = command.detach() if command is not None else None
            kept = f" (its output is in {log})" if log else ""
            raise CliError(
                f"stopped; {old_status}, and the new Envoy is left as it is{kept}: run it again to go on"
            ) from None
        log = command.detach() if command is not None else None
        more = f"; its output is in {log}" if log else ""
        listens = ", ".join(sorted(ready.listeners.values()))
        self._emit("ready", f"{ready.id} is ready at {listens}: Envoy {ready.version}{more}", new=ready.id)
        if new is None:  # else that was told at first
            self._warn(old, ready, kernel_migrates=None)

    def _await_ready(self, old: EnvoyState, command: ChildCommand | None) -> EnvoyState:
        """The new one, once nothing speaks against it. Failure."""
        deadline, last_reasons = time.monotonic() + self._spec.start_timeout, ""
        while True:
            new = self._new_admin.fetch_state()
            if new is not None and (wrong := compatibility.permanent_problems(old, new)):
                raise CliError("; ".join(wrong))
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
        """End the new one, which is of no use. What has become of it, as a clause."""
        sessions = self._drain_new()
        if sessions:
            log = command.detach()
            kept = f", its output is in {log}" if log else ""
            return (
                f"and the new Envoy accepts no more, but has {sessions} sessions, so it is left running{kept}"
                ": end it when they are gone"
            )
        try:
            was_ours = command.is_running or command.exit_failure() is not None
            command.terminate()
            if self._spec.undo_command:
                run_command(self._spec.undo_command, _END_TIMEOUT_SECONDS)
            elif self._new_admin.fetch_state() is not None:
                self._new_admin.quit()
            elif not was_ours:
                return "and whether the new Envoy is still to come is not known: see to it, or give --undo"
        except CliError as failure:
            return f"and the new Envoy could not be ended ({failure}): end it yourself"
        finally:
            command.detach()
        if self._wait_until_gone(
            self._new_admin, _END_TIMEOUT_SECONDS if self._spec.undo_command else 2 * _POLL_SECONDS
        ):
            return "and the new Envoy is ended again"
        return f"but an Envoy still answers at {self._new_admin.address}: end it yourself, or give --undo"

    def _drain_new(self) -> int:
        """Keep further sessions off the new one, and wait a moment; how many it has."""
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
            return 0  # it is in no state to serve anybody
        return new.sessions if new is not None else 0

    # --- from here on there is no way back ---

    def _close_old(self, old: EnvoyState) -> None:
        try:
            self._old_admin.drain_listeners()
        except CliError as failure:
            raise CliError(f"{failure}; both Envoys run: run it again") from None
        deadline = time.monotonic() + _DRAIN_TIMEOUT_SECONDS
        while (now := self._old_admin.fetch_state()) is not None and not now.has_stopped_accepting:
            if time.monotonic() > deadline:
                raise CliError(f"{old.id} was told to accept no new sessions, and does not say that it obeys")
            time.sleep(_POLL_SECONDS)
        left = now.sessions if now is not None else 0
        self._emit("close", f"{old.id} accepts no new sessions", sessions=left)

    def _wait_until_empty(self, old: EnvoyState) -> bool:
        """Wait until it has no session; False: and it has ended by itself. Failure."""
        start = time.monotonic()
        deadline, previous, is_new_down = start + self._spec.deadline, old, False
        try:
            while (now := self._poll(self._old_admin)) is not None:
                if not now.has_stopped_accepting or not compatibility.is_same_process(previous, now):
                    raise CliError(
                        f"the Envoy at {self._old_admin.address} was started again meanwhile, and accepts sessions:"
                        " see who restarts it, then run this again"
                    )
                previous = now
                left = compatibility.seconds_left(deadline, time.monotonic())
                self._emit(
                    "watch", f"sessions left at {now.id}: {now.sessions}", sessions=now.sessions, seconds=left
                )
                if now.sessions == 0:
                    return True
                is_new_down = self._report_new_serving(is_new_down)
                if time.monotonic() >= deadline:
                    self._handle_deadline(now)
                    return True
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            raise CliError(
                f"stopped waiting; {previous.id} accepts no new sessions and keeps those that it has"
                f" ({previous.sessions}): run it again to go on"
            ) from None
        if previous.sessions:
            raise CliError(
                f"{old.id} has ended by itself, with {previous.sessions} sessions when it was last looked at"
            )
        return False

    def _poll(self, admin: EnvoyAdmin) -> EnvoyState | None:
        """The Envoy there, which may be busy for a while. None: it is surely gone. Failure: it stays mute."""
        deadline, failed_polls = time.monotonic() + _UNRESPONSIVE_TIMEOUT_SECONDS, 0
        while True:
            try:
                if (found := admin.fetch_state()) is not None or failed_polls == _MAX_FAILED_POLLS:
                    return found
                failed_polls += 1
            except CliError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def _handle_deadline(self, state: EnvoyState) -> None:
        """Returns when its sessions are to be cut. Failure: they stay."""
        still = f"the deadline came and {state.id} still has sessions ({state.sessions})"
        if self._spec.on_deadline == "keep":
            raise CliError(
                f"{still}; they go on, and no new ones come: run it again to wait on, or with"
                " --on-deadline cut"
            )
        if not self._is_new_serving():
            raise CliError(
                f"{still}; they are not cut, because the new Envoy at {self._new_admin.address} does not serve"
            )
        self._emit("end", f"{still}, which are cut now", sessions=state.sessions)

    def _is_new_serving(self) -> bool:
        """Whether the new one surely accepts sessions."""
        try:
            return _is_accepting(self._poll(self._new_admin))
        except CliError:
            return False

    def _report_new_serving(self, was_down: bool) -> bool:
        """Whether the new one does not serve; told when that changes."""
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
            self._emit("end", f"ending {envoy}")
            if self._spec.stop_command:
                run_command(self._spec.stop_command, _END_TIMEOUT_SECONDS)
            else:
                self._old_admin.quit()
            if not self._wait_until_gone(self._old_admin, _END_TIMEOUT_SECONDS):
                raise CliError(
                    f"an Envoy still answers at {self._old_admin.address} after {_END_TIMEOUT_SECONDS:g} s: see who restarts it,"
                    " and name the command that stops it with --stop"
                )
        self._forget_old(envoy)
        self._emit("done", "the old Envoy has ended")

    def _forget_old(self, envoy: str) -> None:
        """Let nothing wait for what it may still have. That fails without harm: it is forgotten in time."""
        until = time.monotonic() + _FORGET_TIMEOUT_SECONDS
        while True:
            try:
                self._control_plane.forget(envoy)
            except CliError as failure:
                if time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
                    continue
                self._emit("forget", f"the control plane was not told that {envoy} is no more: {failure}")
            return

    def _wait_until_gone(self, admin: EnvoyAdmin, seconds: float) -> bool:
        """Whether nobody answers there any more, and stays away for a moment."""
        until, failed_polls = time.monotonic() + seconds, 0
        while failed_polls < 3:
            try:
                failed_polls = failed_polls + 1 if admin.fetch_state() is None else 0
            except CliError:
                failed_polls = 0  # it is busy, maybe with ending
            if time.monotonic() > until:
                return failed_polls > 0
            time.sleep(_POLL_SECONDS)
        return True

    def _warn(self, old: EnvoyState, new: EnvoyState | None, *, kernel_migrates: bool | None) -> None:
        for caution in compatibility.warnings(old, new, kernel_migrates=kernel_migrates):
            self._emit("check", f"caution: {caution}", caution=caution)

    def _emit(self, step: str, message: str, **data: object) -> None:
        self._report(ProgressMessage(step, message, data))


def _is_accepting(state: EnvoyState | None) -> bool:
    return state is not None and state.is_live and not state.has_stopped_accepting


def _kernel_migrates() -> bool | None:
    try:
        return _TCP_MIGRATE_REQ.read_text().strip() != "0"
    except OSError:
        return None  # a kernel before 5.14, or none of Linux's
