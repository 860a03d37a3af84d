"""Runs the steps of script.py with a driver: `python -m tests.support.clients.python DRIVER`."""

import importlib
import sys

if sys.argv[1] == "connector-c":
    # This module has its own OpenSSL and must load it before Python loads the system's OpenSSL.
    importlib.import_module("_mysql_connector")

from tests.support.clients.python.script import main

main(sys.argv[1])
