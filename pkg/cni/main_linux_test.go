package cni

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == Program { // a runtime finds the plugin by its name; tests link the test program to it
		skel.PluginMainFuncs(Funcs(), Versions(), "")
		return
	}
	if dir := os.Getenv(churnDir); dir != "" {
		churn(dir)
		return
	}
	leaks.Main(m)
}
