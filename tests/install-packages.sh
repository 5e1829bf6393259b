#!/bin/sh
# What the tests use beyond Python: network namespaces and packet filters, from Debian; Azure's emulator, from npm. Without
# root, apt or npm, the tests that need them are skipped with the reason.
set -eu
if [ -d .venv/bin ] && [ ! -e .venv/bin/azurite-blob ]; then
    if command -v npm >/dev/null 2>&1 &&
        timeout 180 npm install --silent --no-audit --no-fund --prefix .venv/azurite azurite@3 >/dev/null 2>&1; then
        ln -s ../azurite/node_modules/.bin/azurite-blob .venv/bin/azurite-blob
    else
        echo "not installed (needs npm): azurite" >&2
    fi
fi
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
