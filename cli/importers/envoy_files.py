"""Files that Envoys read on their own machines, such as certificates. No I/O."""

from __future__ import annotations

from pathlib import PurePosixPath

ENVOY_DIRECTORY = "/etc/tidevoy"


def envoy_file(path: str) -> tuple[str, str]:
    """Return the absolute path of a file on the machines of the Envoys, and what the operator has to do.

    For an absolute path, there is nothing to do, and the text is empty.
    """
    if path.startswith("/"):
        return path, ""
    todo = f"write the absolute path of {path} on the machines of the Envoys"
    return f"{ENVOY_DIRECTORY}/{PurePosixPath(path).name or 'tls.pem'}", todo
