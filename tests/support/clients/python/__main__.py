"""`python -m tests.clients.python DRIVER`."""

import importlib
import sys

if sys.argv[1] == "connector-c":
    # First of all: it brings its own OpenSSL, and cannot use the system's once Python has loaded that one.
    importlib.import_module("_mysql_connector")

from tests.support.clients.python.script import main

main(sys.argv[1])
