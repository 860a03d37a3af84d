#!/bin/sh
# Makes the certificate and key with which the TiDB servers sign and check session tokens: `session.crt` and
# `session.key` in the directory that is named. A pair that fits and is good for a while yet stays as it is, so this
# can run at each start.
#
# By openssl alone, which every image has that trusts certificate authorities.
set -eu
# The key is for the owner alone, and so is the directory.
umask 077

days=3650
# A pair with less time left, in seconds, is made anew. TiDB does not look at the date, but other tools may.
renew=$((90 * 24 * 3600))

cd "${1:?name the directory of the certificate}"
chmod 0700 .

fits() {
    [ -s session.crt ] && [ -s session.key ] || return 1
    openssl x509 -in session.crt -noout -checkend "$renew" > /dev/null 2>&1 || return 1
    certified=$(openssl x509 -in session.crt -noout -pubkey 2> /dev/null) || return 1
    [ "$certified" = "$(openssl pkey -in session.key -pubout 2> /dev/null)" ]
}

if fits; then
    echo "the certificate is kept: $(openssl x509 -in session.crt -noout -enddate)"
    exit 0
fi

rm -f new.crt new.key
# RSA or Ed25519: of a token signed by an ECDSA key TiDB checks a part only.
told=$(openssl req -x509 -newkey rsa:2048 -sha256 -nodes -days "$days" -subj /CN=tidb-session \
    -keyout new.key -out new.crt 2>&1) || {
    echo "openssl could not make a certificate in $PWD: $told" >&2
    exit 1
}
# A server that reads between these two finds a pair that does not fit, keeps the former one, and reads again ten
# minutes later (pingcap/tidb pkg/sessionctx/sessionstates/session_token.go).
mv new.key session.key
mv new.crt session.crt
echo "a new certificate is there: $(openssl x509 -in session.crt -noout -enddate)"
