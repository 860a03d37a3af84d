#!/bin/sh
# session-certificate.sh DIRECTORY: creates the certificate and key with which TiDB servers sign and verify session
# tokens, as session.crt and session.key. It keeps a matching pair that is valid for at least 90 more days, so it can
# run at each start. It needs only openssl.
set -eu
# Only the owner may read the key and the directory.
umask 077

days=3650
# Seconds. A pair that expires sooner is replaced. TiDB ignores the expiry date, but other tools may check it.
renew=$((90 * 24 * 3600))

cd "${1:?missing argument: the directory of the certificate}"
chmod 0700 .

is_valid_pair() {
    [ -s session.crt ] && [ -s session.key ] || return 1
    openssl x509 -in session.crt -noout -checkend "$renew" > /dev/null 2>&1 || return 1
    certified=$(openssl x509 -in session.crt -noout -pubkey 2> /dev/null) || return 1
    [ "$certified" = "$(openssl pkey -in session.key -pubout 2> /dev/null)" ]
}

if is_valid_pair; then
    echo "kept the existing certificate: $(openssl x509 -in session.crt -noout -enddate)"
    exit 0
fi

rm -f new.crt new.key
# The key is RSA and not ECDSA: TiDB verifies only a part of a token that is signed with an ECDSA key.
output=$(openssl req -x509 -newkey rsa:2048 -sha256 -nodes -days "$days" -subj /CN=tidb-session \
    -keyout new.key -out new.crt 2>&1) || {
    echo "openssl failed to create a certificate in $PWD: $output" >&2
    exit 1
}
# A server that reads the files between the two renames finds that they do not match. It keeps the previous pair and
# reads again ten minutes later (pingcap/tidb pkg/sessionctx/sessionstates/session_token.go).
mv new.key session.key
mv new.crt session.crt
echo "created a new certificate: $(openssl x509 -in session.crt -noout -enddate)"
