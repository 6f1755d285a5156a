package main

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"tunnel.example/tunnel/internal/freeport"
	"tunnel.example/tunnel/test/rig"
)

const konnectivityModule = "sigs.k8s.io/apiserver-network-proxy"

// startKonnectivity starts the stock server and agent, to which clients speak HTTP CONNECT
// over a unix socket. That asks for no library of theirs.
func startKonnectivity(b *bench, l *line) error {
	server, agent, err := b.konnectivity()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bench-") // the path of a socket has to be short
	if err != nil {
		return err
	}
	b.folders = append(b.folders, dir)
	var ports [5]int
	for i := range ports {
		if ports[i], err = freeport.New(); err != nil {
			return err
		}
	}
	l.carrier = ports[0]
	port := func(i int) string { return fmt.Sprint(ports[i]) }
	ip, _, err := net.SplitHostPort(l.at.cloud.Address(l.carrier))
	if err != nil {
		return err
	}
	socket := filepath.Join(dir, "s")
	log := new(rig.Log)
	l.logs = log.String
	l.cloud, err = l.run(l.at.cloud, log, server, "--mode=http-connect", "--uds-name="+socket, "--server-port=0",
		"--server-id=one", "--server-count=1",
		"--cluster-cert="+b.file("relay.crt"), "--cluster-key="+b.file("relay.key"), "--cluster-ca-cert="+b.file("ca.crt"),
		"--agent-port="+port(0), "--health-port="+port(1), "--admin-port="+port(2), "-v=0")
	if err != nil {
		return err
	}
	if err = l.listening(); err != nil {
		return err
	}
	l.edge, err = l.run(l.at.edge, log, agent, "--agent-id=one", "--ca-cert="+b.file("ca.crt"),
		"--agent-cert="+b.file("client.crt"), "--agent-key="+b.file("client.key"),
		"--proxy-server-host="+ip, "--proxy-server-port="+port(0), "--health-server-port="+port(3),
		"--admin-server-port="+port(4), "-v=0")
	l.dial = func() (net.Conn, error) { return connect(socket, l.target) }
	return err
}

// connect asks for a conn by HTTP CONNECT.
func connect(socket, target string) (net.Conn, error) {
	c, err := net.DialTimeout("unix", socket, patience)
	if err != nil {
		return nil, err
	}
	if err = c.SetDeadline(time.Now().Add(patience)); err == nil {
		_, err = fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	// The target speaks when it was spoken to, so nothing follows the answer.
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	if err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("CONNECT: HTTP %d", resp.StatusCode)
		}
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// konnectivity builds both programs.
func (b *bench) konnectivity() (server, agent string, err error) {
	if server, err = b.foreign(konnectivityModule + "/cmd/server"); err == nil {
		agent, err = b.foreign(konnectivityModule + "/cmd/agent")
	}
	return server, agent, err
}

func konnectivityVersion(b *bench) string { return b.versionOf(konnectivityModule) }

// foreign builds a program that is not ours, once, in the module that has it among its requirements.
func (b *bench) foreign(pkg string) (program string, err error) {
	program = b.file(filepath.Base(pkg))
	if _, err = os.Stat(program); err != nil {
		_, err = b.goTool("build", "-o", program, pkg)
	}
	return program, err
}

// versionOf returns the version of a module that is not ours.
func (b *bench) versionOf(module string) string {
	out, err := b.goTool("list", "-m", "-f", "{{.Version}}", module)
	if err != nil {
		return "unknown"
	}
	return out
}

// goTool runs the go command in test/interop.
func (b *bench) goTool(args ...string) (string, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir = filepath.Join(b.top, "test", "interop")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go %s: %w: %s", args[0], err, out)
	}
	return strings.TrimSpace(string(out)), nil
}
