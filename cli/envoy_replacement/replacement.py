"""Replace one Envoy by another: start the new one, close the ports of the old one, wait, stop the old one.

Until the old Envoy closes its listeners, it serves as before, whatever fails. Envoy cannot reopen listeners,
so all checks come before that. Each step is repeatable. The progress is visible in the two Envoys
themselves, so an interrupted replacement continues where it stopped when the command runs again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from cli.client import ControlPlaneClient, NotFound
from cli.envoy_replacement import compatibility
from cli.envoy_replacement.child_command import ChildCommand, run_command
from cli.envoy_replacement.envoy_admin import EnvoyAdmin, EnvoyState
from cli.errors import CliError, UsageError
from cli.output import format_duration
from cli.progress_display import ProgressDisplay

_POLL_SECONDS = 0.25
_END_TIMEOUT_SECONDS = 30.0  # for an Envoy to stop, or for a command that stops one
_DRAIN_TIMEOUT_SECONDS = 10.0  # until all workers have closed their ports
_DRAIN_START_SECONDS = 2.0  # until the module of the old Envoy begins to end its sessions
_CLOSE_TIMEOUT_SECONDS = 5.0  # until the module has closed the last sessions
_FORGET_TIMEOUT_SECONDS = 10.0  # until the control plane notices that an Envoy is disconnected
_UNRESPONSIVE_TIMEOUT_SECONDS = 60.0  # how long an Envoy may be too busy to answer
_MAX_FAILED_POLLS = 2  # consecutive polls that may find no Envoy before it counts as gone
_ROLLBACK_WAIT_SECONDS = 5.0  # time for short sessions to leave a new Envoy that cannot take over
_TCP_MIGRATE_REQ = Path("/proc/sys/net/ipv4/tcp_migrate_req")


@dataclass(frozen=True, slots=True)
class EnvoyReplacement:
    """One replacement: `run` performs it, `dry_run` reports what it would do. Times are in seconds."""

    client: ControlPlaneClient
    display: ProgressDisplay
    old_admin: EnvoyAdmin
    new_admin: EnvoyAdmin
    start_command: tuple[str, ...] = ()  # starts the new Envoy; empty if the operator starts it
    undo_command: tuple[str, ...] = ()  # stops the new Envoy if it cannot take over
    stop_command: tuple[str, ...] = ()  # stops the old Envoy; empty to use its admin port
    start_timeout: float = 60.0
    deadline: float = 3600.0
    on_deadline: Literal["keep", "close"] = "keep"
    # Listeners of the old Envoy that the new one does not need.
    optional_listeners: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Raises UsageError if both admin ports are the same."""
        if self.old_admin.address == self.new_admin.address:
            raise UsageError("--old-admin and --new-admin name the same port")

    def dry_run(self) -> None:
        """Check both Envoys and report what would be done. Raises CliError if `run` would be rejected now."""
        old, new = self._fetch_states()
        if old is None:
            return
        self.client.get("/v1/envoys")  # `run` needs the control plane, and perhaps a token
        for step in self.describe_steps(old, new):
            self._emit("check", f"would {step}", is_result=True)
        if new is not None and (blockers := self._takeover_blockers(old, new)):
            raise CliError("the replacement would be rejected now: " + "; ".join(blockers))

    def describe_steps(self, old: EnvoyState, new: EnvoyState | None) -> Iterator[str]:
        """Yield what a replacement would do from here on, as sentences without a subject."""
        if new is None:
            yield f"start the new Envoy: {' '.join(self.start_command)}"
            limit = f"for at most {self.start_timeout:g} s"
            yield f"wait until it is ready and runs the published version, {limit}"
        if not old.has_stopped_accepting:
            listen_addresses = ", ".join(sorted(old.listeners.values()))
            yield f"make {old.id} stop accepting sessions at {listen_addresses or 'any port'}"
        yield f"wait until its sessions have ended ({old.sessions} now), for at most {self.deadline:g} s"
        if self.on_deadline == "close":
            yield "end the sessions that are left then as they become idle; close the rest after end.timeout"
        else:
            yield "keep the sessions that are left then, and fail"
        stop_command = " ".join(self.stop_command)
        yield f"stop {old.id}: {stop_command or f'POST /quitquitquit at {self.old_admin.address}'}"
        yield f"remove {old.id} from the control plane"

    def run(self) -> None:
        """Replace the old Envoy. Raises CliError, whose text says which Envoys still run."""
        old, new = self._fetch_states()
        if old is None:
            return
        if old.has_stopped_accepting:
            self._emit("close", f"{old.id} already accepts no new sessions", sessions=old.sessions)
        # If the old Envoy has closed its ports, it cannot reopen them, so a running new Envoy is not checked.
        if not old.has_stopped_accepting or (new is None and self.start_command):
            self._start_new(old, new)
        if not old.has_stopped_accepting:
            self._close_old(old)
        is_running = self._wait_until_empty(old)
        self._stop_old(old.id, is_running=is_running)

    # --- before any change to the old Envoy ---

    def _fetch_states(self) -> tuple[EnvoyState | None, EnvoyState | None]:
        """Return both states. Without an old Envoy, report that there is nothing to do. Raises CliError."""
        old, new = self.old_admin.fetch_state(), self.new_admin.fetch_state()
        if old is None:
            if new is None:
                raise CliError(
                    f"no Envoy answers at {self.old_admin.address} or {self.new_admin.address}: set"
                    " --old-admin to the admin port of the Envoy to replace"
                )
            message = f"nothing to do: no Envoy runs at {self.old_admin.address} any more, and {new.id} runs"
            self._emit("done", message, is_result=True, new=new.id)
            return None, new
        if new is not None and (problem := compatibility.permanent_problem(old, new)):
            raise CliError(problem)
        if new is None and not self.start_command and not old.has_stopped_accepting:
            raise CliError(
                f"no Envoy answers at {self.new_admin.address}: start the new Envoy first, or set --start"
            )
        message = f"replacing {old.id} at {self.old_admin.address}: Envoy {old.version}"
        self._emit("check", message, old=old.id, sessions=old.sessions, listeners=dict(old.listeners))
        self._warn(old, new, kernel_migrates=_kernel_migrates())
        return old, new

    def _start_new(self, old: EnvoyState, new: EnvoyState | None) -> None:
        """Start the new Envoy if needed, and wait until it is ready.

        Raises CliError; the old Envoy is then unchanged.
        """
        self.client.get("/v1/envoys")  # fail before the start: no check works without the control plane
        old_status = (
            f"{old.id} accepts no new sessions" if old.has_stopped_accepting else f"{old.id} keeps serving"
        )
        command = None
        try:
            if new is None:
                self._emit("start", f"starting the new Envoy: {' '.join(self.start_command)}")
                command = ChildCommand(self.start_command)
            ready = self._await_ready(old, command)
        except CliError as error:
            new_status = "and the new Envoy is left unchanged"
            if command is not None and not old.has_stopped_accepting:
                new_status = self._roll_back_new(command)
            elif command is not None:
                command.detach()
            raise type(error)(f"{error}; {old_status}, {new_status}") from None
        except KeyboardInterrupt:
            log_note = command.detach() if command is not None else ""
            raise CliError(
                f"interrupted; {old_status}, and the new Envoy is left unchanged{log_note}: run the command"
                " again to continue"
            ) from None
        log_note = command.detach() if command is not None else ""
        listen_addresses = ", ".join(sorted(ready.listeners.values()))
        message = f"{ready.id} is ready at {listen_addresses}: Envoy {ready.version}{log_note}"
        self._emit("ready", message, new=ready.id)
        if new is None:  # else `_fetch_states` has reported these warnings
            self._warn(old, ready, kernel_migrates=None)

    def _await_ready(self, old: EnvoyState, command: ChildCommand | None) -> EnvoyState:
        """Return the new Envoy's state once nothing blocks the takeover. Raises CliError, also on timeout."""
        deadline, last_reasons = time.monotonic() + self.start_timeout, ""
        while True:
            new = self.new_admin.fetch_state()
            if new is not None and (problem := compatibility.permanent_problem(old, new)):
                raise CliError(problem)
            blockers = self._takeover_blockers(old, new)
            if new is not None and not blockers:
                return new
            if command is not None and (failure := command.exit_failure()) is not None:
                raise failure
            reasons = "; ".join(blockers)
            if time.monotonic() > deadline:
                raise CliError(f"the new Envoy cannot take over after {self.start_timeout:g} s: {reasons}")
            if reasons != last_reasons:
                self._emit("start", f"waiting: {reasons}")
                last_reasons = reasons
            time.sleep(_POLL_SECONDS)

    def _takeover_blockers(self, old: EnvoyState, new: EnvoyState | None) -> tuple[str, ...]:
        registered = {envoy["id"]: envoy for envoy in self.client.get("/v1/envoys")["envoys"]}
        return compatibility.takeover_blockers(old, new, registered, self.optional_listeners)

    def _roll_back_new(self, command: ChildCommand) -> str:
        """Stop a new Envoy that cannot take over. Return the result as a clause."""
        sessions = self._drain_new()
        if sessions is None:
            return (
                f"and it is unknown whether the new Envoy at {self.new_admin.address} has sessions, so it is"
                f" left running{command.detach()}: stop it yourself"
            )
        if sessions:
            return (
                f"and the new Envoy accepts no more sessions, but has {sessions}, so it is left running"
                f"{command.detach()}: stop it when they have ended"
            )
        try:
            was_ours = command.is_running or command.exit_failure() is not None
            command.terminate()
            if self.undo_command:
                run_command(self.undo_command, _END_TIMEOUT_SECONDS)
            elif self.new_admin.fetch_state() is not None:
                self.new_admin.quit()
            elif not was_ours:
                return "and the new Envoy may still start: check it, or set --undo"
        except CliError as error:
            return f"and the new Envoy could not be stopped ({error}): stop it yourself"
        finally:
            command.detach()
        if self._is_gone_within(self.new_admin, _END_TIMEOUT_SECONDS):
            return "and the new Envoy is stopped again"
        return f"but an Envoy still answers at {self.new_admin.address}: stop it yourself, or set --undo"

    def _drain_new(self) -> int | None:
        """Make the new Envoy stop accepting, wait for short sessions, and return how many are left.

        Return 0 if the Envoy is gone, and None if its admin port fails until the deadline: such an Envoy may
        have sessions.
        """
        deadline, has_drained = time.monotonic() + _ROLLBACK_WAIT_SECONDS, False
        while True:
            sessions = None
            with suppress(CliError):
                if (new := self._poll(self.new_admin, deadline - time.monotonic())) is None:
                    return 0
                if not has_drained:
                    self.new_admin.drain_listeners()
                    has_drained = True
                    continue
                sessions = new.sessions
            if sessions == 0 or time.monotonic() >= deadline:
                return sessions
            time.sleep(_POLL_SECONDS)

    # --- from here on the replacement is irreversible ---

    def _close_old(self, old: EnvoyState) -> None:
        try:
            self.old_admin.drain_listeners()
        except CliError as error:
            raise CliError(f"{error}; both Envoys run: run the command again") from None
        deadline = time.monotonic() + _DRAIN_TIMEOUT_SECONDS
        while (state := self.old_admin.fetch_state()) is not None and not state.has_stopped_accepting:
            if time.monotonic() > deadline:
                problem = f"did not stop accepting sessions within {_DRAIN_TIMEOUT_SECONDS:g} s"
                raise CliError(f"{old.id} {problem}: run the command again")
            time.sleep(_POLL_SECONDS)
        sessions = state.sessions if state is not None else 0
        self._emit("close", f"{old.id} accepts no new sessions", sessions=sessions)

    def _wait_until_empty(self, old: EnvoyState) -> bool:
        """Wait for the old Envoy's sessions to end. Return False if it has stopped. Raises CliError."""
        deadline, previous, is_new_down = time.monotonic() + self.deadline, old, False
        try:
            while (state := self._poll(self.old_admin, _UNRESPONSIVE_TIMEOUT_SECONDS)) is not None:
                if not state.has_stopped_accepting or not compatibility.may_be_same_process(previous, state):
                    raise CliError(
                        f"the Envoy at {self.old_admin.address} was restarted meanwhile, and accepts"
                        " sessions: find out what restarts it, then run the command again"
                    )
                previous = state
                self._emit_sessions_left(state, max(0, math.ceil(deadline - time.monotonic())))
                if state.sessions == 0:
                    return True
                is_new_down = self._report_new_down(is_new_down)
                if time.monotonic() >= deadline:
                    self._handle_deadline(state)
                    return self._drain_sessions(old)
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

    def _poll(self, admin: EnvoyAdmin, seconds: float) -> EnvoyState | None:
        """Return the Envoy's state, or None once it is certainly gone; wait while it is too busy to answer.

        Raises CliError if it does not answer within `seconds`.
        """
        deadline, failed_polls = time.monotonic() + seconds, 0
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
        """Return if the remaining sessions may be closed. Raises CliError if they must stay."""
        problem = f"the deadline has passed and {state.id} still has sessions ({state.sessions})"
        if self.on_deadline == "keep":
            raise CliError(
                f"{problem}; they stay open, and no new ones start: run the command again to keep waiting,"
                " or with --on-deadline close"
            )
        if not self._is_new_serving():
            new = f"the new Envoy at {self.new_admin.address}"
            raise CliError(f"{problem}; they are not closed, because {new} does not serve")
        self._emit("end", f"{problem}, which end now", sessions=state.sessions)

    def _drain_sessions(self, old: EnvoyState) -> bool:
        """Let the old Envoy's module end its sessions. Without a module, return soon.

        Return False if the Envoy has stopped. Raises CliError.
        """
        try:
            self.old_admin.drain_sessions()
        except CliError:
            return True  # its bootstrap has no layer for changes of the runtime
        begin = closing_since = time.monotonic()
        has_begun = False
        try:
            while (state := self._poll(self.old_admin, _UNRESPONSIVE_TIMEOUT_SECONDS)) is not None:
                self._emit_sessions_left(state, 0)
                now = time.monotonic()
                has_begun |= state.drain_phase > 0
                if state.drain_phase < 3:
                    closing_since = now
                is_too_late = not has_begun and now > begin + _DRAIN_START_SECONDS
                if state.sessions == 0 or is_too_late or now > closing_since + _CLOSE_TIMEOUT_SECONDS:
                    return True
                if not self._is_new_serving():
                    self.old_admin.drain_sessions(is_on=False)
                    raise CliError(
                        f"the new Envoy at {self.new_admin.address} does not serve any more, so the"
                        f" {state.sessions} sessions that are left at {old.id} stay open"
                    )
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            raise CliError(
                f"stopped waiting; the sessions of {old.id} end as they become idle: run the command again to"
                " stop it"
            ) from None
        return False

    def _is_new_serving(self) -> bool:
        """Return whether the new Envoy certainly accepts sessions."""
        try:
            return _is_accepting(self._poll(self.new_admin, _UNRESPONSIVE_TIMEOUT_SECONDS))
        except CliError:
            return False

    def _report_new_down(self, was_down: bool) -> bool:
        """Return whether the new Envoy is down, that is, does not serve, and report a change."""
        try:
            is_down = not _is_accepting(self.new_admin.fetch_state())
        except CliError:
            return was_down  # the new Envoy is too busy to answer
        if is_down and not was_down:
            problem = f"the new Envoy at {self.new_admin.address} does not serve"
            self._emit("watch", f"no Envoy accepts new sessions: {problem}")
        elif was_down and not is_down:
            self._emit("watch", f"the new Envoy at {self.new_admin.address} serves")
        return is_down

    def _stop_old(self, envoy: str, *, is_running: bool) -> None:
        if is_running:
            self._emit("end", f"stopping {envoy}")
            if self.stop_command:
                run_command(self.stop_command, _END_TIMEOUT_SECONDS)
            else:
                self.old_admin.quit()
            if not self._is_gone_within(self.old_admin, _END_TIMEOUT_SECONDS):
                raise CliError(
                    f"an Envoy still answers at {self.old_admin.address} after {_END_TIMEOUT_SECONDS:g} s:"
                    " find out what restarts it, and set --stop to the command that stops it"
                )
        self._forget_old(envoy)
        self._emit("done", "the old Envoy has stopped", is_result=True)

    def _forget_old(self, envoy: str) -> None:
        """Remove the old Envoy from the control plane, so that no drain waits for its sessions.

        A failure is harmless: the control plane removes the Envoy later by itself.
        """
        deadline = time.monotonic() + _FORGET_TIMEOUT_SECONDS
        while True:
            try:
                self.client.delete(f"/v1/envoys/{quote(envoy, safe='')}")
            except NotFound:
                return
            except CliError as error:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                self._emit("forget", f"{envoy} could not be removed from the control plane: {error}")
            return

    def _is_gone_within(self, admin: EnvoyAdmin, seconds: float) -> bool:
        """Wait at most `seconds` until no Envoy answers any more, and return whether this happened."""
        deadline = time.monotonic() + seconds
        try:
            while self._poll(admin, deadline - time.monotonic()) is not None:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        except CliError:
            return False
        return True

    def _warn(self, old: EnvoyState, new: EnvoyState | None, *, kernel_migrates: bool | None) -> None:
        for warning in compatibility.warnings(old, new, kernel_migrates=kernel_migrates):
            self._emit("check", f"warning: {warning}", caution=warning)

    def _emit(self, step: str, message: str, *, is_result: bool = False, **data: Any) -> None:
        self._print_json(step, message, data)
        show = self.display.show_result if is_result else self.display.show_event
        show(message)

    def _emit_sessions_left(self, state: EnvoyState, seconds: int) -> None:
        message = f"sessions left at {state.id}: {state.sessions}"
        self._print_json("watch", message, {"sessions": state.sessions, "seconds": seconds})
        text = f"{message}, {format_duration(seconds)} until the deadline"
        self.display.show_state(text, change=message)

    def _print_json(self, step: str, message: str, data: dict[str, Any]) -> None:
        line = {"step": step, "message": message, **data}
        # A line that differs only in the remaining time is not printed.
        self.display.print_json(line, change=line | {"seconds": None})


def _is_accepting(state: EnvoyState | None) -> bool:
    return state is not None and state.is_live and not state.has_stopped_accepting


def _kernel_migrates() -> bool | None:
    try:
        return _TCP_MIGRATE_REQ.read_text().strip() != "0"
    except OSError:
        return None  # a Linux kernel before 5.14, or another system
