package cni

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// node is a folder of reservations with the configuration that names it.
type node struct {
	t    testing.TB
	conf *Conf
}

func newNode(t testing.TB, subnets ...string) *node {
	t.Helper()
	conf := &Conf{DataDir: filepath.Join(t.TempDir(), "data"), Bridge: "br-none"}
	conf.Name = "test-" + filepath.Base(filepath.Dir(conf.DataDir))
	for _, subnet := range subnets {
		conf.Subnets = append(conf.Subnets, netip.MustParsePrefix(subnet))
	}
	if err := conf.validate(); err != nil {
		t.Fatal(err)
	}
	return &node{t, conf}
}

// live is the reservation of a container whose namespace is this process's.
func (n *node) live(container, pod string) Reservation {
	n.t.Helper()
	inode, err := namespaceAt("/proc/self/ns/net")
	if err != nil {
		n.t.Fatal(err)
	}
	r := Reservation{
		Network: n.conf.Name, ContainerID: container, IfName: "eth0", BootID: bootID(), Reserved: time.Now().UTC(),
		NetNS: fmt.Sprintf("/proc/%d/ns/net", os.Getpid()), NetNSInode: inode,
	}
	if pod != "" {
		r.Pod = Pod{"shop", pod, "uid"}
	}
	return r
}

// gone is the reservation of a container whose namespace has ended.
func (n *node) gone(container, pod string) Reservation {
	r := n.live(container, pod)
	r.NetNS = filepath.Join(n.conf.DataDir, "no-such-namespace")
	return r
}

// add reserves addresses, and returns them as text.
func (n *node) add(r Reservation) string {
	n.t.Helper()
	addrs, _, err := reserve(n.conf, r)
	if err != nil {
		n.t.Fatalf("reserving for %s: %v", r.ContainerID, err)
	}
	return join(addrs)
}

func (n *node) del(container string) {
	n.t.Helper()
	if err := free(n.conf, attachment{n.conf.Name, container, "eth0"}); err != nil {
		n.t.Fatalf("freeing %s: %v", container, err)
	}
}

// inUse returns who has which address, from the files as they are.
func (n *node) inUse() map[string]string {
	n.t.Helper()
	s, err := openStore(n.conf.DataDir)
	if err != nil {
		n.t.Fatal(err)
	}
	defer s.close()
	all := make(map[string]string)
	for addr, r := range s.known {
		if !r.remembered() {
			all[addr.String()] = r.ContainerID
		}
	}
	return all
}

func (n *node) file(addr string) string { return filepath.Join(n.conf.DataDir, addr) }

func join(addrs []netip.Addr) string {
	texts := make([]string, len(addrs))
	for i, addr := range addrs {
		texts[i] = addr.String()
	}
	return strings.Join(texts, ",")
}

// want compares addresses.
func want(t testing.TB, why, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %s, want %s", why, got, want)
	}
}

func TestSticky(t *testing.T) {
	for subnets, first := range map[string]string{
		"10.88.1.0/24":                "10.88.1.2",
		"fd00:88:1::/64":              "fd00:88:1::2",
		"10.88.1.0/24,fd00:88:1::/64": "10.88.1.2,fd00:88:1::2",
	} {
		t.Run(subnets, func(t *testing.T) {
			n := newNode(t, strings.Split(subnets, ",")...)
			web := n.add(n.live("c1", "web-0"))
			want(t, "the first pod", web, first)
			db := n.add(n.live("c2", "db-0"))
			if web == db {
				t.Errorf("two pods have %s", web)
			}
			want(t, "the same container again", n.add(n.live("c1", "web-0")), web)
			n.del("c1")
			n.del("c1") // DEL may come twice
			n.del("c2")
			n.add(n.live("c3", "job-0")) // a new pod takes neither
			want(t, "db-0, made again", n.add(n.live("c4", "db-0")), db)
			want(t, "web-0, made again", n.add(n.live("c5", "web-0")), web)
		})
	}
}

// A machine that reboots calls DEL for nobody. The namespaces are gone and the boot has another id.
func TestReboot(t *testing.T) {
	n := newNode(t, "10.88.1.0/24", "fd00:88:1::/64")
	before := make(map[string]string)
	for i := range 20 {
		pod := fmt.Sprintf("pod-%d", i)
		before[pod] = n.add(n.live("old-"+pod, pod))
	}
	reboot(t, n)
	n.add(n.live("new-job", "job-0")) // the first pod after the boot is a new one
	for i := 19; i >= 0; i-- {
		pod := fmt.Sprintf("pod-%d", i)
		want(t, pod+" after the reboot", n.add(n.live("new-"+pod, pod)), before[pod])
	}
	if got := len(n.inUse()); got != 2*21 {
		t.Errorf("%d addresses are in use after the reboot, want 42", got)
	}
}

// The edge starts after a reboot, before the runtime calls the plugin: addresses of the earlier boot are free, and
// remembered. A pod of this boot keeps its address, though its link is not there yet.
func TestReleaseOtherBoots(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	if err := ReleaseOtherBoots(n.conf.DataDir); err != nil {
		t.Errorf("without a folder: %v", err)
	}
	before := n.add(n.live("c1", "web-0"))
	reboot(t, n)
	s, err := openStore(n.conf.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	now := n.gone("c2", "db-0")
	now.Address = netip.MustParseAddr("10.88.1.9")
	if err := s.put(now); err != nil {
		t.Fatal(err)
	}
	s.close()
	if err := ReleaseOtherBoots(n.conf.DataDir); err != nil {
		t.Error(err)
	}
	if used := n.inUse(); len(used) != 1 || used["10.88.1.9"] != "c2" {
		t.Errorf("in use after the edge has started: %v, want the address of this boot alone", used)
	}
	want(t, "web-0, made again", n.add(n.live("c3", "web-0")), before)
}

// A plugin that is stuck with the lock does not keep the edge from starting.
func TestReleaseOtherBootsLocked(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	stuck, err := openStore(n.conf.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	released := make(chan error, 1) // capacity 1: the test may have failed
	go func() { released <- ReleaseOtherBoots(n.conf.DataDir) }()
	select {
	case err = <-released:
		if !errors.Is(err, unix.EWOULDBLOCK) {
			t.Errorf("with the lock held: %v", err)
		}
		stuck.close()
	case <-time.After(20 * time.Second):
		t.Error("it waits for the lock")
		stuck.close()
		<-released
	}
}

// A node without a battery for its clock boots in 1970, until a time server answers. What the boot released is
// newer than everything before, though the clock says otherwise.
func TestClockBehind(t *testing.T) {
	n := newNode(t, "fd00:88:1::/64")
	fillMemory(t, n, time.Now().Unix()-maxRemembered)
	before := n.add(n.live("old-web", "web-0"))
	reboot(t, n)
	late := func(container, pod string) Reservation {
		r := n.live(container, pod)
		r.Reserved = at(20) // 20 seconds after the boot
		return r
	}
	job := n.add(late("new-job", "job-0"))
	want(t, "web-0 after the reboot", n.add(late("new-web", "web-0")), before)
	if job == before {
		t.Errorf("job-0 gets %s, the address of web-0", job)
	}
}

// The pool is full of remembered addresses, and the clock is behind: a new pod gets the address that was released
// first, not one of the pods that ran until the reboot.
func TestClockBehindFullPool(t *testing.T) {
	n := newNode(t, "10.88.1.0/29") // five addresses
	for i := range 5 {
		n.add(n.live(fmt.Sprintf("c%d", i), fmt.Sprintf("pod-%d", i)))
	}
	n.del("c3")
	reboot(t, n)
	r := n.live("new-job", "job-0")
	r.Reserved = at(20)
	want(t, "a new pod", n.add(r), "10.88.1.5")
}

// A pod whose runtime lost track of two containers gets the address of the later one.
func TestLaterOfTwo(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	n.add(n.live("c0", "job-0"))
	n.add(n.live("c1", "web-0"))
	n.del("c0")
	later := n.add(n.live("c2", "web-0"))
	if later == "10.88.1.3" {
		t.Fatal("both containers have one address")
	}
	reboot(t, n)
	r := n.live("c3", "web-0")
	r.Reserved = at(20)
	want(t, "web-0 after the reboot", n.add(r), later)
}

// reboot has every file say that it was written in another boot.
func reboot(t *testing.T, n *node) {
	t.Helper()
	s, err := openStore(n.conf.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	for _, r := range s.known {
		old := *r
		old.BootID = "another boot"
		if err := s.put(old); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFullPool(t *testing.T) {
	n := newNode(t, "10.88.1.0/29", "fd00:88:1::/64") // five addresses for pods
	for i := range 5 {
		n.add(n.live(fmt.Sprintf("c%d", i), fmt.Sprintf("pod-%d", i)))
	}
	_, _, err := reserve(n.conf, n.live("c5", "pod-5"))
	e, ok := errors.AsType[*types.Error](err)
	if !ok || e.Code != types.ErrTryAgainLater || !strings.Contains(e.Msg, "10.88.1.0/29") ||
		!strings.Contains(e.Details, "5 addresses are in use") {
		t.Fatalf("a full pool says %v, %+v", err, e)
	}
	for addr, container := range n.inUse() {
		if container == "c5" {
			t.Errorf("the ADD that failed keeps %s", addr)
		}
	}
	n.del("c3")
	want(t, "after a DEL", n.add(n.live("c5", "pod-5")), "10.88.1.5,fd00:88:1::7")
}

// The address that was released first is given away first, and only when no other is free.
func TestOldestIsReused(t *testing.T) {
	n := newNode(t, "10.88.1.0/29")
	for i := range 5 {
		n.add(n.live(fmt.Sprintf("c%d", i), fmt.Sprintf("pod-%d", i)))
	}
	for _, i := range []int{2, 0, 1} {
		n.del(fmt.Sprintf("c%d", i))
	}
	want(t, "the next pod", n.add(n.live("c5", "pod-5")), "10.88.1.4")
	want(t, "pod-0, whose address was kept", n.add(n.live("c6", "pod-0")), "10.88.1.2")
	want(t, "pod-2, whose address was given away", n.add(n.live("c7", "pod-2")), "10.88.1.3")
}

func TestHeal(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	dead := n.add(n.gone("dead", "web-0"))
	alive := n.add(n.live("alive", "db-0"))
	if _, there := n.inUse()[dead]; there {
		t.Errorf("%s is in use though its namespace is gone and an ADD came after", dead)
	}
	want(t, "the pod of the dead container", n.add(n.live("c3", "web-0")), dead)
	if n.inUse()[alive] != "alive" {
		t.Errorf("%s was taken from a container that lives", alive)
	}
}

// A path that leads to another namespace than before says nothing about the container.
func TestPathOfAnother(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	r := n.live("c1", "web-0")
	r.NetNSInode++
	addr := n.add(r)
	n.add(n.live("c2", "db-0"))
	if _, there := n.inUse()[addr]; there {
		t.Errorf("%s is in use by a namespace that ended; its path belongs to another", addr)
	}
}

// A file where a namespace was bound stays when the mount is gone.
func TestPathOfNoNamespace(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	r := n.live("c1", "web-0")
	r.NetNS = filepath.Join(t.TempDir(), "cni-1")
	if err := os.WriteFile(r.NetNS, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	addr := n.add(r)
	n.add(n.live("c2", "db-0"))
	if _, there := n.inUse()[addr]; there {
		t.Errorf("%s is in use, but an empty file is no namespace", addr)
	}
}

// Whatever is in the folder, ADD gives an address that is free, and removes what it cannot use.
func TestDamagedFiles(t *testing.T) {
	for name, content := range map[string]string{
		"zero length":         "",
		"zeros":               "\x00\x00\x00\x00",
		"truncated":           `{"address":"10.88.1.2","network":"x","contai`,
		"another's address":   `{"address":"10.88.1.9","network":"x","containerID":"c0","ifname":"eth0"}`,
		"no container":        `{"address":"10.88.1.2"}`,
		"not of this version": `[1, 2, 3]`,
		"binary":              "\x7fELF\xff\xfe",
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, "10.88.1.0/30", "fd00:88:7::/126") // one and two addresses for pods
			if err := os.MkdirAll(n.conf.DataDir, 0o755); err != nil {
				t.Fatal(err)
			}
			for _, addr := range []string{"10.88.1.2", "fd00:88:7::2", "fd00:88:7::3"} {
				if err := os.WriteFile(n.file(addr), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want(t, "the first pod", n.add(n.live("c1", "web-0")), "10.88.1.2,fd00:88:7::2")
			if _, err := os.Stat(n.file("fd00:88:7::3")); !os.IsNotExist(err) {
				t.Errorf("the file of the other free address is still there: %v", err)
			}
		})
	}
}

// If the links cannot be listed, a damaged file may belong to a running pod: the file stays, and nobody gets an
// address that the pod may have.
func TestLinksUnknown(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	addr := n.add(n.live("c1", "web-0"))
	if err := os.Truncate(n.file(addr), 0); err != nil {
		t.Fatal(err)
	}
	s, err := openStore(n.conf.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if err = s.repairBy(nil, errors.New("no buffer space"), bootID(), time.Now()); err == nil {
		t.Error("a repair without the links reports nothing")
	}
	if _, err = os.Stat(n.file(addr)); err != nil {
		t.Errorf("the damaged file is gone: %v", err)
	}
	e, ok := errors.AsType[*types.Error](s.checkSure())
	if !ok || e.Code != types.ErrTryAgainLater || e.Details != "no buffer space" {
		t.Errorf("an ADD meanwhile says %v", e)
	}
	links := map[attachment][]netip.Addr{{n.conf.Name, "c1", "eth0"}: {netip.MustParseAddr(addr)}}
	if err = s.repairBy(links, nil, bootID(), time.Now()); err != nil || s.checkSure() != nil {
		t.Errorf("with the links again: %v, %v", err, s.checkSure())
	}
}

// An ADD fails. Meanwhile DEL has freed its addresses, and one belongs to another pod now.
func TestUndoAsksWhose(t *testing.T) {
	n := newNode(t, "10.88.1.0/24", "fd00:88:1::/64")
	addrs, fresh, err := reserve(n.conf, n.live("c1", "web-0"))
	if err != nil {
		t.Fatal(err)
	}
	n.del("c1")
	want(t, "the same pod, made again", n.add(n.live("c2", "web-0")), join(addrs))
	failed := n.live("c1", "web-0")
	if err := undo(n.conf, failed.attachment(), fresh); err != nil {
		t.Error(err)
	}
	for addr := range strings.SplitSeq(join(addrs), ",") {
		if owner := n.inUse()[addr]; owner != "c2" {
			t.Errorf("after the other ADD has failed, %s belongs to %q, want c2", addr, owner)
		}
	}
}

// Files that are not ours stay, and disturb nobody. A file that cannot be read may be a reservation.
func TestForeignFiles(t *testing.T) {
	n := newNode(t, "10.88.1.0/29")
	for _, dir := range []string{"lost+found", "10.88.1.2"} { // reading a folder fails, as reading a bad sector does
		if err := os.MkdirAll(n.file(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	foreign := []string{"README", "10.88.1.3.bak", "010.088.001.003", "lock", "last_reserved_ip.0", "fd00:0::3"}
	for _, file := range foreign {
		if err := os.WriteFile(n.file(file), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// What a process leaves that was killed before its rename.
	if err := os.WriteFile(n.file(aside), []byte(`{"address":"10.88.1.4","conta`), 0o600); err != nil {
		t.Fatal(err)
	}
	want(t, "the first pod", n.add(n.live("c1", "web-0")), "10.88.1.3")
	want(t, "the second pod", n.add(n.live("c2", "db-0")), "10.88.1.4")
	for _, file := range foreign {
		if _, err := os.Stat(n.file(file)); err != nil {
			t.Errorf("a foreign file is gone: %v", err)
		}
	}
	if _, err := os.Stat(n.file(aside)); !os.IsNotExist(err) {
		t.Errorf("the file of the killed process is still there: %v", err)
	}
}

func TestParallelAdds(t *testing.T) {
	n := newNode(t, "10.88.1.0/24", "fd00:88:1::/64")
	var wg sync.WaitGroup
	got := make([]string, 100)
	errs := make([]error, len(got))
	for i := range got {
		wg.Go(func() {
			var addrs []netip.Addr
			addrs, _, errs[i] = reserve(n.conf, n.live(fmt.Sprintf("c%d", i), fmt.Sprintf("pod-%d", i)))
			got[i] = join(addrs)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	if distinct := slices.Compact(got); len(distinct) != 100 {
		t.Errorf("100 ADDs at once gave %d pairs of addresses", len(distinct))
	}
	if all := n.inUse(); len(all) != 200 {
		t.Errorf("%d addresses are in use, want 200", len(all))
	}
}

func TestMemoryIsBounded(t *testing.T) {
	n := newNode(t, "fd00:88:1::/64")
	addr := fillMemory(t, n, 0)
	n.add(n.live("c1", "web-0"))
	entries, err := os.ReadDir(n.conf.DataDir)
	if err != nil || len(entries) != maxRemembered+1 {
		t.Errorf("%d files are left, %v, want %d remembered and one in use", len(entries), err, maxRemembered)
	}
	want(t, "the pod that was released last", n.add(n.live("c2", fmt.Sprintf("pod-%d", maxRemembered+9))), addr.String())
}

// fillMemory releases addresses, one second after the other: ten more than the folder remembers. It returns the
// address that was released last.
func fillMemory(t *testing.T, n *node, first int64) netip.Addr {
	t.Helper()
	s, err := openStore(n.conf.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	addr := gatewayOf(n.conf.Subnets[0])
	for i := range maxRemembered + 10 {
		addr = addr.Next()
		r := n.live("c", fmt.Sprintf("pod-%d", i))
		r.Address, r.Reserved, r.Released = addr, at(first), at(first+int64(i))
		if err := s.put(r); err != nil {
			t.Fatal(err)
		}
	}
	return addr
}

// Two networks may share a folder. They never share an address, and do not forget each other's pods.
func TestTwoNetworks(t *testing.T) {
	a, b := newNode(t, "10.88.1.0/24"), newNode(t, "10.88.1.0/24")
	b.conf.DataDir = a.conf.DataDir
	b.conf.Name = "another"
	first := a.add(a.live("c1", "web-0"))
	if second := b.add(b.live("c1", "web-0")); second == first {
		t.Errorf("both networks give %s to one container", first)
	}
	b.del("c1")
	if a.inUse()[first] != "c1" {
		t.Errorf("DEL in one network released %s of the other", first)
	}
}

// smallDisk has the folder be a disk of its own.
func smallDisk(t *testing.T, n *node) {
	t.Helper()
	if err := os.MkdirAll(n.conf.DataDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", n.conf.DataDir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("a small disk needs the right to mount one: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(n.conf.DataDir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// fillDisk leaves no space on a small disk. It returns a function that makes space.
func fillDisk(t *testing.T, n *node) (makeSpace func()) {
	t.Helper()
	filler := n.file("filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); err == nil {
		t.Fatal("the disk is not small")
	}
	return func() {
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
	}
}

// A node reboots with a full disk. Nobody can write which addresses are free, and no pod loses its address: once
// there is space, each pod gets its own, though a new pod comes first.
func TestRebootWithFullDisk(t *testing.T) {
	n := newNode(t, "10.88.1.0/24")
	smallDisk(t, n)
	web, db := n.add(n.live("c1", "web-0")), n.add(n.live("c2", "db-0"))
	reboot(t, n)
	makeSpace := fillDisk(t, n)
	for _, pod := range []string{"job-0", "web-0"} {
		_, _, err := reserve(n.conf, n.live("new-"+pod, pod))
		if e, ok := errors.AsType[*types.Error](err); !ok || e.Code != types.ErrIOFailure {
			t.Fatalf("ADD on a full disk says %v", err)
		}
	}
	for _, addr := range []string{web, db} {
		if info, err := os.Stat(n.file(addr)); err != nil || info.Size() == 0 {
			t.Errorf("the reservation of %s is lost: %v, %v", addr, info, err)
		}
	}
	makeSpace()
	n.add(n.live("c3", "job-0"))
	want(t, "db-0, with space again", n.add(n.live("c4", "db-0")), db)
	want(t, "web-0, with space again", n.add(n.live("c5", "web-0")), web)
}

// A disk without space: ADD fails and leaves nothing; DEL succeeds.
func TestFullDisk(t *testing.T) {
	n := newNode(t, "10.88.1.0/24", "fd00:88:1::/64")
	smallDisk(t, n)
	first := n.add(n.live("c1", "web-0"))
	makeSpace := fillDisk(t, n)
	for range 3 {
		_, _, err := reserve(n.conf, n.live("c2", "db-0"))
		if e, ok := errors.AsType[*types.Error](err); !ok || e.Code != types.ErrIOFailure ||
			!strings.Contains(e.Details, "no space left on device") {
			t.Fatalf("ADD on a full disk says %v", err)
		}
	}
	if all := n.inUse(); len(all) != 2 {
		t.Errorf("in use on the full disk: %v, want %s alone", all, first)
	}
	n.del("c1")
	if all := n.inUse(); len(all) != 0 {
		t.Errorf("in use after DEL on the full disk: %v", all)
	}
	makeSpace()
	want(t, "with space again", n.add(n.live("c3", "web-0")), first)
}

// Whatever the order of ADD, DEL, deaths and reboots: no two live containers share an address; after an ADD
// no dead one has one; and a pod whose address nobody took gets it again.
func TestAnyOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := newNode(t, "10.88.1.0/28", "fd00:88:1::/124")
		type container struct {
			id, addrs string
			dead      bool
		}
		pods := make(map[string]*container) // by name
		count := 0
		rt.Repeat(map[string]func(*rapid.T){
			"add": func(rt *rapid.T) {
				pod := fmt.Sprintf("pod-%d", rapid.IntRange(0, 9).Draw(rt, "pod"))
				if c := pods[pod]; c != nil && !c.dead {
					return
				}
				count++
				c := &container{id: fmt.Sprintf("c%d", count)}
				c.addrs = n.add(n.live(c.id, pod))
				// Ten pods and 13 addresses: nobody's address is ever given away.
				if old := pods[pod]; old != nil && old.addrs != c.addrs {
					rt.Fatalf("%s had %s and gets %s", pod, old.addrs, c.addrs)
				}
				pods[pod] = c
			},
			"del": func(rt *rapid.T) {
				if c := pods[fmt.Sprintf("pod-%d", rapid.IntRange(0, 9).Draw(rt, "pod"))]; c != nil {
					n.del(c.id)
					c.dead = true
				}
			},
			"die": func(rt *rapid.T) {
				if c := pods[fmt.Sprintf("pod-%d", rapid.IntRange(0, 9).Draw(rt, "pod"))]; c != nil && !c.dead {
					s, err := openStore(n.conf.DataDir)
					if err != nil {
						rt.Fatal(err)
					}
					for _, addr := range s.held(attachment{n.conf.Name, c.id, "eth0"}) {
						r := *s.known[addr]
						r.NetNS = "/run/netns/no-such-namespace"
						if err := s.put(r); err != nil {
							rt.Fatal(err)
						}
					}
					s.close()
					c.dead = true
				}
			},
			"": func(rt *rapid.T) {
				owners := n.inUse()
				for pod, c := range pods {
					for addr := range strings.SplitSeq(c.addrs, ",") {
						if !c.dead && owners[addr] != c.id {
							rt.Fatalf("%s of %s (%s) is in use by %q", addr, pod, c.id, owners[addr])
						}
					}
				}
			},
		})
	})
}

// Each interface of a container has addresses of its own, and DEL of one leaves the other's.
func TestTwoInterfaces(t *testing.T) {
	n := newNode(t, "10.88.1.0/24", "fd00:88:1::/64")
	eth0, eth1 := n.live("c1", "web-0"), n.live("c1", "web-0")
	eth1.IfName = "eth1"
	want(t, "eth0", n.add(eth0), "10.88.1.2,fd00:88:1::2")
	want(t, "eth1", n.add(eth1), "10.88.1.3,fd00:88:1::3")
	n.del("c1") // of eth0
	if used := n.inUse(); len(used) != 2 || used["10.88.1.3"] != "c1" || used["fd00:88:1::3"] != "c1" {
		t.Errorf("in use after DEL of eth0: %v", used)
	}
	want(t, "eth1 again", n.add(eth1), "10.88.1.3,fd00:88:1::3")
}
