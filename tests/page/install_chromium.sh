#!/usr/bin/env bash
# Install Debian's Chromium unless there is one, for tests/page. Needs root. "bin/setup --page-tests" runs it.
set -euo pipefail
exec 9>"${TMPDIR:-/tmp}/physarum-chromium.lock"
flock -w 600 9
! command -v chromium >/dev/null || exit 0
if ! command -v apt-get >/dev/null; then
    echo "install_chromium: there is no apt-get here; install a Chromium that is called chromium" >&2
    exit 1
fi
if [[ $(id -u) != 0 ]]; then
    echo "install_chromium: needs root: sudo apt-get install chromium" >&2
    exit 1
fi
echo "install_chromium: installing Debian's chromium, about 130 MB" >&2
export DEBIAN_FRONTEND=noninteractive
get=(apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300)
"${get[@]}" update >/dev/null
"${get[@]}" install --no-install-recommends chromium >/dev/null
chromium --version >&2
