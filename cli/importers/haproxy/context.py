"""What the converters of an HAProxy configuration share: the draft, the proxy, and checked values. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cli.importers.draft import SettingsDraft, SourceKey
from cli.importers.envoy_files import envoy_file
from cli.importers.haproxy.keys import GLOBAL_RULES, PROXY_RULES
from cli.importers.haproxy.parser import HaproxyFile, Proxy, Statement
from cli.importers.haproxy.selection import SelectedProxy
from cli.importers.haproxy.values import ValueProblem
from controlplane.errors import ConfigError

T = TypeVar("T")


class HaproxyContext:
    """The proxy that is imported, and the statements that have their row in the report, by line."""

    def __init__(self, file: HaproxyFile, proxy: SelectedProxy) -> None:
        self.file, self.proxy = file, proxy
        self.draft = SettingsDraft()
        self.done: set[int] = set()
        sections = [section for section in file.sections if section.kind == "global"]
        statements = tuple(statement for section in sections for statement in section.statements)
        self.globals = Proxy(sections[0], statements) if sections else Proxy(proxy.front.section, ())

    def source(self, statement: Statement, key: str = "") -> SourceKey:
        """Return the name of a statement in the report: its keyword, or `key`."""
        return SourceKey(key or statement.words[0], statement.line)

    def global_source(self, statement: Statement) -> SourceKey:
        return SourceKey(f"global {statement.words[0]}", statement.line)

    def parse(self, parser: Callable[[str], T], statement: Statement, key: str, text: str | None) -> T:
        """Return a checked value. Raises ConfigError with the line and the key."""
        where = f"{self.file.name}:{statement.line}"
        if text is None or not text:
            raise ConfigError(where, key, "the value is missing", "add it, or remove the keyword")
        try:
            return parser(text)
        except ValueProblem as error:
            raise ConfigError(where, key, str(error), error.remedy) from None

    def argument(self, parser: Callable[[str], T], statement: Statement, index: int = 1) -> T:
        """Return the checked value of a statement: the word with the given index."""
        key = " ".join(statement.words[:index])
        text = statement.words[index] if len(statement.words) > index else None
        return self.parse(parser, statement, key, text)

    def note(self, key: str) -> str:
        """Return the note of a keyword of proxies, or of `global KEYWORD`."""
        rules = GLOBAL_RULES if key.startswith("global ") else PROXY_RULES
        return rules[key.removeprefix("global ")].note

    def envoy_file(self, base: str, path: str) -> tuple[str, str]:
        """Return the absolute path of a file on the machines of the Envoys, and what to do about it.

        `base`: `ca-base` or `crt-base`, which completes relative paths.
        """
        directory = self.globals.last(base)
        if not path.startswith("/") and directory is not None and directory.arguments:
            path = f"{directory.arguments[0].rstrip('/')}/{path}"
        return envoy_file(path)
