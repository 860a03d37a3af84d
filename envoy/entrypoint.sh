#!/bin/sh
# Starts Envoy with the options below and the arguments of this script. The node id must be unique in the fleet. It is
# TIDEVOY_NODE_ID, or else that of the bootstrap (`tidevoy bootstrap --id`), or else the host name, which Docker and
# Kubernetes make unique for each container with a network of its own.
set -eu

bootstrap=/etc/tidevoy/bootstrap.yaml
if [ -n "${TIDEVOY_NODE_ID:-}" ]; then
    set -- --service-node "$TIDEVOY_NODE_ID" "$@"
elif ! sed -n '/^node:/,/^[^ #]/p' "$bootstrap" | grep -Eq '^ +"?id"?:'; then
    set -- --service-node "$(hostname)" "$@"
fi

# The supervisor drains Envoy when the container is stopped.
# A hot restart needs a second Envoy, but each container has only one.
exec tidevoy-envoy envoy \
    --config-path "$bootstrap" \
    --service-cluster tidevoy \
    --disable-hot-restart \
    "$@"
