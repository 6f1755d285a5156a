package setup

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/kube"
)

// apiServer is an API server for tests. It stores objects, such as Secrets and ConfigMaps, in memory.
type apiServer struct {
	mu       sync.Mutex                // guards the following
	objects  map[string]map[string]any // by path
	requests []string                  // method and path
	refuse   func(r *http.Request) int // HTTP status; 0: the server answers as usual; nil: always
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r.Method+" "+r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	status := func(code int, reason string) {
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(map[string]any{
			"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason,
		})
	}
	if s.refuse != nil {
		if code := s.refuse(r); code != 0 {
			status(code, map[int]string{403: "Forbidden", 409: "AlreadyExists"}[code])
			return
		}
	}
	switch r.Method {
	case http.MethodGet:
		if o := s.objects[r.URL.Path]; o != nil {
			json.NewEncoder(w).Encode(o)
			return
		}
		status(404, "NotFound")
	case http.MethodPost:
		var o map[string]any
		if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
			status(400, "BadRequest")
			return
		}
		meta := o["metadata"].(map[string]any)
		at := path.Join(r.URL.Path, meta["name"].(string))
		if s.objects[at] != nil {
			status(409, "AlreadyExists")
			return
		}
		meta["resourceVersion"] = "1"
		s.objects[at] = o
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(o)
	default:
		status(405, "MethodNotAllowed")
	}
}

const (
	secretPath    = "/api/v1/namespaces/tunnel-system/secrets/tunnel-cloud"
	configMapPath = "/api/v1/namespaces/tunnel-system/configmaps/tunnel-ca"
)

// newAPIServer starts an API server, and returns what InitCluster needs to use it.
func newAPIServer(t *testing.T) (*apiServer, ClusterConfig) {
	t.Helper()
	s := &apiServer{objects: make(map[string]map[string]any)}
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	client, err := kube.New(testkit.Kubeconfig(t, h.URL), "test")
	if err != nil {
		t.Fatal(err)
	}
	return s, ClusterConfig{
		Address: "tunnel.example.com:9000", Names: []string{"tunnel-cloud.tunnel-system.svc", "10.0.0.5"}, Client: client,
		Namespace: "tunnel-system", Secret: "tunnel-cloud", ConfigMap: "tunnel-ca", Out: io.Discard,
	}
}

// data returns the data of a Secret, or of a ConfigMap.
func (s *apiServer) data(t *testing.T, at string) map[string][]byte {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	text, err := json.Marshal(s.objects[at]["data"])
	if err != nil {
		t.Fatal(err)
	}
	data := make(map[string][]byte)
	if strings.Contains(at, "/secrets/") {
		err = json.Unmarshal(text, &data)
	} else {
		var texts map[string]string
		err = json.Unmarshal(text, &texts)
		for key, value := range texts {
			data[key] = []byte(value)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// A cloud starts with what the Secret holds, mounted as files. Its certificate is good for each name, for
// the cloud as a server and as a client of the other replicas. The ConfigMap holds the CA and no secret.
func TestInitCluster(t *testing.T) {
	s, cfg := newAPIServer(t)
	var out strings.Builder
	cfg.Out = &out
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	data := s.data(t, secretPath)
	keys := slices.Sorted(maps.Keys(data))
	want := []string{"ca.crt", "nodes-ca.crt", "nodes-ca.key", "tls.crt", "tls.key", "tokens"}
	if !slices.Equal(keys, want) || s.objects[secretPath]["type"] != "Opaque" {
		t.Errorf("the Secret has the keys %q and the type %v, want %q and Opaque", keys, s.objects[secretPath]["type"], want)
	}
	if public := s.data(t, configMapPath); len(public) != 1 || string(public["ca.crt"]) != string(data["ca.crt"]) {
		t.Errorf("the ConfigMap holds %q, want only ca.crt", slices.Sorted(maps.Keys(public)))
	}

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(data["ca.crt"])
	block, _ := pem.Decode(data["tls.crt"])
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tunnel.example.com", "tunnel-cloud.tunnel-system.svc", "10.0.0.5"} {
		for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
			_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name, KeyUsages: []x509.ExtKeyUsage{usage}})
			if err != nil {
				t.Errorf("%s, usage %v: %v", name, usage, err)
			}
		}
	}

	dir := t.TempDir()
	for key, value := range data {
		if err = os.WriteFile(filepath.Join(dir, key), value, secretFile); err != nil {
			t.Fatal(err)
		}
	}
	config := strings.NewReplacer("{Port}", "9000", "{Key}", "tls.key", "cloud.crt", "tls.crt", "{Tokens}", "tokens",
		"{NodesKey}", "nodes-ca.key", "{Address}", cfg.Address, "{Socket}", "", "{Inventory}", "nodes.json").Replace(initTOML)
	if err = os.WriteFile(filepath.Join(dir, cloudFile), []byte(config), publicFile); err != nil {
		t.Fatal(err)
	}
	c, err := conf.LoadCloud(filepath.Join(dir, cloudFile), conf.Env{})
	if err != nil {
		t.Fatal(err)
	}
	if warnings, err := CheckTrust(c); err != nil || len(warnings) > 0 {
		t.Errorf("CheckTrust: %q, %v", warnings, err)
	}
	for _, key := range []string{"tls.key", "nodes-ca.key"} {
		if strings.Contains(out.String(), string(data[key])) {
			t.Errorf("%s was printed", key)
		}
	}
}

// Another run reads both objects and changes neither.
func TestInitClusterAgain(t *testing.T) {
	s, cfg := newAPIServer(t)
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	before := s.data(t, secretPath)
	s.requests = nil
	var out strings.Builder
	cfg.Out = &out
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if want := []string{"GET " + secretPath, "GET " + configMapPath}; !slices.Equal(s.requests, want) {
		t.Errorf("another run sends %q, want %q", s.requests, want)
	}
	if !maps.EqualFunc(before, s.data(t, secretPath), func(a, b []byte) bool { return string(a) == string(b) }) {
		t.Error("another run changes the Secret")
	}
	const says = "secret tunnel-system/tunnel-cloud stays as it was\nconfigmap tunnel-system/tunnel-ca stays as it was\n"
	if out.String() != says {
		t.Errorf("another run prints\n%s", &out)
	}
}

// A Secret without its ConfigMap gets the ConfigMap from its own CA.
func TestInitClusterRestoresTheConfigMap(t *testing.T) {
	s, cfg := newAPIServer(t)
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	ca := s.data(t, secretPath)["ca.crt"]
	delete(s.objects, configMapPath)
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if got := s.data(t, configMapPath)["ca.crt"]; string(got) != string(ca) {
		t.Errorf("the ConfigMap holds %q, want the CA of the Secret", got)
	}
}

// Two pods of a Job at once agree: the slower one uses the Secret of the faster one.
func TestInitClusterAtOnce(t *testing.T) {
	s, cfg := newAPIServer(t)
	_, other := newAPIServer(t)
	other.Client = cfg.Client
	first := true
	s.refuse = func(r *http.Request) int {
		if r.Method == http.MethodPost && first {
			first = false
			s.refuse = nil
			s.mu.Unlock() // the other pod runs while this request is under way
			defer s.mu.Lock()
			if err := InitCluster(t.Context(), other); err != nil {
				t.Error(err)
			}
		}
		return 0
	}
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if first {
		t.Fatal("the pods have not met")
	}
	if string(s.data(t, configMapPath)["ca.crt"]) != string(s.data(t, secretPath)["ca.crt"]) {
		t.Error("the two objects hold different CAs")
	}
}

// What InitCluster cannot mend is an error that says what to do, and no object changes.
func TestInitClusterRefuses(t *testing.T) {
	const junk = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	_, elsewhere := newAPIServer(t)
	theirs, cfg := newAPIServer(t)
	elsewhere.Client = cfg.Client
	if err := InitCluster(t.Context(), elsewhere); err != nil {
		t.Fatal(err)
	}
	another := string(theirs.data(t, configMapPath)["ca.crt"])
	object := func(data map[string]any) map[string]any {
		return map[string]any{"metadata": map[string]any{"resourceVersion": "5"}, "data": data}
	}
	for name, tt := range map[string]struct {
		change func(s *apiServer, cfg *ClusterConfig)
		says   string
	}{
		"the secret is gone": {
			func(s *apiServer, _ *ClusterConfig) { delete(s.objects, secretPath) },
			"configmap tunnel-system/tunnel-ca is there without secret tunnel-system/tunnel-cloud",
		},
		"another CA": {
			func(s *apiServer, _ *ClusterConfig) {
				s.objects[configMapPath] = object(map[string]any{"ca.crt": another})
			},
			"holds another CA than the secret tunnel-cloud",
		},
		"a configmap without the key": {
			func(s *apiServer, _ *ClusterConfig) { s.objects[configMapPath] = object(nil) },
			"configmap tunnel-system/tunnel-ca: ca.crt: it holds no certificate",
		},
		"a secret without the key": {
			func(s *apiServer, _ *ClusterConfig) { s.objects[secretPath] = object(nil) },
			"secret tunnel-system/tunnel-cloud: ca.crt: it holds no certificate",
		},
		"a CA that is none": {
			func(s *apiServer, _ *ClusterConfig) {
				s.objects[configMapPath] = object(map[string]any{"ca.crt": junk})
			},
			"configmap tunnel-system/tunnel-ca: ca.crt: ",
		},
		"no rights": {
			func(s *apiServer, _ *ClusterConfig) { s.refuse = func(*http.Request) int { return 403 } },
			"create on secrets and configmaps, get on the secret tunnel-cloud and on the configmap tunnel-ca",
		},
		"no name": {
			func(_ *apiServer, cfg *ClusterConfig) { cfg.Names = []string{"*.example.com"} },
			`--san: "*.example.com" is neither a name nor an IP address`,
		},
		"an address that leads nowhere": {
			func(_ *apiServer, cfg *ClusterConfig) { cfg.Names = []string{"0.0.0.0"} },
			`--san: "0.0.0.0" is neither`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, cfg := newAPIServer(t)
			if err := InitCluster(t.Context(), cfg); err != nil {
				t.Fatal(err)
			}
			tt.change(s, &cfg)
			before := maps.Clone(s.objects)
			err := InitCluster(t.Context(), cfg)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v, want %q", err, tt.says)
			}
			if !slices.Equal(slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(s.objects))) {
				t.Error("objects have come or gone")
			}
		})
	}
}

// An operator who replaces the CA may have the old one and the new one in the ConfigMap.
func TestInitClusterWithTwoCAs(t *testing.T) {
	s, cfg := newAPIServer(t)
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	other, elsewhere := newAPIServer(t)
	if err := InitCluster(t.Context(), elsewhere); err != nil {
		t.Fatal(err)
	}
	both := string(other.data(t, configMapPath)["ca.crt"]) + string(s.data(t, configMapPath)["ca.crt"])
	s.objects[configMapPath]["data"] = map[string]any{"ca.crt": both}
	if err := InitCluster(t.Context(), cfg); err != nil {
		t.Error(err)
	}
}
