package hostile

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// A konnectivity agent with a node's own token sends identifiers that no gRPC client would
// send. No replica notices.
func TestHostileAgent(t *testing.T) {
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	var ports [2]int
	for i := range ports {
		ports[i] = testkit.FreePort(t)
	}
	f, err := rig.NewFleet(rig.FleetConfig{
		Binary: program, Dir: t.TempDir(), CA: ca, Hosts: make([]rig.Host, 2), Nodes: []string{"evil"},
		Cloud: fmt.Sprintf("[mode.cloud.egress]\nagentport = {{if eq .Name \"replica0\"}}%d{{else}}%d{{end}}\n",
			ports[0], ports[1]),
	})
	if err != nil {
		t.Fatal(err)
	}
	var replicas []*rig.Process
	for _, r := range f.Replicas {
		p, err := r.Start()
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if p.Alive() {
				p.Kill()
			}
		}()
		replicas = append(replicas, p)
	}
	for _, r := range f.Replicas {
		testkit.Within(t, readyWithin, "the replicas have joined each other", func() error {
			if text, err := page(r.Health() + "/readyz?verbose"); err != nil ||
				!strings.Contains(text, "1 others joined, 1 have joined here") {
				return fmt.Errorf("%w: %s", err, text)
			}
			return nil
		})
	}
	for name, identifiers := range map[string]string{
		"not UTF-8":             "host=x\xff",
		"not UTF-8, by escapes": "host=%ff&host=%c3%28",
		"half of a rune":        "host=\xe2\x82",
		"only escapes of zeros": "host=%00%00",
	} {
		for i, port := range ports {
			answer := joinAsAgent(t, port, f.Token("evil"), identifiers)
			time.Sleep(200 * time.Millisecond) // for the replica to tell the other one, 20 ms later
			for j, p := range replicas {
				if !p.Alive() {
					log := p.Log().String()
					t.Fatalf("%s, to replica %d (%s): replica %d has ended with code %d\n%s", name, i, answer, j, p.ExitCode(),
						log[max(0, len(log)-1500):])
				}
			}
			t.Logf("%s: %s", name, answer)
		}
	}
	for _, r := range f.Replicas {
		if text, err := page(r.Health() + "/metrics"); err != nil || !strings.Contains(text, "tunnel_panics_total 0\n") ||
			!strings.Contains(text, "tunnel_relay_panics_total 0\n") {
			t.Errorf("%s has met with a panic (%v)", r.Name, err)
		}
	}
}

// joinAsAgent joins as node evil and stays for a moment. It returns how that was answered.
func joinAsAgent(t *testing.T, port int, token auth.Secret, identifiers string) string {
	t.Helper()
	raw, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err.Error()
	}
	defer raw.Close()
	c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}) // the attacker does not mind
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		return err.Error()
	}
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var head bytes.Buffer
	enc := hpack.NewEncoder(&head)
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", "/AgentService/Connect"}, {":authority", "tunnel.cloud.io"},
		{"content-type", "application/grpc"}, {"te", "trailers"},
		{"agentid", "evil"}, {"authorization", "Bearer " + token.Reveal()}, {"agentidentifiers", identifiers},
	} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	err = errors.Join(f.WriteSettings(),
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndHeaders: true}))
	if err != nil {
		return err.Error()
	}
	c.SetReadDeadline(time.Now().Add(hangs))
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return "closed: " + err.Error()
		}
		h, ok := frame.(*http2.MetaHeadersFrame)
		if !ok {
			continue
		}
		for _, field := range h.Fields {
			switch field.Name {
			case "serverid":
				time.Sleep(100 * time.Millisecond)
				return "joined"
			case "grpc-message":
				return "refused: " + field.Value
			}
		}
	}
}

func page(address string) (string, error) {
	resp, err := http.Get("http://" + address)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}
