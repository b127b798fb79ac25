#!/usr/bin/env bash
# The servers that some tests run against (Prometheus, etcd), and Chromium, from Debian's packages, unpacked under
# FOLDER: nothing is installed, nothing is started, no root is needed. What cannot be had is named, and its tests are skipped.
set -u
folder=${1:?usage: tests/servers.sh FOLDER}
declare -A package=([prometheus]=prometheus [promtool]=prometheus [etcd]=etcd-server [etcdctl]=etcd-client)
export PATH="$PATH:$folder/usr/bin"
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
mkdir -p "$folder"
cd "$folder" || exit 0
# The browser wants libraries that most machines without a screen do not have: all that apt would install beside it.
if ! command -v chromium >/dev/null && [ ! -x usr/lib/chromium/chromium ] && command -v apt-get >/dev/null; then
  wanted=$(apt-get -s install --no-install-recommends chromium 2>/dev/null | sed -n 's/^Inst \([^ ]*\).*/\1/p')
  if [ -n "$wanted" ] && mkdir -p debs && (cd debs && timeout 300 apt-get download -qq $wanted >/dev/null 2>&1) \
    && for file in debs/*.deb; do dpkg -x "$file" .; done; then
    echo "unpacked chromium and its libraries under $folder"
  else
    echo "no chromium (apt-get download does not work here): the dashboard's test is skipped"
  fi
  rm -rf debs
fi
[ ${#missing[@]} -gt 0 ] || exit 0
for name in $(printf '%s\n' "${missing[@]}" | sort -u); do
  if command -v apt-get >/dev/null && timeout 120 apt-get download -qq "$name" >/dev/null 2>&1 \
    && dpkg -x "$name"_*.deb . && rm -f "$name"_*.deb; then
    echo "unpacked $name under $folder"
  else
    echo "no $name (apt-get download $name does not work here): tests that need it are skipped"
  fi
done
exit 0
