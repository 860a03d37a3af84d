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
from cli.envoy_replacement.child_command import Command, run
from cli.envoy_replacement.envoy_admin import Admin
from cli.envoy_replacement.model import Member, Order, Proxy, Told
from cli.errors import Failure

_POLL = 0.25  # seconds
_ENDING = 30.0  # seconds that an Envoy, or a command that ends one, may take
_CLOSING = 10.0  # seconds until all workers have closed their ports
_FORGETTING = 10.0  # seconds within which the control plane notices that an Envoy is gone
_MUTE = 60.0  # seconds that an Envoy may be too busy to answer
_MISSES = 2  # times in a row that an admin port may turn a look away before its Envoy counts as gone
_LEAVING = 5.0  # seconds in which short sessions leave an Envoy that is of no use
_MIGRATES = Path("/proc/sys/net/ipv4/tcp_migrate_req")

Tell = Callable[[Told], None]


class ControlPlane(Protocol):
    """What a recycle needs of one. Each call may raise Failure."""

    def envoys(self) -> Mapping[str, Member]:
        """All Envoys that it knows, by id."""
        ...

    def forget(self, envoy: str) -> None:
        """It has ended for good."""
        ...


class Recycle:
    """One recycle; `run` it, or ask `rehearse` what it would do."""

    def __init__(self, order: Order, plane: ControlPlane, tell: Tell) -> None:
        """Failure (usage) when the order makes no sense."""
        self._order = order
        self._old, self._new = Admin(order.old), Admin(order.new)
        if self._old.address == self._new.address:
            raise Failure("--old-admin and --new-admin name the same port", 2)
        self._plane = plane
        self._tell = tell

    def rehearse(self) -> None:
        """Check what can be checked, and tell what would be done. Failure when it would be refused."""
        old, new = self._first_look()
        if old is None:
            return
        for step in compatibility.steps(self._order, old, new):
            self._say("check", f"would {step}")
        if new is not None and (
            why := compatibility.hindrances(old, new, self._plane.envoys(), self._order.without)
        ):
            raise Failure("it would be refused now: " + "; ".join(why))

    def run(self) -> None:
        """Do it. Failure, and then what is left as it is stands in it."""
        old, new = self._first_look()
        if old is None:
            return
        if old.is_closed:
            self._say("close", f"{old.id} accepts no new sessions already", sessions=old.sessions)
        # An old one that is closed cannot go back, so that there is a new one at all is enough then.
        if not old.is_closed or (new is None and self._order.start):
            self._take_over(old, new)
        if not old.is_closed:
            self._close(old)
        is_there = self._watch(old)
        self._end(old.id, is_there=is_there)

    # --- before the old one is touched ---

    def _first_look(self) -> tuple[Proxy | None, Proxy | None]:
        """Both as they are; no old one: there is nothing to do, and that is told. Failure."""
        old, new = self._old.look(), self._new.look()
        if old is None:
            if new is None:
                raise Failure(
                    f"no Envoy answers at {self._old.address}, nor at {self._new.address}: name the admin"
                    " port of the Envoy that is to be replaced with --old-admin"
                )
            self._say(
                "done",
                f"nothing to do: no Envoy is left at {self._old.address}, and {new.id} runs",
                new=new.id,
            )
            return None, new
        if new is not None and (wrong := compatibility.mistakes(old, new)):
            raise Failure("; ".join(wrong))
        if new is None and not self._order.start and not old.is_closed:
            raise Failure(
                f"no Envoy answers at {self._new.address}: start the new one first, or say how with --start"
            )
        seen = f"{old.id} at {self._old.address} is to be replaced: Envoy {old.version}"
        self._say("check", seen, old=old.id, sessions=old.sessions, listeners=dict(old.listeners))
        self._warn(old, new, migrates=_migrates())
        return old, new

    def _take_over(self, old: Proxy, new: Proxy | None) -> None:
        """Bring the new one up to serving. Failure: the old one is as it was."""
        self._plane.envoys()  # without it no Envoy can be checked, so none need be started
        stays = f"{old.id} accepts no new sessions" if old.is_closed else f"{old.id} serves on"
        command = None
        try:
            if new is None:
                self._say("start", f"starting the new Envoy: {' '.join(self._order.start)}")
                command = Command(self._order.start)
            ready = self._await_ready(old, command)
        except Failure as failure:
            undone = "and the new Envoy is left as it is"
            if command is not None and not old.is_closed:
                undone = self._undo(command)
            elif command is not None:
                command.leave()
            raise Failure(f"{failure}; {stays}, {undone}", failure.code) from None
        except KeyboardInterrupt:
            log = command.leave() if command is not None else None
            kept = f" (its output is in {log})" if log else ""
            raise Failure(
                f"stopped; {stays}, and the new Envoy is left as it is{kept}: run it again to go on"
            ) from None
        log = command.leave() if command is not None else None
        more = f"; its output is in {log}" if log else ""
        listens = ", ".join(sorted(ready.listeners.values()))
        self._say("ready", f"{ready.id} is ready at {listens}: Envoy {ready.version}{more}", new=ready.id)
        if new is None:  # else that was told at first
            self._warn(old, ready, migrates=None)

    def _await_ready(self, old: Proxy, command: Command | None) -> Proxy:
        """The new one, once nothing speaks against it. Failure."""
        until, told = time.monotonic() + self._order.start_timeout, ""
        while True:
            new = self._new.look()
            if new is not None and (wrong := compatibility.mistakes(old, new)):
                raise Failure("; ".join(wrong))
            why = compatibility.hindrances(old, new, self._plane.envoys(), self._order.without)
            if new is not None and not why:
                return new
            if command is not None and (failure := command.failure()) is not None:
                raise failure
            reasons = "; ".join(why)
            if time.monotonic() > until:
                raise Failure(
                    f"the new Envoy cannot take over after {self._order.start_timeout:g} s: {reasons}"
                )
            if reasons != told:
                self._say("start", f"waiting: {reasons}")
                told = reasons
            time.sleep(_POLL)

    def _undo(self, command: Command) -> str:
        """End the new one, which is of no use. What has become of it, as a clause."""
        sessions = self._emptied()
        if sessions:
            log = command.leave()
            kept = f", its output is in {log}" if log else ""
            return (
                f"and the new Envoy accepts no more, but has {sessions} sessions, so it is left running{kept}"
                ": end it when they are gone"
            )
        try:
            was_ours = command.runs or command.failure() is not None
            command.end()
            if self._order.undo:
                run(self._order.undo, _ENDING)
            elif self._new.look() is not None:
                self._new.end()
            elif not was_ours:
                return "and whether the new Envoy is still to come is not known: see to it, or give --undo"
        except Failure as failure:
            return f"and the new Envoy could not be ended ({failure}): end it yourself"
        finally:
            command.leave()
        if self._gone(self._new, _ENDING if self._order.undo else 2 * _POLL):
            return "and the new Envoy is ended again"
        return f"but an Envoy still answers at {self._new.address}: end it yourself, or give --undo"

    def _emptied(self) -> int:
        """Keep further sessions off the new one, and wait a moment; how many it has."""
        until = time.monotonic() + _LEAVING
        try:
            if (new := self._new.look()) is None:
                return 0
            self._new.close()
            while (new := self._new.look()) is not None and new.sessions and time.monotonic() < until:
                time.sleep(_POLL)
        except Failure:
            return 0  # it is in no state to serve anybody
        return new.sessions if new is not None else 0

    # --- from here on there is no way back ---

    def _close(self, old: Proxy) -> None:
        try:
            self._old.close()
        except Failure as failure:
            raise Failure(f"{failure}; both Envoys run: run it again") from None
        until = time.monotonic() + _CLOSING
        while (now := self._old.look()) is not None and not now.is_closed:
            if time.monotonic() > until:
                raise Failure(f"{old.id} was told to accept no new sessions, and does not say that it obeys")
            time.sleep(_POLL)
        left = now.sessions if now is not None else 0
        self._say("close", f"{old.id} accepts no new sessions", sessions=left)

    def _watch(self, old: Proxy) -> bool:
        """Wait until it has no session; False: and it has ended by itself. Failure."""
        start = time.monotonic()
        deadline, before, is_missed = start + self._order.deadline, old, False
        try:
            while (now := self._glance(self._old)) is not None:
                if not now.is_closed or not compatibility.is_same_run(before, now):
                    raise Failure(
                        f"the Envoy at {self._old.address} was started again meanwhile, and accepts sessions:"
                        " see who restarts it, then run this again"
                    )
                before = now
                left = compatibility.left(deadline, time.monotonic())
                self._say(
                    "watch", f"sessions left at {now.id}: {now.sessions}", sessions=now.sessions, seconds=left
                )
                if now.sessions == 0:
                    return True
                is_missed = self._miss(is_missed)
                if time.monotonic() >= deadline:
                    self._at_deadline(now)
                    return True
                time.sleep(_POLL)
        except KeyboardInterrupt:
            raise Failure(
                f"stopped waiting; {before.id} accepts no new sessions and keeps those that it has"
                f" ({before.sessions}): run it again to go on"
            ) from None
        if before.sessions:
            raise Failure(
                f"{old.id} has ended by itself, with {before.sessions} sessions when it was last looked at"
            )
        return False

    def _glance(self, admin: Admin) -> Proxy | None:
        """The Envoy there, which may be busy for a while. None: it is surely gone. Failure: it stays mute."""
        until, misses = time.monotonic() + _MUTE, 0
        while True:
            try:
                if (found := admin.look()) is not None or misses == _MISSES:
                    return found
                misses += 1
            except Failure:
                if time.monotonic() > until:
                    raise
            time.sleep(_POLL)

    def _at_deadline(self, now: Proxy) -> None:
        """Returns when its sessions are to be cut. Failure: they stay."""
        still = f"the deadline came and {now.id} still has sessions ({now.sessions})"
        if self._order.on_deadline == "keep":
            raise Failure(
                f"{still}; they go on, and no new ones come: run it again to wait on, or with"
                " --on-deadline cut"
            )
        if not self._serves():
            raise Failure(
                f"{still}; they are not cut, because the new Envoy at {self._new.address} does not serve"
            )
        self._say("end", f"{still}, which are cut now", sessions=now.sessions)

    def _serves(self) -> bool:
        """Whether the new one surely accepts sessions."""
        try:
            return _accepts(self._glance(self._new))
        except Failure:
            return False

    def _miss(self, was_missed: bool) -> bool:
        """Whether the new one does not serve; told when that changes."""
        try:
            is_missed = not _accepts(self._new.look())
        except Failure:
            return was_missed  # busy
        if is_missed and not was_missed:
            self._say(
                "watch", f"nobody accepts new sessions: the new Envoy at {self._new.address} does not serve"
            )
        elif was_missed and not is_missed:
            self._say("watch", f"the new Envoy at {self._new.address} serves")
        return is_missed

    def _end(self, envoy: str, *, is_there: bool) -> None:
        if is_there:
            self._say("end", f"ending {envoy}")
            if self._order.stop:
                run(self._order.stop, _ENDING)
            else:
                self._old.end()
            if not self._gone(self._old, _ENDING):
                raise Failure(
                    f"an Envoy still answers at {self._old.address} after {_ENDING:g} s: see who restarts it,"
                    " and name the command that stops it with --stop"
                )
        self._forget(envoy)
        self._say("done", "the old Envoy has ended")

    def _forget(self, envoy: str) -> None:
        """Let nothing wait for what it may still have. That fails without harm: it is forgotten in time."""
        until = time.monotonic() + _FORGETTING
        while True:
            try:
                self._plane.forget(envoy)
            except Failure as failure:
                if time.monotonic() < until:
                    time.sleep(_POLL)
                    continue
                self._say("forget", f"the control plane was not told that {envoy} is no more: {failure}")
            return

    def _gone(self, admin: Admin, seconds: float) -> bool:
        """Whether nobody answers there any more, and stays away for a moment."""
        until, away = time.monotonic() + seconds, 0
        while away < 3:
            try:
                away = away + 1 if admin.look() is None else 0
            except Failure:
                away = 0  # it is busy, maybe with ending
            if time.monotonic() > until:
                return away > 0
            time.sleep(_POLL)
        return True

    def _warn(self, old: Proxy, new: Proxy | None, *, migrates: bool | None) -> None:
        for caution in compatibility.cautions(old, new, migrates=migrates):
            self._say("check", f"caution: {caution}", caution=caution)

    def _say(self, step: str, message: str, **data: object) -> None:
        self._tell(Told(step, message, data))


def _accepts(proxy: Proxy | None) -> bool:
    return proxy is not None and proxy.is_live and not proxy.is_closed


def _migrates() -> bool | None:
    try:
        return _MIGRATES.read_text().strip() != "0"
    except OSError:
        return None  # a kernel before 5.14, or none of Linux's
