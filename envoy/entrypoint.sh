#!/bin/sh
# Starts Envoy; the arguments are added to its own. Its node id must be unique in the fleet: by default it is the
# host name, which Docker and Kubernetes make unique for each container.
set -eu

# Two files a session: as many as we may have.
ulimit -S -n "$(ulimit -H -n)"

# Each container has one Envoy, so nothing would take over in a hot restart.
exec envoy \
    --config-path /etc/tidevoy/bootstrap.yaml \
    --service-node "${TIDEVOY_NODE_ID:-$(hostname)}" \
    --service-cluster tidevoy \
    --disable-hot-restart \
    "$@"
