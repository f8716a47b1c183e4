# shellcheck shell=bash
# What the scripts share. Sourced, never run: `. "$(dirname "$0")/lib.sh"`.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
peers=$target/peers
lab=$target/lab
qemu=qemu-system-x86_64
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
    # The brackets keep grep from finding itself.
    grep -alE 'containerd-shim-podviso[r]|podvisor-infr[a]|podvisor-cn[i]' /proc/[0-9]*/cmdline 2>/dev/null | while IFS=/ read -r _ _ pid _; do
      c=$(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline") || continue
      echo "process $pid $c"
    done
    find /run/netns -mindepth 1 -printf 'netns %p\n' 2>/dev/null || true
    awk '/podvisor/ || / - nsfs / { print "mount " $5 }' /proc/self/mountinfo
    ip -o link | awk -F': ' '{ print "link " $2 }'
    iptables-save 2>/dev/null | grep '^-A' | grep -vE '^-A [A-Z]+ .*-j CNI-(HOSTPORT|FORWARD|ADMIN)|^-A CNI-HOSTPORT-(SETMARK|MASQ) ' | sed 's/^/rule /' || true
    find /var/lib/cni -type f ! -name 'last_reserved_ip*' ! -name lock -printf 'lease %p\n' 2>/dev/null || true
    find /sys/fs/cgroup -mindepth 2 -type d -path '*podvisor*/*' -printf 'cgroup %p\n' 2>/dev/null || true
    find /run/podvisor /var/lib/podvisor -mindepth 2 ! \( -type d -empty \) ! -path '/run/podvisor/cni/ids*' ! -path /run/podvisor/cni/swept -printf 'state %p\n' 2>/dev/null || true
    find /run/containerd/s -type s -printf 'socket %p\n' 2>/dev/null || true
  } | sort
}

# Whether scripts/setup --lab has brought a kernel.
kernel_here() { [ -s "$lab/kernel/version" ] && [ -s "$lab/kernel/vmlinuz" ]; }

# A private apt for one suite of the archive this machine already uses, in the current directory, which the caller
# removes: the system's lists, cache and keys are not touched. Leaves its options in `private_options`.
private_apt() {
  local keys=/usr/share/keyrings/debian-archive-keyring.gpg signed=
  [ ! -s "$keys" ] || signed="[signed-by=$keys] "
  mkdir -p lists/partial cache/archives/partial
  echo "deb $signed$(debian_mirror) $1 main" >sources.list
  private_options=(-o "Dir::Etc::SourceList=$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache" -o APT::Sandbox::User=root
    -o Acquire::Languages=none)
  if ! apt-get "${private_options[@]}" update >update.log 2>&1; then
    tail -n 3 update.log >&2
    return 1
  fi
}

# The version of a package there; nothing when there is none.
private_version() {
  apt-cache "${private_options[@]}" madison "$1" | awk -F' *[|] *' 'NR == 1 { print $2 }'
}

# Fetches that version of a package and unpacks it into `unpacked`.
private_unpack() {
  apt-get "${private_options[@]}" download "$1=$2" >download.log 2>&1 || { tail -n 3 download.log >&2; return 1; }
  dpkg -x "$1"_*.deb unpacked
}

# matches TEXT PATTERNS: shell patterns, `|` between.
matches() {
  local pattern rest=$2
  while [ -n "$rest" ]; do
    pattern=${rest%%|*}
    # shellcheck disable=SC2254 # the patterns are patterns
    case $1 in $pattern) return 0 ;; esac
    case $rest in *'|'*) rest=${rest#*|} ;; *) rest= ;; esac
  done
  return 1
}

# The archive this machine already uses, from one-line or deb822 sources; nothing on Ubuntu and the like.
debian_mirror() {
  [ "$(. /etc/os-release && echo "$ID")" = debian ] || return 0
  {
    awk '$1 == "URIs:" { print $2 }' /etc/apt/sources.list.d/*.sources 2>/dev/null || true
    awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { print $i; break } }' \
      /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true
  } | awk '/debian\/?$/ && !/security/ { print; exit }'
}
