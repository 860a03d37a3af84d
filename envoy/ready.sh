#!/bin/bash
# Exit code 0 when Envoy has its listeners (`GET /ready` of the admin port says 200). By bash alone: the image has
# no HTTP client.
exec 3<>/dev/tcp/127.0.0.1/9901 || exit 1
printf 'GET /ready HTTP/1.0\r\nHost: envoy\r\n\r\n' >&3
read -r -t 2 _ status _ <&3
[ "$status" = 200 ]
