# Gives the test a cgroup subtree of its own, then namespaces; what follows the argument becomes pid 1's command.
# $1: name of the subtree. Whether it could be made is handed on in SANDBOX_CGROUPS (private or shared).
set -eu
group=$1
shift
mounts() { awk '{ for (i = 7; i <= NF; i++) if ($i == "-" && ($(i+1) == "cgroup" || $(i+1) == "cgroup2")) print $5, $(i+1) }' /proc/self/mountinfo; }

export SANDBOX_CGROUPS=private
while read -r dir kind; do
    if ! mkdir "$dir/$group" 2>/dev/null; then
        echo "sandbox: no cgroup of its own below $dir: cgroups are the machine's"
        SANDBOX_CGROUPS=shared
        continue
    fi
    # A new v1 cpuset has no cpus; a new v2 group has only the controllers its parent hands down (under systemd it does;
    # the v2 half of a hybrid layout is not used, so it stays as it is).
    for file in cpuset.cpus cpuset.mems; do
        [ "$kind" = cgroup2 ] || [ ! -e "$dir/$file" ] || cat "$dir/$file" >"$dir/$group/$file"
    done
    [ "$kind" = cgroup ] || mkdir "$dir/$group/init"
    if [ "$dir" = /sys/fs/cgroup ]; then
        for c in $(cat "$dir/cgroup.controllers"); do echo "+$c" >"$dir/cgroup.subtree_control" 2>/dev/null || true; done
    fi
    echo $$ >"$dir/$group/cgroup.procs"
done <<<"$(mounts)"

# The namespace's root is where we are now; in v2 the process then moves into a leaf, so that the root can hand down controllers.
leave='for d in $1; do echo $$ >"$d/init/cgroup.procs"; done; shift; exec "$@"'
leaves=$(mounts | awk -v g="$group" '$2 == "cgroup2" { print $1 "/" g }')
[ "$SANDBOX_CGROUPS" = private ] || leaves=
namespaces=(--mount --net --pid --ipc --uts --fork --kill-child=KILL --mount-proc)
if [ "$SANDBOX_CGROUPS" = private ]; then
    exec unshare --cgroup bash -euc "$leave" outer "$leaves" unshare "${namespaces[@]}" "$@"
fi
exec unshare "${namespaces[@]}" "$@"
