package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// containers is a container runtime: it executes the plugin. test/cni has libcni and go-cni execute it.
type containers struct {
	*node
	plugin  string // path of the program
	version string
	count   int
}

// inOwnNetwork is testkit.InOwnNetwork for tests that also need the right to bind namespaces to files.
func inOwnNetwork(t *testing.T) bool {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("namespaces for pods are made by root")
	}
	return testkit.InOwnNetwork(t)
}

func newContainers(t *testing.T, version string, subnets ...string) *containers {
	t.Helper()
	n := newNode(t, subnets...)
	n.conf.Bridge = "tunnel0"
	bin := t.TempDir()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(program, filepath.Join(bin, Program)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the bridge would be in the way of the next subtest's, if that has another name
		if bridge, err := netlink.LinkByName(n.conf.Bridge); err == nil && bridge.Type() == "bridge" {
			_ = netlink.LinkDel(bridge)
		}
	})
	return &containers{n, filepath.Join(bin, Program), version, 0}
}

// command returns the plugin for a verb and an attachment. extra are keys that the runtime adds to the
// configuration.
func (c *containers) command(verb string, rt attached, extra map[string]any) (*exec.Cmd, error) {
	conf := map[string]any{"cniVersion": c.version, "name": c.conf.Name, "type": Program,
		"bridge": c.conf.Bridge, "datadir": c.conf.DataDir, "mtu": c.conf.MTU, "subnets": c.conf.Subnets}
	maps.Copy(conf, extra)
	stdin, err := json.Marshal(conf)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(c.plugin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+rt.container, "CNI_NETNS="+rt.netns,
		"CNI_IFNAME="+rt.ifName, "CNI_ARGS="+rt.args, "CNI_PATH="+filepath.Dir(c.plugin),
		"GORACE=atexit_sleep_ms=0") // the race detector has a process sleep for a second at its end
	cmd.Stdin = bytes.NewReader(stdin)
	return cmd, nil
}

// run executes a verb, and returns what the plugin prints.
func (c *containers) run(verb string, rt attached, extra map[string]any) ([]byte, error) {
	cmd, err := c.command(verb, rt, extra)
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		said := &types.Error{}
		if json.Unmarshal(stdout.Bytes(), said) == nil && said.Msg != "" {
			return nil, said
		}
		return nil, fmt.Errorf("%s: %w: %s%s", verb, err, stdout.String(), stderr.String())
	}
	if strings.Contains(stderr.String(), "DATA RACE") {
		return nil, errors.New(stderr.String())
	}
	return stdout.Bytes(), nil
}

// attached is what a runtime says about an attachment.
type attached struct{ container, netns, ifName, args string }

// pod is a container with a network namespace, which may have been added.
type pod struct {
	c      *containers
	path   string // of the namespace
	rt     attached
	result json.RawMessage // of the last ADD
	addrs  []netip.Addr
}

// newPod makes a namespace for a pod of that name.
func (c *containers) newPod(name string) *pod {
	c.t.Helper()
	c.count++
	path := filepath.Join(c.t.TempDir(), "netns")
	if err := bindNamespace(path); err != nil {
		c.t.Fatalf("making a namespace: %v", err)
	}
	p := &pod{c: c, path: path, rt: attached{fmt.Sprintf("%s-%d", name, c.count), path, "eth0",
		"IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=" + name + ";K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=uid"}}
	c.t.Cleanup(p.end)
	return p
}

func bindNamespace(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	return onThread(func() error {
		if err := testkit.UnshareNetwork(); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
}

// end destroys the namespace, as the end of a pod does. It may be called twice.
func (p *pod) end() {
	_ = unix.Unmount(p.path, unix.MNT_DETACH)
	_ = os.Remove(p.path)
}

func (p *pod) hostLink() string { return p.attachment().hostLink() }

func (p *pod) attachment() attachment {
	return attachment{p.c.conf.Name, p.rt.container, p.rt.ifName}
}

// tryAdd is ADD.
func (p *pod) tryAdd() (*current.Result, error) {
	out, err := p.c.run("ADD", p.rt, nil)
	if err != nil {
		return nil, err
	}
	result, err := create.Create(p.c.version, out)
	if err != nil {
		return nil, err
	}
	converted, err := current.NewResultFromResult(result)
	if err != nil {
		return nil, err
	}
	p.result, p.addrs = out, addressesIn(converted, p.rt.netns)
	return converted, nil
}

func (p *pod) add() *current.Result {
	p.c.t.Helper()
	result, err := p.tryAdd()
	if err != nil {
		p.c.t.Fatalf("ADD of %s: %v", p.rt.container, err)
	}
	return result
}

// previous is what the runtime adds to the configuration after ADD.
func (p *pod) previous() map[string]any {
	if p.result == nil {
		return nil
	}
	return map[string]any{"prevResult": p.result}
}

func (p *pod) tryDel() error {
	_, err := p.c.run("DEL", p.rt, p.previous())
	return err
}

func (p *pod) del() {
	p.c.t.Helper()
	if err := p.tryDel(); err != nil {
		p.c.t.Fatalf("DEL of %s: %v", p.rt.container, err)
	}
}

func (p *pod) check() error {
	_, err := p.c.run("CHECK", p.rt, p.previous())
	return err
}

func (c *containers) status() error {
	_, err := c.run("STATUS", attached{}, nil)
	return err
}

// gc is GC with a list of attachments; nil is no list.
func (c *containers) gc(valid []types.GCAttachment) error {
	extra := make(map[string]any)
	if valid != nil {
		extra["cni.dev/valid-attachments"] = valid
	}
	_, err := c.run("GC", attached{}, extra)
	return err
}

// inside runs f in the namespace of the pod.
func (p *pod) inside(f func() error) {
	p.c.t.Helper()
	s, err := openSandbox(p.path)
	if err == nil {
		err = s.do(f)
		s.close()
	}
	if err != nil {
		p.c.t.Fatalf("in the namespace of %s: %v", p.rt.container, err)
	}
}

// reaches has a client in one namespace send a request to a server in another; nil is the node.
func reaches(t *testing.T, from, to *pod, addr netip.Addr) {
	t.Helper()
	in := func(p *pod, f func() error) {
		if p != nil {
			p.inside(f)
		} else if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	var server net.Listener
	in(to, func() (err error) {
		server, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	})
	defer server.Close()
	go func() {
		if conn, err := server.Accept(); err == nil {
			fmt.Fprint(conn, conn.RemoteAddr().(*net.TCPAddr).IP)
			conn.Close()
		}
	}()
	in(from, func() error {
		conn, err := net.DialTimeout("tcp", server.Addr().String(), 5*time.Second)
		if err != nil {
			return err
		}
		defer conn.Close()
		seen := make([]byte, 64)
		n, err := conn.Read(seen)
		if err != nil {
			return err
		}
		if from != nil && !strings.Contains(join(from.addrs), string(seen[:n])) {
			t.Errorf("%s sees %s as %s, want one of %s", addr, from.rt.container, seen[:n], join(from.addrs))
		}
		return nil
	})
}

// code returns the error code of the specification, and the text.
func code(t *testing.T, err error) (uint, string) {
	t.Helper()
	e, ok := errors.AsType[*types.Error](err)
	if !ok {
		t.Fatalf("the error is %v, not one of the specification", err)
	}
	return e.Code, e.Msg + "; " + e.Details
}

// refused checks the code and the text of an error.
func refused(t *testing.T, why string, err error, want uint, text string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error", why)
		return
	}
	if got, said := code(t, err); got != want || !strings.Contains(said, text) {
		t.Errorf("%s: code %d, %q; want %d, %q", why, got, said, want, text)
	}
}

// hostLinks returns the ends of veth pairs on the bridge.
func hostLinks(t *testing.T) (names []string) {
	t.Helper()
	links, err := Dump(netlink.LinkList)
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if link.Type() == "veth" {
			names = append(names, link.Attrs().Name)
		}
	}
	return names
}

// nothingLeft waits until neither addresses in use nor links are left: the kernel ends a namespace in the
// background.
func (c *containers) nothingLeft(why string) {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		links, used := hostLinks(c.t.(*testing.T)), c.inUse()
		if len(links) == 0 && len(used) == 0 {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: left are the links %v and the addresses %v", why, links, used)
		}
	}
}
