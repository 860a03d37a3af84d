"""Reads the file to import."""

from __future__ import annotations

from pathlib import Path

from controlplane.errors import ConfigError

_MAX_BYTES = 1 << 20


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError if it cannot be read, is too large or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
        raise ConfigError(str(path), "", problem, "name a file that you may read") from None
    if len(raw) > _MAX_BYTES:
        problem = "the file is larger than 1 MiB, so it is probably not a configuration"
        raise ConfigError(str(path), "", problem, "name the configuration file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"the byte 0x{raw[error.start]:02x} is not UTF-8"
        raise ConfigError(f"{path}:{line}", "", problem, "save the file as UTF-8") from None
