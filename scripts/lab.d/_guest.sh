# shellcheck shell=bash
# What the lab's scripts share, in the guest. Sourced by them: `. /lab/_guest.sh`.
set -u
. /lab/lib.sh
me=$(basename "$0")
failures=0

rootfs=/tmp/rootfs
config=/etc/podvisor/config.toml

# is WHAT WANTED GOT: one line for each thing looked at; the script goes on after a failure.
is() {
  if [ "$2" = "$3" ]; then echo "ok: $1"; return; fi
  echo "FAILED: $1: wanted '$2', got '$3'"
  failures=$((failures + 1))
}

# has WHAT PATTERN TEXT: the text has a line that matches (grep -E).
has() {
  if grep -qE -- "$2" <<<"$3"; then echo "ok: $1"; return; fi
  echo "FAILED: $1: no '$2' in:"
  head -n 30 <<<"$3"
  failures=$((failures + 1))
}

# ok WHAT COMMAND...: it exits 0.
ok() {
  local what=$1 code=0
  shift
  "$@" || code=$?
  is "$what" 0 "$code"
}

# soon COMMAND...: succeeds within a minute. What ends by itself may need a moment.
soon() {
  local end=$((SECONDS + 60))
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.3
  done
}

# A bridge network as the first one configured, and a root file system of busybox alone.
prepare() {
  local name
  mkdir -p /etc/cni/net.d "$(dirname "$config")" "$rootfs"/{bin,dev,etc,proc,sys,tmp,www}
  cp /bin/busybox "$rootfs/bin/"
  for name in sh sleep echo cat httpd wget id ls true hostname ip dd; do ln -sf busybox "$rootfs/bin/$name"; done
  echo 'root:x:0:0:root:/:/bin/sh' >"$rootfs/etc/passwd"
  echo 'hello from a pod' >"$rootfs/www/index.html"
  cat >/etc/cni/net.d/10-lab.conflist <<-JSON
	{
	  "cniVersion": "0.4.0", "name": "lab",
	  "plugins": [
	    { "type": "bridge", "bridge": "lab0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
	      "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.88.7.0/24" }]], "routes": [{ "dst": "0.0.0.0/0" }] } },
	    { "type": "portmap", "capabilities": { "portMappings": true }, "snat": true }
	  ]
	}
	JSON
}

# The bridge plugin keeps its bridge, so that is made first: the listings are the same then.
remember_residue() {
  ip link add lab0 type bridge
  residue_list >/tmp/residue.before
}

nothing_left() {
  # shellcheck disable=SC2317 # called by name
  same() { residue_list >/tmp/residue.after && diff /tmp/residue.before /tmp/residue.after; }
  soon same
  is "$1" "" "$(diff /tmp/residue.before /tmp/residue.after)"
}

finish() {
  [ "$failures" = 0 ] || { echo "$me: $failures failed"; exit 1; }
  echo "$me: all as it should be"
  exit 0
}
