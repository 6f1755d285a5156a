package check

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/cni"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/stream"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// want compares a result with a state, a part of its text and a part of its next step.
func want(t *testing.T, what string, r Result, state State, text, do string) {
	t.Helper()
	if r.State != state || !strings.Contains(r.Text, text) || !strings.Contains(r.Do, do) || (r.Do == "") != (do == "") {
		t.Errorf("%s: %+v; want %s, %q, %q", what, r, state, text, do)
	}
}

// The checks run in order until the context ends, and their texts are printable.
func TestRun(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var told []Line
	lines := Run(ctx, []Check{
		Found("a", "x", OK("fine\x1b[2J")),
		{"a", "y", func(context.Context) Result { cancel(); return Fail("do\nthis", "broken") }},
		Found("b", "z", OK("never")),
	}, func(l Line) { told = append(told, l) })
	wanted := []Line{{"a", "x", Result{StateOK, "fine?[2J", ""}}, {"a", "y", Result{StateFail, "broken", "do?this"}}}
	if !slices.Equal(lines, wanted) || !slices.Equal(told, wanted) || !slices.Equal(Failed(lines), wanted[1:]) {
		t.Errorf("%+v, told %+v", lines, told)
	}
}

// A certificate is worth a warning when it should have been replaced, and not before.
func TestValidity(t *testing.T) {
	day := 24 * time.Hour
	for _, tt := range []struct {
		name        string
		begun, left time.Duration // since and until
		by          renewal
		state       State
		text, do    string
	}{
		{"new", time.Hour, 30 * day, byItself, StateOK, "is valid until", ""},
		{"it renews itself soon", 20 * day, 10 * day, byItself, StateOK, "is valid until", ""},
		{"it should have renewed itself", 26 * day, 4 * day, byItself, StateWarn, "ends in 95h59m",
			"the program that renews it has failed"},
		{"by hand, long", 330 * day, 35 * day, byHand, StateOK, "is valid until", ""},
		{"by hand, soon", 340 * day, 25 * day, byHand, StateWarn, "ends in", "replace it"},
		{"by hand, of a day", 12 * time.Hour, 12 * time.Hour, byHand, StateOK, "is valid until", ""},
		{"over", 30 * day, -time.Minute, byHand, StateFail, "expired on", "replace it; if this machine's clock is wrong"},
		{"not yet", -day, 30 * day, byHand, StateFail, "is not valid before", "timedatectl"},
	} {
		now := time.Now()
		cert := &x509.Certificate{NotBefore: now.Add(-tt.begun), NotAfter: now.Add(tt.left)}
		want(t, tt.name, validity("it", cert, tt.by, "replace it"), tt.state, tt.text, tt.do)
	}
}

// Names of a certificate are few, and a certificate without any has its subject.
func TestNames(t *testing.T) {
	issuer := pkix.Name{CommonName: "CA"}
	cert := &x509.Certificate{DNSNames: strings.Fields("a b c d e"), Issuer: issuer}
	if got := names(cert); got != `made out to a, b, c, d, … and signed by "CN=CA"` {
		t.Error(got)
	}
	cert = &x509.Certificate{Subject: pkix.Name{CommonName: "x"}, Issuer: issuer}
	if got := names(cert); got != `made out to "CN=x" and signed by "CN=CA"` {
		t.Error(got)
	}
}

func TestClock(t *testing.T) {
	want(t, "right", clock(-30*time.Second), StateOK, "as on the cloud", "")
	want(t, "behind", clock(-2*time.Minute), StateWarn, "2m behind the cloud's", "timedatectl")
	want(t, "a day ahead", clock(24*time.Hour), StateFail, "24h ahead of the cloud's", "timedatectl")
}

// A way that fails is no failure while another one leads to the cloud, and later steps say which step comes first.
func TestForgive(t *testing.T) {
	w := &way{results: map[step]Result{stepName: OK("it resolves"), stepTCP: Fail("start it", "refused")}}
	want(t, "after a failure", w.result(stepTLS), StateSkipped, "because tcp comes first", "")
	w.forgive("the edge uses another server", "")
	want(t, "forgiven", w.result(stepTCP), StateWarn, "refused (the edge uses another server)", "start it")
}

// A way that is closed to the check alone is no failure of an edge with a session. What answers on the way may be.
func TestForgiveEnvironment(t *testing.T) {
	live := &api.Status{Mode: "edge", Sessions: []api.Session{{ID: "s"}}}
	look := func(st *api.Status, shown bool) Result {
		w := &way{ // to walk leads nowhere
			cfg: &EdgeConfig{}, results: make(map[step]Result), shown: shown, err: errors.New("closed"),
		}
		e := &edge{ways: []*way{w}, daemon: daemon{mode: "edge", asked: true, last: st}}
		e.walk(t.Context())
		return w.result(stepBox)
	}
	want(t, "a session", look(live, false), StateWarn, "(the running edge has a session", "sudo --preserve-env")
	want(t, "no session", look(&api.Status{Mode: "edge"}, false), StateFail, "closed", "correct proxy")
	want(t, "no edge", look(nil, false), StateFail, "closed", "correct proxy")
	want(t, "the socket of a cloud", look(&api.Status{Mode: "cloud", Sessions: live.Sessions}, false), StateFail,
		"closed",
		"correct proxy")
	want(t, "a certificate has come", look(live, true), StateFail, "closed", "correct proxy")
}

// The rights that a cloud with every feature needs are those of deployment/cloud-rbac.yaml.
func TestRights(t *testing.T) {
	const ns = "tunnel-system"
	c := &conf.Cloud{
		DNS:    conf.DNS{ConfigMap: "tunnel-nodes", Namespace: ns, Service: "tunnel-cloud"},
		Join:   conf.Join{Kubernetes: true, ServiceAccounts: []string{"a/b"}},
		HTTPS:  conf.HTTPS{Ports: map[string]string{"10250": DefaultKubelet}, ClientCA: "ca.crt"},
		Egress: conf.Egress{GRPC: []string{"unix:///x"}, Kubernetes: true},

		Inventory: "configmap:tunnel-inventory", Namespace: ns,
		Services: conf.CloudServices{On: true, Mirror: conf.Mirror{First: 1, Last: 1, Namespace: ns}},
	}
	var got, granted []string
	for _, r := range rights(c) {
		got = append(got, r.String()+" of "+r.Group)
	}
	text, err := os.ReadFile("../../deployment/cloud-rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Namespace string }
			Rules    []struct{ APIGroups, Resources, ResourceNames, Verbs []string }
		}
		if err = yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatal(err)
		}
		for _, rule := range o.Rules {
			for _, verb := range rule.Verbs {
				name := append(rule.ResourceNames, "")[0]
				resource, sub, _ := strings.Cut(rule.Resources[0], "/")
				r := kube.Right{Verb: verb, Resource: resource, Subresource: sub, Name: name, Namespace: o.Metadata.Namespace}
				granted = append(granted, r.String()+" of "+rule.APIGroups[0])
			}
		}
	}
	slices.Sort(got)
	slices.Sort(granted)
	if len(granted) < 20 || !slices.Equal(got, granted) {
		t.Errorf("the checks ask for\n%s\ncloud-rbac.yaml grants\n%s", strings.Join(got, "\n"), strings.Join(granted, "\n"))
	}
	if none := rights(new(conf.Cloud)); none != nil {
		t.Errorf("without Kubernetes: %v", none)
	}
}

// The network of a node's pods, broken step by step.
func TestPodNetwork(t *testing.T) {
	dir := t.TempDir()
	subnet := netip.MustParsePrefix("127.0.0.0/29") // the link lo has an address in it
	c := conf.CNI{On: true, ConfDir: dir, BinDir: dir}
	find := func(name string) Result {
		t.Helper()
		for _, l := range Run(t.Context(), podNetwork(c), nil) {
			if l.Name == name {
				return l.Result
			}
		}
		t.Fatalf("no check %q", name)
		return Result{}
	}
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	want(t, "no plugin", find("plugin"), StateFail, "no such file", "tunnel cni install")
	want(t, "no podCIDR", find("configuration"), StateFail, "does not know the networks", "spec.podCIDRs")
	want(t, "later", find("bridge"), StateSkipped, "the configuration comes first", "")
	write(cni.Program, "", 0o755)
	want(t, "a plugin", find("plugin"), StateOK, "is there", "")
	c.PodCIDRs = []netip.Prefix{subnet}
	want(t, "not written", find("configuration"), StateFail, "there is no", "start the edge")
	write(cni.ListFile, `{"name": "mine"}`, 0o644)
	want(t, "of a person", find("configuration"), StateFail, "the edge did not write", "remove the file")
	own := netip.MustParsePrefix("10.88.1.0/29")
	list := func(subnet netip.Prefix) string {
		return fmt.Sprintf(`{"cniVersion": "1.0.0", "cniVersions": ["1.0.0"], "name": "tunnel",
			"plugins": [{"type": "tunnel-cni", "subnets": [%q]}]}`, subnet)
	}
	write(cni.ListFile, list(own), 0o644)
	want(t, "another network", find("configuration"), StateWarn, "and podcidrs are", "start the edge")
	c.PodCIDRs = nil
	want(t, "a file of the edge", find("configuration"), StateOK, "10.88.1.0/29", "")
	want(t, "no bridge", find("bridge"), StateFail, "tunnel0 does not have the address 10.88.1.1", "start the edge")
	want(t, "the only file", find("first"), StateOK, "no other", "")
	write("00-notes.txt", "", 0o644)
	write("20-later.conflist", "{}", 0o644)
	if err := os.Mkdir(filepath.Join(dir, "01-folder.conflist"), 0o755); err != nil {
		t.Fatal(err)
	}
	want(t, "no configuration before", find("first"), StateOK, "no other", "")
	write("05-flannel.conflist", "{}", 0o644)
	want(t, "another file", find("first"), StateFail, "05-flannel.conflist", "remove it")
	write(".03-hidden.conf", "{}", 0o644)
	want(t, "another file, hidden", find("first"), StateFail, ".03-hidden.conf", "remove it")

	// The next checks look at a configuration, however it was read.
	p := &pods{conf: &cni.Conf{Bridge: "tunnel0", DataDir: filepath.Join(dir, "data"), Subnets: []netip.Prefix{subnet}}}
	want(t, "a link in the network", p.bridge(t.Context()), StateFail, "has the address 127.0.0.1/8", "another network")
	p.conf.Subnets = []netip.Prefix{own}
	for _, c := range []struct {
		why   string
		found []netip.Prefix
		err   error
		state State
		says  string
		help  string
	}{
		{"a kernel without nftables", nil, syscall.EINVAL, StateFail, "the kernel has no nftables", "modprobe nf_tables"},
		{"another user", nil, syscall.EPERM, StateFail, "operation not permitted", "run this as root"},
		{"no rule", nil, nil, StateFail, "pods of 10.88.1.0/29 reach nothing outside", "start the edge"},
		{"a rule", []netip.Prefix{own}, nil, StateOK, "under the node's address", ""},
	} {
		p.rules = func([]netip.Prefix) ([]netip.Prefix, error) { return c.found, c.err }
		want(t, c.why, p.masquerade(t.Context()), c.state, c.says, c.help)
	}
	want(t, "no reservations yet", p.addresses(t.Context()), StateOK, "pods have 0 addresses", "")
	if err := os.Mkdir(p.conf.DataDir, 0o755); err != nil {
		t.Fatal(err)
	}
	reserve := func(last int, released string) {
		t.Helper()
		addr := fmt.Sprintf("10.88.1.%d", last)
		write("data/"+addr, fmt.Sprintf(`{"address": %q, "containerID": "c" %s}`, addr, released), 0o644)
	}
	for last := 2; last <= 6; last++ {
		reserve(last, "")
	}
	want(t, "a full network", p.addresses(t.Context()), StateFail, "all 5 addresses of 10.88.1.0/29 are in use", "larger")
	reserve(6, `, "released": "2026-01-02T03:04:05Z"`)
	write("data/.new", `{"address": "10.88.1.6", "containerID": "c"}`, 0o644) // a plugin was killed before the rename
	want(t, "room for one", p.addresses(t.Context()), StateOK, "pods have 4 addresses", "")
}

// answers is an http.Handler that answers each request with this JSON.
type answers string

func (a answers) ServeHTTP(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, string(a)) }

// servicesOf returns the checks of an edge whose daemon answers st, and to /v1/services the JSON list; nil: nothing
// answers.
func servicesOf(t *testing.T, st *api.Status, list answers) *relayed {
	t.Helper()
	dir := t.TempDir()
	d := &daemon{mode: "edge", socket: filepath.Join(dir, "s"), asked: true, last: st}
	if st == nil {
		d.err = syscall.ECONNREFUSED
	} else {
		ln, err := net.Listen("unix", d.socket)
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Handler: list, ReadHeaderTimeout: time.Minute}
		go srv.Serve(ln) // Close ends it
		t.Cleanup(func() { srv.Close() })
	}
	return &relayed{
		EdgeServices: conf.EdgeServices{State: filepath.Join(dir, "lib", "services.db")}, daemon: d,
		rules: func() (redirects, error) { return redirects{there: true}, nil }, writable: writable,
		links: func() ([]net.Addr, error) {
			return []net.Addr{&net.IPNet{IP: net.IPv4(169, 254, 77, 1), Mask: net.CIDRMask(32, 32)}}, nil
		},
	}
}

// What an edge has in the kernel for Services, broken step by step.
func TestServicesRules(t *testing.T) {
	live := &api.Status{Mode: "edge", Checks: []api.Check{
		{Name: "services", Text: "adding 169.254.77.1: no; it needs CAP_NET_ADMIN"}}}
	missing := func() (redirects, error) { return redirects{}, nil }
	ctx := t.Context()
	s := servicesOf(t, live, "{}")
	want(t, "before the rules", s.first(ctx), StateSkipped, "rules come first", "")
	want(t, "rules", s.redirect(ctx), StateOK, "lead to the edge", "")
	want(t, "nobody is first", s.first(ctx), StateOK, "no rules of another program", "")
	s.rules = func() (redirects, error) { return redirects{true, []string{"ip mine pre", "ip6 mine pre"}}, nil }
	want(t, "others are first", s.first(ctx), StateWarn, "ip mine pre, ip6 mine pre", "nft list chain ip mine pre;")
	s.links = func() ([]net.Addr, error) { return nil, nil }
	want(t, "no address", s.redirect(ctx), StateFail, "no link has the address 169.254.77.1", "start the edge again")
	s.rules = missing
	want(t, "no rights", s.redirect(ctx), StateFail, "serves no Services: adding 169.254.77.1: no; it needs",
		"give the edge the node's network and CAP_NET_ADMIN")
	live.Checks[0].Text = "its rules are on this node"
	s = servicesOf(t, live, "{}")
	s.rules = missing
	want(t, "kube-proxy", s.redirect(ctx), StateFail, "serves no Services: its rules are on this node",
		"do what the line says")
	s = servicesOf(t, nil, "")
	s.rules = missing
	want(t, "no edge", s.redirect(ctx), StateFail, "is not there", "start the edge, which writes it")
	s.rules = func() (redirects, error) { return redirects{}, syscall.EPERM }
	want(t, "another user", s.redirect(ctx), StateFail, "operation not permitted", "run this as root")
	s.rules = func() (redirects, error) { return redirects{}, syscall.EINVAL }
	want(t, "no nftables", s.redirect(ctx), StateFail, "the kernel has no nftables", "modprobe nf_tables")
}

// What the edge says about the cloud, and what this machine says about Services that the edge does not serve.
func TestServicesOfCloud(t *testing.T) {
	ctx, live := t.Context(), &api.Status{Mode: "edge"}
	want(t, "no edge", servicesOf(t, nil, "").cloud(ctx), StateSkipped, "the edge does not answer", "")
	want(t, "no answer", servicesOf(t, live, "no JSON").cloud(ctx), StateFail, "", "start the edge again")
	want(t, "never", servicesOf(t, live, `{"stale_since": "0001-01-01T00:00:00Z", "stale_because": "write a table"}`).
		cloud(ctx), StateFail, "has never sent this edge any Services: write a table", "do what the text says")
	want(t, "stale", servicesOf(t, live, `{"stale_since": "2026-11-23T12:00:00Z"}`).cloud(ctx), StateWarn,
		"until 2026-11-23 12:00 UTC: the edge has not asked yet", "do what the text says")

	s := servicesOf(t, live, `{"ports": [{"address": "10.96.0.10", "port": 80}, {"address": "10.96.0.11", "port": 80},
		{"address": "fd00:96::a", "port": 443}]}`)
	want(t, "before", s.route(ctx), StateSkipped, "does not say", "")
	want(t, "right", s.cloud(ctx), StateOK, "the edge knows 3 ports", "")
	var dialled []string
	s.dial = func(_ context.Context, network, address string) (net.Conn, error) {
		dialled = append(dialled, network+" "+address)
		near, far := net.Pipe()
		far.Close()
		return near, nil
	}
	want(t, "routes", s.route(ctx), StateOK, "has a route", "")
	if !slices.Equal(dialled, []string{"udp 10.96.0.10:80", "udp [fd00:96::a]:443"}) {
		t.Errorf("asked for the routes to %q", dialled)
	}
	s.dial = func(context.Context, string, string) (net.Conn, error) { return nil, syscall.ENETUNREACH }
	want(t, "no route", s.route(ctx), StateWarn, "network is unreachable", "ip route add")
	s.known.Ports = nil
	want(t, "no Service", s.route(ctx), StateSkipped, "knows no Service", "")

	proxy := httptest.NewServer(http.NotFoundHandler())
	s.proxy = proxy.URL
	want(t, "kube-proxy", s.kubeProxy(ctx), StateOK, proxy.URL, "")
	proxy.Close()
	want(t, "no kube-proxy", s.kubeProxy(ctx), StateWarn, "connection refused", "start kube-proxy")
	s.Full = true
	want(t, "in place of kube-proxy", s.kubeProxy(ctx), StateOK, "does not run", "")
	proxy = httptest.NewServer(http.NotFoundHandler())
	defer proxy.Close()
	s.proxy = proxy.URL
	want(t, "beside kube-proxy", s.kubeProxy(ctx), StateFail, "answers at "+proxy.URL, "kube-proxy --cleanup")
}

// FuzzReadHosts: whatever a hosts file holds, each name has addresses in order.
func FuzzReadHosts(f *testing.F) {
	f.Add("10.0.0.1    edge1 # tunnel\n::1 a b\n# x\n10.0.0.1\n999 x\n")
	f.Fuzz(func(t *testing.T, text string) {
		for name, addrs := range readHosts(text) {
			if name == "" || len(addrs) == 0 || !slices.IsSortedFunc(addrs, netip.Addr.Compare) {
				t.Errorf("%q: %v", name, addrs)
			}
		}
		if n := differences(readHosts(text), readHosts(text)); n != 0 {
			t.Errorf("%d differences from itself", n)
		}
	})
}

// The session that the cloud has is another edge's only if the edge of this machine has answered, and does not have it.
func TestOtherEdge(t *testing.T) {
	since := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	look := func(answer stream.Answer, st *api.Status) Result {
		e := &edge{
			EdgeConfig: EdgeConfig{Conf: &conf.Edge{Node: "n"}}, ways: []*way{{answer: &answer}},
			daemon: daemon{mode: "edge", socket: filepath.Join(t.TempDir(), "no.sock"), asked: true, last: st},
		}
		return e.otherEdge(t.Context())
	}
	theirs := stream.Answer{Session: "s2", Remote: "192.0.2.1:5", Since: since}
	own := &api.Status{Mode: "edge", Sessions: []api.Session{{ID: "s1"}, {ID: "s2"}}}
	want(t, "no session", look(stream.Answer{Time: since}, nil), StateOK, "no other edge", "")
	want(t, "an older cloud", look(stream.Answer{}, nil), StateSkipped, "older release", "")
	want(t, "an older session of this edge", look(theirs, own), StateOK, "this edge alone", "")
	want(t, "no answer", look(theirs, nil), StateSkipped,
		"it is not known whose session this is: from 192.0.2.1:5 since 2026-01-02 03:04 UTC", "")
	want(t, "the socket of a cloud", look(theirs, &api.Status{Mode: "cloud"}), StateSkipped, "not known", "")
}

// Only a daemon that certainly does not run is to be started.
func TestDaemonIsSilent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.sock")
	silent := func(ctx context.Context) *daemon {
		d := &daemon{mode: "cloud", socket: path}
		d.ask(ctx)
		return d
	}
	d := silent(t.Context())
	want(t, "no socket", d.running(t.Context()), StateFail, "nothing listens", "systemctl start tunnel-cloud")
	if d.unknown(t.Context()) {
		t.Error("a cloud without its socket may run")
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	d = silent(late)
	want(t, "no answer", d.running(t.Context()), StateFail, "does not answer within", "tunnel diag")
	if !d.unknown(t.Context()) {
		t.Error("a cloud that is slow is known to be down")
	}
	d = &daemon{mode: "edge", socket: path, asked: true, err: &fs.PathError{Op: "dial", Path: path, Err: fs.ErrPermission}}
	want(t, "not ours", d.running(t.Context()), StateFail, "permission denied", "such as with sudo")
	if !d.unknown(t.Context()) || !(&daemon{mode: "cloud"}).unknown(t.Context()) {
		t.Error("an edge that nobody could ask is known to be down")
	}
}
