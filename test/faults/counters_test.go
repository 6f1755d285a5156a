package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/socket"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// newOperatedPair makes a pair whose cloud has an admin socket, and more lines in [mode.cloud.admin] and after it.
func newOperatedPair(t testing.TB, more string, targets map[string]string) *rig.Pair {
	t.Helper()
	dir, err := os.MkdirTemp("", "operated") // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p, err := rig.NewPair(rig.Config{
		Binary: program, Dir: dir, TCP: targets, Cloud: "\n[mode.cloud.admin]\nsocket = \"c.sock\"\n" + more,
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestCountersAddUp: the metrics of both ends, `tunnel ls` and the audit count what clients have sent and received.
func TestCountersAddUp(t *testing.T) {
	t.Parallel()
	const served, refused = 60, 7
	twice := serve(t, func(_ context.Context, c net.Conn) {
		b, _ := io.ReadAll(c)
		c.Write(append(b, b...))
	})
	p := newOperatedPair(t, "[mode.cloud.audit]\nfile = \"audit.json\"\n",
		map[string]string{"twice": twice, "closed": testkit.FreeAddress(t)})
	for _, start := range []func() (*rig.Process, error){p.StartCloud, p.StartEdge} {
		process, err := start()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(process.Kill)
	}
	testkit.Within(t, patience, "cloud and edge are ready", func() error {
		return errors.Join(rig.Ready(p.CloudHealth()), rig.Ready(p.EdgeHealth()))
	})

	up := 0
	var clients errgroup.Group
	for i := range served {
		sends := bytes.Repeat([]byte{'x'}, i*i*97) // none, up to 330 KiB
		up += len(sends)
		clients.Go(func() error { return sendTwice(p.Door("twice"), sends) })
	}
	for range refused {
		clients.Go(func() error {
			if err := tryEcho(context.Background(), p.Door("closed")); err == nil {
				return errors.New("a target that does not listen has answered")
			}
			return nil
		})
	}
	if err := clients.Wait(); err != nil {
		t.Fatal(err)
	}

	ok, no := `{door="tcp",result="ok"}`, `{door="tcp",result="refused"}`
	testkit.Within(t, patience, "the cloud's metrics add up", func() error {
		return counted(p.CloudHealth(), map[string]int{
			"tunnel_conns_opened_total": served, `tunnel_conns_refused_total{code="refused"}`: refused,
			"tunnel_sent_bytes_total": up, "tunnel_received_bytes_total": 2 * up, "tunnel_conns": 0,
			"tunnel_conns_reset_total": 0, "tunnel_door_callers_total" + ok: served, "tunnel_door_callers_total" + no: refused,
			`tunnel_door_open_duration_seconds_count{door="tcp"}`: served,
		})
	})
	testkit.Within(t, patience, "the edge's metrics add up", func() error {
		return counted(p.EdgeHealth(), map[string]int{
			"tunnel_conns_opened_total": served, `tunnel_conns_refused_total{code="refused"}`: refused,
			"tunnel_sent_bytes_total": 2 * up, "tunnel_received_bytes_total": up, "tunnel_conns": 0,
		})
	})
	testkit.Within(t, patience, "the audit adds up",
		func() error { return audited(p.Path("audit.json"), served, refused, up) })

	out, err := exec.CommandContext(t.Context(), program, "ls", "-o", "json", "-c", p.Path("cloud.toml")).Output()
	var list struct {
		Nodes []struct {
			Sessions []struct {
				Conns         int `json:"conns"`
				SentBytes     int `json:"sent_bytes"`
				ReceivedBytes int `json:"received_bytes"`
			} `json:"sessions"`
		} `json:"nodes"`
	}
	if err == nil {
		err = json.Unmarshal(out, &list)
	}
	if err != nil || len(list.Nodes) != 1 || len(list.Nodes[0].Sessions) != 1 {
		t.Fatalf("tunnel ls: %v: %s", err, out)
	}
	if s := list.Nodes[0].Sessions[0]; s.Conns != 0 || s.SentBytes != up || s.ReceivedBytes != 2*up {
		t.Errorf("tunnel ls says %+v, and clients have sent %d bytes", s, up)
	}
	t.Logf("%d conns, %d refused, %d bytes to targets, %d bytes from them", served, refused, up, 2*up)
}

// sendTwice sends bytes, and expects them twice.
func sendTwice(door string, sends []byte) error {
	conn, closeIt, err := dial(context.Background(), door)
	if err != nil {
		return err
	}
	defer closeIt()
	if _, err = conn.Write(sends); err != nil {
		return err
	}
	if err = conn.CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(conn)
	if err == nil && !bytes.Equal(got, append(sends, sends...)) {
		err = fmt.Errorf("%d bytes came back for %d", len(got), len(sends))
	}
	return err
}

// counted checks metrics of a process.
func counted(health string, want map[string]int) error {
	values, err := rig.Metrics(health)
	if err != nil {
		return err
	}
	var errs []error
	for name, n := range want {
		if got, ok := values[name]; !ok || got != float64(n) {
			errs = append(errs, fmt.Errorf("%s is %v, want %d", name, got, n))
		}
	}
	return errors.Join(errs...)
}

// audited checks the sums of the conns in an audit.
func audited(file string, served, refused, up int) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	count := make(map[string]int)
	var sent, received int
	for line := range bytes.Lines(text) {
		var e struct {
			Event, Result string
			SentBytes     int `json:"sent_bytes"`
			ReceivedBytes int `json:"received_bytes"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		count[e.Event+" "+e.Result]++
		sent, received = sent+e.SentBytes, received+e.ReceivedBytes
	}
	if count["tcp ok"] != served || count["tcp refused"] != refused || sent != up || received != 2*up {
		return fmt.Errorf("%v, %d bytes sent and %d received", count, sent, received)
	}
	return nil
}

// lsNodes is the number of nodes of BenchmarkLs. lsWithin is how long `tunnel ls` may take for them.
const lsNodes, lsWithin = 10_000, 300 * time.Millisecond

// lsName is the name of a node of BenchmarkLs.
func lsName(n int) string { return fmt.Sprintf("edge-%05d.site-%03d.example.com", n, n%100) }

// BenchmarkLs runs `tunnel ls` with 10,000 nodes: from the start of the command to its end. It fails if that takes
// longer than lsWithin, on average.
func BenchmarkLs(b *testing.B) {
	b.Run("missing", lsOfMissing)
	b.Run("connected", lsOfConnected)
}

// measureLs runs `tunnel ls` with args. cpu returns the processor time that the asked process has used.
func measureLs(b *testing.B, cpu func() (time.Duration, error), args ...string) {
	b.Helper()
	before, err := cpu()
	if err != nil {
		b.Fatal(err)
	}
	var busy time.Duration // processor time
	for b.Loop() {
		ls := exec.CommandContext(b.Context(), program, append([]string{"ls"}, args...)...)
		out, err := ls.CombinedOutput()
		if lines := strings.Count(string(out), "\n"); err != nil || lines <= lsNodes {
			b.Fatalf("%d lines, %v", lines, err)
		}
		busy += ls.ProcessState.UserTime() + ls.ProcessState.SystemTime()
	}
	after, err := cpu()
	if err != nil {
		b.Fatal(err)
	}
	each, processor := b.Elapsed()/time.Duration(b.N), (busy+after-before)/time.Duration(b.N)
	b.ReportMetric(float64(each.Milliseconds()), "ms/ls")
	b.ReportMetric(float64(processor.Milliseconds()), "processor-ms/ls")
	if each > lsWithin {
		b.Errorf("tunnel ls takes %v, of which %v on a processor, want %v at most", each, processor, lsWithin)
	}
}

// lsOfConnected asks the API of a cloud, in this process, with nodes that are connected. No transport has their
// sessions.
func lsOfConnected(b *testing.B) {
	dir, err := os.MkdirTemp("", "operated") // b.TempDir's path is too long for a socket
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	log := slog.New(slog.DiscardHandler)
	nodes := inventory.New("", log)
	directory := &tunnel.Directory{Watcher: nodes}
	for n := range lsNodes {
		s := &tunnel.Session{
			ID: fmt.Sprint("session ", n), Node: tunnel.NodeName(lsName(n)), Remote: "192.0.2.7:40000", Software: "v1.2.3",
			Since: time.Now().Add(-time.Hour),
		}
		s.RTT.Store(int64(12 * time.Millisecond))
		s.Conns.Store(3)
		s.Traffic.Send(123_456)
		s.Traffic.Receive(789)
		s.CertificateEnds.Store(time.Now().Add(24 * time.Hour).Unix())
		directory.Attach(s)
	}
	server := api.New(api.Config{
		Mode: "cloud", Software: "v1.2.3", Replica: "cloud-0", Counters: new(tunnel.Counters), Inventory: nodes, Log: log,
		Checks: func() []admin.Check { return nil }, Sessions: directory.Sessions, Dialer: directory,
	})
	path := filepath.Join(dir, "s")
	ln, err := socket.Listen(b.Context(), path)
	if err != nil {
		b.Fatal(err)
	}
	srv := &http.Server{Handler: server.Handler(), ReadHeaderTimeout: time.Minute}
	go srv.Serve(ln) // Close ends it
	b.Cleanup(func() { srv.Close() })
	measureLs(b, func() (time.Duration, error) {
		var used syscall.Rusage
		err := syscall.Getrusage(syscall.RUSAGE_SELF, &used)
		return time.Duration(used.Utime.Nano() + used.Stime.Nano()), err
	}, "--socket", path)
}

// lsOfMissing asks a cloud that remembers nodes, of which none is connected.
func lsOfMissing(b *testing.B) {
	p := newOperatedPair(b, "inventory = \"nodes.json\"\n", nil)
	now := time.Now().UTC()
	records := make(map[string]any)
	for n := range lsNodes {
		records[lsName(n)] = map[string]any{
			"first_seen": now.Add(-24 * time.Hour), "last_seen": now.Add(-time.Hour), "facts_at": now.Add(-time.Hour),
			"sessions": 3, "remote": "192.0.2.7:40000", "software": "v1.2.3", "ended": "connection lost",
			"cert_ends": now.Add(24 * time.Hour), "certificate": "3f", "cert_by": "CN=nodes",
		}
	}
	text, err := json.Marshal(map[string]any{"format": 1, "nodes": records})
	if err == nil {
		err = os.WriteFile(p.Path("nodes.json"), text, 0o600)
	}
	if err != nil {
		b.Fatal(err)
	}
	cloud, err := p.StartCloud()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(cloud.Kill)
	testkit.Within(b, backWithin, "the cloud is ready", func() error { return rig.Ready(p.CloudHealth()) })
	measureLs(b, cloud.CPU, "-c", p.Path("cloud.toml"))
}
