"""The parameters of one run of a client: environment variables that all clients read in the same way."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The server, the accounts, and the amount of data.

    With `ca` (a PEM file), the client requires TLS and verifies the server's certificate. `rows` and
    `rows_prepared`: rows of the table `numbers` to read, in the text and in the binary protocol.
    `blob`: bytes of the largest value. `long`: characters of the longest text. `load_file`: a file with two
    columns and `load_rows` lines. `steps`: the steps to run, in order.
    """

    host: str
    port: int
    user: str
    password: str
    other_user: str
    other_password: str
    database: str
    ca: str
    rows: int
    rows_prepared: int
    blob: int
    long: int
    load_file: str
    load_rows: int
    steps: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> MatrixPlan:
        """Read the variables that tests/support/clients/runner.py sets. Raises KeyError if one is missing."""
        value = os.environ
        return cls(
            host=value["MATRIX_HOST"],
            port=int(value["MATRIX_PORT"]),
            user=value["MATRIX_USER"],
            password=value["MATRIX_PASSWORD"],
            other_user=value["MATRIX_OTHER_USER"],
            other_password=value["MATRIX_OTHER_PASSWORD"],
            database=value["MATRIX_DATABASE"],
            ca=value["MATRIX_CA"],
            rows=int(value["MATRIX_ROWS"]),
            rows_prepared=int(value["MATRIX_ROWS_PREPARED"]),
            blob=int(value["MATRIX_BLOB"]),
            long=int(value["MATRIX_LONG"]),
            load_file=value["MATRIX_LOAD_FILE"],
            load_rows=int(value["MATRIX_LOAD_ROWS"]),
            steps=tuple(value["MATRIX_STEPS"].split()),
        )
