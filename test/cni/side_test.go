package cni

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// rivalKey names a file with one more rival, in JSON, for the comparison.
const rivalKey = "TUNNEL_CNI_RIVAL"

// rival is a plugin of the comparison.
type rival struct {
	Title   string `json:"name"`
	Program string `json:"program"`    // its path
	Version string `json:"cniVersion"` // of the specification: the highest that it speaks
	State   string `json:"state"`      // the folder of its files; empty: one that Plugin can name
	NoIPv6  bool   `json:"noIPv6"`     // it works only if links have no IPv6
	// Plugin is its part of a network configuration. $SUBNET stands for the network of the pods, $ALL for all addresses
	// of that family, $STATE for the folder.
	Plugin map[string]any `json:"plugin"`
}

func rivals(t *testing.T) []rival {
	t.Helper()
	all := []rival{
		{Title: "tunnel-cni", Program: "tunnel-cni", Version: "1.1.0", Plugin: map[string]any{
			"subnets": []string{"$SUBNET"}, "datadir": "$STATE"}},
		{Title: "bridge with host-local", Program: "bridge", Version: "1.1.0", Plugin: map[string]any{
			"bridge": "stock0", "isGateway": true, "hairpinMode": true, "ipam": map[string]any{
				"type": "host-local", "dataDir": "$STATE", "ranges": [][]map[string]any{{{"subnet": "$SUBNET"}}},
				"routes": []map[string]any{{"dst": "$ALL"}}}}},
	}
	for i := range all {
		all[i].Program = filepath.Join(programs, all[i].Program)
	}
	file := os.Getenv(rivalKey)
	if file == "" {
		return all
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var other rival
	if err := json.Unmarshal(data, &other); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return append(all, other)
}

// row is a row of the table: what happens to each rival, and what of tunnel-cni must come of it.
type row struct {
	name    string
	measure func(s *side) string
	ours    string
}

func rows() []row {
	return []row{
		{"100 ADDs at once", (*side).parallel, "100 pods, 100 addresses"},
		{"versions whose results libcni accepts", (*side).versions, strings.Join(versions, ", ")},
		{"IPv6", (*side).ipv6, "yes"},
		{"DEL, when the namespace is gone", (*side).delGone, "succeeds, 5 of 5 free"},
		{"60 ADDs and DELs killed at random, nobody calls DEL", (*side).killed, "56 of 56 free, 0 given twice"},
		{"all files cut to nothing", func(s *side) string { return s.cut(0) },
			"0 given twice; after DEL 5 of 5 free"},
		{"all files cut in half", func(s *side) string { return s.cut(2) },
			"0 given twice; after DEL 5 of 5 free"},
		{"full disk", (*side).fullDisk, "ADD fails, DEL succeeds; with space again 5 of 5 free"},
		{"STATUS without a free address", (*side).status, "not ready"},
		{"reboot, nobody calls DEL", (*side).reboot, "3 of 3 pods keep theirs, 9 of 9 others free"},
	}
}

// sideKey tells a process of the test its row and its rival.
const sideKey = "TUNNEL_CNI_TEST_SIDE"

// timeRow is the row for which one process measures all rivals, in turn.
const timeRow = -1

// TestSideBySide does the same to tunnel-cni, to the stock plugins and to the plugin that rivalKey names, and prints a
// table. Each cell has a process with a network, a disk and mounts of its own. Only our column can fail the test.
func TestSideBySide(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("namespaces for pods are made by root")
	}
	all := rivals(t)
	if text := os.Getenv(sideKey); text != "" {
		measure(t, all, text)
		return
	}
	var table strings.Builder
	line := func(name string, cells []string) {
		fmt.Fprintf(&table, "| %s | %s |\n", name, strings.Join(cells, " | "))
	}
	var names []string
	for _, r := range all {
		names = append(names, r.Title)
	}
	line("", names)
	line("---", slices.Repeat([]string{"---"}, len(all)))
	for i, row := range rows() {
		var cells []string
		for j := range all {
			cells = append(cells, process(t, i, j)...)
		}
		if len(cells) == 0 || cells[0] != row.ours {
			t.Errorf("%s: %q, want %q", row.name, cells, row.ours)
		}
		line(row.name, cells)
	}
	for _, text := range process(t, timeRow, 0) {
		name, cells, _ := strings.Cut(text, ": ")
		line(name, strings.Split(cells, ", "))
	}
	t.Logf("\n%s", table.String())
}

// process measures in a process with namespaces of its own, and returns its cells.
func process(t *testing.T, row, rival int) (cells []string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestSideBySide$", "-test.v", "-test.timeout=5m")
	cmd.Env = append(os.Environ(), programsKey+"="+programs, fmt.Sprintf("%s=%d %d", sideKey, row, rival))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // the kernel sends Pdeathsig when the thread ends (prctl(2))
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		if cell, ok := strings.CutPrefix(lines.Text(), "cell: "); ok {
			cells = append(cells, cell)
		}
	}
	if err != nil {
		t.Errorf("row %d, rival %d: %v: %s", row, rival, err, out)
	}
	return cells
}

// measure is the test in a process of process.
func measure(t *testing.T, all []rival, text string) {
	t.Helper()
	var row, index int
	if _, err := fmt.Sscan(text, &row, &index); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	loopback, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(loopback)
	}
	if err != nil {
		t.Fatal(err)
	}
	if row == timeRow {
		for _, cell := range times(t, all) {
			fmt.Println("\ncell:", cell)
		}
		return
	}
	s := newSide(t, all[index], true)
	if s.NoIPv6 {
		s.setIPv6(false)
	}
	fmt.Println("\ncell:", rows()[row].measure(s))
}

// side is a node with one rival.
type side struct {
	*testing.T
	rival
	*client
	subnet netip.Prefix
	count  int
	pods   []*sidePod // those whose namespaces live
}

// newSide makes the folder of the rival's files. On a disk of its own, which is small, a test can fill it.
func newSide(t *testing.T, r rival, ownDisk bool) *side {
	t.Helper()
	if r.State == "" {
		r.State = t.TempDir()
	} else {
		ownDisk = true // others' files stay as they are
	}
	for _, mine := range []string{programs, os.TempDir(), r.Program} {
		if strings.HasPrefix(mine+"/", r.State+"/") {
			t.Fatalf("%s is in the folder %s of %s: set TMPDIR to another folder", mine, r.State, r.Title)
		}
	}
	if ownDisk {
		if err := unix.Mount("tmpfs", r.State, "tmpfs", 0, "size=1m"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(r.State, unix.MNT_DETACH) })
	}
	return &side{T: t, rival: r}
}

// use makes subnet the network of the pods.
func (s *side) use(subnet, version string) {
	s.Helper()
	s.subnet = netip.MustParsePrefix(subnet)
	plugin, err := json.Marshal(s.Plugin)
	if err != nil {
		s.Fatal(err)
	}
	everything := netip.PrefixFrom(s.subnet.Addr(), 0).Masked().String()
	text := strings.NewReplacer("$SUBNET", subnet, "$ALL", everything, "$STATE", s.State).Replace(string(plugin))
	filled := map[string]any{"type": filepath.Base(s.Program)}
	if err := json.Unmarshal([]byte(text), &filled); err != nil {
		s.Fatal(err)
	}
	s.client = newClient(s, network(s, version, "pods", filled))
	s.Path = []string{filepath.Dir(s.Program), programs}
}

// sidePod is a pod with a namespace.
type sidePod struct {
	*libcni.RuntimeConf
	addr string
}

func (s *side) pod(name string) *sidePod {
	s.Helper()
	s.count++
	p := &sidePod{RuntimeConf: container(fmt.Sprintf("%s-%d", name, s.count), newNamespace(s))}
	p.Args[2][1] = name // a pod that is made again has another container
	if s.NoIPv6 {
		if err := inside(p.NetNS, func() error { s.setIPv6(false); return nil }); err != nil {
			s.Fatal(err)
		}
	}
	s.pods = append(s.pods, p)
	return p
}

// try is ADD of a new pod. It asks the pod itself for its address, not the result.
func (s *side) try(name string) (*sidePod, error) {
	s.Helper()
	p := s.pod(name)
	return p, s.tryPod(s.Context(), p)
}

func (s *side) tryPod(ctx context.Context, p *sidePod) error {
	if _, err := s.AddNetworkList(ctx, s.list, p.RuntimeConf); err != nil {
		return err
	}
	return inside(p.NetNS, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		for _, a := range addrs {
			if s.subnet.Addr().Is4() == (a.IP.To4() != nil) && !a.IP.IsLinkLocalUnicast() {
				p.addr = a.IP.String()
			}
		}
		return err
	})
}

func (s *side) add(name string) *sidePod {
	s.Helper()
	p, err := s.try(name)
	if err != nil {
		s.Logf("ADD of %s: %v", name, err)
	}
	return p
}

// end ends the namespaces of pods, and waits until the kernel has removed their links.
func (s *side) end(pods ...*sidePod) {
	s.Helper()
	for _, p := range pods {
		_ = unix.Unmount(p.NetNS, unix.MNT_DETACH)
		_ = os.Remove(p.NetNS)
		s.pods = slices.DeleteFunc(s.pods, func(other *sidePod) bool { return other == p })
	}
	testkit.Eventually(s, "links of the ended pods to be gone", func() bool { return len(veths(s.T)) <= len(s.pods) })
}

// free starts pods until that fails, and returns how many addresses were free, and how many of all pods have an address
// that another one has.
func (s *side) free() (free, twice int) {
	s.Helper()
	for {
		p, err := s.try("filler")
		if err != nil || free > 300 {
			s.Logf("no further pod: %v", err)
			break
		}
		if p.addr != "" {
			free++
		}
	}
	return free, s.twice()
}

// twice returns how many addresses two pods have.
func (s *side) twice() (n int) {
	owners := make(map[string]int)
	for _, p := range s.pods {
		if p.addr != "" {
			owners[p.addr]++
		}
	}
	for _, pods := range owners {
		if pods > 1 {
			n++
		}
	}
	return n
}

// setIPv6 says whether links in the namespace of the caller have IPv6.
func (s *side) setIPv6(on bool) {
	s.Helper()
	for _, links := range []string{"all", "default"} {
		s.write("/proc/sys/net/ipv6/conf/"+links+"/disable_ipv6", map[bool]string{true: "0", false: "1"}[on])
	}
}

func (s *side) write(file, text string) {
	s.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		s.Fatal(err)
	}
}

func outcome(err error) string {
	if err != nil {
		return "fails"
	}
	return "succeeds"
}

func (s *side) parallel() string {
	s.use("10.88.1.0/24", s.Version)
	pods, started := make([]*sidePod, 100), make(map[string]bool)
	for i := range pods {
		pods[i] = s.pod(fmt.Sprint("pod-", i))
	}
	errs := make([]error, len(pods))
	var wg sync.WaitGroup
	for i, p := range pods {
		wg.Go(func() { errs[i] = s.tryPod(s.Context(), p) })
	}
	wg.Wait()
	n := 0
	for i, p := range pods {
		if errs[i] != nil {
			s.Log(errs[i])
			continue
		}
		n++
		started[p.addr] = true
	}
	return fmt.Sprintf("%d pods, %d addresses", n, len(started))
}

func (s *side) versions() string {
	var accepted []string
	for _, version := range versions {
		s.use("10.88.1.0/24", version)
		result, err := s.AddNetworkList(s.Context(), s.list, s.pod("web").RuntimeConf)
		if err == nil {
			var converted *current.Result
			if converted, err = current.NewResultFromResult(result); err == nil && len(converted.IPs) == 0 {
				err = errors.New("the result has no address")
			}
		}
		if err == nil {
			accepted = append(accepted, version)
		}
		s.Log(version, err)
	}
	if len(accepted) == 0 {
		return "none"
	}
	return strings.Join(accepted, ", ")
}

// A plugin that lists every address of a network in memory would use all of the memory.
func (s *side) ipv6() string {
	s.NoIPv6 = false
	s.setIPv6(true)
	memory := unix.Rlimit{Cur: 512 << 20, Max: 512 << 20}
	if err := unix.Setrlimit(unix.RLIMIT_DATA, &memory); err != nil {
		s.Fatal(err)
	}
	s.use("fd00:88:1::/64", s.Version)
	ctx, cancel := context.WithTimeout(s.Context(), 20*time.Second)
	defer cancel()
	p := s.pod("web")
	if err := s.tryPod(ctx, p); err != nil || p.addr == "" {
		s.Log(p.addr, err)
		return "no"
	}
	server := "[" + p.addr + "]:80"
	greet(s.T, p.NetNS, server)
	err := errors.New("not asked")
	for range 5 { // the kernel may still look for duplicates of the address
		if _, err = ask("/proc/self/ns/net", server); err == nil {
			return "yes"
		}
	}
	s.Log(err)
	return "no"
}

func (s *side) delGone() string {
	s.use("10.88.1.0/29", s.Version)
	p := s.add("web")
	s.end(p)
	err := s.del(p.RuntimeConf)
	free, _ := s.free()
	return fmt.Sprintf("%s, %d of 5 free", outcome(err), free)
}

func (s *side) killed() string {
	s.use("10.88.1.0/26", s.Version)
	for range 5 {
		s.add("stays")
	}
	began := now()
	first := s.add("first")
	added := now()
	_ = s.del(first.RuntimeConf)
	deleted := now()
	s.end(first)
	killing := func(took int64, f func(ctx context.Context) error) {
		ctx, cancel := context.WithTimeout(s.Context(), time.Duration(rand.Int64N(took)))
		defer cancel()
		_ = f(ctx) // the end of ctx kills the plugin
	}
	for i := range 60 {
		p := s.pod("killed")
		if i%3 == 0 {
			_ = s.tryPod(s.Context(), p)
			killing(deleted-added, func(ctx context.Context) error { return s.DelNetworkList(ctx, s.list, p.RuntimeConf) })
		} else {
			killing(added-began, func(ctx context.Context) error { return s.tryPod(ctx, p) })
		}
		s.end(p)
	}
	free, twice := s.free()
	return fmt.Sprintf("%d of 56 free, %d given twice", free, twice)
}

// cut cuts all files of the rival to nothing (0), or to a part of their size, while two pods run.
func (s *side) cut(part int64) string {
	s.use("10.88.1.0/29", s.Version)
	s.add("web")
	s.add("db")
	err := filepath.WalkDir(s.State, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		return os.Truncate(path, part*info.Size()/4)
	})
	if err != nil {
		s.Fatal(err)
	}
	for i := range 3 {
		s.add(fmt.Sprint("later-", i))
	}
	twice := s.twice()
	pods := slices.Clone(s.pods)
	for _, p := range pods {
		if err := s.del(p.RuntimeConf); err != nil {
			s.Logf("DEL: %v", err)
		}
	}
	s.end(pods...)
	free, _ := s.free()
	return fmt.Sprintf("%d given twice; after DEL %d of 5 free", twice, free)
}

func (s *side) fullDisk() string {
	s.use("10.88.1.0/29", s.Version)
	first := s.add("web")
	filler := filepath.Join(s.State, "filler")
	if err := os.WriteFile(filler, make([]byte, 2<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		s.Fatalf("the disk is not small: %v", err)
	}
	second, addErr := s.try("db")
	s.Log(addErr)
	if addErr != nil { // as a runtime does it
		_ = s.del(second.RuntimeConf)
		s.end(second)
	}
	delErr := s.del(first.RuntimeConf)
	s.Log(delErr)
	s.end(first)
	if addErr == nil {
		_ = s.del(second.RuntimeConf)
		s.end(second)
	}
	if err := os.Remove(filler); err != nil {
		s.Fatal(err)
	}
	free, _ := s.free()
	return fmt.Sprintf("ADD %s, DEL %s; with space again %d of 5 free", outcome(addErr), outcome(delErr), free)
}

func (s *side) status() string {
	s.use("10.88.1.0/30", "1.1.0")
	if err := s.GetStatusNetworkList(s.Context(), s.list); err != nil {
		s.Log(err)
		return "fails with free addresses, too"
	}
	s.free()
	if err := s.GetStatusNetworkList(s.Context(), s.list); err != nil {
		return "not ready"
	}
	return "ready"
}

func (s *side) reboot() string {
	s.use("10.88.1.0/28", s.Version)
	names, before := []string{"web", "db", "cache"}, make(map[string]string)
	for _, name := range names {
		before[name] = s.add(name).addr
	}
	s.end(slices.Clone(s.pods)...)
	links, err := netlink.LinkList()
	if err != nil {
		s.Fatal(err)
	}
	for _, link := range links {
		if link.Type() == "bridge" {
			_ = netlink.LinkDel(link)
		}
	}
	const bootID = "/proc/sys/kernel/random/boot_id"
	next := filepath.Join(s.TempDir(), "boot_id")
	s.write(next, "00000000-1111-4222-8333-444444444444\n")
	if err := unix.Mount(next, bootID, "", unix.MS_BIND, ""); err != nil {
		s.Fatal(err)
	}
	same := 0
	s.add("job") // the first pod of the new boot is a new one
	slices.Reverse(names)
	for _, name := range names {
		if p := s.add(name); p.addr != "" && p.addr == before[name] {
			same++
		}
	}
	free, _ := s.free()
	return fmt.Sprintf("%d of 3 pods keep theirs, %d of 9 others free", same, free)
}

// times adds and deletes pods, each rival in turn, and returns what ADD and DEL cost as parts of what they cost the
// second rival in the same round. The files of a rival without State are on the disk of TMPDIR.
func times(t *testing.T, all []rival) (cells []string) {
	t.Helper()
	rounds := 40
	if testing.Short() {
		rounds = 3
	}
	var sides []*side
	for i, r := range all {
		s := newSide(t, r, false)
		if s.NoIPv6 {
			s.setIPv6(false)
		}
		s.use(fmt.Sprintf("10.88.%d.0/24", i+1), s.Version)
		sides = append(sides, s)
	}
	took := map[string][][]float64{} // by verb, then by rival
	for round := range rounds + 1 {
		for i := range sides {
			s := sides[(i+round)%len(sides)]
			p := s.pod("web")
			began := now()
			err := s.tryTimed(p)
			added := now()
			if err == nil {
				err = s.del(p.RuntimeConf)
			}
			deleted := now()
			if err != nil {
				t.Fatalf("%s: %v", s.Title, err)
			}
			s.end(p)
			if round == 0 {
				continue // makes bridge and folder
			}
			for verb, nanoseconds := range map[string]int64{"ADD": added - began, "DEL": deleted - added} {
				if took[verb] == nil {
					took[verb] = make([][]float64, len(sides))
				}
				index := (i + round) % len(sides)
				took[verb][index] = append(took[verb][index], float64(nanoseconds))
			}
		}
	}
	for _, verb := range []string{"ADD", "DEL"} {
		var ratios []string
		for i := range sides {
			var all []float64
			for round, nanoseconds := range took[verb][i] {
				all = append(all, nanoseconds/took[verb][1][round])
			}
			slices.Sort(all)
			ratios = append(ratios, strconv.FormatFloat(all[len(all)/2], 'f', 2, 64))
		}
		cells = append(cells, fmt.Sprintf("time of %s (median of %d ratios): %s", verb, rounds, strings.Join(ratios, ", ")))
	}
	return cells
}

func (s *side) tryTimed(p *sidePod) error {
	_, err := s.AddNetworkList(s.Context(), s.list, p.RuntimeConf)
	return err
}
