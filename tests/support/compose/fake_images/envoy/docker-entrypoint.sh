#!/bin/sh
# At the path of the real image's entry point, which ours replaces.
echo "the entry point of the base image was started" >&2
exit 1
