"""The module's digests of statements are those of TiDB."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.build_tools import find_tool, run_tool
from tests.support.soak import SOAK
from tests.support.tidb.random_sql import random_statements, realistic_statements
from tests.support.tidb.sessions import connect_directly, query_rows

_FILTERS = Path(__file__).parents[2] / "filters"
_RANDOM_STATEMENTS = 200_000 if SOAK else 3_000
_BATCH = 200
_SEED = 20_261_128


@pytest.fixture(scope="session")
def digests_program() -> Path:
    """Build and return the program that prints the digests of its input."""
    cargo = find_tool("cargo", "rustup (rustup.rs)")
    run_tool(
        [cargo, "build", "--quiet", "--locked", "--package", "sql-text", "--example", "digests"], _FILTERS
    )
    return _FILTERS / "target" / "debug" / "examples" / "digests"


def module_digests(program: Path, statements: Sequence[str]) -> list[tuple[str, str]]:
    """Return the digest and the normalized text of each statement."""
    result = subprocess.run(
        [program], input="\0".join(statements).encode(), stdout=subprocess.PIPE, check=True
    )
    lines = [line.split(" ") for line in result.stdout.decode().splitlines()]
    return [(digest, bytes.fromhex(text).decode()) for digest, text in lines]


def tidb_digests(node: Tidb, statements: Sequence[str]) -> list[str]:
    """Return the digest of each statement, as the server computes it."""
    digests: list[str] = []
    with connect_directly(node) as connection:
        for start in range(0, len(statements), _BATCH):
            batch = statements[start : start + _BATCH]
            columns = ", ".join(f"tidb_encode_sql_digest({connection.escape(text)})" for text in batch)
            (row,) = query_rows(connection, f"select {columns}")
            digests += row
    return digests


def test_digests_are_those_of_tidb(cluster: TidbCluster, digests_program: Path) -> None:
    random_texts = itertools.islice(random_statements(_SEED), _RANDOM_STATEMENTS)
    statements = [text for text in (*realistic_statements(), *random_texts) if text]
    ours = module_digests(digests_program, statements)
    theirs = tidb_digests(cluster.tidb[0], statements)
    differences = [
        (statement, text)
        for statement, (digest, text), expected in zip(statements, ours, theirs, strict=True)
        if digest != expected
    ]
    print(f"{len(statements)} statements, {len(set(theirs))} digests, {len(differences)} differences")
    assert not differences, differences[:5]
