#!/bin/sh
# Installs the Debian packages that are missing: sandbox/install.sh python|rust|run|test|tidb|bench
#   python  what makes a virtual environment
#   rust    what builds the module for Envoy beside a Rust toolchain, which must be there
#   run     what `make run` starts
#   test    what `make test` needs beside that
#   tidb    what `make test-tidb` needs beside `run`; PD, TiKV and TiDB are for the user to install
#   bench   what `make bench` needs beside `run`
# As root it installs them, without starting a service; else it says in one sentence what to install.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
python="${PYTHON:-python3}"
rust="${RUST:-}" # the oldest that will do

missing=""
need() { # need COMMAND PACKAGE
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}

# What the clients of the matrix are compiled and run with. mysqlclient comes as C source, which wants the headers
# of this Python; one that is not Debian's has brought its own.
need_for_clients() {
    need mariadb_config libmariadb-dev
    need gcc "gcc libc6-dev"
    need pkg-config pkg-config
    need mvn maven
    need javac default-jdk-headless
    need node nodejs
    need npm npm
    missing="$missing$("$python" -c '
import os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if sys.base_prefix == "/usr" and not os.path.exists(header):
    print(" python%d.%d-dev" % sys.version_info[:2])' 2>/dev/null)" || true
}

look() {
    missing=""
    if [ "$1" = rust ]; then
        need cc "gcc libc6-dev"
        return
    fi
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing=" python3-venv"
    case "$1" in
    python) return ;;
    run | test | tidb | bench) ;;
    *)
        echo "usage: $0 python|rust|run|test|tidb|bench" >&2
        exit 2
        ;;
    esac
    need etcd etcd-server
    need mariadbd mariadb-server
    need mariadb mariadb-client
    need openssl openssl
    if [ "$1" = tidb ]; then
        need iptables iptables
        need ip iproute2
    elif [ "$1" != run ]; then
        need sysbench sysbench
        need haproxy haproxy
        need perf linux-perf
    fi
    if [ "$1" = test ]; then
        need dockerd docker.io
        need docker-compose docker-compose
        need debootstrap debootstrap
        need iptables iptables
        need ip iproute2
        need etcdctl etcd-client
        need prometheus prometheus
        need chromium "chromium fonts-dejavu-core"
        need_for_clients
    fi
}

refuse() {
    echo "Some Debian packages are missing$1; install them with: apt-get install --no-install-recommends$missing" >&2
    exit 1
}

# Not packages: Debian's are often too old, and how to have newer ones is for the user to choose.
is_at_least() { # is_at_least OLDEST FOUND
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]
}

toolchain() {
    found="$(command -v cargo >/dev/null 2>&1 && rustc --version 2>/dev/null | cut -d ' ' -f 2)" || found=""
    is_at_least "$rust" "$found" && return
    echo "make needs Rust $rust or newer to build the module for Envoy, and finds ${found:-none}; install it," \
        "for example with rustup (installing a wheel of tidevoy needs no Rust)" >&2
    exit 1
}

# One client of many needs it, so the other tests go on. Go 1.21 and newer fetch 1.24 by themselves.
look_for_go() {
    found="$(go version 2>/dev/null | cut -d ' ' -f 3)" || found=""
    is_at_least 1.21 "${found#go}" && return
    echo "The tests with go-sql-driver need Go 1.24 or newer, and there is ${found:-none}; they are skipped until it" \
        "is installed (go.dev/doc/install says how)" >&2
}

if [ "${1:-}" = rust ]; then toolchain; fi
if [ "${1:-}" = test ]; then look_for_go; fi
look "${1:-}"
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] || refuse " and only root can install them"
command -v apt-get >/dev/null 2>&1 || refuse " and there is no apt-get here"

# Packages start their services when they are installed unless this program forbids it (invoke-rc.d(8)).
# One that is there already is put back afterwards.
policy=/usr/sbin/policy-rc.d
mark="put here by tidevoy while it installs packages"
restore() {
    if grep -qs "$mark" "$policy"; then rm -f "$policy"; fi
    if [ -e "$policy.before-tidevoy" ]; then mv -f "$policy.before-tidevoy" "$policy"; fi
}
trap restore EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
restore # what a run that was killed left behind
if [ -e "$policy" ]; then mv "$policy" "$policy.before-tidevoy"; fi
printf '#!/bin/sh\n# %s\nexit 101\n' "$mark" >"$policy"
chmod 755 "$policy"

echo "Installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=300 update
# shellcheck disable=SC2086 # a list of words
apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 install --no-install-recommends $missing

look "$1"
[ -z "$missing" ] || refuse " although they were just installed"
