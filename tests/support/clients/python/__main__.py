"""Runs the script with a driver: `python -m tests.support.clients.python DRIVER`."""

import importlib
import sys

if sys.argv[1] == "connector-c":
    # Import this first: it has its own OpenSSL, and cannot use the system's after Python has loaded that one.
    importlib.import_module("_mysql_connector")

from tests.support.clients.python.script import main

main(sys.argv[1])
