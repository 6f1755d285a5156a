package cni

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// programs is the folder with tunnel-cni, the stock plugins and cnitool. TestMain sets it.
var programs string

// programsKey hands the folder to test processes in a network of their own.
const programsKey = "TUNNEL_CNI_TEST_PROGRAMS"

func TestMain(m *testing.M) {
	if programs = os.Getenv(programsKey); programs != "" {
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "tunnel-cni-")
	if err == nil {
		programs = dir
		err = build()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func build() error {
	for program, pkg := range map[string]string{
		"tunnel-cni": "tunnel.example/tunnel/cmd/tunnel-cni",
		"cnitool":    "github.com/containernetworking/cni/cnitool",
		"bridge":     "github.com/containernetworking/plugins/plugins/main/bridge",
		"host-local": "github.com/containernetworking/plugins/plugins/ipam/host-local",
		"loopback":   "github.com/containernetworking/plugins/plugins/main/loopback",
		"bandwidth":  "github.com/containernetworking/plugins/plugins/meta/bandwidth",
		"portmap":    "github.com/containernetworking/plugins/plugins/meta/portmap",
	} {
		out, err := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w",
			"-o", filepath.Join(programs, program), pkg).CombinedOutput()
		if err != nil {
			return fmt.Errorf("building %s: %w: %s", program, err, out)
		}
	}
	return nil
}

// inOwnNetwork runs a test in a network of its own: the node's.
func inOwnNetwork(t *testing.T) bool {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("namespaces for pods are made by root")
	}
	return testkit.InOwnNetwork(t, programsKey+"="+programs)
}

// newNamespace makes a network namespace, as a runtime does for a pod, and returns its path.
func newNamespace(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := testkit.OnThread(func() error {
		if err := testkit.UnshareNetwork(); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
	if err != nil {
		t.Fatalf("making a namespace: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// network is a network configuration, as in a file of /etc/cni/net.d.
func network(t testing.TB, version, name string, plugins ...map[string]any) []byte {
	t.Helper()
	data, err := json.Marshal(map[string]any{"cniVersion": version, "name": name, "plugins": plugins})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// ours is the part of tunnel-cni in a network configuration.
func ours(t testing.TB, subnets ...string) map[string]any {
	return map[string]any{"type": "tunnel-cni", "datadir": filepath.Join(t.TempDir(), "data"), "subnets": subnets}
}

// stock is the part of bridge and host-local for the same addresses, without masquerade, as ours.
func stock(t testing.TB, subnets ...string) map[string]any {
	var ranges [][]map[string]any
	routes := []map[string]any{}
	for _, subnet := range subnets {
		prefix := netip.MustParsePrefix(subnet)
		ranges = append(ranges, []map[string]any{{"subnet": subnet}})
		routes = append(routes, map[string]any{"dst": netip.PrefixFrom(prefix.Addr(), 0).Masked().String()})
	}
	return map[string]any{"type": "bridge", "bridge": "stock0", "isGateway": true, "hairpinMode": true,
		"ipam": map[string]any{"type": "host-local", "dataDir": filepath.Join(t.TempDir(), "data"),
			"ranges": ranges, "routes": routes}}
}

// client executes plugins as libcni does.
type client struct {
	*libcni.CNIConfig
	list *libcni.NetworkConfigList
}

func newClient(t testing.TB, conf []byte) *client {
	t.Helper()
	list, err := libcni.NetworkConfFromBytes(conf)
	if err != nil {
		t.Fatal(err)
	}
	return &client{libcni.NewCNIConfigWithCacheDir([]string{programs}, t.TempDir(), nil), list}
}

func container(id, path string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, NetNS: path, IfName: "eth0", Args: [][2]string{
		{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "pod-" + id}}}
}

func (c *client) add(rt *libcni.RuntimeConf) error {
	_, err := c.AddNetworkList(context.Background(), c.list, rt)
	return err
}

func (c *client) del(rt *libcni.RuntimeConf) error {
	return c.DelNetworkList(context.Background(), c.list, rt)
}

// now is the time in nanoseconds.
func now() int64 { return time.Now().UnixNano() }
