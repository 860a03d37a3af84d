#!/bin/sh
# The real image has its entry point at this path. This repository's image must not use it.
echo "the entry point of the base image was started" >&2
exit 1
