"""Settings of a login of the control plane itself to a node, as a SQL client."""

from __future__ import annotations

from controlplane.config.types import File, SettingsSection, setting


class UserSettings(SettingsSection):
    """A user of nodes, and how to connect."""

    user: str | None = setting(None, min_length=1)
    """User to log in as."""
    password_file: File | None = setting(None)
    """File with the user's password, read for each login; default: empty password."""
    ca: File | None = setting(None)
    """CA bundle (PEM) that nodes' certificates must chain to; default: without TLS."""


class LoginSettings(UserSettings):
    """A login to nodes, and a statement that must succeed."""

    statement: str = setting("SELECT 1", min_length=1, max_length=65_536)
    """Statement that must succeed."""
