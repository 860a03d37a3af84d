"""The `server` and `default-server` lines of an HAProxy backend. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cli.importers.draft import SourceKey
from cli.importers.haproxy.bind import add_option_row
from cli.importers.haproxy.context import HaproxyContext
from cli.importers.haproxy.options import SERVER_RULES, Option, split_server_options
from cli.importers.haproxy.parser import Statement

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HaproxyServer:
    """A server with all of its options by name, also those of the `default-server` lines before it."""

    statement: Statement
    name: str
    address: str
    options: dict[str, Option]

    def has(self, name: str) -> bool:
        return name in self.options


class Servers:
    """All servers of the proxy, and which of their options have been converted."""

    def __init__(self, context: HaproxyContext) -> None:
        self._context = context
        self.all: list[HaproxyServer] = []
        self._lines: dict[str, int] = {}  # line of the first occurrence of each option
        self._converted: set[str] = set()
        self._read()

    def _read(self) -> None:
        defaults: dict[str, Option] = {}
        for statement in self._context.proxy.back.statements:
            if statement.words[0] not in ("server", "default-server") or statement.prefix:
                continue
            self._context.done.add(statement.line)
            is_server = statement.words[0] == "server"
            options = split_server_options(statement.arguments[2 if is_server else 0 :])
            for option in options:
                self._lines.setdefault(option.name, statement.line)
            merged = _merge(defaults, options)
            if is_server:
                name = self._context.argument(str, statement, 1)
                address = self._context.argument(str, statement, 2)
                self.all.append(HaproxyServer(statement, name, address, merged))
            else:
                defaults = merged

    def any_has(self, name: str) -> bool:
        return any(server.has(name) for server in self.all)

    def names_without(self, options: Iterable[str]) -> list[str]:
        """Return the names of the servers in use that have none of the options."""
        used = [server for server in self.all if not server.has("disabled")]
        return [server.name for server in used if not any(map(server.has, options))]

    def is_written(self, name: str) -> bool:
        """Return whether a line has the option, even if another option reverts it."""
        return name in self._lines

    def source(self, name: str) -> SourceKey:
        return SourceKey(f"server {name}", self._lines[name])

    def note(self, name: str) -> str:
        return SERVER_RULES[name].note

    def mark_converted(self, name: str) -> None:
        self._converted.add(name)

    def values(self, name: str) -> list[str]:
        """Return the values of an option, the most frequent one first, and mark it as converted."""
        counts = Counter(server.options[name].value for server in self.all if server.has(name))
        if counts:
            self.mark_converted(name)
        return [value for value, _ in counts.most_common()]

    def parse(self, parser: Callable[[str], T], name: str, text: str) -> T:
        """Return a checked value of an option. Raises ConfigError."""
        statement = next(server.statement for server in self.all if server.has(name))
        return self._context.parse(parser, statement, f"server {name}", text)

    def add_remaining_rows(self) -> None:
        """Add the rows of the options that have not been converted."""
        statements = {each.line: each for each in self._context.proxy.back.statements}
        for name, line in self._lines.items():
            if name not in self._converted:
                option = Option(name, is_known=name in SERVER_RULES)
                unused = "it has no effect in this proxy"
                add_option_row(self._context, statements[line], "server", option, unused)


def _merge(defaults: dict[str, Option], options: Sequence[Option]) -> dict[str, Option]:
    """Return the options that apply: `no-ssl` removes `ssl`, and `enabled` removes `disabled`."""
    merged = dict(defaults)
    for option in options:
        merged[option.name] = option
        if option.name.startswith("no-"):
            merged.pop(option.name.removeprefix("no-"), None)
        if option.name == "enabled":
            merged.pop("disabled", None)
    return merged
