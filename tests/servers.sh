#!/usr/bin/env bash
# The servers that some tests run against (Prometheus, etcd, Slurm), and Chromium, from Debian's packages, unpacked under
# FOLDER: nothing is installed, nothing is started, no root is needed. What cannot be had is named, and its tests are skipped.
set -u
folder=${1:?usage: tests/servers.sh FOLDER}
mkdir -p "$folder"
cd "$folder" || exit 0
export PATH="$PATH:/usr/sbin:$PWD/usr/bin:$PWD/usr/sbin"

# unpack_all WHAT PACKAGE...: these and all that apt would install beside them, such as libraries that few machines have.
unpack_all() {
  local what=$1 wanted
  shift
  wanted=$(apt-get -s install --no-install-recommends "$@" 2>/dev/null | sed -n 's/^Inst \([^ ]*\).*/\1/p')
  if [ -n "$wanted" ] && mkdir -p debs && (cd debs && timeout 300 apt-get download -qq $wanted >/dev/null 2>&1) \
    && for file in debs/*.deb; do dpkg -x "$file" .; done; then
    echo "unpacked $what and its libraries under $folder"
  else
    echo "no $what (apt-get download does not work here): its tests are skipped"
  fi
  rm -rf debs
}

command -v chromium >/dev/null || [ -x usr/lib/chromium/chromium ] || unpack_all chromium chromium
if ! command -v slurmctld >/dev/null; then
  unpack_all Slurm munge slurm-client slurmd slurmctld
  for name in slurmctld slurmd slurmstepd; do # Debian installs links of these names
    [ ! -x "usr/sbin/$name-wlm" ] || ln -sf "$name-wlm" "usr/sbin/$name"
  done
fi

declare -A package=([prometheus]=prometheus [promtool]=prometheus [etcd]=etcd-server [etcdctl]=etcd-client)
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
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
