#!/bin/bash
# Exits with 0 when Envoy has its listeners (`GET /ready` on the admin port returns 200). It uses only bash, because
# the image has no HTTP client, and HTTP/1.1, because Envoy rejects HTTP/1.0.
exec 3<>/dev/tcp/127.0.0.1/9901 || exit 1
printf 'GET /ready HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n' >&3
read -r -t 2 _ status _ <&3
[ "$status" = 200 ]
