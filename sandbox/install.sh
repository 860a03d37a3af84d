#!/bin/sh
# Installs the Debian packages that are missing: sandbox/install.sh python|rust|run|test|dist|tidb|bench
#   python  for creating a virtual environment
#   rust    for building the module for Envoy; the Rust toolchain must be installed already
#   run     for `make run`
#   test    for `make test`, in addition to `run`
#   tidb    for `make test-tidb`, in addition to `run`; the user installs PD, TiKV and TiDB
#   bench   for `make bench`, in addition to `run`
# For root, it installs the packages and starts no service. For other users, it prints the missing packages.
# It discards output in variables: in some containers only root can write to /dev/null.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
python="${PYTHON:-python3}"
rust="${RUST:-}" # The oldest sufficient version of Rust.

missing=""
need() { # need COMMAND PACKAGE
    path="$(command -v "$1")" || missing="$missing $2"
}

need_driver() { # need_driver PACKAGE COMMAND..., where COMMAND fails without PACKAGE
    package="$1"
    shift
    output="$("$@" 2>&1)" || missing="$missing $package"
}

# The packages to compile and run the clients of the driver tests. mysqlclient is C source and needs the headers of
# this Python. A Python that is not from Debian has them.
need_for_clients() {
    need mariadb_config libmariadb-dev
    need gcc "gcc libc6-dev"
    need pkg-config pkg-config
    need mvn maven
    need javac default-jdk-headless
    need node nodejs
    need npm npm
    need php php-cli
    need_driver php-mysql php -r 'exit(extension_loaded("mysqli") && extension_loaded("pdo_mysql") ? 0 : 1);'
    need_driver libdbd-mysql-perl perl -MDBD::mysql -e 1
    need_driver libdbd-mariadb-perl perl -MDBD::MariaDB -e 1
    need ruby ruby
    need_driver ruby-mysql2 ruby -rmysql2 -e ''
    headers="$("$python" -c '
import os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if sys.base_prefix == "/usr" and not os.path.exists(header):
    print(" python%d.%d-dev" % sys.version_info[:2])' 2>&1)" || headers=""
    missing="$missing$headers"
}

find_missing() {
    missing=""
    if [ "$1" = rust ]; then
        need cc "gcc libc6-dev"
        return
    fi
    output="$("$python" -c 'import ensurepip, venv' 2>&1)" || missing=" python3-venv"
    case "$1" in
    python) return ;;
    run | test | dist | tidb | bench) ;;
    *)
        echo "usage: $0 python|rust|run|test|dist|tidb|bench" >&2
        exit 2
        ;;
    esac
    need etcd etcd-server
    need mariadbd mariadb-server
    need mariadb mariadb-client
    need openssl openssl
    if [ "$1" = tidb ]; then
        need cc "gcc libc6-dev"
        need iptables iptables
        need ip iproute2
    elif [ "$1" != run ]; then
        need sysbench sysbench
        need haproxy haproxy
        need perf linux-perf
    fi
    if [ "$1" = dist ]; then
        need systemd-nspawn systemd-container
    fi
    if [ "$1" = test ] || [ "$1" = dist ]; then
        need dockerd docker.io
        need docker-compose docker-compose
        need debootstrap debootstrap
        need iptables iptables
        need ip iproute2
        need etcdctl etcd-client
        need prometheus prometheus
        need keepalived keepalived
        need curl curl
        need chromium "chromium fonts-dejavu-core"
        need_for_clients
    fi
}

fail_missing() {
    echo "Some Debian packages are missing$1; install them with: apt-get install --no-install-recommends$missing" >&2
    exit 1
}

# Rust and Go are only checked: Debian's are often too old, and users choose how to install newer versions.
is_at_least() { # is_at_least MINIMUM VERSION
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]
}

check_rust() {
    found=""
    if path="$(command -v cargo)"; then found="$(rustc --version 2>&1)" || found=""; fi
    found="$(echo "$found" | tail -n 1 | cut -d ' ' -f 2)"
    is_at_least "$rust" "$found" && return
    echo "make needs Rust $rust or newer to build the module for Envoy, but found ${found:-none}; install it," \
        "for example with rustup (installing a wheel of tidevoy needs no Rust)" >&2
    exit 1
}

# Only the tests of one driver need Go, so missing Go is no error. Go 1.21 and newer download Go 1.24.
check_go() {
    found="$(go version 2>&1)" || found=""
    found="$(echo "$found" | tail -n 1 | cut -d ' ' -f 3)"
    is_at_least 1.21 "${found#go}" && return
    echo "The tests with go-sql-driver need Go 1.24 or newer, but found ${found:-none}; they are skipped until it" \
        "is installed (see go.dev/doc/install)" >&2
}

if [ "${1:-}" = rust ]; then check_rust; fi
if [ "${1:-}" = test ]; then check_go; fi
find_missing "${1:-}"
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] || fail_missing " and only root can install them"
path="$(command -v apt-get)" || fail_missing " and there is no apt-get here"

# Packages start their services during installation unless policy-rc.d forbids it (invoke-rc.d(8)). An existing
# policy-rc.d is restored afterwards.
policy=/usr/sbin/policy-rc.d
mark="created by tidevoy while it installs packages"
restore() {
    if grep -qs "$mark" "$policy"; then rm -f "$policy"; fi
    if [ -e "$policy.before-tidevoy" ]; then mv -f "$policy.before-tidevoy" "$policy"; fi
}
trap restore EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
restore # Undo what a killed run has left behind.
if [ -e "$policy" ]; then mv "$policy" "$policy.before-tidevoy"; fi
printf '#!/bin/sh\n# %s\nexit 101\n' "$mark" >"$policy"
chmod 755 "$policy"

echo "Installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=300 update
# shellcheck disable=SC2086 # A list of words.
apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 install --no-install-recommends $missing

find_missing "$1"
[ -z "$missing" ] || fail_missing " although they were just installed"
