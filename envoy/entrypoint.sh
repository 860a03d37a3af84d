#!/bin/sh
# Starts Envoy with the options below and the arguments of this script. The node id must be unique in the fleet. By
# default it is the host name, which Docker and Kubernetes make unique for each container.
set -eu

# The supervisor drains Envoy when the container is stopped.
# A hot restart needs a second Envoy, but each container has only one.
exec tidevoy-envoy envoy \
    --config-path /etc/tidevoy/bootstrap.yaml \
    --service-node "${TIDEVOY_NODE_ID:-$(hostname)}" \
    --service-cluster tidevoy \
    --disable-hot-restart \
    "$@"
