#!/bin/sh
# Debian packages the tests use beyond Python: network namespaces and packet filters. Without root or apt, the tests
# that need them are skipped with the reason.
set -eu
missing=""
command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
command -v iptables >/dev/null 2>&1 || missing="$missing iptables"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed (needs root and apt):$missing" >&2
    exit 0
fi
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
