# Pid 1 of a test's sandbox: makes the directories private, starts the test, reaps whatever is orphaned meanwhile.
set -eu
# Propagation is private already (unshare does that). This comes first, and with -n: mount would note it in the machine's /run.
mount -n -t tmpfs -o mode=0755 upper /run
ip link set lo up
echo sandbox >/proc/sys/kernel/hostname

# Directories that may not exist can be mounted over without being made on the machine: overlays first. Their upper
# layer lies in the tmpfs over /run, which the next one hides.
for name in resolv.conf hosts hostname; do cat "/etc/$name" >"/run/$name" 2>/dev/null || true; done
for dir in etc opt var/lib; do
    [ -d "/$dir" ] || continue
    mkdir -p "/run/upper/$dir" "/run/work/$dir"
    mount -t overlay overlay -o "lowerdir=/$dir,upperdir=/run/upper/$dir,workdir=/run/work/$dir" "/$dir" ||
        echo "sandbox: no overlay over /$dir: missing directories are made on the machine"
done
for name in resolv.conf hosts hostname; do [ ! -s "/run/$name" ] || cat "/run/$name" >"/etc/$name" || true; done
mkdir -p /run/plugins
[ -x /usr/lib/cni/bridge ] || cp -r /opt/cni/bin/. /run/plugins/ 2>/dev/null || true
for dir in /var/lib/cni /var/lib/podvisor /var/lib/containerd /etc/cni/net.d /etc/podvisor /opt/cni; do
    mkdir -p "$dir"
    mount -t tmpfs -o mode=0755 tmpfs "$dir"
done
mkdir -p /opt/cni/bin
cp -r /run/plugins/. /opt/cni/bin/
mount -t tmpfs -o mode=0755 run /run
mkdir -p /run/lock /run/netns

# The subtree of this test becomes all of /sys/fs/cgroup. The v2 half of a hybrid layout goes: an old crun refuses it.
awk '{ for (i = 7; i <= NF; i++) if ($i == "-" && ($(i+1) == "cgroup" || $(i+1) == "cgroup2")) print $5, $(i+1), $(i+3) }' /proc/self/mountinfo |
    while read -r dir kind options; do
        if [ "$kind" = cgroup2 ] && [ "$dir" != /sys/fs/cgroup ]; then
            [ -z "${SANDBOX_KEEP_UNIFIED:-}" ] || continue
            umount "$dir"
        elif [ "$SANDBOX_CGROUPS" = private ]; then
            options=$(echo "$options" | tr ',' '\n' | grep -vxE 'rw|ro|nsdelegate|memory_recursiveprot' | paste -sd, || true)
            umount "$dir"
            mount -t "$kind" ${options:+-o "$options"} cgroup "$dir"
            [ "$kind" != cgroup2 ] || for c in $(cat "$dir/cgroup.controllers"); do
                echo "+$c" >"$dir/cgroup.subtree_control" 2>/dev/null || true
            done
        fi
    done

"$@" &
test=$!
trap 'kill -TERM "$test" 2>/dev/null' TERM INT
set +e
wait "$test"
exit $?
