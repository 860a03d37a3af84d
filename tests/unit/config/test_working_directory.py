"""The settings load in a working directory that is not readable, such as root's for the service's user."""

from __future__ import annotations

import subprocess
import sys

# Root may read every directory, so the call fails here as it fails for other users.
_PROGRAM = """
import os

def getcwd():
    raise PermissionError

os.getcwd = getcwd
import controlplane.config.settings
"""


def test_settings_load_without_working_directory() -> None:
    process = subprocess.run([sys.executable, "-P", "-c", _PROGRAM], stderr=subprocess.PIPE)
    assert process.returncode == 0, process.stderr.decode()
