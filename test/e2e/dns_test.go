//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// The nodes of these tests: objects without a machine. An edge with the name and the token of one is a process here.
const (
	fieldLabel = "tunnel.e2e/field" // on every Node of these tests
	fieldNodes = 9                  // field1 …
	noField    = "nofield"          // a Node without that label
)

// reserved is a name that may not even join.
const reserved = "kubernetes.default.svc"

// refused are the names that may join and may not appear: no Node, and two of the control plane.
func refused() []string {
	return []string{"metrics-server", "control1", "master1"}
}

func fieldNode(i int) string { return fmt.Sprintf("field%d", i) }

// dnsWorks asserts how names come and go, with two clouds at once, and with everything that
// Kubernetes and others do to the ConfigMap meanwhile. The order matters: a step finds what the one
// before it left.
func dnsWorks(ctx context.Context, t *testing.T, c *cluster, program, volume string) {
	nodes := append(refused(), noField, reserved)
	for i := range fieldNodes {
		nodes = append(nodes, fieldNode(i+1))
	}
	f := newField(t, c, program, nodes...)
	f.createNodes(ctx, t)
	f.endpoints(ctx, t, 1, 2)
	if _, err := c.kubectl(ctx, "delete", "configmap,lease", nodesMap, "-n", namespace, "--ignore-not-found"); err != nil {
		t.Fatal(err)
	}
	gate1, gate2 := newGate(t, c), newGate(t, c)
	hosts := filepath.Join(volume, "hosts")
	one := f.replica(ctx, t, 1, "https://"+gate1.addr, hosts, "")
	two := f.replica(ctx, t, 2, "https://"+gate2.addr, hosts, "")
	three := f.replica(ctx, t, 3, apiServer, hosts, fieldLabel)

	watchLeaders(ctx, t, one, two, three)
	one.start(ctx, t)
	if err := c.script(ctx, "dns.sh", "forward", one.ip+":5353"); err != nil {
		t.Fatal(err)
	}
	unharmed := func(context.Context) error { return nil }
	for _, step := range []struct {
		name string
		do   func(t *testing.T)
	}{
		{"names", func(t *testing.T) { names(ctx, t, f, one, volume) }},
		{"429", func(t *testing.T) { throttled(ctx, t, f, one, gate1) }},
		{"rights withdrawn", func(t *testing.T) { forbidden(ctx, t, f, one, gate1) }},
		{"leader killed", func(t *testing.T) {
			two.start(ctx, t)
			takeover(ctx, t, f, one, two)
		}},
		{"foreign writers", func(t *testing.T) { unharmed = foreignWriters(ctx, t, f, two) }},
		{"kube-apiserver restarted", func(t *testing.T) { restarted(ctx, t, f, two, gate2, unharmed) }},
		{"leader left", func(t *testing.T) {
			three.start(ctx, t) // only now, since it could lead while kube-apiserver is away
			handover(ctx, t, f, two, three)
		}},
	} {
		if !c.step(t, step.name, step.do) {
			return
		}
	}
}

// createNodes makes the Nodes. They go with the cluster.
func (f *field) createNodes(ctx context.Context, t *testing.T) {
	t.Helper()
	type object map[string]any
	items := []object{}
	add := func(name, label string) {
		items = append(items,
			object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name, "labels": object{label: ""}}})
	}
	for i := range fieldNodes {
		add(fieldNode(i+1), fieldLabel)
	}
	add(noField, "tunnel.e2e/other")
	add("control1", "node-role.kubernetes.io/control-plane")
	add("master1", "node-role.kubernetes.io/master")
	b, err := json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": items})
	if err == nil {
		_, err = f.c.kubectlIn(ctx, strings.NewReader(string(b)), "apply", "-f", "-")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// endpoints says which replicas' pods there are.
func (f *field) endpoints(ctx context.Context, t *testing.T, numbers ...int) {
	t.Helper()
	var all []string
	for _, n := range numbers {
		all = append(all, fmt.Sprintf(`{"addresses": ["10.77.0.%d"], "conditions": {"ready": true}}`, 200+n))
	}
	if err := f.c.apply(ctx, "replicas.yaml", "ENDPOINTS", "["+strings.Join(all, ", ")+"]"); err != nil {
		t.Fatal(err)
	}
}

// has returns an error unless the cloud's lines are exactly these.
func (f *field) has(ctx context.Context, lines map[string]string) error {
	got, err := f.admin.lines(ctx)
	if err == nil && !maps.Equal(got, lines) {
		err = fmt.Errorf("the ConfigMap has the lines %v, not %v", got, lines)
	}
	return err
}

// names asserts who gets a line and an answer, how soon, and how long a line outlives its node.
func names(ctx context.Context, t *testing.T, f *field, one *replica, volume string) {
	// Those that may not appear are there before the one that may: when its line is written, theirs would be, too.
	for _, n := range refused() {
		f.dial(ctx, t, n, one)
	}
	for _, n := range refused() {
		f.joined(ctx, t, n)
	}
	node := fieldNode(1)
	f.join(ctx, t, node, one)
	began := time.Now()
	took := eventually(ctx, t, 10*time.Second, "CoreDNS to answer by asking the cloud", func(ctx context.Context) error {
		a, err := lookup(ctx, coreDNS, node)
		return want(err, a, one.ip)
	})
	t.Logf("the responder is seen after %v", took.Round(time.Millisecond))
	lines := map[string]string{node: one.ip}
	eventually(ctx, t, time.Until(began.Add(15*time.Second)), "the line",
		func(ctx context.Context) error { return f.has(ctx, lines) })
	t.Logf("the line is there after %v", time.Since(began).Round(time.Millisecond))
	eventually(ctx, t, 10*time.Second, "the mounted file", func(context.Context) error {
		b, err := os.ReadFile(filepath.Join(volume, "hosts"))
		return want(err, string(b), one.ip+"    "+node+" "+ownMark+"\n")
	})
	t.Logf("the mounted file has it after %v", time.Since(began).Round(time.Millisecond))
	eventually(ctx, t, 10*time.Second, "the cloud to see no lag", func(ctx context.Context) error {
		lag, err := one.metric(ctx, "tunnel_dns_hosts_lag_seconds")
		return want(err, fmt.Sprint(lag), "0")
	})

	// A Node that is deleted may no longer appear, whoever is connected.
	deleted := fieldNode(9)
	f.join(ctx, t, deleted, one)
	eventually(ctx, t, 15*time.Second, "the line of "+deleted, func(ctx context.Context) error {
		return f.has(ctx, map[string]string{node: one.ip, deleted: one.ip})
	})
	if _, err := f.c.kubectl(ctx, "delete", "node", deleted); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, 15*time.Second, "the line of the deleted Node to go",
		func(ctx context.Context) error { return f.has(ctx, lines) })
	unknown := append(refused(), deleted)

	// A line outlives its node by 30 s, an answer by 15 s at most.
	f.leave(t, node)
	left := time.Now()
	for time.Since(left) < 20*time.Second {
		if err := f.has(ctx, lines); err != nil {
			t.Fatalf("%v after the edge left: %v", time.Since(left).Round(time.Second), err)
		}
		for _, n := range unknown {
			if a, err := one.answers(ctx, n); !errors.Is(err, errNoAddress) {
				t.Errorf("the responder says of %s: %q, %v", n, a, err)
			}
		}
		time.Sleep(500 * time.Millisecond)
	}
	if a, err := one.answers(ctx, node); !errors.Is(err, errNoAddress) {
		t.Errorf("20 s after its edge left, the responder says of %s: %q, %v", node, a, err)
	}
	eventually(ctx, t, time.Until(left.Add(40*time.Second)), "the line to go",
		func(ctx context.Context) error { return f.has(ctx, nil) })
	t.Logf("the line is gone %v after the edge", time.Since(left).Round(time.Millisecond))

	strangers(ctx, t, f, one)
}

// strangers asserts that either end refuses a name that could be more than one line, and that a
// reserved name may not join, although the token file has a token for it.
func strangers(ctx context.Context, t *testing.T, f *field, one *replica) {
	token := func(node, of string) string {
		b, err := json.Marshal(map[string]string{"nodename": node, "token": f.tokens[of]})
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const unauthenticated = "16"
	if s := f.stranger(ctx, t, one, token(fieldNode(2), fieldNode(2))); s != "" {
		t.Fatalf("a token of its own is refused with gRPC status %s", s) // else the next would show nothing
	}
	for _, name := range []string{fieldNode(2) + "\n10.0.0.1 evil", "evil\n" + fieldNode(2), fieldNode(2) + "\r",
		fieldNode(2) + " # tunnel"} {
		if s := f.stranger(ctx, t, one, token(name, fieldNode(2))); s != unauthenticated {
			t.Errorf("%q may join: gRPC status %q", name, s)
		}
	}
	if s := f.stranger(ctx, t, one, token(reserved, reserved)); s != unauthenticated {
		t.Errorf("%q may join: gRPC status %q", reserved, s)
	}
	f.write(t, "evil.toml", `
[mode.edge]
node = "field2\n10.0.0.1 evil"
[mode.edge.stream.client]
token = "t"
cert = "`+f.c.path("pki/ca.crt")+`"
dns = "`+joinName+`"
servername = "`+one.grpc+`"
`)
	ctx, cancel := within(ctx, 10*time.Second)
	defer cancel()
	_, err := run(f.c.command(ctx, f.program, "edge", "-c", filepath.Join(f.dir, "evil.toml")), nil)
	if code, ok := exitCode(err); !ok || code != 3 {
		t.Errorf("an edge with a line break in its name: %v", err)
	}
}

// throttled asserts that an overloaded kube-apiserver is left alone, and that nothing is asked when
// there is nothing to do.
func throttled(ctx context.Context, t *testing.T, f *field, one *replica, g *gate) {
	const during = 10 * time.Second
	node, second := fieldNode(1), fieldNode(2)
	g.refuse(true)
	g.count()
	began := time.Now()
	f.join(ctx, t, node, one)
	eventually(ctx, t, 15*time.Second, "the answer, which does not need kube-apiserver", func(ctx context.Context) error {
		a, err := one.answers(ctx, node)
		return want(err, a, one.ip)
	})
	eventually(ctx, t, during, "/readyz?verbose to say why",
		func(ctx context.Context) error { return noted(ctx, one, "too many requests") })
	time.Sleep(time.Until(began.Add(during)))
	g.calm(t, "nothing but 429")
	g.refuse(false)
	if n, err := one.metric(ctx, `tunnel_dns_configmap_writes_total{result="throttled"}`); err != nil || n == 0 {
		t.Errorf("throttled writes: %v, %v", n, err)
	}
	took := eventually(ctx, t, 20*time.Second, "the line after all", func(ctx context.Context) error {
		return f.has(ctx, map[string]string{node: one.ip})
	})
	t.Logf("written %v after the last 429", took.Round(time.Millisecond))
	f.join(ctx, t, second, one)
	eventually(ctx, t, 15*time.Second, "everything to be as before", func(ctx context.Context) error {
		return errors.Join(f.has(ctx, map[string]string{node: one.ip, second: one.ip}), noted(ctx, one, ""))
	})

	const quiet = 20 * time.Second
	g.count()
	time.Sleep(quiet)
	asked, _, _, _ := g.counted()
	t.Logf("in 20 s without any change:\n%s", list(asked))
	const lease = "/apis/coordination.k8s.io/v1/namespaces/" + namespace + "/leases/" + nodesMap
	for what, n := range asked {
		verb, path, _ := strings.Cut(what, " ")
		switch {
		case path == lease && (verb == http.MethodGet || verb == http.MethodPut || verb == http.MethodPatch) &&
			n <= int(quiet/time.Second):
		case verb == "WATCH" && n <= 2:
		default:
			t.Errorf("asked %d times though nothing changed: %s", n, what)
		}
	}
}

// noted returns an error unless /readyz?verbose says of the ConfigMap that it cannot be written and
// why, or, without why, that all is well. The replica is ready either way.
func noted(ctx context.Context, r *replica, why ...string) error {
	page, err := r.ask(ctx, "/readyz?verbose")
	if err != nil {
		return err
	}
	for line := range strings.Lines(page) {
		line = strings.ToLower(strings.TrimSpace(line))
		if !strings.Contains(line, "dns-configmap") {
			continue
		}
		warns := strings.HasPrefix(line, "[~]")
		if why[0] == "" && !warns {
			return nil
		}
		for _, w := range why {
			if !warns || w == "" || !strings.Contains(line, w) {
				return fmt.Errorf("it says %q, not %q", line, w)
			}
		}
		return nil
	}
	return fmt.Errorf("nothing of the ConfigMap in:\n%s", page)
}

// forbidden takes the rights away, and gives them back.
func forbidden(ctx context.Context, t *testing.T, f *field, one *replica, g *gate) {
	binding, err := f.c.kubectl(ctx, "get", "rolebinding", account, "-n", namespace, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	from, err := os.Stat(f.c.path("log/" + one.name + ".log"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.c.kubectl(ctx, "delete", "rolebinding", account, "-n", namespace); err != nil {
		t.Fatal(err)
	}
	g.count()
	f.join(ctx, t, fieldNode(3), one)
	rights := []string{"forbidden", `configmaps "` + nodesMap + `"`, `cannot `, `deployment/cloud-rbac.yaml`}
	eventually(ctx, t, 10*time.Second, "/readyz?verbose to name the rights",
		func(ctx context.Context) error { return noted(ctx, one, rights...) })
	if n, err := one.metric(ctx, `tunnel_dns_configmap_writes_total{result="forbidden"}`); err != nil || n == 0 {
		t.Errorf("forbidden writes: %v, %v", n, err)
	}
	log := f.c.logged(one.name, from.Size())
	for _, r := range rights {
		if !strings.Contains(log, r) && !strings.Contains(log, strings.ReplaceAll(r, `"`, `\"`)) {
			t.Errorf("the log does not say %q:\n%s", r, log)
		}
	}
	// Nor can it renew the Lease. It gives up leading and goes on saying why nobody writes.
	eventually(ctx, t, 20*time.Second, "the leader to step down", func(ctx context.Context) error {
		v, err := one.metric(ctx, leader)
		return want(err, fmt.Sprint(v), "0")
	})
	g.calm(t, "rights withdrawn")
	if err := noted(ctx, one, "forbidden", `leases`); err != nil {
		t.Errorf("without the Lease: %v", err)
	}
	if err := f.has(ctx, map[string]string{fieldNode(1): one.ip, fieldNode(2): one.ip}); err != nil {
		t.Error(err)
	}
	if _, err := f.c.kubectlIn(ctx, strings.NewReader(binding), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	took := eventually(ctx, t, 20*time.Second, "the missing line", func(ctx context.Context) error {
		return f.has(ctx, map[string]string{fieldNode(1): one.ip, fieldNode(2): one.ip, fieldNode(3): one.ip})
	})
	t.Logf("written %v after the rights were given back", took.Round(time.Millisecond))
	eventually(ctx, t, 15*time.Second, "/readyz?verbose to be quiet again",
		func(ctx context.Context) error { return noted(ctx, one, "") })
}

// watchLeaders looks until the end of the test that no two replicas lead at once. Those that do not run do not lead.
func watchLeaders(ctx context.Context, t *testing.T, replicas ...*replica) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			var lead []*replica
			for _, r := range replicas {
				if r.leads(ctx) == nil {
					lead = append(lead, r)
				}
			}
			// They were asked one after the other: the first still leads while the last does.
			if len(lead) > 1 && lead[0].leads(ctx) == nil {
				t.Errorf("%s and %s lead at once", lead[0].name, lead[len(lead)-1].name)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// takeover kills the replica that leads.
func takeover(ctx context.Context, t *testing.T, f *field, one, two *replica) {
	f.join(ctx, t, fieldNode(4), two)
	if err := one.leads(ctx); err != nil {
		t.Fatal(err)
	}
	before, err := f.admin.lines(ctx)
	if err != nil {
		t.Fatal(err)
	}
	one.kill(t)
	killed := time.Now()
	f.endpoints(ctx, t, 2, 3)
	eventually(ctx, t, 40*time.Second, "the other replica to lead", two.leads)
	t.Logf("the other leads after %v", time.Since(killed).Round(time.Millisecond))
	// Its own lines come; those of the one that is gone stay for the grace period, as if their nodes had left.
	before[fieldNode(4)] = two.ip
	eventually(ctx, t, 15*time.Second, "its lines", func(ctx context.Context) error { return f.has(ctx, before) })
	for i := range 3 {
		f.leave(t, fieldNode(i+1))
	}
}

// A foreignWriter is everybody else who edits the ConfigMap: well, and badly. Each time it looks,
// all must be there that it wrote the last time. All of it is owned by run.
type foreignWriter struct {
	admin *admin
	rnd   *rand.Rand

	hosts  []string          // lines of the file, in order, as they are to be
	keys   map[string]string // other keys, as they are to be
	binary map[string][]byte // the same, and never changed

	wrote *configMap     // the last time; nil: not yet
	did   map[string]int // by kind of edit
}

// means returns the ConfigMap as it is to be, with the cloud's lines at a place.
func (w *foreignWriter) means(own []string, at int) configMap {
	m := configMap{APIVersion: "v1", Kind: "ConfigMap", Data: maps.Clone(w.keys), BinaryData: w.binary}
	m.Metadata.Name, m.Metadata.Namespace = nodesMap, namespace
	m.Data["hosts"] = strings.Join(slices.Concat(w.hosts[:at], own, w.hosts[at:]), "")
	return m
}

// unharmed returns an error unless all that is foreign is as it was written.
func (w *foreignWriter) unharmed(m configMap) error {
	if w.wrote == nil {
		return nil
	}
	_, is := m.split()
	_, was := w.wrote.split()
	if strings.Join(is, "") != strings.Join(was, "") {
		return fmt.Errorf("foreign lines are now\n%q\nnot\n%q", is, was)
	}
	keys, before := maps.Clone(m.Data), maps.Clone(w.wrote.Data)
	delete(keys, "hosts")
	delete(before, "hosts")
	if !maps.Equal(keys, before) || !maps.EqualFunc(m.BinaryData, w.wrote.BinaryData, slices.Equal) {
		return fmt.Errorf("foreign keys are now %q and %q, not %q and %q", keys, m.BinaryData, before, w.wrote.BinaryData)
	}
	return nil
}

// run edits until ctx is done.
func (w *foreignWriter) run(ctx context.Context) error {
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Duration(w.rnd.IntN(20)) * time.Millisecond):
		}
		var err error
		switch {
		// what it drops of nodes that have left is not missed: let some of that be there at the end
		case i%10 == 9 && i < 200:
			err = w.replace(context.WithoutCancel(ctx))
		case i%3 == 2:
			err = w.patch(context.WithoutCancel(ctx), i)
		default:
			err = w.edit(context.WithoutCancel(ctx), i)
		}
		if err != nil {
			return err
		}
	}
}

// change makes up other lines, with whatever people write into such a file.
func (w *foreignWriter) change(i int) {
	line := fmt.Sprintf("10.9.0.%d\tdb%d db%d.example  # of the DBA's own tunnel\n", i%250, i, i)
	switch w.rnd.IntN(6) {
	case 0:
		line = "\n"
	case 1:
		line = fmt.Sprintf("  fd00::%x  six%d \n", i, i)
	case 2:
		line = fmt.Sprintf("not a line of a hosts file %d\r\n", i)
	case 3:
		line = fmt.Sprintf("# edit %d, see "+ownMark+"\n", i)
	}
	if len(w.hosts) > 20 {
		w.hosts = slices.Delete(w.hosts, 3, 4+w.rnd.IntN(5))
	}
	w.hosts = slices.Insert(w.hosts, w.rnd.IntN(len(w.hosts)+1), line)
	w.keys["counter"] = fmt.Sprint(i)
}

// edit is a good citizen: it reads, changes what is its own, leaves the cloud's lines together, and
// writes only if nobody was faster.
func (w *foreignWriter) edit(ctx context.Context, i int) error {
	w.change(i)
	for {
		there, err := w.admin.load(ctx)
		if err != nil {
			return err
		}
		if err := w.unharmed(there); err != nil {
			return err
		}
		own, _ := there.split()
		m := w.means(own, w.rnd.IntN(len(w.hosts)+1))
		m.Metadata.ResourceVersion = there.Metadata.ResourceVersion
		err = w.admin.do(ctx, http.MethodPut, mapPath, "application/json", m, nil)
		if isStatus(err, http.StatusConflict) {
			w.did["conflict"]++
			continue
		}
		w.did["edit"]++
		w.wrote = &m
		return err
	}
}

// patch is kubectl patch: it names a key, and no version.
func (w *foreignWriter) patch(ctx context.Context, i int) error {
	key := fmt.Sprintf("note%d", i%4)
	w.keys[key] = fmt.Sprintf("edit %d\nof many", i)
	w.did["patch"]++
	m := w.means(nil, 0)
	w.wrote = &m
	return w.admin.do(ctx, http.MethodPatch, mapPath, "application/merge-patch+json",
		map[string]any{"data": map[string]string{key: w.keys[key]}}, nil)
}

// replace is the bad one: it has the file from somewhere else, and writes over all that is there.
func (w *foreignWriter) replace(ctx context.Context) error {
	m := w.means(nil, 0)
	w.did["replace"]++
	w.wrote = &m
	return w.admin.do(ctx, http.MethodPut, mapPath, "application/json", m, nil)
}

// foreignWriters has everybody write at once while edges come and go. It returns what still has to be true later.
func foreignWriters(ctx context.Context, t *testing.T, f *field, two *replica) func(context.Context) error {
	const during = 20 * time.Second
	w := &foreignWriter{
		admin: f.admin, rnd: rand.New(rand.NewPCG(1, 2)), did: make(map[string]int),
		keys: map[string]string{"Corefile": ".:53 {\n  errors\n}\n"}, binary: map[string][]byte{"blob": {0, 0xff, '\n'}},
	}
	ok := func(reason string) float64 {
		n, err := two.metric(ctx, `tunnel_dns_configmap_writes_total{result="`+reason+`"}`)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	wrote, conflicts := ok("ok"), ok("conflict")
	writing, stop := context.WithTimeout(ctx, during)
	defer stop()
	began := time.Now()
	done := make(chan error, 1)
	go func() { done <- w.run(writing) }()
	for i := 0; writing.Err() == nil; i++ {
		n := fieldNode(5 + i%4) // 5 to 8
		if f.edges[n] != nil {
			f.leave(t, n)
		} else {
			f.join(ctx, t, n, two)
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	wrote, conflicts = ok("ok")-wrote, ok("conflict")-conflicts
	t.Logf("others wrote %v; the cloud %v times, and lost %v races", w.did, wrote, conflicts)
	if limit := time.Since(began).Seconds() + 5; wrote > limit {
		t.Errorf("the cloud wrote %v times in %v: more than once a second", wrote, time.Since(began))
	}

	unharmed := func(ctx context.Context) error {
		m, err := f.admin.load(ctx)
		if err != nil {
			return err
		}
		return w.unharmed(m)
	}
	lines := f.connected(two)
	eventually(ctx, t, 15*time.Second, "every foreign byte and every line", func(ctx context.Context) error {
		return errors.Join(unharmed(ctx), f.hasAll(ctx, lines))
	})
	return unharmed
}

// hasAll is has, but there may be more lines.
func (f *field) hasAll(ctx context.Context, lines map[string]string) error {
	got, err := f.admin.lines(ctx)
	for n := range lines {
		if err == nil && got[n] != lines[n] {
			err = fmt.Errorf("no line of %s in %v", n, got)
		}
	}
	return err
}

// connected returns the lines that a replica's nodes should have.
func (f *field) connected(r *replica) map[string]string {
	lines := make(map[string]string)
	for n := range f.edges {
		if strings.HasPrefix(n, "field") && n != fieldNode(9) { // that Node has been deleted
			lines[n] = r.ip
		}
	}
	return lines
}

// restarted takes kube-apiserver away while nodes come and go. Afterwards no line is missing and
// none left over, neither from this nor from the step before, and unharmed still holds.
func restarted(
	ctx context.Context, t *testing.T, f *field, two *replica, g *gate, unharmed func(context.Context) error,
) {
	if err := f.c.script(ctx, "apiserver.sh", "stop"); err != nil {
		t.Fatal(err)
	}
	g.count()
	f.leave(t, fieldNode(4))
	for i := range 3 {
		f.join(ctx, t, fieldNode(i+1), two)
	}
	const what = "/readyz?verbose to say that it cannot be written"
	eventually(ctx, t, 15*time.Second, what, func(ctx context.Context) error {
		return noted(ctx, two, "cannot be written")
	})
	if a, err := two.answers(ctx, fieldNode(1)); err != nil || a != two.ip {
		t.Errorf("the responder needs kube-apiserver: %q, %v", a, err)
	}
	if err := f.c.script(ctx, "apiserver.sh", "kubelet-ca"); err != nil {
		t.Fatal(err)
	}
	g.calm(t, "kube-apiserver restarted")
	lines := f.connected(two)
	took := eventually(ctx, t, 20*time.Second, "the lines of those that joined meanwhile",
		func(ctx context.Context) error { return f.hasAll(ctx, lines) })
	t.Logf("written %v after kube-apiserver was back", took.Round(time.Millisecond))
	took = eventually(ctx, t, 35*time.Second, "no line to be left over",
		func(ctx context.Context) error { return f.has(ctx, lines) })
	t.Logf("no line is left over %v later", took.Round(time.Second))
	if err := unharmed(ctx); err != nil {
		t.Error(err)
	}
}

// handover ends the leader as Kubernetes does. The next one is configured to show some nodes only.
func handover(ctx context.Context, t *testing.T, f *field, two, three *replica) {
	f.join(ctx, t, noField, two)
	eventually(ctx, t, 15*time.Second, "the line of a node without the label", func(ctx context.Context) error {
		got, err := f.admin.lines(ctx)
		return want(err, got[noField], two.ip)
	})
	two.leave(t)
	took := eventually(ctx, t, 15*time.Second, "the other replica to lead", three.leads)
	t.Logf("the other leads after %v", took.Round(time.Millisecond))
	f.leave(t, noField)
	f.leave(t, fieldNode(1))
	f.join(ctx, t, noField, three)
	f.join(ctx, t, fieldNode(1), three)
	eventually(ctx, t, 15*time.Second, "the lines that its nodeselector allows", func(ctx context.Context) error {
		got, err := f.admin.lines(ctx)
		// Nobody has said that the pod of the one before is gone: it may still serve its nodes.
		return errors.Join(want(err, got[fieldNode(1)], three.ip), want(nil, got[noField], ""),
			want(nil, got[fieldNode(2)], two.ip))
	})
	if a, err := three.answers(ctx, fieldNode(1)); err != nil || a != three.ip {
		t.Errorf("the responder says of a node that is selected: %q, %v", a, err)
	}
	if a, err := three.answers(ctx, noField); !errors.Is(err, errNoAddress) {
		t.Errorf("the responder says of a node that is not selected: %q, %v", a, err)
	}
}
