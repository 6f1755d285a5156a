//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

const (
	namespace = "tunnel-system"          // as deployment/cloud-rbac.yaml has it, and so the account
	account   = "tunnel-cloud"           // of the cloud
	nodesMap  = "tunnel-nodes"           // the ConfigMap, and the Lease
	apiServer = "https://10.77.0.1:6443" // of the cluster
	ownMark   = "# tunnel"               // ends the cloud's lines
)

// kubeconfig writes a file with which a cloud is its service account, at a server that shows a
// certificate of the cluster's CA.
func (c *cluster) kubeconfig(ctx context.Context, t *testing.T, file, server string) {
	t.Helper()
	token, err := c.kubectl(ctx, "create", "token", account, "-n", namespace, "--duration=1h")
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: e2e, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: cloud, user: {token: %q}}]
contexts: [{name: e2e, context: {cluster: e2e, user: cloud}}]
current-context: e2e
`, server, c.path("pki/ca.crt"), strings.TrimSpace(token))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// mounted returns the directory in which a kubelet keeps a volume of the pod "coredns" that is a ConfigMap.
func (c *cluster) mounted(ctx context.Context, t *testing.T, node string) string {
	t.Helper()
	uid, err := c.kubectl(ctx, "get", "pod", "coredns", "-n", namespace, "-o", "jsonpath={.metadata.uid}")
	if err != nil {
		t.Fatal(err)
	}
	dir := c.path(filepath.Join("node", node, "kubelet/pods", uid, "volumes/kubernetes.io~configmap/nodes"))
	if _, err := os.Stat(dir); err != nil {
		t.Fatalf("the volume of pod coredns: %v", err)
	}
	return dir
}

// An admin asks kube-apiserver as its administrator, faster than kubectl does.
type admin struct{ client *http.Client }

func newAdmin(t *testing.T, c *cluster) *admin {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(c.path("pki/admin.crt"), c.path("pki/admin.key"))
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: c.pool(t), Certificates: []tls.Certificate{pair}},
		ForceAttemptHTTP2: true,
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &admin{&http.Client{Transport: tr, Timeout: 5 * time.Second}}
}

func (c *cluster) pool(t *testing.T) *x509.CertPool {
	t.Helper()
	pem, err := os.ReadFile(c.path("pki/ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		t.Fatal("no CA in pki/ca.crt")
	}
	return pool
}

// A statusError is kube-apiserver's refusal.
type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return fmt.Sprintf("status %d: %s", e.code, e.text) }

// isStatus reports whether err is a refusal with that code.
func isStatus(err error, code int) bool {
	var e *statusError
	return errors.As(err, &e) && e.code == code
}

// do makes one request; in and out may be nil.
func (a *admin) do(ctx context.Context, method, path, contentType string, in, out any) error {
	var body bytes.Buffer
	if in != nil {
		if err := json.NewEncoder(&body).Encode(in); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, apiServer+path, &body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return &statusError{resp.StatusCode, string(b)}
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(b, out)
}

const (
	mapsPath = "/api/v1/namespaces/" + namespace + "/configmaps"
	mapPath  = mapsPath + "/" + nodesMap
)

// configMap is a ConfigMap, as far as we look.
type configMap struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name            string `json:"name"`
		Namespace       string `json:"namespace"`
		ResourceVersion string `json:"resourceVersion,omitempty"`
	} `json:"metadata"`
	Data       map[string]string `json:"data,omitempty"`
	BinaryData map[string][]byte `json:"binaryData,omitempty"`
}

func (a *admin) load(ctx context.Context) (configMap, error) {
	var m configMap
	err := a.do(ctx, http.MethodGet, mapPath, "", nil, &m)
	return m, err
}

var ownLine = regexp.MustCompile(`^([0-9a-f.:]+)    ([a-z0-9.-]+) ` + ownMark + `\n$`)

// split returns the lines of the file, the cloud's and everybody else's.
func (m configMap) split() (own, foreign []string) {
	for line := range strings.Lines(m.Data["hosts"]) {
		if ownLine.MatchString(line) {
			own = append(own, line)
		} else {
			foreign = append(foreign, line)
		}
	}
	return own, foreign
}

// own returns the cloud's lines, address by node, and an error when they are not sorted or a node has two.
func (m configMap) own() (map[string]string, error) {
	lines := make(map[string]string)
	last := ""
	own, _ := m.split()
	for _, line := range own {
		entry := ownLine.FindStringSubmatch(line)
		if entry[2] <= last {
			return nil, fmt.Errorf("line %q after that of %s in:\n%s", line, last, m.Data["hosts"])
		}
		last = entry[2]
		lines[entry[2]] = entry[1]
	}
	return lines, nil
}

// lines returns the cloud's lines that are there now; none when there is no ConfigMap yet.
func (a *admin) lines(ctx context.Context) (map[string]string, error) {
	m, err := a.load(ctx)
	if isStatus(err, http.StatusNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return m.own()
}
