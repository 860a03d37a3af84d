#!/bin/sh
# Where the real image has its own entry point, which ours replaces.
echo "the entry point of the base image was started" >&2
exit 1
