package faults

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// The kernel reports the loss of a route at accept, though nothing is wrong with the
// listener (accept(2)). Nothing ends because of that: not one of the cloud's listeners, and
// not the process. strace(1) puts the errors in.
func TestAcceptErrors(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skipf("the errors are put in by strace(1): %v", err)
	}
	if out, err := exec.Command(strace, "-f", "-qq", "-e", "trace=accept4", "-e", "inject=accept4:error=EHOSTUNREACH",
		"true").CombinedOutput(); err != nil {
		t.Skipf("strace(1) may not put errors in here: %v: %s", err, out)
	}
	for _, errno := range []string{"EHOSTUNREACH", "ENETDOWN", "EPROTO", "ENOPROTOOPT", "ENONET", "EMFILE"} {
		t.Run(errno, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			// -D: the program is our child and strace its own, so that signals reach the program.
			// Of the calls of each thread the first, the third, the fifth and so on fail.
			wrapped := filepath.Join(dir, "tunnel")
			script := fmt.Sprintf("#!/bin/sh\nexec %s -D -f -qq -o /dev/null -e trace=accept4 -e "+
				"inject=accept4:error=%s:when=1+2 %s \"$@\"\n", strace, errno, program)
			if err := os.WriteFile(wrapped, []byte(script), 0o700); err != nil {
				t.Fatal(err)
			}
			ca, err := rig.NewCA()
			if err != nil {
				t.Fatal(err)
			}
			targets := newTargets(t, ca)
			agents := testkit.FreePort(t)
			dials := testkit.FreePort(t)
			page := testkit.FreePort(t)
			onePort := fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))
			names := fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))
			files := filepath.Join(dir, "files")
			if err := os.Mkdir(files, 0o700); err != nil {
				t.Fatal(err)
			}
			p := &pair{t: t, targets: targets}
			p.Pair, err = rig.NewPair(rig.Config{
				Binary: wrapped, Dir: files, CA: ca, TCP: targets.doors(), HTTPS: targets.https,
				Cloud: fmt.Sprintf(`[mode.cloud.egress]
grpc = ["unix://%s/g", "tls://127.0.0.1:%d"]
httpconnect = ["unix://%s/c"]
cert = "cloud.crt"
key = "cloud.key"
clientca = "ca.crt"
clientnames = ["kube-apiserver"]
agentport = %d
[mode.cloud.admin]
socket = "%s/a"
page = "127.0.0.1:%d"
`, dir, dials, dir, agents, dir, page),
			})
			if err != nil {
				t.Fatal(err)
			}
			addLines(t, p.Path("cloud.toml"), map[string]string{
				"mode.cloud.stream.server": fmt.Sprintf("listen = %q", onePort),
				"mode.cloud.stream.dns":    fmt.Sprintf("listen = %q", names),
			})
			t.Cleanup(p.end)
			p.startCloud()
			p.startEdge()
			ask := func(network, addr, request, want string) error {
				select {
				case <-p.cloud.Done():
					return errors.New("the cloud has ended")
				default:
				}
				c, err := net.Dial(network, addr)
				if err != nil {
					return err
				}
				defer c.Close()
				if request == "" {
					return nil
				}
				if _, err := io.WriteString(c, request); err != nil {
					return err
				}
				b := make([]byte, len(want))
				if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
					return fmt.Errorf("%q, %w", b, err)
				}
				return nil
			}
			testkit.Within(t, patience, "cloud and edge are ready", func() error {
				if !p.cloud.Alive() {
					t.Fatalf("the cloud has ended with code %d", p.cloud.ExitCode())
				}
				return errors.Join(rig.Ready(p.CloudHealth()), rig.Ready(p.EdgeHealth()))
			})
			for range 10 { // each listener meets the error a few times
				for _, where := range []struct{ network, addr, request, want string }{
					{"unix", dir + "/c", "CONNECT " + targets.echo + " HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 200"},
					{"unix", dir + "/a", "GET /loglevel HTTP/1.0\r\n\r\n", "HTTP/1.0 200"},
					{"unix", dir + "/g", "", ""},
					{"tcp", fmt.Sprintf("127.0.0.1:%d", dials), "", ""},
					{"tcp", fmt.Sprintf("127.0.0.1:%d", agents), "", ""},
					{"tcp", p.HTTPSDoor(), "", ""},
					{"tcp", fmt.Sprintf("127.0.0.1:%d", page), "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n", "HTTP/1.0 200"},
					{"tcp", p.CloudHealth(), "GET /healthz HTTP/1.0\r\n\r\n", "HTTP/1.0 200"},
					{"tcp", onePort, "GET / HTTP/1.0\r\n\r\n", "HTTP/1.0 400"}, // it expects TLS, and says so
				} {
					if err := ask(where.network, where.addr, where.request, where.want); err != nil {
						t.Fatalf("%s: %v", strings.TrimPrefix(where.addr, dir), err)
					}
				}
				client := dns.Client{Net: "tcp", Timeout: backWithin}
				if _, _, err := client.Exchange(new(dns.Msg).SetQuestion(rig.Node+".", dns.TypeA), names); err != nil {
					t.Fatalf("DNS over TCP, %s: %v", names, err)
				}
			}
			if err := rig.Ready(p.CloudHealth()); err != nil || !strings.Contains(p.CloudLog.String(), "trying again") {
				t.Errorf("%v; no listener has met the error", err)
			}
		})
	}
}

// addLines puts lines behind the heads of tables in a file.
func addLines(t *testing.T, file string, lines map[string]string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	for table, more := range lines {
		head := "[" + table + "]\n"
		if !strings.Contains(text, head) {
			t.Fatalf("%s has no table %s", file, table)
		}
		text = strings.Replace(text, head, head+more+"\n", 1)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
