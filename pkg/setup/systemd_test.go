package setup

import (
	"os"
	"strings"
	"testing"
)

// Join installs the same unit as the packages, and can replace the paths in it.
func TestUnitIsTheOneOfTheDeployment(t *testing.T) {
	text, err := os.ReadFile("../../deployment/systemd/tunnel-edge.service")
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != unitText {
		t.Error("pkg/setup/tunnel-edge.service differs from deployment/systemd/tunnel-edge.service")
	}
	for _, what := range []string{
		"ExecStart=" + unitProgram + " edge -c " + unitDir + "/" + edgeFile + "\n",
		"StateDirectory=" + strings.TrimPrefix(stateDir, "/var/lib/") + "\n",
	} {
		if strings.Count(unitText, what) != 1 {
			t.Errorf("the unit does not hold %q once", what)
		}
	}
}
