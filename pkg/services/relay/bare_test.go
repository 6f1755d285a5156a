package relay

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
)

// bareRelay is an environment variable for a process that runs one program of BenchmarkBareRelays, and no test. It has
// what the program listens with, and where and how the program connects: "tcp 127.0.0.1:7000 tls", for example. Without
// an address, the program is the target, which sends zeros.
const bareRelay = "TUNNEL_BARE_RELAY"

// BenchmarkBareRelays reports how fast 100 MiB go from a target to a caller through bare relays, which do nothing but
// copy bytes. Each program is a process, and all share the processors of this machine.
//
//   - "front door" has the relays of a TCP front door: cloud and edge, with TLS between them.
//   - "service" has the relays of a connection to a Service on another node: edge, cloud and edge, with TLS between
//     each two.
//
// The quotient of the two is the most that connections to Services can reach of the throughput of a front door, if all
// programs run on one machine.
func BenchmarkBareRelays(b *testing.B) {
	pair := testca.New(b, "ca").Pair(b, auth.Leaf{Server: true})
	der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		b.Fatal(err)
	}
	key := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	for _, cert := range pair.Certificate {
		key = append(key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})...)
	}
	for _, chain := range []struct {
		name   string
		relays []string // what each listens with, and connects with; the one at the target comes first
	}{
		{"front door", []string{"tls tcp", "tcp tls"}},
		{"service", []string{"tls tcp", "tls tls", "tcp tls"}},
	} {
		b.Run(chain.name, func(b *testing.B) {
			at := startBare(b, key, "tcp")
			for _, relay := range chain.relays {
				listens, connects, _ := strings.Cut(relay, " ")
				at = startBare(b, key, listens+" "+at+" "+connects)
			}
			c, err := net.Dial("tcp", at)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			const size = 100 << 20
			b.SetBytes(size)
			for b.Loop() {
				if _, err := io.CopyN(io.Discard, c, size); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// startBare starts a program of BenchmarkBareRelays, and returns where it listens.
func startBare(b *testing.B, key []byte, program string) string {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), bareRelay+"="+program)
	cmd.Stdin, cmd.Stderr = strings.NewReader(string(key)), os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { cmd.Wait() }) // the end of the context has killed it
	at, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(at)
}

// runBareRelay runs a program of BenchmarkBareRelays until it is killed. Standard input has a certificate and its key.
func runBareRelay(program string) {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	key, err := io.ReadAll(os.Stdin)
	must(err)
	pair, err := tls.X509KeyPair(key, key)
	must(err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	fmt.Println(ln.Addr())
	fields := strings.Fields(program)
	if fields[0] == "tls" {
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{pair}})
	}
	for {
		c, err := ln.Accept()
		must(err)
		var from io.ReadCloser = zeros{}
		switch {
		case len(fields) == 1:
		case fields[2] == "tls":
			from, err = tls.Dial("tcp", fields[1], &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // the test's own server
		default:
			from, err = net.Dial("tcp", fields[1])
		}
		must(err)
		go func() {
			io.Copy(c, from)
			c.Close()
			from.Close()
		}()
	}
}

// zeros is the source of the target.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

func (zeros) Close() error { return nil }
