#!/usr/bin/env bash
# The servers that some tests run against (Prometheus, etcd), from Debian's packages, unpacked under FOLDER: nothing
# is installed, nothing is started, no root is needed. What cannot be had is named, and its tests are skipped.
set -u
folder=${1:?usage: tests/servers.sh FOLDER}
declare -A package=([prometheus]=prometheus [promtool]=prometheus [etcd]=etcd-server [etcdctl]=etcd-client)
export PATH="$PATH:$folder/usr/bin"
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
mkdir -p "$folder"
cd "$folder" || exit 0
for name in $(printf '%s\n' "${missing[@]}" | sort -u); do
  if command -v apt-get >/dev/null && timeout 120 apt-get download -qq "$name" >/dev/null 2>&1 \
    && dpkg -x "$name"_*.deb . && rm -f "$name"_*.deb; then
    echo "unpacked $name under $folder"
  else
    echo "no $name (apt-get download $name does not work here): tests that need it are skipped"
  fi
done
exit 0
