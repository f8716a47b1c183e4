# shellcheck shell=bash
# What the scripts share. Sourced, never run: `. "$(dirname "$0")/lib.sh"`.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
peers=$target/peers
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

me=$(basename "$0")
say() { printf '%s: %s\n' "$me" "$*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# A missing optional thing ends a CI run and is only told to a person.
skip_or_die() {
  if [ -n "${CI:-}" ]; then die "$*"; fi
  say "skipped: $*"
}

need_root() { [ "$(id -u)" = 0 ] || die "has to run as root: try 'sudo -E $0'"; }

# The directory that holds the reference CNI plugins, empty where there is none.
cni_plugins() {
  local d
  for d in /usr/lib/cni /usr/libexec/cni /opt/cni/bin; do
    if [ -x "$d/bridge" ] && [ -x "$d/host-local" ] && [ -x "$d/portmap" ]; then echo "$d"; return; fi
  done
}

# Everything a pod may leave on a machine, one line each, sorted; compare two listings with diff.
# Bridges and the portmap plugin's fixed chains belong to the plugins and outlive pods by their design. A directory that
# is not there, and a grep that finds nothing, are no failures: a caller under `set -e` must get the whole list.
residue_list() {
  {
    for p in /proc/[0-9]*; do
      c=$(tr '\0' ' ' <"$p/cmdline" 2>/dev/null) || continue
      case $c in *containerd-shim-podvisor*|*podvisor-infra*) echo "process ${p#/proc/} $c" ;; esac
    done
    find /run/netns -mindepth 1 -printf 'netns %p\n' 2>/dev/null || true
    awk '/podvisor/ || / - nsfs / { print "mount " $5 }' /proc/self/mountinfo
    ip -o link | awk -F': ' '{ print "link " $2 }'
    iptables-save 2>/dev/null | grep '^-A' | grep -vE '^-A [A-Z]+ .*-j CNI-(HOSTPORT|FORWARD|ADMIN)|^-A CNI-HOSTPORT-(SETMARK|MASQ) ' | sed 's/^/rule /' || true
    find /var/lib/cni -type f ! -name 'last_reserved_ip*' ! -name lock -printf 'lease %p\n' 2>/dev/null || true
    find /sys/fs/cgroup -mindepth 2 -type d -path '*podvisor*/*' -printf 'cgroup %p\n' 2>/dev/null || true
    find /run/podvisor /var/lib/podvisor -mindepth 2 ! \( -type d -empty \) -printf 'state %p\n' 2>/dev/null || true
    find /run/containerd/s -type s -printf 'socket %p\n' 2>/dev/null || true
  } | sort
}
