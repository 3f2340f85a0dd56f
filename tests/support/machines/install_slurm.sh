#!/usr/bin/env bash
# Download Debian's Slurm and unpack it into .slurm at the root of the checkout, for tests/nodes. Installs nothing into
# the system, and needs no root. "just nodes" runs it.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")")
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15 liblua5.1-0)
[[ ! -x $root/.slurm/usr/bin/srun ]] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "install_slurm: there is no apt-get here; the tests need Debian's packages: ${packages[*]}" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq "${packages[@]}")
for package in "$work"/*.deb; do
    dpkg-deb --extract "$package" "$work/tree"
done
missing=$(LD_LIBRARY_PATH=$(echo "$work"/tree/usr/lib/*-linux-gnu{,/slurm-wlm} | tr ' ' ':') \
    ldd "$work"/tree/usr/sbin/slurm{ctld,d,stepd}-wlm "$work/tree/usr/bin/srun" | grep 'not found' | sort -u || true)
if [[ $missing ]]; then
    printf 'install_slurm: libraries are missing here:\n%s\n' "$missing" >&2
    exit 1
fi
rm -rf "$root/.slurm"
mv "$work/tree" "$root/.slurm"
