package tunnel

import (
	"strings"
	"testing"
)

func TestMayJoin(t *testing.T) {
	for name, says := range map[NodeName]string{
		"edge1": "", "10-0-0-1": "", "1234": "", "10.0.0": "", "node.10.0.0.1": "", "kubernetes1": "",
		"kubernetes.default.svcs": "",
		"10.0.0.1":                "is an IP address", "localhost": "is reserved", "a.localhost": "is reserved",
		"kubernetes": "is reserved", "kubernetes.default": "is reserved", "kubernetes.default.svc": "is reserved",
		"kubernetes.default.svc.cluster.local": "is reserved",
		"api.example.com":                      "is the host of the API server",
	} {
		err := name.MayJoin("API.example.com.")
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", name, err, says)
		}
	}
}
