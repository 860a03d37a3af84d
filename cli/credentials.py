"""The command line's credentials: a token or a client certificate, named by environment variables.

A token is never an argument: every user of the machine can read arguments (`ps`).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.errors import EXIT_USAGE, CliError

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "TIDEVOY_TOKEN", "TIDEVOY_TOKEN_FILE"
CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "TIDEVOY_CA", "TIDEVOY_CERT", "TIDEVOY_KEY"


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """The credentials sent to a control plane. `token_variable`: the variable that the token comes from."""

    token: str = ""
    token_variable: str = ""
    tls: ssl.SSLContext | bool = False

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of each request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def load_credentials(url: str, environ: Mapping[str, str] | None = None) -> ClientCredentials:
    """Load the credentials for `url` from the environment. Raises CliError (usage) if a file is unusable."""
    variables = os.environ if environ is None else environ
    token, source = variables.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    if not token and (file := variables.get(TOKEN_FILE_VARIABLE)):
        token, source = _read_token_file(file), TOKEN_FILE_VARIABLE
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise CliError(
            f"{source} does not hold a valid token; `tidevoy token create` creates one", EXIT_USAGE
        )
    tls = _make_tls_context(variables) if url.startswith("https://") else False
    return ClientCredentials(token, source if token else "", tls)


def _read_token_file(file: str) -> str:
    try:
        token = Path(file).read_text("ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise CliError(f"{TOKEN_FILE_VARIABLE}: {file} cannot be read: {reason}", EXIT_USAGE) from None
    if not token:
        raise CliError(f"{TOKEN_FILE_VARIABLE}: {file} is empty; write the token into it", EXIT_USAGE)
    return token


def _make_tls_context(variables: Mapping[str, str]) -> ssl.SSLContext:
    ca, cert, key = (variables.get(name) or None for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
    if (cert is None) != (key is None):
        raise CliError(
            f"{CERT_VARIABLE} and {KEY_VARIABLE} (--cert and --key) must be set together", EXIT_USAGE
        )
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError:
        raise CliError(
            f"{CA_VARIABLE}: {ca} cannot be read, or contains no PEM certificate", EXIT_USAGE
        ) from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key)
        except OSError:
            problem = f"{cert} and {key} cannot be read, or are not a PEM certificate and its key"
            raise CliError(f"{CERT_VARIABLE}, {KEY_VARIABLE}: {problem}", EXIT_USAGE) from None
    return context
