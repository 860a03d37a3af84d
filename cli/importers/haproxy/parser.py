"""Reads an HAProxy configuration: sections with their statements, and proxies with their defaults. No I/O.

Source: sections 2 and 4 of HAProxy's configuration manual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cli.importers.haproxy.conditions import evaluate
from cli.importers.haproxy.lexer import LexerError, split_words
from controlplane.errors import ConfigError

PROXY_KINDS = ("listen", "frontend", "backend")
SECTION_KINDS = frozenset(
    (
        *PROXY_KINDS,
        *("global", "defaults", "userlist", "mailers", "namespace_list", "traces", "acme", "cache", "peers"),
        *("fcgi-app", "spoe-agent", "spoe-group", "spoe-message", "http-errors", "log-forward", "ring"),
        *("log-profile", "resolvers", "crt-store", "healthcheck", "program"),
    )
)
_ENVIRONMENT_KEYWORDS = ("setenv", "presetenv", "unsetenv", "resetenv")
_MAX_CONDITIONS = 1024


@dataclass(frozen=True, slots=True)
class Statement:
    """A line: its words without the prefix `no` or `default`, and that prefix."""

    line: int
    words: tuple[str, ...]
    prefix: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.words[1:]


@dataclass(frozen=True, slots=True)
class Section:
    """A section. `name` is empty if it has none; `parent` is the name after `from`."""

    kind: str
    name: str
    line: int
    statements: tuple[Statement, ...]
    parent: str = ""


@dataclass(frozen=True, slots=True)
class HaproxyFile:
    """All sections in order. `remarks`: what a reader of the result should know, one sentence each."""

    name: str
    sections: tuple[Section, ...]
    remarks: tuple[str, ...] = ()

    def defaults_of(self, section: Section) -> tuple[Section, ...]:
        """Return the `defaults` sections that apply to a section, the most general one first.

        Raises ConfigError if a name after `from` does not exist, or if sections inherit in a circle.
        """
        chain: list[Section] = []
        parent = self._parent_of(section)
        while parent is not None:
            if parent in chain:
                where = f"{self.name}:{parent.line}"
                raise ConfigError(where, "defaults", "it inherits from itself", "remove one `from`")
            chain.insert(0, parent)
            parent = self._parent_of(parent)
        return tuple(chain)

    def _parent_of(self, section: Section) -> Section | None:
        defaults = [each for each in self.sections if each.kind == "defaults"]
        if section.parent:
            for each in defaults:
                if each.name == section.parent:
                    return each
            where = f"{self.name}:{section.line}"
            problem = f"there is no defaults section {section.parent}"
            raise ConfigError(
                where, f"{section.kind} {section.name}", problem, "correct the name after `from`"
            )
        if section.kind == "defaults":
            return None
        return next((each for each in reversed(defaults) if each.line < section.line), None)


@dataclass(slots=True)
class _OpenSection:
    kind: str
    name: str
    line: int
    parent: str
    statements: list[Statement] = field(default_factory=list)

    def close(self) -> Section:
        return Section(self.kind, self.name, self.line, tuple(self.statements), self.parent)


def parse_haproxy(text: str, name: str, environ: Mapping[str, str]) -> HaproxyFile:
    """Parse a configuration. Raises ConfigError with file and line if it is invalid."""
    return _FileParser(name, environ).parse(text)


class _FileParser:
    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self._name = name
        self._initial, self._environ = dict(environ), dict(environ)
        self._sections: list[_OpenSection] = []
        self._remarks: list[str] = []
        self._line = 0
        # For each open `.if`: whether the lines are read, whether a branch was read, and its line.
        self._conditions: list[tuple[bool, bool, int]] = []

    def parse(self, text: str) -> HaproxyFile:
        if "\0" in text:
            where = f"{self._name}:{text.count(chr(10), 0, text.index(chr(0))) + 1}"
            raise ConfigError(where, "", "the file contains a NUL character", "remove it")
        for number, line in enumerate(text.split("\n"), start=1):
            self._line = number
            try:
                self._read_line(line)
            except LexerError as error:
                raise ConfigError(f"{self._name}:{number}", "", error.problem, error.remedy) from None
        if self._conditions:
            where = f"{self._name}:{self._conditions[-1][2]}"
            raise ConfigError(where, ".if", "it has no .endif", "add one")
        return HaproxyFile(
            self._name, tuple(section.close() for section in self._sections), tuple(self._remarks)
        )

    def _read_line(self, line: str) -> None:
        if line.lstrip().startswith("["):  # a scope of the `program` section or of templates
            return
        result = split_words(line, self._variables())
        words = result.words
        if not words:
            return
        if words[0].startswith("."):
            self._read_directive(words)
            return
        if not all(is_read for is_read, _, _ in self._conditions):
            return
        for variable in result.unset:
            self._remark(f"the environment variable {variable} is not set, and is read as empty")
        prefix = words[0] if words[0] in ("no", "default") and len(words) > 1 else ""
        if words[0] in SECTION_KINDS:
            self._open_section(words)
        elif not self._sections:
            problem = f"{words[0]} is outside of a section"
            raise LexerError(problem, "check that this is a configuration of HAProxy")
        else:
            statement = Statement(self._line, words[1:] if prefix else words, prefix)
            self._sections[-1].statements.append(statement)
            self._apply_environment(statement)

    def _variables(self) -> dict[str, str]:
        section = self._sections[-1] if self._sections else None
        return {
            **self._environ,
            ".FILE": self._name,
            ".LINE": str(self._line),
            ".SECTION": (section.name or section.kind) if section else "",
        }

    def _open_section(self, words: Sequence[str]) -> None:
        rest = list(words[1:])
        parent = ""
        if "from" in rest and words[0] in (*PROXY_KINDS, "defaults"):
            position = rest.index("from")
            parent = rest[position + 1] if position + 1 < len(rest) else ""
            rest = rest[:position]
        name = rest[0] if rest else ""
        if words[0] in PROXY_KINDS and not name:
            raise LexerError(f"the section {words[0]} has no name", f"write `{words[0]} NAME`")
        section = _OpenSection(words[0], name, self._line, parent)
        if words[0] in ("listen", "frontend") and len(rest) > 1:  # as before HAProxy 2.0
            section.statements.append(Statement(self._line, ("bind", *rest[1:])))
        self._sections.append(section)

    def _apply_environment(self, statement: Statement) -> None:
        keyword, *arguments = statement.words
        if keyword not in _ENVIRONMENT_KEYWORDS:
            return
        if keyword in ("setenv", "presetenv") and len(arguments) >= 2:
            if keyword == "setenv" or arguments[0] not in self._environ:
                self._environ[arguments[0]] = arguments[1]
        elif keyword == "unsetenv":
            for variable in arguments:
                self._environ.pop(variable, None)
        elif keyword == "resetenv":
            self._environ = {key: self._initial[key] for key in arguments if key in self._initial}

    def _read_directive(self, words: Sequence[str]) -> None:
        directive, condition = words[0], " ".join(words[1:])
        if directive == ".if":
            if len(self._conditions) >= _MAX_CONDITIONS:
                raise LexerError("the conditions are nested too deeply", "remove some")
            is_true = self._is_reading() and self._evaluate(condition)
            self._conditions.append((is_true, is_true, self._line))
        elif directive in (".elif", ".else", ".endif"):
            if not self._conditions:
                raise LexerError(f"{directive} has no .if", "remove it, or add the .if")
            _, was_read, line = self._conditions.pop()
            if directive == ".endif":
                return
            is_true = not was_read and self._is_reading()
            is_true = is_true and (directive == ".else" or self._evaluate(condition))
            self._conditions.append((is_true, was_read or is_true, line))
        elif directive == ".alert" and self._is_reading():
            self._remark("the configuration emits an .alert, so HAProxy does not start with it")
        elif directive not in (".notice", ".warning", ".diag", ".alert"):
            raise LexerError(f"{directive} is no directive", "write .if, .elif, .else or .endif")

    def _is_reading(self) -> bool:
        return all(is_read for is_read, _, _ in self._conditions)

    def _evaluate(self, condition: str) -> bool:
        result, assumed = evaluate(condition, self._environ)
        for predicate in assumed:
            self._remark(f"the result of {predicate} is assumed, since HAProxy is not started")
        return result

    def _remark(self, text: str) -> None:
        self._remarks.append(f"line {self._line}: {text}")


@dataclass(frozen=True, slots=True)
class Proxy:
    """The statements of one side of a proxy with those of its defaults, in the order in which they apply."""

    section: Section
    statements: tuple[Statement, ...]

    def last(self, *key: str) -> Statement | None:
        """Return the statement that counts for a key such as `timeout client`, unless it is reverted."""
        for statement in reversed(self.statements):
            if statement.words[: len(key)] == key:
                return None if statement.prefix else statement
        return None

    def all(self, keyword: str) -> Iterator[Statement]:
        for statement in self.statements:
            if statement.words[0] == keyword and not statement.prefix:
                yield statement


def resolve(file: HaproxyFile, section: Section) -> Proxy:
    """Return a proxy with the statements that it inherits. Raises ConfigError."""
    inherited = [statement for each in file.defaults_of(section) for statement in each.statements]
    return Proxy(section, (*inherited, *section.statements))
