"""Finds the proxy that carries MySQL in an HAProxy configuration. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cli.importers.haproxy.parser import HaproxyFile, Proxy, Section, Statement, resolve
from controlplane.errors import ConfigError

_NAMES = ("tidb", "mysql", "mariadb", "sql")
_PORTS = ("3306", "3390", "4000", "6000")


@dataclass(frozen=True, slots=True)
class SelectedProxy:
    """The two sides of a proxy; for a `listen` section, both are the same."""

    front: Proxy
    back: Proxy

    @property
    def name(self) -> str:
        return self.front.section.name

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections of the proxy itself, without their defaults."""
        return tuple(dict.fromkeys((self.front.section, self.back.section)))

    def statements(self) -> list[Statement]:
        """Return all statements that apply, each once, by line."""
        statements = {each.line: each for side in (self.front, self.back) for each in side.statements}
        return [statements[line] for line in sorted(statements)]


def select_proxy(file: HaproxyFile, name: str | None) -> SelectedProxy:
    """Return the proxy with this name, or the only one that looks like MySQL. Raises ConfigError."""
    candidates = list(_candidates(file))
    if name is not None:
        chosen = [each for each in candidates if name in (each.front.section.name, each.back.section.name)]
        if not chosen:
            raise ConfigError(
                file.name, "", f"there is no proxy {name} in TCP mode with servers", _list(candidates)
            )
        return chosen[0]
    if not candidates:
        remedy = "check that the file is complete: a `listen`, or a `frontend` with `default_backend`"
        raise ConfigError(file.name, "", "there is no proxy in TCP mode with servers", remedy)
    likely = [each for each in candidates if _looks_like_mysql(each)] or candidates
    if len(likely) > 1:
        raise ConfigError(file.name, "", "several proxies may be the one for MySQL", _list(likely))
    return likely[0]


def _list(candidates: Iterable[SelectedProxy]) -> str:
    names = ", ".join(dict.fromkeys(each.name for each in candidates))
    return f"choose one with --proxy: {names}" if names else "check the file"


def _candidates(file: HaproxyFile) -> Iterator[SelectedProxy]:
    for section in file.sections:
        if section.kind not in ("listen", "frontend"):
            continue
        front = resolve(file, section)
        back = front
        if section.kind == "frontend":
            backend = _find_backend(file, front)
            if backend is None:
                continue
            back = resolve(file, backend)
        if _is_usable(front) and _is_usable(back) and any(back.all("server")):
            yield SelectedProxy(front, back)


def _is_usable(proxy: Proxy) -> bool:
    mode = proxy.last("mode")
    is_tcp = mode is None or mode.arguments[:1] == ("tcp",)
    return is_tcp and not any(each.words == ("disabled",) for each in proxy.section.statements)


def _find_backend(file: HaproxyFile, front: Proxy) -> Section | None:
    """Return the backend of `default_backend`, or else of the first `use_backend`."""
    for statement in (front.last("default_backend"), front.last("use_backend")):
        if statement is not None and statement.arguments:
            for section in file.sections:
                if section.kind in ("backend", "listen") and section.name == statement.arguments[0]:
                    return section
    return None


def _looks_like_mysql(proxy: SelectedProxy) -> bool:
    names = f"{proxy.front.section.name} {proxy.back.section.name}".lower()
    if proxy.back.last("option", "mysql-check") or any(name in names for name in _NAMES):
        return True
    addresses = [each.arguments[0] for each in proxy.front.all("bind") if each.arguments]
    addresses += [each.arguments[1] for each in proxy.back.all("server") if len(each.arguments) > 1]
    return any(address.rpartition(":")[2] in _PORTS for address in addresses)
