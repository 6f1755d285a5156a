package tunnel

import (
	"regexp"
	"strings"
	"testing"
)

func TestParseNodeName(t *testing.T) {
	for _, good := range []string{
		"n", "0", "edge1", "edge-1.example.com", "a--b", "10.0.0.1", strings.Repeat("a", 253),
		strings.Repeat("a", 64) + ".b", // Kubernetes does not limit a label
	} {
		if n, err := ParseNodeName(good); err != nil || string(n) != good {
			t.Errorf("%q: %q, %v", good, n, err)
		}
	}
	for bad, says := range map[string]string{
		"": "empty", strings.Repeat("a", 254): "254 bytes long; 253 are allowed",
		"Edge1": "RFC 1123", "edge_1": "RFC 1123", "-a": "RFC 1123", "a-": "RFC 1123", ".a": "RFC 1123", "a.": "RFC 1123",
		"a..b": "RFC 1123", "a b": "RFC 1123", "a\n127.0.0.1 b": "RFC 1123", "a\x00": "RFC 1123", "é": "RFC 1123",
		"*": "RFC 1123", "a.-b": "RFC 1123",
	} {
		if n, err := ParseNodeName(bad); err == nil || n != "" || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %q, %v; want an error that says %q", bad, n, err, says)
		}
	}
}

// subdomain is the regular expression of Kubernetes' validation.IsDNS1123Subdomain.
var subdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

func FuzzParseNodeName(f *testing.F) {
	for _, s := range []string{"", "a", "a.b-c", "-", "A", "a..b", "a\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseNodeName(s)
		if want := len(s) <= 253 && subdomain.MatchString(s); (err == nil) != want {
			t.Errorf("%q: %v; Kubernetes accepts it: %t", s, err, want)
		}
		if err == nil && string(n) != s {
			t.Errorf("%q becomes %q", s, n)
		}
	})
}
