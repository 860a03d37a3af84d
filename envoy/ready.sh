#!/bin/bash
# Exits with 0 when Envoy has a listener for SQL clients (`GET /listeners` on the admin port). `GET /ready` would not do:
# half a minute after the start, it returns 200 without a control plane and without such a listener. The script uses only
# bash, because the image has no HTTP client, and HTTP/1.1, because Envoy rejects HTTP/1.0.

# Envoy writes the address of its admin port to a file of the supervisor. Earlier starts may have left such files.
file=$(ls -t "${TMPDIR:-/tmp}"/tidevoy-envoy-*/admin 2>/dev/null | head -n 1)
address=$(cat "$file" 2>/dev/null) || exit 1
host=${address%:*}
host=${host#[}
exec 3<>"/dev/tcp/${host%]}/${address##*:}" || exit 1
printf 'GET /listeners HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n' >&3
while read -r -t 2 line <&3; do # NAME::ADDRESS
    case $line in
        health::*) ;;
        *::*) exit 0 ;;
    esac
done
exit 1
