package check

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/services"
)

// The file of the state: not made yet, the edge's, another program's, and on a disk that is read-only.
func TestServicesState(t *testing.T) {
	ctx, live := t.Context(), &api.Status{Mode: "edge"}
	s := servicesOf(t, live, "{}")
	want(t, "a running edge without a file", s.file(ctx), StateFail, "there is no", "start the edge again")
	s = servicesOf(t, nil, "")
	want(t, "an edge that has not run", s.file(ctx), StateOK, "the edge makes it", "")
	if err := os.MkdirAll(filepath.Dir(s.State), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(s.State)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want(t, "an edge that has stopped", s.file(ctx), StateOK, "no other program has it", "")
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	want(t, "a stranger", s.file(ctx), StateFail, "another process has", "stop the other edge")
	s.daemon.last = live
	want(t, "the edge", s.file(ctx), StateOK, "can be written", "")
	if err = unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	want(t, "an edge with another file", s.file(ctx), StateWarn, "does not have", "start the edge again")
	var asked []string
	s.writable = func(path string) error { // root may write everywhere but on a disk that is read-only
		asked = append(asked, path)
		return unix.EROFS
	}
	want(t, "a read-only file", s.file(ctx), StateFail, "cannot be written", "state in [mode.edge.services]")
	file := s.State
	s.State = filepath.Join(filepath.Dir(file), "a", "b", "services.db")
	want(t, "a read-only folder", s.file(ctx), StateFail, "cannot make", "state in [mode.edge.services]")
	if !slices.Equal(asked, []string{file, filepath.Dir(file)}) {
		t.Errorf("asked about %q", asked)
	}
}

// The rules of the edge, and rules of other programs before and after them.
func TestServicesRulesOfKernel(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	c, err := nftables.New()
	if err == nil {
		_, err = c.ListTables()
	}
	if err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	add := func(family nftables.TableFamily, table, chain string, hook *nftables.ChainHook, priority int32, rules int) {
		t.Helper()
		to := c.AddTable(&nftables.Table{Family: family, Name: table})
		in := c.AddChain(&nftables.Chain{Name: chain, Table: to, Type: nftables.ChainTypeNAT, Hooknum: hook,
			Priority: nftables.ChainPriorityRef(nftables.ChainPriority(priority))})
		for range rules {
			c.AddRule(&nftables.Rule{Table: to, Chain: in, Exprs: []expr.Any{&expr.Counter{}}})
		}
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	add(nftables.TableFamilyIPv4, "early", "pre", nftables.ChainHookPrerouting, -150, 1)
	if found, err := redirected(); err != nil || found.there || found.before != nil {
		t.Fatalf("without the edge: %+v, %v", found, err)
	}
	add(nftables.TableFamilyINet, services.RulesTable, "prerouting-1", nftables.ChainHookPrerouting, -110, 1)
	add(nftables.TableFamilyINet, services.RulesTableDNS, "prerouting-2", nftables.ChainHookPrerouting, -111, 1)
	add(nftables.TableFamilyIPv4, "kube-proxy", "nat-prerouting", nftables.ChainHookPrerouting, -100, 1)
	add(nftables.TableFamilyIPv6, "empty", "pre", nftables.ChainHookPrerouting, -150, 0)
	add(nftables.TableFamilyIPv4, "elsewhere", "out", nftables.ChainHookOutput, -150, 1)
	found, err := redirected()
	if err != nil || !found.there || !slices.Equal(found.before, []string{"ip early pre"}) {
		t.Errorf("with the edge: %+v, %v", found, err)
	}
}
