"""Reads a file that an operator wrote. A problem names the file, and the line if one is known."""

from __future__ import annotations

from pathlib import Path

from controlplane.errors import ConfigError

_MAX_BYTES = 1 << 20


def read_text(path: Path, kind: str) -> str:
    """Return the text of a file. `kind`: what it is, such as "settings file".

    Raises ConfigError if the file cannot be read, is larger than 1 MiB, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
        raise ConfigError(str(path), "", problem, f"name a {kind} that Tidevoy can read") from None
    if len(raw) > _MAX_BYTES:
        problem = f"the file is larger than 1 MiB, so it is probably not a {kind}"
        raise ConfigError(str(path), "", problem, f"give the path of the {kind}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"the byte 0x{raw[error.start]:02x} is not UTF-8"
        raise ConfigError(f"{path}:{line}", "", problem, "save the file as UTF-8") from None
