"""Words, conditions and sections of HAProxy's configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.importers.haproxy.conditions import evaluate
from cli.importers.haproxy.lexer import LexerError, split_words
from cli.importers.haproxy.parser import HaproxyFile, Section, parse_haproxy, resolve
from cli.importers.haproxy.values import TcpAddress, ValueProblem, parse_address, parse_integer, parse_time
from controlplane.errors import ConfigError

ENVIRONMENT = {"A": "b c", "EMPTY": "", "PORT": "6000"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("  \t # comment", []),
        ("global#comment", ["global"]),
        ("bind\t:3306  ssl", ["bind", ":3306", "ssl"]),
        (r"a\ b \#c \\ \' \"", ["a b", "#c", "\\", "'", '"']),
        (r"\n\r\t\x41\x7a", ["\n\r\tAz"]),
        (r"\q \1", [r"\q", r"\1"]),
        ("""'a "b" #c\\n'""", ['a "b" #c\\n']),
        ('''"it's #1 \\"x\\" \\$A"''', ['it\'s #1 "x" $A']),
        ("""x"y z"'u v'w""", ["xy zu vw"]),
        ('""', [""]),
        ("''", [""]),
        ("$A ${A} '$A'", ["$A", "${A}", "$A"]),
        ('"$A" "${A}:${PORT}"', ["b c", "b c:6000"]),
        ('"${NONE-default value}" "${EMPTY-x}" "${A-x}"', ["default value", "", "b c"]),
        ('"${A[*]}"', ["b", "c"]),
        ('x"${A[*]}"y', ["xb", "cy"]),
        ('a "${EMPTY[*]}" b', ["a", "b"]),
    ],
)
def test_splits_words(line: str, words: list[str]) -> None:
    assert list(split_words(line, ENVIRONMENT).words) == words


def test_names_variables_that_are_not_set() -> None:
    result = split_words('"$NONE" "${NONE}" "${OTHER-x}" "$A"', ENVIRONMENT)
    assert result.words == ("", "", "x", "b c")
    assert result.unset == ("NONE",)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a 'b", "quote"),
        ('a "b', "quote"),
        ('"a\\"', "quote"),
        (r"\x4", "hexadecimal"),
        (r"\xzz", "hexadecimal"),
        ('"$"', "name of a variable"),
        ('"${}"', "name of a variable"),
        ('"$1"', "name of a variable"),
        ('"${A"', "closing brace"),
        ('"${A:x}"', "closing brace"),
        ('"${A[1]}"', "closing brace"),
    ],
)
def test_reports_invalid_lines(line: str, problem: str) -> None:
    with pytest.raises(LexerError, match=problem):
        split_words(line, ENVIRONMENT)


_LINES = st.text(st.one_of(st.sampled_from("\"'\\$#{}[]*-. \tabxn0A_"), st.characters()))


@given(_LINES)
def test_every_line_is_split_or_rejected(line: str) -> None:
    with contextlib.suppress(LexerError):
        assert all(isinstance(word, str) for word in split_words(line, ENVIRONMENT).words)


@given(st.lists(st.text(min_size=1)))
def test_quoted_words_are_read_back(words: list[str]) -> None:
    def quote(word: str) -> str:
        return "'" + word.replace("'", "'\\''") + "'"

    assert list(split_words(" ".join(map(quote, words)), {}).words) == words


@given(st.text("abAB$\\\"' {}#", max_size=20))
def test_single_quotes_protect_everything(text: str) -> None:
    inner = text.replace("'", "")
    assert split_words(f"'{inner}'", ENVIRONMENT).words == (inner,)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("", False),
        ("0", False),
        ("1", True),
        ("!0", True),
        ("defined(A)", True),
        ("defined(NONE)", False),
        ("streq(a,a)", True),
        ("strneq(a,a) || streq(b,b)", True),
        ("strstr(haystack,ays)", True),
        ("1 && 0 || 1", True),
        ("1 && (0 || !1)", False),
        ("!defined(NONE) && defined(A)", True),
        ("feature(OPENSSL)", True),
        ("version_before(2.4)", False),
    ],
)
def test_evaluates_conditions(condition: str, expected: bool) -> None:
    result, assumed = evaluate(condition, ENVIRONMENT)
    assert result is expected
    assert bool(assumed) == condition.startswith(("feature", "version"))


@pytest.mark.parametrize("condition", ["(", "1 1", "x", "nope(1)", "defined(A", "&&", "streq(a)", "!" * 100])
def test_reports_invalid_conditions(condition: str) -> None:
    with pytest.raises(LexerError):
        evaluate(condition, ENVIRONMENT)


@given(st.text(st.sampled_from("01!&|() defined,streqA-"), max_size=30))
def test_every_condition_is_evaluated_or_rejected(condition: str) -> None:
    with contextlib.suppress(LexerError):
        evaluate(condition, ENVIRONMENT)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5000", 5.0),
        ("10us", 0.00001),
        ("250ms", 0.25),
        ("30s", 30.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1d", 86400.0),
    ],
)
def test_parses_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (parse_time, "1.5s"),
        (parse_time, "-1"),
        (parse_time, "5 s"),
        (parse_integer, "1k"),
        (parse_address, "a:b"),
    ],
)
def test_reports_invalid_values(parser: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueProblem):
        parser(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":3306", TcpAddress("", 3306)),
        ("*:3306", TcpAddress("", 3306)),
        ("10.0.0.1:3306", TcpAddress("10.0.0.1", 3306)),
        ("ipv4@10.0.0.1:3306", TcpAddress("10.0.0.1", 3306)),
        ("[::]:3306", TcpAddress("::", 3306)),
        (":::3306", TcpAddress("::", 3306)),
        ("::1:3306", TcpAddress("::1", 3306)),
        ("[fd00::1]", TcpAddress("fd00::1", None)),
        ("tidb-0.peer:4000", TcpAddress("tidb-0.peer", 4000)),
        ("tidb-0", TcpAddress("tidb-0", None)),
        ("10.0.0.1:3306-3310", TcpAddress("10.0.0.1", 3306, 3310)),
        ("10.0.0.1:+10", TcpAddress("10.0.0.1", 10, is_offset=True)),
        ("/run/mysql.sock", None),
        ("unix@/run/mysql.sock", None),
        ("fd@3", None),
        ("quic4@:443", None),
    ],
)
def test_parses_addresses(text: str, address: TcpAddress | None) -> None:
    assert parse_address(text) == address


def parse(text: str, environ: dict[str, str] | None = None) -> HaproxyFile:
    return parse_haproxy(text, "haproxy.cfg", environ or {})


def section_of(file: HaproxyFile, name: str) -> Section:
    (section,) = [each for each in file.sections if each.name == name]
    return section


def test_reads_sections_and_prefixes() -> None:
    file = parse("global\n daemon\nlisten tidb from base # x\n no option tcpka\n default option tcplog\n")
    assert [(each.kind, each.name, each.parent, each.line) for each in file.sections] == [
        ("global", "", "", 1),
        ("listen", "tidb", "base", 3),
    ]
    assert [(each.prefix, each.words) for each in file.sections[1].statements] == [
        ("no", ("option", "tcpka")),
        ("default", ("option", "tcplog")),
    ]


def test_a_proxy_inherits_from_the_last_defaults_section_before_it() -> None:
    file = parse(
        "defaults\n retries 1\nfrontend a\n"
        "defaults\n retries 2\nfrontend b\n"
        "listen c\n retries 3\n no retries\n"
    )
    retries = {
        name: statement and statement.words[1]
        for name in "abc"
        for statement in [resolve(file, section_of(file, name)).last("retries")]
    }
    assert retries == {"a": "1", "b": "2", "c": None}


def test_named_defaults_are_inherited_over_several_levels() -> None:
    file = parse(
        "defaults base\n mode tcp\n retries 1\n"
        "defaults slow from base\n retries 9\n"
        "defaults http\n mode http\n"
        "listen tidb from slow\n bind :1\n"
    )
    tidb = resolve(file, section_of(file, "tidb"))
    assert [statement.words for statement in tidb.statements] == [
        ("mode", "tcp"),
        ("retries", "1"),
        ("retries", "9"),
        ("bind", ":1"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mode tcp", r"haproxy.cfg:1: mode is outside of a section"),
        ("global\n log 'x", r"haproxy.cfg:2: a quote \('\) is not closed"),
        ("listen", r"haproxy.cfg:1: the section listen has no name"),
        ("global\n.if 1", r"haproxy.cfg:2: .if: it has no .endif"),
        (".endif", r"haproxy.cfg:1: .endif has no .if"),
        (".nope", r".nope is no directive"),
        (".if nope(1)\n.endif", r"haproxy.cfg:1: the condition .* uses nope"),
        ("global\n a\0", r"haproxy.cfg:2: the file contains a NUL"),
    ],
)
def test_reports_invalid_files_with_their_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen a from x", r"haproxy.cfg:1: listen a: there is no defaults section x"),
        ("defaults a from b\ndefaults b from a\nlisten c from b", r"it inherits from itself"),
    ],
)
def test_reports_invalid_inheritance(text: str, message: str) -> None:
    file = parse(text)
    with pytest.raises(ConfigError, match=message):
        resolve(file, file.sections[-1])


CONDITIONAL = """\
global
.if defined(A)
  a
  .if defined(NONE)
    nested
  .else
    other
  .endif
.elif 1
  b
.else
  c
.endif
"""


@pytest.mark.parametrize(("environ", "words"), [({"A": ""}, ["a", "other"]), ({}, ["b"])])
def test_reads_only_the_branch_that_applies(environ: dict[str, str], words: list[str]) -> None:
    (section,) = parse(CONDITIONAL, environ).sections
    assert [statement.words[0] for statement in section.statements] == words


def test_applies_the_environment_that_the_file_sets() -> None:
    file = parse(
        "global\n"
        " setenv HOST 10.0.0.1\n"
        " presetenv HOST 10.0.0.2\n"
        " presetenv PORT 4000\n"
        ' x "${HOST}:${PORT}"\n'
        " unsetenv HOST\n"
        ' x "$HOST" "$KEEP"\n'
        " resetenv KEEP\n"
        ' x "$KEEP$PORT" "$.LINE" "$.FILE" "$.SECTION"\n',
        {"KEEP": "kept"},
    )
    values = [each.arguments for each in file.sections[0].statements if each.words[0] == "x"]
    assert values == [("10.0.0.1:4000",), ("", "kept"), ("kept", "9", "haproxy.cfg", "global")]
    assert file.remarks == (
        "line 7: the environment variable HOST is not set, and is read as empty",
        "line 9: the environment variable PORT is not set, and is read as empty",
    )


def test_remarks_assumptions_and_alerts() -> None:
    file = parse('global\n.if feature(OPENSSL)\n.alert "x"\n.endif\n.notice "y"\n')
    assert [remark.partition(":")[0] for remark in file.remarks] == ["line 2", "line 3"]


def test_an_address_after_the_name_of_a_proxy_is_a_bind_line() -> None:
    (section,) = parse("listen tidb 0.0.0.0:3306").sections
    assert [statement.words for statement in section.statements] == [("bind", "0.0.0.0:3306")]
