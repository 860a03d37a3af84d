"""Who leads, and what follows from that for this control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import structlog
from prometheus_client import Counter

from controlplane.errors import LeaseLost, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.replicas.lease import Lease
from controlplane.replicas.role import Outlook, Stance, stance
from controlplane.storage.etcd_keys import Keys, Reign, reign, reign_value
from controlplane.storage.etcd_mirror import Mirror
from controlplane.storage.etcd_store import SharedStore
from controlplane.storage.store import SavedPlan, Stored

log = structlog.get_logger("tidevoy.replicas")

_LOOK = 0.25  # seconds between two looks at the time: a lease runs out without a word
_CAMPAIGN_AGAIN = 0.5
_WRITE = 2.0


class Helm(Protocol):
    """What decides and publishes here."""

    def lead(self, term: int, saved: SavedPlan | None) -> None: ...

    def stand_by(self) -> None: ...

    def follow(self, saved: SavedPlan, term: int) -> None: ...

    def decide_alone(self) -> None: ...


class Succession:
    """Stands for leader whenever there is none; the `Leadership` of this control plane."""

    def __init__(
        self,
        name: str,
        client: EtcdClient,
        keys: Keys,
        mirror: Mirror,
        lease: Lease,
        store: SharedStore,
        helm: Helm,
        *,
        clock: Callable[[], float],
        awake: Callable[[], float],
        seconds: int,
        on_stored: Callable[[Stored], None],
        tell: Callable[..., None],
        changes: Counter,
    ) -> None:
        """`clock` gives Unix seconds, `awake` those by which leases run; `seconds` is how long these are.

        `on_stored` gets what is kept whenever something of it may have changed.
        """
        self._name = name
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._lease = lease
        self._store = store
        self._helm = helm
        self._clock, self._awake = clock, awake
        self._seconds = seconds
        self._on_stored = on_stored
        self._tell = tell
        self._changes = changes
        self._wake = asyncio.Event()
        self._vacant = asyncio.Event()  # whether there is a leader is to be looked at
        self._stance = Stance.FOLLOWS
        self._term: int | None = None
        self._led: int | None = None  # the last term in which we led
        self._last_led = awake()
        self._stored: Stored | None = None
        self._told: frozenset[str] = frozenset()  # damages that have been told
        self.reign: Reign | None = None

    @property
    def stance(self) -> Stance:
        """What we are to the others."""
        return self._stance

    @property
    def term(self) -> int | None:
        """The number of the term in which we lead, while the lease of that term surely holds."""
        ours = self.reign is not None and self._is_ours(self.reign)
        return self._term if ours and self._lease.holds else None

    @property
    def fenced_term(self) -> int | None:
        """The term of what we decide. Whether we still lead in it PD judges, when something is written."""
        return self._term

    def look(self) -> None:
        """Something has changed in the mirror, or with the lease."""
        self._wake.set()
        self._vacant.set()

    async def run(self) -> None:
        """Stand for leader, lead and follow, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._campaign())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK):
                        await self._wake.wait()
                self._wake.clear()
                await self._step()

    def leave(self) -> None:
        """Nothing is led any more."""
        self._term = None

    async def _step(self) -> None:
        # All that earlier leaders have written came before the key by which we are the leader: what is handed
        # on here is whole before anybody hears of our term.
        entries = self._mirror.entries
        stands = self._mirror.stands
        stored = await self._store.look(entries)
        if stored is not self._stored:
            self._stored = stored
            self._tell_damages(stored)
            self._on_stored(stored)
        self._see(reign(entries.get(self._keys.leader)))
        outlook = self._outlook(stands)
        before, self._stance = self._stance, stance(outlook, self._awake(), self._seconds)
        if self._stance is Stance.LEADS:
            assert self.reign is not None
            if self._term != self.reign.term:
                self._helm.lead(self.reign.term, stored.plan)
                self._term = self._led = self.reign.term
            return
        self._term = None
        if self._stance is Stance.ALONE:
            if before is not Stance.ALONE:
                self._tell_alone()
                self._helm.decide_alone()
            return
        if before is not Stance.FOLLOWS:
            self._helm.stand_by()
        if stored.plan is not None and self.reign is not None and self._store.is_readable:
            self._helm.follow(stored.plan, self.reign.term)

    def _tell_alone(self) -> None:
        why = "nobody is known to lead" if self._store.is_readable else "it cannot read what replicas share"
        self._tell("replica.alone", self._name, f"{why}, so this control plane decides for its own Envoys")

    def _outlook(self, stands: bool) -> Outlook:
        ours = self.reign is not None and self._is_ours(self.reign)
        # A term of ours in which we do not lead any more is over, though the mirror may still lag behind:
        # who followed it would take back what was decided since.
        another = self.reign is not None and not ours and stands and self.reign.term != self._led
        if another:
            self._last_led = self._awake()
        elif ours:
            self._last_led = float("-inf")
        return Outlook(ours, self._lease.holds, another, self._last_led, self._store.is_readable)

    def _is_ours(self, reign: Reign) -> bool:
        return self._lease.id is not None and reign.lease == f"{self._lease.id:x}"

    def _see(self, now: Reign | None) -> None:
        before, self.reign = self.reign, now
        if now is not None and (before is None or before.term != now.term):
            self._changes.inc()
            who = "this control plane" if self._is_ours(now) else f"the control plane {now.name}"
            self._tell("replica.leads", now.name, f"{who} leads now, in term {now.term}", {"term": now.term})

    def _tell_damages(self, stored: Stored) -> None:
        for damage in stored.damages:
            if damage not in self._told:
                self._tell("state.damaged", self._keys.prefix, damage)
        self._told = frozenset(stored.damages)

    async def _campaign(self) -> None:
        """Become the leader when there is none. That it worked is learned from the mirror."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CAMPAIGN_AGAIN):
                    await self._vacant.wait()
            self._vacant.clear()
            if self._may_stand():
                await self._stand()

    def _may_stand(self) -> bool:
        return (
            self._lease.holds
            and self._mirror.stands
            and self._keys.leader not in self._mirror.entries
            and self._store.is_readable
        )

    async def _stand(self) -> None:
        lease = self._lease.id
        assert lease is not None
        try:
            await self._client.txn(
                {self._keys.leader: 0},
                puts={self._keys.leader: reign_value(self._name, lease, self._clock())},
                lease=lease,
                within=_WRITE,
            )
        except LeaseLost:
            self._lease.lose()
        except PdError as error:
            log.info("could not stand for leader", error=str(error))
