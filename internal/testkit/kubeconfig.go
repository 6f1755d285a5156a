package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Kubeconfig writes a kubeconfig for the API server at url, without credentials, and returns its path.
func Kubeconfig(t testing.TB, url string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c"}}],
		"clusters": [{"name": "c", "cluster": {"server": %q}}]}`, url)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
