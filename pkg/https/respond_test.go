package https

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
)

// wantKubeStatus fails unless b is a metav1.Status with this code, whose message contains words.
func wantKubeStatus(t *testing.T, b []byte, code int, words string) {
	t.Helper()
	var s struct {
		Kind, APIVersion, Status, Message, Reason string
		Code                                      int
	}
	if err := json.Unmarshal(b, &s); err != nil {
		t.Errorf("%q is not JSON: %v", b, err)
	}
	if s.Kind != "Status" || s.APIVersion != "v1" || s.Status != "Failure" ||
		s.Code != code || !strings.Contains(s.Message, words) {
		t.Errorf("status %+v, want one that says %q", s, words)
	}
}

// The reason reaches the user: as a Status with kubectl, as text with curl.
func TestRefusalBodies(t *testing.T) {
	r := newRig(t, nil, nil).start()
	c := r.client(r.caller("127.0.0.1"), false)
	for _, test := range []struct {
		name   string
		header http.Header
		json   bool
	}{
		{"curl", http.Header{"Accept": {"*/*"}}, false},
		{"kube-apiserver for logs", nil, false},
		{"kubectl get --raw", http.Header{"Accept": {"application/json, */*"}}, true},
		{"a typed client", http.Header{"Accept": {"application/vnd.kubernetes.protobuf,application/json"}}, true},
		{"SPDY", http.Header{"Connection": {"Upgrade"}, "Upgrade": {"SPDY/3.1"}}, true},
		{"websocket", http.Header{"Connection": {"keep-alive, upgrade"}, "Upgrade": {"websocket"}}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			req, err := http.NewRequest("GET", "https://edge9/pods", nil)
			must(t, err)
			if test.header != nil {
				req.Header = test.header
			}
			res, err := c.Do(req)
			must(t, err)
			defer res.Body.Close()
			b, err := io.ReadAll(res.Body)
			must(t, err)
			wantStatus(t, res, string(b), 502)
			if h := res.Header.Get(RefusalHeader); h != "no-such-node" {
				t.Errorf("%s: %q", RefusalHeader, h)
			}
			if !test.json {
				if !strings.HasPrefix(string(b), "tunnel: node edge9 is not connected") ||
					res.Header.Get("Content-Type") != "text/plain; charset=utf-8" {
					t.Errorf("%s %q", res.Header.Get("Content-Type"), b)
				}
				return
			}
			if h := res.Header.Get("Content-Type"); h != "application/json" {
				t.Errorf("Content-Type %q", h)
			}
			wantKubeStatus(t, b, 502, "node edge9 is not connected")
		})
	}
}

// The dialler's reason reaches kubectl, too.
func TestUpgradeNotDialled(t *testing.T) {
	r := newRig(t, nil, func(r *rig, _ *Config) { r.tunnel.fail = io.ErrUnexpectedEOF }).start()
	c := r.raw(r.caller("127.0.0.1"))
	_, err := io.WriteString(c, upgradeRequest("SPDY/3.1", ""))
	must(t, err)
	res := readResponse(t, bufio.NewReader(c), "POST")
	b, err := io.ReadAll(res.Body)
	must(t, err)
	wantKubeStatus(t, b, 502, "node edge1: unexpected EOF")
}

// A Status is never longer than kubectl reads.
func TestLongStatus(t *testing.T) {
	for _, text := range []string{
		strings.Repeat("x", 5000), strings.Repeat("\x01", 3000), strings.Repeat("ä", 3000),
		strings.Repeat("<\"", 3000), "",
	} {
		b := kubeStatus(504, "tunnel: "+text)
		if len(b) > maxStatus || len(text) > 0 && len(b) < maxStatus/2 {
			t.Errorf("%d bytes", len(b))
		}
		wantKubeStatus(t, b, 504, "tunnel: ")
	}
}

// What a kubelet wrote is for its caller only; the log must not contain it.
func TestUnquoted(t *testing.T) {
	const broken = "net/http: HTTP/1.x transport connection broken: "
	for text, want := range map[string]string{
		broken + `malformed HTTP status code "canary"`:            broken + `malformed HTTP status code "…"`,
		`bad Content-Length "a \"canary\" b" of "canary"`:         `bad Content-Length "…" of "…"`,
		broken + `malformed MIME header line: canary`:             broken + `malformed MIME header`,
		broken + `malformed MIME header: missing colon: "canary"`: broken + `malformed MIME header`,
		`dialing 127.0.0.1:10250: connection refused`:             `dialing 127.0.0.1:10250: connection refused`,
	} {
		if got := unquoted(errors.New(text)); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
