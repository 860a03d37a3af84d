#!/bin/sh
# Installs the Debian packages that are missing: sandbox/install.sh python|run|test|bench
#   python  what makes a virtual environment
#   run     what `make run` starts
#   test    what `make test` needs beside that
#   bench   what `make bench` needs beside `run`
# As root it installs them, without starting a service; else it says in one sentence what to install.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
python="${PYTHON:-python3}"

missing=""
need() { # need COMMAND PACKAGE
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}

look() {
    missing=""
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing=" python3-venv"
    case "$1" in
    python) return ;;
    run | test | bench) ;;
    *)
        echo "usage: $0 python|run|test|bench" >&2
        exit 2
        ;;
    esac
    need etcd etcd-server
    need mariadbd mariadb-server
    need mariadb mariadb-client
    if [ "$1" != run ]; then
        need sysbench sysbench
    fi
    if [ "$1" = test ]; then
        need dockerd docker.io
        need docker-compose docker-compose
        need debootstrap debootstrap
        need iptables iptables
        need ip iproute2
        need openssl openssl
        need etcdctl etcd-client
    fi
}

refuse() {
    echo "Some Debian packages are missing$1; install them with: apt-get install --no-install-recommends$missing" >&2
    exit 1
}

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
