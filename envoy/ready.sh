#!/bin/bash
# Exit code 0 when Envoy has its listeners (`GET /ready` of the admin port says 200). By bash alone: the image has
# no HTTP client. Not HTTP/1.0, which Envoy refuses.
exec 3<>/dev/tcp/127.0.0.1/9901 || exit 1
printf 'GET /ready HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n' >&3
read -r -t 2 _ status _ <&3
[ "$status" = 200 ]
