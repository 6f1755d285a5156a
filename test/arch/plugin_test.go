package arch

import (
	"debug/buildinfo"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// maxPlugin is the size of the stripped plugin that nobody exceeds unnoticed, in bytes.
const maxPlugin = 8 << 20

// foreignToPlugin names modules that the CNI plugin never links, with the reason.
var foreignToPlugin = map[string]string{
	"google.golang.org/grpc":     "the plugin works while no cloud is there; the edge has the session",
	"google.golang.org/protobuf": "the plugin speaks the JSON of the CNI specification alone",
	"k8s.io/":                    "the plugin asks no API server: pods get addresses offline",
	"github.com/spf13/cobra":     "a runtime passes the environment and standard input, no command line",
	"github.com/prometheus/":     "the plugin lives for milliseconds; nobody can ask it for metrics",
}

// A runtime executes the CNI plugin for each pod, on machines with little memory and slow disks.
func TestPluginIsSmall(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tunnel-cni")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", file, "./cmd/tunnel-cni")
	build.Dir = filepath.Join("..", "..")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > maxPlugin {
		t.Errorf("cmd/tunnel-cni has %d bytes, more than %d", info.Size(), maxPlugin)
	}
	linked, err := buildinfo.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	seen := false
	for _, module := range linked.Deps {
		seen = seen || module.Path == "github.com/containernetworking/cni"
		for foreign, why := range foreignToPlugin {
			if strings.HasPrefix(module.Path, foreign) {
				t.Errorf("cmd/tunnel-cni links %s: %s", module.Path, why)
			}
		}
	}
	if !seen {
		t.Errorf("cmd/tunnel-cni does not link the CNI library; this test would never fail: %v", linked.Deps)
	}
}
