"""The MariaDB of the matrix: with TLS, large packets, accounts with passwords, and a table of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
import trustme

from sandbox.mariadb import MariaDb

DATABASE = "matrix"
NUMBERS_ROWS = 1_000_000
"""The table `numbers` has one column `n`, with the values from 1 to NUMBERS_ROWS."""


@dataclass(frozen=True, slots=True)
class MatrixAccount:
    user: str
    password: str


MAIN_ACCOUNT = MatrixAccount("matrix", 'Ebbe & Flut \'n "1"')
OTHER_ACCOUNT = MatrixAccount("matrix_other", "other")


@dataclass(frozen=True, slots=True)
class PemFiles:
    """PEM files: a CA, a server certificate of this CA for 127.0.0.1 and localhost, and the server's key."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def create(cls, directory: Path) -> PemFiles:
        """Write the files for a new CA."""
        directory.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        files = cls(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
        authority.cert_pem.write_to_path(str(files.ca))
        issued.cert_chain_pems[0].write_to_path(str(files.cert))
        issued.private_key_pem.write_to_path(str(files.key))
        return files

    def arguments(self) -> tuple[str, ...]:
        """Return the options that give a simulated TiDB server this certificate."""
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))


class MatrixMariaDb(MariaDb):
    """A MariaDB for the matrix; call `fill` once it runs."""

    def __init__(self, directory: Path, port: int, *, max_connections: int = 500) -> None:
        super().__init__(directory, port, max_connections=max_connections)
        self.certificates = PemFiles.create(directory / "certificates")

    def command(self) -> list[str]:
        """Return the usual command with TLS and room for large values."""
        return [
            *super().command(),
            f"--ssl-ca={self.certificates.ca}",
            f"--ssl-cert={self.certificates.cert}",
            f"--ssl-key={self.certificates.key}",
            "--max-allowed-packet=128M",
            "--innodb-log-file-size=256M",
        ]

    def fill(self) -> None:
        """Create the accounts and the data."""
        connection: Any = pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True)
        with connection, connection.cursor() as cursor:
            cursor.execute(f"create database {DATABASE}")
            for account in (MAIN_ACCOUNT, OTHER_ACCOUNT):
                cursor.execute("create user %s@'%%' identified by %s", (account.user, account.password))
                cursor.execute(f"grant all on {DATABASE}.* to %s@'%%'", (account.user,))
            cursor.execute(f"use {DATABASE}")
            cursor.execute("create table numbers (n int primary key)")
            cursor.execute(f"insert into numbers select seq from seq_1_to_{NUMBERS_ROWS}")
