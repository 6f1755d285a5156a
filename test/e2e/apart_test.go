//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	noticed = 20 * time.Second // until replicas say that they are apart: 14 s, and what a busy machine takes
	healed  = 28 * time.Second // until they are together again, and that is written: up to 15 s, and the looks
	grace   = 30 * time.Second // for which a line outlives its node
	// from noticed on: what is lost is forgotten, and the line of a node that is not there would go
	torn = 15*time.Second + grace + 3*time.Second
)

// A divide is two replicas that tell each other what they hold, each with a network of its own, and
// edges between them. Its fields are set once, holder by its methods.
type divide struct {
	f        *field
	one, two *replica
	holder   map[string]*replica // by node that is connected
}

// replicasApart drops the packets between two replicas, and then those between one of them and
// kube-apiserver as well, while edges come, go and move. Each node's line changes as often as it
// has to, and never because of the cut: each version of the ConfigMap is looked at.
func replicasApart(ctx context.Context, t *testing.T, c *cluster, program string) {
	var nodes []string
	for i := range fieldNodes {
		nodes = append(nodes, fieldNode(i+1))
	}
	f := newField(t, c, program, nodes...)
	f.createNodes(ctx, t)
	f.endpoints(ctx, t, 4, 5)
	if _, err := c.kubectl(ctx, "delete", "configmap,lease", nodesMap, "-n", namespace, "--ignore-not-found"); err != nil {
		t.Fatal(err)
	}
	d := &divide{f: f, one: f.island(ctx, t, 4, 5), two: f.island(ctx, t, 5, 4), holder: make(map[string]*replica)}
	watchLeaders(ctx, t, d.one, d.two)
	d.one.start(ctx, t)
	eventually(ctx, t, 10*time.Second, "the first replica to lead", d.one.leads)
	d.two.start(ctx, t)
	eventually(ctx, t, noticed, "the replicas to know each other", d.together)

	var r *record
	for _, step := range []struct {
		name string
		do   func(t *testing.T)
	}{
		{"a line of the other replica deleted", func(t *testing.T) { d.restored(ctx, t) }},
		{"cut off from each other", func(t *testing.T) {
			r = f.record(ctx, t)
			d.cutOff(ctx, t, r)
		}},
		{"leader cut off from kube-apiserver, too", func(t *testing.T) {
			r = f.record(ctx, t)
			d.leaderCutOff(ctx, t, r)
		}},
	} {
		if !c.step(t, step.name, step.do) {
			return
		}
	}
}

// island makes a replica in a network namespace of its own on the bridge. It has a front door to
// every node, which leads to the edge's own health port.
func (f *field) island(ctx context.Context, t *testing.T, number, other int) *replica {
	t.Helper()
	r := f.configure(ctx, t, number, apiServer, "", "")
	name := "te2e-replica" + strconv.Itoa(number) // down.sh goes by te2e
	r.netns = "/run/netns/" + name
	port := "te2ev" + strconv.Itoa(200+number)
	for _, do := range []string{
		"netns add " + name,
		"link add " + port + " type veth peer name eth0 netns " + name,
		"link set " + port + " master te2e0 up",
		"-n " + name + " link set lo up",
		"-n " + name + " addr add " + r.ip + "/24 dev eth0",
		"-n " + name + " link set eth0 up",
	} {
		if _, err := run(command(ctx, "ip", strings.Fields(do)...), nil); err != nil {
			t.Fatal(err)
		}
	}
	file := r.name + ".toml"
	config, err := os.ReadFile(filepath.Join(f.dir, file))
	if err != nil {
		t.Fatal(err)
	}
	more := fmt.Sprintf(`
[mode.cloud.stream.peers]
addresses = ["10.77.0.%d:900%d"]
ca = "%s"
servername = "%s"
`, 200+other, other, f.c.path("pki/ca.crt"), joinName)
	doors, allow := "[mode.cloud.tcp]\n", "[mode.cloud.tcpallow]\n"
	for n, p := range f.port {
		doors += fmt.Sprintf("%q = \"%s/127.0.0.1:%d\"\n", r.door(n), n, p)
		allow += fmt.Sprintf("%q = [\"10.77.0.0/24\"]\n", r.door(n))
	}
	f.write(t, file, string(config)+more+doors+allow)
	return r
}

// door returns where a replica's front door to a node is.
func (r *replica) door(node string) string { return fmt.Sprintf("%s:%d", r.ip, 1000+r.f.port[node]) }

// reaches returns an error unless the replica's front door leads to the node.
func (r *replica) reaches(ctx context.Context, node string) error {
	return is200(get(ctx, &http.Transport{DisableKeepAlives: true}, "http://"+r.door(node)+"/healthz"))
}

// iptables runs it in the replica's network.
func (r *replica) iptables(ctx context.Context, t *testing.T, args string) {
	t.Helper()
	cmd := command(ctx, "nsenter",
		append([]string{"--net=" + r.netns, filepath.Join(r.f.c.home, "nodebin/iptables"), "-w"}, strings.Fields(args)...)...)
	if _, err := run(cmd, nil); err != nil {
		t.Fatal(err)
	}
}

// cut drops what comes from one replica to the other, without a word to either.
func (d *divide) cut(ctx context.Context, t *testing.T) {
	t.Helper()
	d.one.iptables(ctx, t, "-A INPUT -s "+d.two.ip+" -j DROP")
	d.two.iptables(ctx, t, "-A INPUT -s "+d.one.ip+" -j DROP")
}

// mend drops nothing any more.
func (d *divide) mend(ctx context.Context, t *testing.T) {
	t.Helper()
	d.one.iptables(ctx, t, "-F")
	d.two.iptables(ctx, t, "-F")
}

func (d *divide) join(ctx context.Context, t *testing.T, node string, r *replica) {
	t.Helper()
	d.f.join(ctx, t, node, r)
	d.holder[node] = r
}

func (d *divide) leave(t *testing.T, node string) {
	t.Helper()
	d.f.leave(t, node)
	delete(d.holder, node)
}

// vanish is leave, but no packet tells the replica.
func (d *divide) vanish(ctx context.Context, t *testing.T, node string) {
	t.Helper()
	r := d.holder[node]
	conns, err := run(command(ctx, "ss", "-Htnp", "dst", r.grpc), nil)
	if err != nil {
		t.Fatal(err)
	}
	pid := fmt.Sprintf("pid=%d,", d.f.edges[node].cmd.Process.Pid)
	for line := range strings.Lines(conns) {
		if !strings.Contains(line, pid) {
			continue
		}
		_, port, err := net.SplitHostPort(strings.Fields(line)[3])
		if err != nil {
			t.Fatal(err)
		}
		r.iptables(ctx, t, "-t mangle -A PREROUTING -p tcp --sport "+port+" -j DROP") // mend leaves it
		d.leave(t, node)
		return
	}
	t.Fatalf("no connection of %s to %s in:\n%s", node, r.grpc, conns)
}

func (d *divide) move(ctx context.Context, t *testing.T, node string, to *replica) {
	t.Helper()
	d.leave(t, node)
	d.join(ctx, t, node, to)
}

// lines returns a line for each node that is connected, and more or other ones.
func (d *divide) lines(others map[string]string) map[string]string {
	lines := make(map[string]string)
	for n, r := range d.holder {
		lines[n] = r.ip
	}
	for n, ip := range others {
		if lines[n] = ip; ip == "" {
			delete(lines, n)
		}
	}
	return lines
}

// together returns an error unless each replica has joined the other.
func (d *divide) together(ctx context.Context) error {
	return errors.Join(d.one.peers(ctx, 1, "[+]"), d.two.peers(ctx, 1, "[+]"))
}

// apart returns an error unless each replica says that it has lost the other.
func (d *divide) apart(ctx context.Context) error {
	return errors.Join(d.one.peers(ctx, 0, "[~]"), d.two.peers(ctx, 0, "[~]"))
}

// peers returns an error unless the replica knows so many others, and /readyz says of them what is
// at the beginning of a line.
func (r *replica) peers(ctx context.Context, others float64, mark string) error {
	n, err := r.metric(ctx, "tunnel_replicas")
	if err == nil && n != others {
		err = fmt.Errorf("%s has %v other replicas", r.name, n)
	}
	if err != nil {
		return err
	}
	page, err := r.ask(ctx, "/readyz?verbose")
	if err == nil && !strings.Contains("\n"+page, "\n"+mark+"peers") {
		err = fmt.Errorf("%s says of its peers:\n%s", r.name, page)
	}
	return err
}

// everywhere returns an error unless both replicas lead to every node, by name and by front door.
func (d *divide) everywhere(ctx context.Context) error {
	var errs []error
	for n, holder := range d.holder {
		for _, r := range []*replica{d.one, d.two} {
			a, err := r.answers(ctx, n)
			errs = append(errs, want(err, a, holder.ip))
			if err := r.reaches(ctx, n); err != nil {
				errs = append(errs, fmt.Errorf("%s at %s, which is at %s: %w", n, r.ip, holder.ip, err))
			}
		}
	}
	return errors.Join(errs...)
}

// restored has somebody delete a line of the replica that does not write.
func (d *divide) restored(ctx context.Context, t *testing.T) {
	d.join(ctx, t, fieldNode(1), d.one)
	d.join(ctx, t, fieldNode(2), d.two)
	eventually(ctx, t, 15*time.Second, "the lines of both replicas",
		func(ctx context.Context) error { return d.f.has(ctx, d.lines(nil)) })
	eventually(ctx, t, 15*time.Second, "each to relay to the other", d.everywhere)
	m, err := d.f.admin.load(ctx)
	if err != nil {
		t.Fatal(err)
	}
	own, _ := m.split()
	m.Data["hosts"] = own[0]
	if err := d.f.admin.do(ctx, http.MethodPut, mapPath, "application/json", m, nil); err != nil {
		t.Fatal(err)
	}
	took := eventually(ctx, t, 15*time.Second, "the line to be written back",
		func(ctx context.Context) error { return d.f.has(ctx, d.lines(nil)) })
	t.Logf("written back after %v", took.Round(time.Millisecond))
}

// cutOff keeps the replicas apart until either has forgotten what the other held.
func (d *divide) cutOff(ctx context.Context, t *testing.T, r *record) {
	one, two := d.one.ip, d.two.ip
	d.join(ctx, t, fieldNode(3), d.two)
	d.join(ctx, t, fieldNode(4), d.one)
	d.join(ctx, t, fieldNode(5), d.two)
	d.join(ctx, t, fieldNode(6), d.one)
	eventually(ctx, t, 15*time.Second, "all lines", func(ctx context.Context) error { return d.f.has(ctx, d.lines(nil)) })

	d.cut(ctx, t)
	took := eventually(ctx, t, noticed, "both replicas to notice", d.apart)
	lost := time.Now()
	t.Logf("noticed after %v", took.Round(time.Millisecond))
	for n, holder := range d.holder {
		for _, r := range []*replica{d.one, d.two} {
			if err := r.reaches(ctx, n); (err == nil) != (r == holder) {
				t.Errorf("%s at %s while it is at %s: %v", n, r.ip, holder.ip, err)
			}
		}
	}
	d.move(ctx, t, fieldNode(3), d.one) // from the one that is cut off to the one that writes
	d.leave(t, fieldNode(5))            // unseen
	d.leave(t, fieldNode(6))            // seen
	d.join(ctx, t, fieldNode(7), d.two) // unseen
	d.join(ctx, t, fieldNode(8), d.one) // seen
	there := map[string]string{fieldNode(5): two, fieldNode(6): one, fieldNode(7): ""}
	eventually(ctx, t, 15*time.Second, "the lines of what the leader sees",
		func(ctx context.Context) error { return d.f.has(ctx, d.lines(there)) })
	delete(there, fieldNode(6))
	eventually(ctx, t, time.Until(lost.Add(torn)), "the line of what has left the leader to go",
		func(ctx context.Context) error { return d.f.has(ctx, d.lines(there)) })
	time.Sleep(time.Until(lost.Add(torn - 3*time.Second)))
	d.vanish(ctx, t, fieldNode(4)) // for the leader it is still there when they meet again
	d.join(ctx, t, fieldNode(4), d.two)
	there[fieldNode(4)] = one
	time.Sleep(time.Until(lost.Add(torn)))
	if err := errors.Join(d.f.has(ctx, d.lines(there)), d.apart(ctx), d.one.leads(ctx)); err != nil {
		t.Errorf("at the end of the cut: %v", err)
	}

	d.mend(ctx, t)
	mended := time.Now()
	took = eventually(ctx, t, healed, "what has happened meanwhile to be written", func(ctx context.Context) error {
		return d.f.has(ctx, d.lines(map[string]string{fieldNode(5): two}))
	})
	t.Logf("healed after %v", took.Round(time.Millisecond))
	eventually(ctx, t, time.Until(mended.Add(healed)), "both to lead to every node", func(ctx context.Context) error {
		return errors.Join(d.together(ctx), d.everywhere(ctx))
	})
	eventually(ctx, t, healed+grace, "the line of the node that left unseen to go",
		func(ctx context.Context) error { return d.f.has(ctx, d.lines(nil)) })
	if err := d.everywhere(ctx); err != nil {
		t.Error(err)
	}
	r.stop(t, map[string][]string{
		fieldNode(1): {one},
		fieldNode(2): {two},
		fieldNode(3): {two, one},
		fieldNode(4): {one, two},
		fieldNode(5): {two, ""},
		fieldNode(6): {one, ""},
		fieldNode(7): {two},
		fieldNode(8): {one},
	})
}

// leaderCutOff takes the leader away from kube-apiserver, too. Its edges can still reach it.
func (d *divide) leaderCutOff(ctx context.Context, t *testing.T, r *record) {
	one, two := d.one.ip, d.two.ip
	d.cut(ctx, t)
	d.one.iptables(ctx, t, "-A INPUT -p tcp -s 10.77.0.1 --sport 6443 -j DROP")
	d.one.iptables(ctx, t, "-A OUTPUT -p tcp -d 10.77.0.1 --dport 6443 -j DROP")
	began := time.Now()
	d.move(ctx, t, fieldNode(3), d.two) // while nobody writes
	eventually(ctx, t, time.Until(began.Add(noticed)), "both replicas to notice", d.apart)
	eventually(ctx, t, 20*time.Second, "the other replica to lead", d.two.leads)
	t.Logf("the other leads after %v", time.Since(began).Round(time.Millisecond))
	d.move(ctx, t, fieldNode(8), d.two)
	d.join(ctx, t, fieldNode(5), d.two)
	eventually(ctx, t, 15*time.Second, "the lines of what it holds",
		func(ctx context.Context) error { return d.f.has(ctx, d.lines(nil)) })
	// Until what is lost is forgotten.
	time.Sleep(time.Until(began.Add(noticed + 15*time.Second + 2*time.Second)))
	d.move(ctx, t, fieldNode(2), d.one) // for the leader it is gone
	d.leave(t, fieldNode(4))            // and this, too, but it is
	there := map[string]string{fieldNode(2): two, fieldNode(4): two}
	time.Sleep(2 * time.Second)
	if err := errors.Join(d.f.has(ctx, d.lines(there)), d.apart(ctx), d.two.leads(ctx)); err != nil {
		t.Errorf("at the end of the cut: %v", err)
	}

	d.mend(ctx, t)
	delete(there, fieldNode(2))
	took := eventually(ctx, t, healed, "what has happened meanwhile to be written",
		func(ctx context.Context) error { return d.f.has(ctx, d.lines(there)) })
	t.Logf("healed after %v", took.Round(time.Millisecond))
	eventually(ctx, t, healed-took, "both to lead to every node", func(ctx context.Context) error {
		return errors.Join(d.together(ctx), d.everywhere(ctx))
	})
	if err := d.two.leads(ctx); err != nil {
		t.Error(err)
	}
	r.stop(t, map[string][]string{
		fieldNode(1): {one},
		fieldNode(2): {two, one},
		fieldNode(3): {one, two},
		fieldNode(4): {two},
		fieldNode(5): {two},
		fieldNode(7): {two},
		fieldNode(8): {one, two},
	})
}

// A record is what the lines of the ConfigMap have been since it was begun.
type record struct {
	admin *admin
	end   context.CancelFunc
	done  chan error // one send, when nothing is watched any more

	mu       sync.Mutex // guards the following
	version  string     // of the last that was seen
	versions int
	lines    map[string]string   // as of then
	history  map[string][]string // addresses by node; "" after it had a line and had none
}

// record begins one, for the duration of the test at most.
func (f *field) record(ctx context.Context, t *testing.T) *record {
	t.Helper()
	first, err := f.admin.load(ctx)
	if err != nil {
		t.Fatal(err)
	}
	r := &record{admin: f.admin, done: make(chan error, 1), history: make(map[string][]string)}
	if err := r.add(first); err != nil {
		t.Fatal(err)
	}
	ctx, r.end = context.WithCancel(ctx)
	t.Cleanup(r.end)
	path := fmt.Sprintf("%s?watch=1&timeoutSeconds=600&fieldSelector=metadata.name%%3D%s&resourceVersion=%s", mapsPath,
		nodesMap, first.Metadata.ResourceVersion)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, apiServer+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: f.admin.client.Transport}).Do(req) // without a limit
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		t.Fatalf("watching the ConfigMap: %s", resp.Status)
	}
	go func() {
		defer resp.Body.Close()
		for dec := json.NewDecoder(resp.Body); ; {
			var event struct {
				Type   string    `json:"type"`
				Object configMap `json:"object"`
			}
			err := dec.Decode(&event)
			if err == nil && event.Type != "MODIFIED" {
				err = fmt.Errorf("watching the ConfigMap: %+v", event)
			}
			if err == nil {
				err = r.add(event.Object)
			}
			if err != nil {
				r.done <- err
				return
			}
		}
	}()
	return r
}

// add takes the next version.
func (r *record) add(m configMap) error {
	lines, err := m.own()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for n := range r.lines {
		if _, ok := lines[n]; !ok {
			r.history[n] = append(r.history[n], "")
		}
	}
	for n, ip := range lines {
		if r.lines[n] != ip {
			r.history[n] = append(r.history[n], ip)
		}
	}
	r.version, r.lines = m.Metadata.ResourceVersion, lines
	r.versions++
	return nil
}

// stop ends the record, and asserts that the nodes' lines have changed so and no more.
func (r *record) stop(t *testing.T, history map[string][]string) {
	t.Helper()
	last, err := r.admin.load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t.Context(), t, 5*time.Second, "the record to be complete", func(context.Context) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		return want(nil, r.version, last.Metadata.ResourceVersion)
	})
	r.end()
	if err := <-r.done; !errors.Is(err, context.Canceled) {
		t.Errorf("the record ended: %v", err)
	}
	t.Logf("%d versions of the ConfigMap", r.versions)
	if !maps.EqualFunc(r.history, history, slices.Equal) {
		t.Errorf("the lines have been\n%v\nnot\n%v", r.history, history)
	}
}
