package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/socket"
)

// testCertStatus checks what tunnel cert status shows of a cloud with one node, and of that node's edge.
func testCertStatus(o *operated) {
	o.t.Helper()
	list := o.certificates(o.cloud)
	if len(list.Processes) != 1 || len(list.Nodes) != 1 || list.Mode != "cloud" {
		o.t.Fatalf("%+v", list)
	}
	p, n := list.Processes[0], list.Nodes[0]
	if p.Own == nil || len(p.CloudCAs) != 1 || len(p.NodeCAs) != 1 || p.Err != "" ||
		p.Own.Signer != p.CloudCAs[0].Name || p.Signer != p.NodeCAs[0].Name {
		o.t.Errorf("the replica has %+v", p)
	}
	if n.Node != "edge1" || n.State != api.Connected || n.Signer != p.Signer || n.Serial == "" ||
		time.Until(n.Ends) < 24*time.Hour {
		o.t.Errorf("the node has %+v", n)
	}
	edge := o.certificates(o.edge)
	if own := edge.Processes[0].Own; own == nil || own.Serial != n.Serial || edge.Node != "edge1" ||
		edge.Processes[0].RenewAt.After(n.Ends) || edge.Processes[0].CloudCAs[0].ID != p.CloudCAs[0].ID {
		o.t.Errorf("the edge has %+v", edge)
	}
	for _, form := range []string{"table", "wide", "yaml"} {
		if out := o.want(exitOK, "cert", "status", "-c", o.cloud, "-o", form); !strings.Contains(out, "tunnel cloud CA") ||
			!strings.Contains(out, "edge1") {
			o.t.Errorf("-o %s:\n%s", form, out)
		}
	}
	if out := o.want(exitOK, "cert", "status", "-c", o.edge); !strings.Contains(out, "renews in") {
		o.t.Errorf("the edge:\n%s", out)
	}
	if out := o.want(exitOK, "cert", "status", "-c", o.cloud, "--expiring", "1h"); out != "no certificates\n" {
		o.t.Errorf("within an hour:\n%s", out)
	}
	if out := o.want(exitAway, "cert", "status", "-c", o.cloud, "--expiring", "744h"); !strings.Contains(out, "edge1") ||
		strings.Contains(out, "tunnel cloud CA") {
		o.t.Errorf("within 31 days:\n%s", out)
	}
	o.want(exitUsage, "cert", "status", "-c", o.cloud, "-o", "xml")
}

// certificates returns what tunnel cert status shows of the daemon of a configuration.
func (o *operated) certificates(config string) *api.CertificateList {
	o.t.Helper()
	var list api.CertificateList
	if err := json.Unmarshal([]byte(o.want(exitOK, "cert", "status", "-c", config, "-o", "json")), &list); err != nil {
		o.t.Fatal(err)
	}
	return &list
}

// An edge renews its certificate when it is asked, by its own operator or by that of the cloud.
func TestCertRenew(t *testing.T) {
	o := newOperated(t, nil)
	serial := func() string {
		t.Helper()
		return o.certificates(o.edge).Processes[0].Own.Serial
	}
	before := serial()
	var shown api.CertificateList
	if err := json.Unmarshal([]byte(o.want(exitOK, "cert", "renew", "-c", o.edge, "-o", "json")), &shown); err != nil {
		t.Fatal(err)
	}
	if got := shown.Processes[0].Own.Serial; got == before {
		t.Errorf("renew shows the old certificate, with the serial %s", got)
	}
	testkit.Within(t, time.Minute, "the edge uses its new certificate", func() error {
		if serial() == before {
			return fmt.Errorf("its serial is still %s", before)
		}
		return nil
	})
	before = o.certificates(o.cloud).Nodes[0].Serial
	if out := o.want(exitOK, "cert", "renew", "-c", o.cloud, "--all"); !strings.Contains(out, "asked 1 nodes") {
		t.Errorf("renew --all says %q", out)
	}
	testkit.Within(t, time.Minute, "the edge does what the cloud asks", func() error {
		if o.certificates(o.cloud).Nodes[0].Serial == before {
			return fmt.Errorf("its serial is still %s", before)
		}
		return nil
	})
	o.want(exitAway, "cert", "renew", "-c", o.cloud, "edge2")
	o.want(exitUsage, "cert", "renew", "-c", o.cloud)
	o.want(exitUsage, "cert", "renew", "-c", o.cloud, "--all", "edge1")
}

// renew --all fails if it could ask none of the nodes that are connected. What other machines say begins no line.
func TestCertRenewOfNobody(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	ln, err := socket.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	var answer api.RenewAnswer
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { api.Answer(w, answer) })}
	var served sync.WaitGroup
	served.Go(func() { srv.Serve(ln) })
	defer served.Wait()
	defer srv.Close()
	old := []api.NotAsked{{Node: "old", Why: "its edge is older"}}
	for _, c := range []struct {
		answer api.RenewAnswer
		want   int
	}{
		{api.RenewAnswer{}, exitOK},
		{api.RenewAnswer{NotAsked: old}, exitRuntime},
		{api.RenewAnswer{NotAsked: old, Asked: []string{"edge1"}}, exitOK},
		{api.RenewAnswer{Asked: []string{"edge1"}, Incomplete: []string{"gone\nasked"}}, exitRuntime},
	} {
		answer = c.answer
		code, _, errs := says(t, "cert", "renew", "--socket", path, "--all")
		if code != c.want || strings.Contains(errs, "\nasked") {
			t.Errorf("%+v: exit code %d, want %d\n%s", c.answer, code, c.want, errs)
		}
	}
}

// A token for several nodes lets so many join, each by its own name, and none twice. The audit has who made the token
// and withdrew it.
func TestBulkJoin(t *testing.T) {
	var audit string
	o := newOperated(t, func(o *operated, _ string) {
		audit = filepath.Join(filepath.Dir(o.cloud), "audit.json")
		o.edit(func(text string) string { return text + "\n[mode.cloud.audit]\nfile = \"audit.json\"\n" })
	})
	dir := filepath.Dir(filepath.Dir(o.cloud))
	token := func(args ...string) []string {
		t.Helper()
		out := o.want(exitOK, append([]string{"token", "create", "-c", o.cloud, "-o", "json"}, args...)...)
		if !strings.HasPrefix(out, "[") {
			out = "[" + out + "]"
		}
		var made []struct{ Token string }
		if err := json.Unmarshal([]byte(out), &made); err != nil {
			t.Fatal(err)
		}
		var files []string
		for i, m := range made {
			files = append(files, filepath.Join(dir, fmt.Sprintf("token-%d-%d", len(args), i)))
			if err := os.WriteFile(files[i], []byte(m.Token), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return files
	}
	join := func(want int, file, name string) string {
		t.Helper()
		folder := filepath.Join(dir, fmt.Sprintf("join%d", time.Now().UnixNano()))
		args := []string{"join", "--dir", folder, "--token-file", file}
		if name != "" {
			args = append(args, "--node", name)
		}
		code, out, errs := says(t, args...)
		if code != want {
			t.Errorf("%s: exit code %d, want %d\n%s%s", name, code, want, out, errs)
		}
		return out + errs
	}
	shared := token("--node", "edge-*", "--uses", "2", "--expires", "24h")[0]
	join(exitOK, shared, "edge-a")
	if text := join(exitRefused, shared, "edge-a"); !strings.Contains(text, "joined already") {
		t.Errorf("the second join as edge-a:\n%s", text)
	}
	join(exitUsage, shared, "other")
	if out := o.want(exitOK, "token", "list", "-c", o.cloud); !strings.Contains(out, "used 1 of 2, last 0 min ago") {
		t.Errorf("the list:\n%s", out)
	}
	join(exitOK, shared, "edge-b")
	if text := join(exitRefused, shared, "edge-c"); !strings.Contains(text, "used up") {
		t.Errorf("the third node:\n%s", text)
	}
	if out := o.want(exitOK, "token", "list", "-c", o.cloud); !strings.Contains(out, "used up") {
		t.Errorf("the list:\n%s", out)
	}
	join(exitOK, token("--node", "edge-a")[0], "") // by the operator's word
	names := filepath.Join(dir, "names")
	if err := os.WriteFile(names, []byte("# site 1\nsite-1\n\nsite-2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	each := token("--nodes-from", names)
	if len(each) != 2 {
		t.Fatalf("%d tokens for two nodes", len(each))
	}
	join(exitOK, each[1], "site-2")
	join(exitUsage, each[0], "site-2")
	o.edit(func(text string) string { return strings.Replace(text, "\ninventory = ", "\n#inventory = ", 1) })
	o.cloudRuns.cmd.Process.Signal(os.Interrupt)
	o.cloudRuns.wait()
	o.startCloud()
	if text := join(exitRefused, shared, "edge-d"); !strings.Contains(text, "does not remember") {
		t.Errorf("without an inventory:\n%s", text)
	}
	o.want(exitConfig, "token", "create", "-c", o.cloud, "--node", "edge-*", "--uses", "2")
	o.want(exitOK, "token", "revoke", "-c", o.cloud, "--node", "edge-*")
	events, err := os.ReadFile(audit)
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range []string{"token-create", "token-revoke"} {
		if want := `"event":"` + event + `","result":"ok","nodes":"edge-*",`; !strings.Contains(string(events), want) {
			t.Errorf("the audit lacks %s:\n%s", want, events)
		}
	}
	if out := o.want(exitOK, "token", "list", "-c", o.cloud); strings.Contains(out, "edge-*") {
		t.Errorf("the list after revoke:\n%s", out)
	}
	for _, args := range [][]string{
		{"--node", "edge-*"}, {"--node", "edge-9", "--uses", "2"}, {"--node", "*-*", "--uses", "2"},
		{"--node", "edge-*", "--uses", "-1"}, {}, {"--nodes-from", filepath.Join(dir, "none")},
		{"--nodes-from", names, "--node", "edge-9"},
	} {
		o.want(exitUsage, append([]string{"token", "create", "-c", o.cloud}, args...)...)
	}
}

// edit changes the configuration of the cloud.
func (o *operated) edit(change func(text string) string) {
	o.t.Helper()
	text, err := os.ReadFile(o.cloud)
	if err != nil {
		o.t.Fatal(err)
	}
	edited := change(string(text))
	if edited == string(text) {
		o.t.Fatalf("nothing has changed in\n%s", text)
	}
	if err = os.WriteFile(o.cloud, []byte(edited), 0o600); err != nil {
		o.t.Fatal(err)
	}
}

// Both CAs of a cloud are replaced while a node carries conns. Its session stays, and no conn fails. Each step waits
// for the node. Afterwards only the new CAs are in use, also for the next process of the edge.
func TestRotateCA(t *testing.T) {
	echo := testkit.Serve(t, testkit.Echo)
	o := newOperated(t, nil)
	door := testkit.FreeAddress(t)
	o.want(exitOK, "forward", "add", "-c", o.cloud, door, "edge1/"+echo)
	session := o.list().Nodes[0].Newest().ID
	old := o.certificates(o.cloud).Processes[0]

	// One conn lives through all of it. Eight callers at a time open others and end them.
	long, err := net.Dial("tcp", door)
	if err != nil {
		t.Fatal(err)
	}
	defer long.Close()
	var stop atomic.Bool
	var conns, fails atomic.Int64
	var load sync.WaitGroup
	for range 8 {
		load.Go(func() {
			for !stop.Load() {
				if err := echoOnce(door); err != nil {
					t.Error(err)
					fails.Add(1)
				}
				conns.Add(1)
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	defer load.Wait()
	defer stop.Store(true)

	rotate := func(want int, args ...string) string {
		t.Helper()
		return o.want(want, append([]string{"cert", "rotate-ca", "-c", o.cloud}, args...)...)
	}
	if out := rotate(exitOK, "--status"); !strings.Contains(out, "no rotation is under way") {
		t.Errorf("before: %s", out)
	}
	rotate(exitOK)
	o.eventually("the node trusts the new CA", exitOK, "cert", "rotate-ca", "-c", o.cloud, "--status")
	rotate(exitOK)
	o.eventually("the node has a certificate of the new CA", exitOK, "cert", "rotate-ca", "-c", o.cloud, "--status")
	rotate(exitOK)
	if out := rotate(exitOK, "--status"); !strings.Contains(out, "no rotation is under way") {
		t.Errorf("after: %s", out)
	}

	now := o.certificates(o.cloud)
	p, n := now.Processes[0], now.Nodes[0]
	if len(p.CloudCAs) != 1 || len(p.NodeCAs) != 1 || p.CloudCAs[0].ID == old.CloudCAs[0].ID ||
		p.NodeCAs[0].ID == old.NodeCAs[0].ID || p.Own.Signer != p.CloudCAs[0].Name || n.Signer != p.NodeCAs[0].Name {
		t.Errorf("after: %+v, %+v", p, n)
	}
	if id := o.list().Nodes[0].Newest().ID; id != session {
		t.Error("the session of the node was lost")
	}
	if _, err = long.Write([]byte("still there")); err != nil {
		t.Error(err)
	}
	got := make([]byte, len("still there"))
	if _, err = io.ReadFull(long, got); err != nil {
		t.Errorf("the long conn: %v", err)
	}
	stop.Store(true)
	load.Wait()
	if fails.Load() > 0 || conns.Load() == 0 {
		t.Errorf("%d of %d conns have failed", fails.Load(), conns.Load())
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(o.cloud), "*next*"))
	if err != nil || len(left) > 0 {
		t.Errorf("files that are left: %q, %v", left, err)
	}
	for _, file := range []string{"ca.key", "nodes-ca.key", "cloud.key"} {
		if info, err := os.Stat(filepath.Join(filepath.Dir(o.cloud), file)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", file, info, err)
		}
	}
	o.edgeRuns.cmd.Process.Signal(os.Interrupt)
	o.edgeRuns.wait()
	o.startEdge()
	if cas := o.certificates(o.edge).Processes[0].CloudCAs; len(cas) == 0 || cas[len(cas)-1].ID != p.CloudCAs[0].ID {
		t.Errorf("the edge trusts %+v", cas)
	}
	o.want(exitOK, "config", "check", "-c", o.cloud)
}

// echoOnce sends a few bytes through a conn and back.
func echoOnce(addr string) error {
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if err = c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	if _, err = c.Write([]byte("ping")); err != nil {
		return err
	}
	got := make([]byte, 4)
	_, err = io.ReadFull(c, got)
	return err
}

// revoke says whether the cloud has ended the session of the node. A cloud that reads another token file has not.
func TestRevokeAsksTheCloud(t *testing.T) {
	o := newOperated(t, nil)
	dir := t.TempDir()
	for _, name := range []string{"cloud.toml", "tokens"} { // what revoke reads
		text, err := os.ReadFile(filepath.Join(filepath.Dir(o.cloud), name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	old := filepath.Join(dir, "cloud.toml")
	revoke := func(code int, config, want string) {
		t.Helper()
		if out := o.want(code, "token", "revoke", "-c", config, "--node", "edge1"); !strings.Contains(out, want) {
			t.Errorf("revoke by %s says\n%swant %q", config, out, want)
		}
	}
	revoke(exitOK, old, "Not checked whether a cloud has ended a session: nothing listens")
	text, err := os.ReadFile(old)
	if err == nil {
		socket := fmt.Sprintf("socket = %q", filepath.Join(filepath.Dir(o.cloud), "cloud.sock"))
		err = os.WriteFile(old, []byte(strings.Replace(string(text), `socket = "cloud.sock"`, socket, 1)), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	revoke(exitRuntime, old, "STILL has a session of node edge1")
	o.want(exitOK, "ls", "-c", o.cloud, "edge1")
	revoke(exitOK, o.cloud, "has no session of node edge1.")
	o.want(exitAway, "ls", "-c", o.cloud, "edge1")
}
