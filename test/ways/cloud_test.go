package ways

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// cluster is an API server of Kubernetes that answers what tunnel check asks.
type cluster struct {
	denied string // a verb and a resource, "patch configmaps"; "": the cloud has every right
	names  string // the content of the ConfigMap; "": there is none
}

// runs serves the cluster until the test ends, and has the cloud use it.
func (c cluster) runs(s *site) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.URL.Path == "/version":
			io.WriteString(w, `{"gitVersion": "v1.36.1"}`)
		case strings.HasSuffix(r.URL.Path, "/selfsubjectaccessreviews"):
			var ask struct {
				Spec struct {
					ResourceAttributes struct{ Verb, Resource string }
				}
			}
			json.NewDecoder(r.Body).Decode(&ask)
			of := ask.Spec.ResourceAttributes
			w.WriteHeader(http.StatusCreated)
			fmt.Fprintf(w, `{"status": {"allowed": %t}}`, of.Verb+" "+of.Resource != c.denied)
		case strings.HasSuffix(r.URL.Path, "/configmaps/tunnel-nodes") && c.names != "":
			fmt.Fprintf(w, `{"metadata": {"resourceVersion": "1"}, "data": {"hosts": %q}}`, c.names)
		default:
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}`)
		}
	}))
	s.Cleanup(api.Close)
	inCluster(s, api.URL)
}

// inCluster has the cloud of the site use Kubernetes at a URL.
func inCluster(s *site, url string) {
	s.env = append(s.env, "KUBECONFIG="+testkit.Kubeconfig(s, url), "POD_NAMESPACE=tunnel-system", "POD_NAME=cloud-0",
		"POD_IP=10.244.0.5")
	s.edit("cloud.toml", "debug = true", "configmap = \"tunnel-nodes\"\nhosts = \"hosts\"")
}

// line of the ConfigMap for a node of the cloud.
const ofEdge1 = "10.244.0.5    edge1 # tunnel\n"

// answering is a DNS server that leads every name to an address; "": it knows none.
func answering(s *site, addr string) string {
	s.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	started := make(chan struct{})
	server := &dns.Server{PacketConn: conn, NotifyStartedFunc: func() { close(started) },
		Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			m := new(dns.Msg).SetReply(q)
			if addr == "" {
				m.Rcode = dns.RcodeNameError
			} else if q.Question[0].Qtype == dns.TypeA {
				rr, _ := dns.NewRR(q.Question[0].Name + " 5 IN A " + addr)
				m.Answer = append(m.Answer, rr)
			}
			w.WriteMsg(m)
		})}
	ended := make(chan error, 1)
	go func() { ended <- server.ActivateAndServe() }()
	<-started
	s.Cleanup(func() { server.Shutdown(); <-ended })
	return conn.LocalAddr().String()
}

// clouds are the ways to break a cloud, by the rows of docs/check.md.
func clouds() map[string]broken {
	return map[string]broken{
		"the cloud does not run": {
			func(*site) []string { return nil },
			"cloud", "daemon", "fail", "nothing listens on", "systemctl start tunnel-cloud",
		},
		"its certificate has expired": {
			func(s *site) []string { s.certify(time.Now().Add(-10*day), time.Now().Add(-day)); return nil },
			"certificates", "server cert", "fail", "expired on", "replace cert and key",
		},
		"its certificate ends soon": {
			func(s *site) []string { s.certify(time.Now().Add(-80*day), time.Now().Add(3*day)); return nil },
			"certificates", "server cert", "warn",
			"made out to tunnel.cloud.io and signed by \"CN=tunnel test\", ends in 71h59m", "replace cert and key",
		},
		"another program has its port": {
			func(s *site) []string {
				ln, err := net.Listen("tcp", s.CloudHealth())
				s.must(err)
				s.Cleanup(func() { ln.Close() })
				return nil
			},
			"ports", "admin :LOGPORT", "fail", "another program has the port", "ss -ltnup",
		},
		"a node is missing": {
			func(s *site) []string {
				s.cloudRuns()
				p, err := s.StartEdge()
				s.must(err)
				testkit.Within(s, soon, "the edge has a session", func() error { return rig.Ready(s.EdgeHealth()) })
				p.Kill()
				testkit.Within(s, soon, "the cloud misses the edge", func() error {
					if !strings.Contains(s.CloudLog.String(), "session ended") {
						return fmt.Errorf("it has not noticed")
					}
					return nil
				})
				return nil
			},
			"cloud", "nodes", "warn", "0 nodes are connected, and 1 are missing: edge1", "tunnel ls --missing",
		},
		"no Kubernetes": {
			func(s *site) []string { inCluster(s, "http://"+testkit.FreeAddress(s.T)); return nil },
			"kubernetes", "api", "fail", "connection refused", "KUBECONFIG",
		},
		"a right is missing": {
			func(s *site) []string { cluster{denied: "patch configmaps", names: ofEdge1}.runs(s); return nil },
			"kubernetes", "right to patch configmaps tunnel-nodes in tunnel-system", "fail",
			"missing: the names of nodes are not written", "deployment/cloud-rbac.yaml",
		},
		"a right that the cloud can do without is missing": {
			func(s *site) []string { cluster{denied: "create configmaps", names: ofEdge1}.runs(s); return nil },
			"kubernetes", "right to create configmaps in tunnel-system", "warn",
			"unless the ConfigMap exists", "cloud-rbac.yaml",
		},
		"there is no ConfigMap": {
			func(s *site) []string { cluster{}.runs(s); return nil },
			"names", "configmap", "fail", "there is no ConfigMap tunnel-nodes in tunnel-system", "kubectl create configmap",
		},
		"the ConfigMap is not mounted": {
			func(s *site) []string { cluster{names: ofEdge1}.runs(s); return nil },
			"names", "mounted", "fail", "the ConfigMap is not mounted", "without subPath",
		},
		"an old ConfigMap is mounted": {
			func(s *site) []string { cluster{names: ofEdge1}.runs(s); s.write("hosts", "# nothing\n"); return nil },
			"names", "mounted", "warn", "differs from the ConfigMap in 1 names", "subPath",
		},
		"CoreDNS does not mount the ConfigMap": {
			func(s *site) []string {
				cluster{names: ofEdge1}.runs(s)
				s.write("hosts", ofEdge1)
				return []string{"--dns", answering(s, "")}
			},
			"names", "dns", "fail", "does not know edge1, which should lead to 10.244.0.5", "mount ConfigMap tunnel-nodes",
		},
		"DNS leads elsewhere": {
			func(s *site) []string {
				cluster{names: ofEdge1}.runs(s)
				return []string{"--dns", answering(s, "192.0.2.9")}
			},
			"names", "dns", "fail", "leads edge1 to 192.0.2.9, and it should be 10.244.0.5", "another source answers",
		},
		"the token file is damaged": {
			func(s *site) []string { s.write("tokens", "edge1\n"); return nil },
			"configuration", "file", "fail", "tokens", "tunnel config check",
		},
		"kube-apiserver dials nodes by address": {
			func(s *site) []string {
				byNames(s)
				return apiserver(s, "--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname")
			},
			"kube-apiserver", "address types", "fail", "by its InternalIP first", "=Hostname,InternalIP",
		},
		"kube-apiserver does not verify kubelets": {
			func(s *site) []string { byNames(s); return apiserver(s, "--v=2") },
			"kube-apiserver", "kubelet ca", "fail", "name no node", "clientca",
		},
		"kube-apiserver does not use egress": {
			func(s *site) []string { byEgress(s); return apiserver(s, "--v=2") },
			"kube-apiserver", "egress selector", "fail", "does not use [mode.cloud.egress]", "set the flag",
		},
		"kube-apiserver's egress leads elsewhere": {
			func(s *site) []string {
				byEgress(s)
				s.write("selector.yaml", "kind: EgressSelectorConfiguration\negressSelections:\n- name: cluster\n"+
					"  connection: {proxyProtocol: GRPC, transport: {uds: {udsName: "+s.Path("old.sock")+"}}}\n")
				return apiserver(s, "--egress-selector-config-file="+s.Path("selector.yaml"))
			},
			"kube-apiserver", "egress selector", "fail", "old.sock is no line of grpc", "name the same",
		},
	}
}

// byNames gives the cloud a port for callers that find nodes by their names.
func byNames(s *site) {
	s.edit("cloud.toml", "\n[mode.cloud.admin]",
		fmt.Sprintf("\n[mode.cloud.https]\nlisten = \"127.0.0.1\"\n"+
			"[mode.cloud.https.addr]\n%q = \"127.0.0.1:10250\"\n[mode.cloud.admin]",
			strings.TrimPrefix(testkit.FreeAddress(s.T), "127.0.0.1:")))
}

// byEgress gives the cloud a socket for kube-apiserver.
func byEgress(s *site) {
	s.edit("cloud.toml", "\n[mode.cloud.admin]",
		fmt.Sprintf("\n[mode.cloud.egress]\ngrpc = [%q]\n[mode.cloud.admin]", "unix://"+s.Path("grpc.sock")))
}

// apiserver writes a manifest of a kube-apiserver with a flag, whose pod has the folder of the site.
func apiserver(s *site, flag string) []string {
	file, dir := s.Path("kube-apiserver.yaml"), s.Path("")
	s.write("kube-apiserver.yaml", fmt.Sprintf("kind: Pod\nspec:\n  containers:\n  - name: kube-apiserver\n"+
		"    command: [kube-apiserver, %s]\n    volumeMounts: [{name: x, mountPath: %s}]\n"+
		"  volumes: [{name: x, hostPath: {path: %s}}]\n", flag, dir, dir))
	return []string{"--apiserver", file}
}

// A cloud that is broken in one way.
func TestCloud(t *testing.T) {
	for name, tt := range clouds() {
		t.Run(name, func(t *testing.T) { tt.test(t, "cloud.toml") })
	}
}

// DNS that leads to the cloud is fine.
func TestDNSLeadsHere(t *testing.T) {
	broken{
		func(s *site) []string {
			cluster{names: ofEdge1}.runs(s)
			return []string{"--dns", answering(s, "10.244.0.5")}
		},
		"names", "dns", "ok", "leads edge1 to 10.244.0.5", "",
	}.test(t, "cloud.toml")
}

// After an API server has hung up once, no further right is asked, and the check fails. A server that answers with an
// error once is asked for the other rights.
func TestRightsAreNotKnown(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	var asked atomic.Int32
	var hangsUp atomic.Bool
	hangsUp.Store(true)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.URL.Path == "/version":
			io.WriteString(w, `{"gitVersion": "v1.36.1"}`)
		case asked.Add(1) > 1:
			io.WriteString(w, `{"status": {"allowed": true}}`)
		case hangsUp.Load():
			panic(http.ErrAbortHandler)
		default:
			w.WriteHeader(http.StatusInternalServerError)
			io.WriteString(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500}`)
		}
	}))
	t.Cleanup(api.Close)
	inCluster(s, api.URL)
	rights := func() (states map[string]int, r report) {
		r = s.check("cloud.toml")
		states = make(map[string]int)
		for _, l := range r.Checks {
			if strings.HasPrefix(l.Name, "right to ") {
				states[l.State]++
			}
		}
		return states, r
	}
	states, r := rights()
	if asked.Load() != 1 || states["fail"] != 1 || states["skipped"] < 5 || len(states) != 2 {
		t.Errorf("the server hangs up: %d questions, %v:\n%s", asked.Load(), states, r)
	}
	hangsUp.Store(false)
	asked.Store(0)
	if states, r = rights(); states["warn"] != 1 || states["ok"] < 5 || len(states) != 2 {
		t.Errorf("the server answers with an error: %d questions, %v:\n%s", asked.Load(), states, r)
	}
}

// A wait ends in time, within a round as well: then the round before it counts.
func TestWaitEnds(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	var asked atomic.Int32
	over := make(chan struct{})
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) > 1 {
			select {
			case <-r.Context().Done():
			case <-over:
			}
		}
		http.Error(w, "no", http.StatusTeapot)
	}))
	t.Cleanup(api.Close)
	t.Cleanup(func() { close(over) })
	inCluster(s, api.URL)
	r := s.check("cloud.toml", "--wait", "4s") // a request alone takes 4 s, and begins after 2 s
	if l := r.line("kubernetes", "api"); l == nil || l.State != "fail" || strings.Contains(l.Text, "no answer") {
		t.Errorf("%d questions:\n%s", asked.Load(), r)
	}
}

// docs/check.md has a row for each case, and no others.
func TestPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/check.md")
	if err != nil {
		t.Fatal(err)
	}
	_, page, _ := strings.Cut(string(text), "\n### On an edge\n")
	edge, cloud, _ := strings.Cut(page, "\n### On a cloud\n")
	cloud, _, _ = strings.Cut(cloud, "\n### In the network of pods\n") // pkg/check has the tests of those rows
	ofEdge := append(slices.Collect(maps.Keys(edges())),
		"large packets are lost", // TestSmallMTU
		"two edges of one name")  // TestTwoEdges
	for part, want := range map[string][]string{edge: ofEdge, cloud: slices.Collect(maps.Keys(clouds()))} {
		var rows []string
		for line := range strings.Lines(part) {
			if row, ok := strings.CutPrefix(line, "| "); ok {
				row, _, _ = strings.Cut(row, " |")
				rows = append(rows, row)
			}
		}
		rows = rows[1:] // the heading
		slices.Sort(rows)
		slices.Sort(want)
		if !slices.Equal(rows, want) {
			t.Errorf("the page has the rows\n%s\nthe tests are\n%s", strings.Join(rows, "\n"), strings.Join(want, "\n"))
		}
	}
}
