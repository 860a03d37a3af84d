"""The certificate with which stand-ins sign tokens, so that sessions can move between them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sandbox.process import find_program


def signing_arguments(directory: Path) -> tuple[str, ...]:
    """What gives all stand-ins one certificate, which is made once. ProgramMissing without openssl."""
    directory.mkdir(parents=True, exist_ok=True)
    cert, key = directory / "token.crt", directory / "token.key"
    if not (cert.exists() and key.exists()):
        command = [
            *(find_program("openssl", "openssl"), "req", "-x509", "-nodes", "-days", "3650"),
            *("-newkey", "ed25519", "-subj", "/CN=session tokens", "-keyout", str(key), "-out", str(cert)),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    return f"--session-token-signing-cert={cert}", f"--session-token-signing-key={key}"
