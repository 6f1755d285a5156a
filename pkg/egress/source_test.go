package egress

import (
	"log/slog"
	"testing"

	"tunnel.example/tunnel/pkg/tunnel"
)

// An edge may claim anything but the name of another connected node.
func TestNamesAreNotClaimed(t *testing.T) {
	var dir tunnel.Directory
	for node, reach := range map[tunnel.NodeName]string{
		"a":        "host=B&host=b.&host=::ffff:10.0.0.9&host=a.lan&host=away&ipv4=10.0.0.1",
		"b":        "host=b&cidr=10.88.2.0/24",
		"10.0.0.9": "", // a node whose name is an address
	} {
		dir.Attach(&tunnel.Session{Node: node, Reach: reach, Link: newLink()})
	}
	all := newTable(Believed(&dir, slog.New(slog.DiscardHandler)).Identifiers())
	for host, want := range map[string]tunnel.NodeName{"a": "a", "b": "b", "B": "b", "b.": "b", "10.0.0.9": "10.0.0.9",
		"a.lan": "a", "10.0.0.1": "a", "away": "a"} {
		if got := all.host(host); len(got) != 1 || got[0] != want {
			t.Errorf("%s is %q, want %q", host, got, want)
		}
	}
}
