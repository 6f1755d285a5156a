package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/test/rig"
)

// system is tunnel or KPNG. Each runs in a network namespace of its own, together with the API server that it reads.
type system interface {
	// startServer starts the process that reads the cluster and tells the nodes.
	startServer() (*rig.Process, error)
	// join makes a node that asks the server. keep: it keeps what it gets.
	join(ctx context.Context, name string, keep bool) (node, error)
	// startNode starts the process that programs the kernel of a node.
	startNode() (*rig.Process, error)
	// call connects to a Service on the node, and returns the address of the endpoint.
	call(service int) (endpoint string, err error)
	// clearKernel removes what the node's process has left in the kernel, as a reboot does.
	clearKernel() error
	// keepsState reports whether the node's process starts without the server.
	keepsState() bool
}

// site is the network of a system. Every address in the network endpoints is one of this machine, and a server there
// tells its callers which endpoint they have reached.
type site struct {
	network *rig.Network
	dir     string // for files; removed by close
}

// kubeconfig returns the path of the kubeconfig.
func (s *site) kubeconfig() string { return filepath.Join(s.dir, "kubeconfig") }

// newSite makes a network with the API server of a cluster. Its files are in a folder below dir.
func newSite(c *cluster, dir string) (s *site, err error) {
	s = new(site)
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.dir, err = os.MkdirTemp(dir, "site"); err != nil {
		return s, err
	}
	if s.network, err = rig.NewNetwork(); err != nil {
		return s, err
	}
	for _, command := range []string{
		"address add 10.1.0.1/32 dev lo",
		"route add " + clusterIPs + " dev lo src 10.1.0.1", // the rules change the destination
		"route add local " + endpoints + " dev lo",
	} {
		if err = s.network.IP(command); err != nil {
			return s, err
		}
	}
	api, err := s.network.Listen("127.0.0.1:0")
	if err != nil {
		return s, err
	}
	if err = c.serve(api, s.kubeconfig()); err != nil {
		return s, err
	}
	targets, err := s.network.Listen(fmt.Sprintf("0.0.0.0:%d", targetPort))
	if err != nil {
		return s, err
	}
	go func() {
		for {
			conn, err := targets.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(conn.LocalAddr().String()) // it is an address
			conn.Write([]byte(host))                                   //nolint:errcheck // the caller reads less
			conn.Close()
		}
	}()
	return s, nil
}

func (s *site) close() {
	if s.network != nil {
		s.network.Close()
	}
	os.RemoveAll(s.dir)
}

// answerTime bounds a call of a Service. As long as the kernel has no rules for the Service, nobody answers the call.
const answerTime = 50 * time.Millisecond

func (s *site) call(service int) (endpoint string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	conn, err := s.network.Dial(ctx, "tcp", fmt.Sprintf("%s:%d", clusterIP(service), servicePort))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err = conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	text := make([]byte, len("255.255.255.255"))
	n, err := conn.Read(text)
	return string(text[:n]), err
}

// tunnelSystem is `tunnel cloud` with [mode.cloud.services], and `tunnel edge` in mode full.
type tunnelSystem struct {
	*site
	fleet *rig.Fleet
	edge  *rig.Member
}

func newTunnel(s *site, binary string, nodes int) (*tunnelSystem, error) {
	ca, err := rig.NewCA()
	if err != nil {
		return nil, err
	}
	t := &tunnelSystem{site: s}
	names := make([]string, nodes)
	for i := range names {
		names[i] = nodeName(i)
	}
	host := rig.Host{Network: s.network}
	t.fleet, err = rig.NewFleet(rig.FleetConfig{
		Binary: binary, Dir: s.dir, CA: ca, Hosts: []rig.Host{host}, Nodes: names, Cloud: "[mode.cloud.services]\n",
	})
	if err != nil {
		return nil, err
	}
	t.edge, err = t.fleet.Edge(rig.EdgeConfig{
		Node: nodeName(0), Host: host, Cloud: t.fleet.Replicas[0].GRPC(),
		More: fmt.Sprintf("[mode.edge.services]\nmode = \"full\"\nstate = %q\ndirect = [%q]\n",
			filepath.Join(s.dir, "services.db"), endpoints),
	})
	return t, err
}

func (t *tunnelSystem) startServer() (*rig.Process, error) {
	if err := os.Setenv("KUBECONFIG", t.kubeconfig()); err != nil {
		return nil, err
	}
	p, err := t.fleet.Replicas[0].Start()
	if err != nil {
		return nil, err
	}
	return p, within(time.Minute, p, t.fleet.Replicas[0].Ready)
}

func (t *tunnelSystem) join(ctx context.Context, name string, keep bool) (node, error) {
	return newTunnelNode(ctx, t.network, t.fleet, name, keep)
}

func (t *tunnelSystem) startNode() (*rig.Process, error) { return t.edge.Start() }

func (t *tunnelSystem) clearKernel() error {
	return t.nft("delete table inet " + services.RulesTable)
}

func (*tunnelSystem) keepsState() bool { return true }

// kpng is KPNG's own program: `kpng kube to-api` reads the cluster, and `kpng local to-nft` programs a node.
type kpng struct {
	*site
	binary string
}

func (k *kpng) startServer() (*rig.Process, error) {
	return rig.StartIn(k.network, new(rig.Log), k.binary, "kube", "--kubeconfig", k.kubeconfig(), "to-api")
}

func (k *kpng) join(ctx context.Context, name string, _ bool) (node, error) {
	return newKPNGNode(ctx, k.network, name)
}

func (k *kpng) startNode() (*rig.Process, error) {
	return rig.StartIn(k.network, new(rig.Log), k.binary, "local", "--node-name", nodeName(0), "to-nft")
}

func (k *kpng) clearKernel() error { return k.nft("flush ruleset") }

func (*kpng) keepsState() bool { return false }

// nft runs a command of nft(8) in the network.
func (s *site) nft(command string) error {
	return s.network.Do(func() error {
		if out, err := exec.Command("nft", command).CombinedOutput(); err != nil {
			return fmt.Errorf("nft %s: %w: %s", command, err, out)
		}
		return nil
	})
}

// within calls f until it succeeds, for a time at most, and while a process is alive.
func within(limit time.Duration, p *rig.Process, f func() error) error {
	for end := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		err := f()
		switch {
		case err == nil:
			return nil
		case !p.Alive():
			return errors.Join(err, fmt.Errorf("the process has ended:\n%s", p.Log()))
		case time.Now().After(end):
			return fmt.Errorf("after %s: %w\n%s", limit, err, p.Log())
		}
	}
}
