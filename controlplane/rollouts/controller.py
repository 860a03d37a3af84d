"""The loop that moves rollouts on while this control plane leads: look, decide, write down, do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.errors import NotLeading, TidevoyError, UnknownRollout
from controlplane.intents import changes as wishes
from controlplane.model.intents import Intents
from controlplane.model.rollout import Rollout, Stage
from controlplane.rollouts import state_machine
from controlplane.rollouts.actions import login_probe
from controlplane.rollouts.actions.action_runner import Errands, Key
from controlplane.rollouts.actions.actions import Errand
from controlplane.rollouts.observation import Footing, Outlook, Sight, beside, look
from controlplane.rollouts.repository import Records
from controlplane.rollouts.state_machine import Act, Drain, Effect, LogIn, Undrain

log = structlog.get_logger("tidevoy.rollouts")

# Seconds between two looks at least, and at most: time itself moves rollouts on. With thousands of nodes a
# look takes its time, and is followed by a rest that is so many times as long.
_REST, _TICK, _REST_FACTOR = 0.1, 1.0, 5.0
# Seconds for which a drain of a rollout that is over, or not known, is borne before it is taken back.
_STRAY = 10.0

Change = Callable[[Callable[[Intents], Intents]], Awaitable[int]]
Tell = Callable[[str, str, str], None]


class Runner:
    """Moves the rollouts on. All methods belong to the event loop that `run` runs in."""

    def __init__(
        self,
        records: Records,
        errands: Errands,
        *,
        clock: Clock,
        term: Callable[[], int | None],
        look: Callable[[], Outlook],
        change: Change,
        settings: Callable[[], Settings],
        tell: Tell,
        wake: asyncio.Event,
    ) -> None:
        self._records = records
        self._errands = errands
        self._clock = clock
        self._term = term
        self._look = look
        self._change = change
        self._settings = settings
        self._tell = tell
        self._wake = wake
        self._since = 0.0  # when we began to look in this term
        self._looked_in: int | None = None  # the term of the last look
        self._footings: dict[str, Mapping[str, Footing]] = {}  # by rollout
        self._stuck: set[str] = set()  # rollouts of which it was told that they cannot be recorded
        self._strays: dict[str, float] = {}  # drains that nobody stands for -> since when

    async def run(self) -> None:
        """Move rollouts on until cancelled; then actions that are under way are ended."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                start = loop.time()
                await self._pass()
                await asyncio.sleep(min(_TICK, max(_REST, _REST_FACTOR * (loop.time() - start))))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self._errands.stop()

    async def _pass(self) -> None:
        term = self._term()
        if term is None:
            self._looked_in = None
            return
        if term != self._looked_in:
            self._looked_in, self._since = term, self._clock()
            self._footings.clear()
            self._strays.clear()
            self._errands.logins.clear()
        live = self._records.live()
        for rollout in live:
            try:
                await self._advance(rollout.id, term)
            except (NotLeading, UnknownRollout):
                continue
            except TidevoyError as error:
                self._cannot(rollout.id, str(error))
            else:
                self._stuck.discard(rollout.id)
        self._footings = {r.id: self._footings[r.id] for r in live if r.id in self._footings}
        await self._give_back_strays(term)
        await self._records.forget_old()

    async def _advance(self, name: str, term: int) -> None:
        outlook = self._look()
        effects: tuple[Effect, ...] = ()
        ended: list[Key] = []  # actions whose outcome was considered

        def decided(rollout: Rollout) -> Rollout:
            nonlocal outlook, effects, ended
            now, outlook = self._clock(), self._look()  # of now: who was there before may have taken long
            ended = [key for key in self._errands.outcomes if key[0] == name]
            rollout = self._noted(rollout, now)
            following, effects = state_machine.advance(rollout, self._sight(rollout, outlook, now), now)
            return following

        rollout = await self._records.change(name, decided, term)
        for key in ended:
            del self._errands.outcomes[key]
        # Nothing is awaited between the record that says "started" and the start.
        for effect in effects:
            if isinstance(effect, Act) and self._term() == term:
                self._act(rollout, effect, term)
            elif isinstance(effect, LogIn):
                self._log_in(effect.address, outlook)
        await self._drain(rollout, effects, term)

    def _noted(self, rollout: Rollout, now: float) -> Rollout:
        """With what is known here of its actions: those that have ended, and those that nobody runs."""
        for address, step in rollout.steps.items():
            key = (rollout.id, address, step.attempts)
            if step.stage is not Stage.STARTED:
                continue
            if key in self._errands.outcomes:
                rollout = state_machine.act_ended(
                    rollout, address, step.attempts, self._errands.outcomes[key], now
                )
            elif not self._errands.at(key):
                rollout = state_machine.cut_off(rollout, address, now)
        return rollout

    def _sight(self, rollout: Rollout, outlook: Outlook, now: float) -> Sight:
        sight, footings = look(outlook, rollout, self._footings.get(rollout.id, {}), now)
        self._footings[rollout.id] = footings
        logins = self._errands.logins
        nodes = {a: replace(n, login=logins[a]) if a in logins else n for a, n in sight.nodes.items()}
        asks = self._settings().rollouts.probe.user is not None
        sight = replace(sight, nodes=nodes, since=self._since, asks_login=asks)
        return beside(sight, rollout, self._records.live())

    def _act(self, rollout: Rollout, act: Act, term: int) -> None:
        order = rollout.order
        errand = Errand(rollout.id, order.action, act.address, act.attempt, order.version)
        self._errands.begin(errand, self._settings().rollouts.actions.get(order.action), term)

    def _log_in(self, address: str, outlook: Outlook) -> None:
        endpoint, settings = outlook.plan.nodes[address].endpoint, self._settings()
        if endpoint is not None:
            host, _ = addresses.split(address)
            attempt = partial(
                login_probe.log_in,
                endpoint,
                host,
                settings.rollouts.probe,
                proxy_protocol=settings.backend.proxy_protocol != "off",
            )
            self._errands.log_in(address, attempt)

    async def _drain(self, rollout: Rollout, effects: Iterable[Effect], term: int) -> None:
        """Drain and undrain; done again with the next look if it fails."""
        drained = [effect.address for effect in effects if isinstance(effect, Drain)]
        undrained = [effect.address for effect in effects if isinstance(effect, Undrain)]
        if not drained and not undrained:
            return

        def changed(intents: Intents) -> Intents:
            self._demand(term)
            order, now = rollout.order, self._clock()
            for address in drained:
                intents = wishes.drain(
                    intents, address, now, order.drain_deadline, order.on_deadline, by=rollout.id
                )
            for address in undrained:
                intents = wishes.undrain(intents, address, by=rollout.id)
            return intents

        await self._change(changed)
        self._wake.set()  # what was asked for is seen with the next look

    async def _give_back_strays(self, term: int) -> None:
        """Drains of rollouts that are over or forgotten: a leader that stood still may have left them."""
        live = {rollout.id for rollout in self._records.live()}
        drains = self._look().intents.drains
        strays = {address: drain.by for address, drain in drains.items() if drain.by and drain.by not in live}
        now = self._clock()
        self._strays = {address: self._strays.get(address, now) for address in strays}
        due = [address for address, since in self._strays.items() if now - since >= _STRAY]
        if not due:
            return

        def changed(intents: Intents) -> Intents:
            self._demand(term)
            for address in due:
                intents = wishes.undrain(intents, address, by=strays[address])
            return intents

        with suppress(TidevoyError):  # tried again with the next look
            await self._change(changed)

    def _demand(self, term: int) -> None:
        """NotLeading, when our term is over: then a successor decides."""
        if self._term() != term:
            raise NotLeading("running a rollout")

    def _cannot(self, name: str, problem: str) -> None:
        """Tell once that a rollout stands still because it cannot be written down."""
        if name not in self._stuck:
            self._stuck.add(name)
            message = f"the rollout {name} waits, for its next step cannot be recorded: {problem}"
            self._tell("rollout.not_recorded", name, message)
