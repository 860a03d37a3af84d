"""The live sessions of all Envoys, also of those that call other replicas. Each call asks all of them."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from controlplane.decide.kill_target import KillDecision, decide_kill, describe_ambiguity, sessions_with_id
from controlplane.decide.views import envoys_without_module
from controlplane.engine.cluster_view import ClusterView
from controlplane.errors import AmbiguousSession, SessionsUnavailable, UnknownEnvoy, UnknownSession
from controlplane.model.sessions import Session, SessionListing, SessionQuery, SessionResult
from controlplane.replicas.replica_set import ReplicaSet
from controlplane.sessions.command_queue import CommandQueue
from controlplane.sessions.messages import end_command, find_command, list_command
from controlplane.texts import some_of

ASK_SECONDS = 2.0
_MAX_NAMED = 5
_STATE_ORDER = {"busy": 0, "transaction": 1}


@dataclass(slots=True)
class _Answers:
    """The results of one command, by Envoy and process, and the replicas that could not be asked."""

    results: dict[tuple[str, str], SessionResult] = field(default_factory=dict)
    failed_replicas: dict[str, str] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, result: SessionResult) -> None:
        self.results.setdefault((result.envoy, result.instance), result)
        self.changed.set()

    def missing(self, expected: dict[str, int]) -> list[str]:
        """Return the Envoys of which fewer processes have answered than expected."""
        answered = Counter(envoy for envoy, _ in self.results)
        return sorted(envoy for envoy, count in expected.items() if answered[envoy] < count)

    @property
    def sessions(self) -> list[Session]:
        return [session for result in self.results.values() for session in result.sessions]


class SessionDirectory:
    """Lists, finds and ends sessions.

    After a start, an Envoy that has not reconnected is unknown here. Even the saved plan may not name it: it
    may have connected just before the control plane ended. So until `drain.reconnect_grace` is over, an
    answer counts as incomplete.
    """

    def __init__(self, queue: CommandQueue, cluster: ClusterView, replicas: ReplicaSet | None) -> None:
        self._queue = queue
        self._cluster = cluster
        self._replicas = replicas
        self._open_since = math.inf

    def mark_open(self) -> None:
        """Record that Envoys can connect from now on."""
        self._open_since = self._cluster.now()

    async def list(self, query: SessionQuery) -> SessionListing:
        """Ask the Envoys for their sessions. Raises UnknownEnvoy."""
        expected = self._expected(query.envoy)
        answers = await self._ask(list_command(_new_id(), query), expected)
        results = [result for result in answers.results.values() if query.envoy in (None, result.envoy)]
        sessions = merge_sessions((session for result in results for session in result.sessions), query.limit)
        problems = [*self._problems(answers, expected), *self._envoys_without_module(query.envoy)]
        return SessionListing(
            sessions, total=sum(result.total for result in results), incomplete=tuple(problems)
        )

    async def resolve_kill(self, id_: int) -> KillDecision:
        """Find the session that a KILL of this id means.

        The session that is found does not start to move for 3 s.
        """
        expected = self._expected(None)
        answers = await self._ask(find_command(_new_id(), id_), expected)
        return decide_kill(id_, answers.sessions, list(self._problems(answers, expected)))

    async def end(self, id_: int, envoy: str | None) -> Session:
        """End the session with this id, of any Envoy or of this one, and return it.

        Raises UnknownEnvoy, UnknownSession, AmbiguousSession, or SessionsUnavailable.
        """
        expected = self._expected(envoy)
        answers = await self._ask(find_command(_new_id(), id_), expected)
        found = sessions_with_id(id_, answers.sessions)
        if envoy is not None:
            found = [session for session in found if session.envoy == envoy]
        if problems := list(self._problems(answers, expected)):
            raise SessionsUnavailable(f"no session was ended, because {'; '.join(problems)}")
        if not found:
            raise UnknownSession(id_)
        if len(found) > 1:
            raise AmbiguousSession(describe_ambiguity(id_, found))
        (session,) = found
        ended = await self._ask(end_command(_new_id(), session), {session.envoy: 1})
        if ended.missing({session.envoy: 1}) or any(
            result.is_incomplete for result in ended.results.values()
        ):
            raise SessionsUnavailable(
                f"the Envoy {session.envoy} has not confirmed that it has ended the session {id_}"
            )
        if not ended.sessions:
            raise UnknownSession(id_)
        return session

    def _expected(self, envoy: str | None) -> dict[str, int]:
        """Return the Envoys that may have sessions, and how many processes of each."""
        statuses = self._cluster.envoys_with_sessions()
        if envoy is not None:
            if all(status.id != envoy for status in statuses):
                raise UnknownEnvoy(envoy)
            statuses = [status for status in statuses if status.id == envoy]
        return {status.id: max(1, status.streams) for status in statuses if status.filter == "module"}

    async def _ask(self, command: Any, expected: dict[str, int]) -> _Answers:
        """Run a command until all expected Envoys have answered, at most ASK_SECONDS."""
        answers = _Answers()
        replicas = self._replicas.commands if self._replicas is not None else None

        async def ask_replica(name: str) -> None:
            assert replicas is not None
            if problem := await replicas.run(name, command, ASK_SECONDS, answers.add):
                answers.failed_replicas[name] = problem

        with self._queue.run(command, lambda result, _: answers.add(result)):
            names = replicas.names() if replicas is not None else ()
            tasks = [asyncio.create_task(ask_replica(name)) for name in names]
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    while answers.missing(expected):
                        answers.changed.clear()
                        await answers.changed.wait()
            except TimeoutError:
                pass
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    def _problems(self, answers: _Answers, expected: dict[str, int]) -> Iterator[str]:
        """Yield why the answers may be incomplete, as clauses."""
        if self._cluster.now() < self._open_since + self._cluster.reconnect_grace:
            yield "the control plane has just started, and some Envoys may not have reconnected to it yet"
        if self._replicas is not None:
            for name, reason in sorted(self._replicas.peer_sync.unreachable().items()):
                yield f"the control plane {name} {reason}"
        missing = answers.missing(expected)
        if missing:
            # A replica that could not be asked matters only if an answer is missing.
            for name, reason in sorted(answers.failed_replicas.items()):
                yield f"the control plane {name} {reason}"
            yield (
                f"these Envoys have not answered: {some_of(missing, _MAX_NAMED)} (`tidevoy envoys` shows"
                " them; `tidevoy envoys forget` if one has ended)"
            )
        for result in answers.results.values():
            if result.is_incomplete and result.envoy in expected:
                yield f"not all threads of the Envoy {result.envoy} have answered in time"

    def _envoys_without_module(self, envoy: str | None) -> Iterator[str]:
        statuses = (view.status for view in self._cluster.envoys(traffic=False))
        names = [name for name in envoys_without_module(statuses) if envoy in (None, name)]
        if names:
            named = some_of(names, _MAX_NAMED)
            yield f"without Tidevoy's module, these Envoys do not know their sessions: {named}"


def merge_sessions(sessions: Iterable[Session], limit: int) -> list[Session]:
    """Return the sessions in the order of the modules: those that have been busy longest come first."""
    unique = {session.key: session for session in sessions}

    def order(session: Session) -> tuple[int, float, str, int]:
        rank = _STATE_ORDER.get(session.state, len(_STATE_ORDER))
        is_used = rank < len(_STATE_ORDER)
        return (rank, -session.seconds_in_state if is_used else session.seconds_in_state, *session.key)

    return sorted(unique.values(), key=order)[:limit]


def _new_id() -> int:
    """Return the id of a new command, unique among all control planes."""
    return random.getrandbits(64)
