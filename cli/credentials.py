"""How the command line says who it is: a token or a certificate, named by the environment.

A token is never an argument: every user of the machine sees those (`ps`).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.errors import USAGE, Failure

TOKEN, TOKEN_FILE = "TIDEVOY_TOKEN", "TIDEVOY_TOKEN_FILE"
CA, CERT, KEY = "TIDEVOY_CA", "TIDEVOY_CERT", "TIDEVOY_KEY"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is shown to a control plane. `source`: the variable that the token is from."""

    token: str = ""
    source: str = ""
    tls: ssl.SSLContext | bool = False

    @property
    def headers(self) -> dict[str, str]:
        """What is sent with each request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def credentials(url: str, environ: Mapping[str, str] | None = None) -> Credentials:
    """What the environment says for this URL. Failure (usage) when a file of it cannot be used."""
    given = os.environ if environ is None else environ
    token, source = given.get(TOKEN, "").strip(), TOKEN
    if not token and (file := given.get(TOKEN_FILE)):
        token, source = _read(file), TOKEN_FILE
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise Failure(f"what {source} gives is no token; `tidevoy token create` makes one", USAGE)
    tls = _context(given) if url.startswith("https://") else False
    return Credentials(token, source if token else "", tls)


def _read(file: str) -> str:
    try:
        token = Path(file).read_text("ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Failure(f"{TOKEN_FILE}: {file} cannot be read: {reason}", USAGE) from None
    if not token:
        raise Failure(f"{TOKEN_FILE}: {file} is empty; write the token into it", USAGE)
    return token


def _context(given: Mapping[str, str]) -> ssl.SSLContext:
    ca, cert, key = (given.get(name) or None for name in (CA, CERT, KEY))
    if (cert is None) != (key is None):
        raise Failure(f"{CERT} and {KEY} (--cert and --key) go together", USAGE)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError:
        raise Failure(f"{CA}: {ca} cannot be read, or holds no certificate in PEM", USAGE) from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key)
        except OSError:
            problem = f"{cert} and {key} cannot be read, or are no certificate and its key in PEM"
            raise Failure(f"{CERT}, {KEY}: {problem}", USAGE) from None
    return context
