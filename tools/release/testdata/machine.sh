#!/bin/bash
# machine.sh ROOT CGROUP CMD...: becomes CMD, as process 1 of a machine that has the files in ROOT. The caller makes the
# namespaces: unshare --mount --propagation=private --uts --ipc --net --pid --fork. The cgroup (v2) is new.
#
# CMD may be systemd, so it gets nothing by which it could change this machine: /sys and /proc/sys are read-only, /dev
# has no disk, and process 1 has no capability for modules, the clock, reboots and the kernel's log.
set -euo pipefail
root=$1 cgroup=$2
shift 2
umask 022

mount --bind "$root" "$root" # pivot_root wants a mount point
cd "$root"
mount -t proc -o nosuid,nodev,noexec proc proc
for file in sys sysrq-trigger; do
  [ -e proc/$file ] || continue # a kernel may have no sysrq-trigger
  mount --bind proc/$file proc/$file
  mount -o remount,bind,ro proc/$file
done
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs sys
mount -t tmpfs -o mode=755,nosuid tmpfs dev
for file in null zero full random urandom tty; do
  : >dev/$file
  mount --bind /dev/$file dev/$file
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs dev/shm
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs run
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs tmp

# systemd moves processes between cgroups: those of a cgroup namespace, whose root is the new cgroup.
mount -t cgroup2 cgroup2 sys/fs/cgroup
mkdir "sys/fs/cgroup/$cgroup"
echo 0 >"sys/fs/cgroup/$cgroup/cgroup.procs" # 0: this process
umount sys/fs/cgroup
# shellcheck disable=SC2016 # expanded by the inner shell
exec unshare --cgroup bash -euc '
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  mkdir .outside
  pivot_root . .outside
  umount -l .outside
  rmdir .outside
  exec setpriv --bounding-set -sys_module,-sys_time,-sys_boot,-sys_rawio,-syslog \
    env -i container=tunnel-test HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"
' machine.sh "$@"
