package tunnel

import (
	"fmt"
	"testing"
)

func BenchmarkRouter(b *testing.B) {
	routes := map[string]Handler{"hello": ignore, "open": ignore, "refused": ignore, "cancel": ignore}
	r, err := NewRouter(
		&module{name: "stream", routes: routes}, &module{name: "https", routes: routes}, &module{name: "tcp", routes: routes},
	)
	if err != nil {
		b.Fatal(err)
	}
	from, m := &Session{Node: "edge1"}, &Message{Category: "https", Type: "open"}
	b.ReportAllocs()
	for b.Loop() {
		if known, err := r.Handle(b.Context(), &Incoming{Message: m, From: from}); !known || err != nil {
			b.Fatal(known, err)
		}
	}
}

// BenchmarkDirectory measures a directory that holds 10,000 nodes. join: a session replaces
// another one. end: a session ends and another one starts. sessions and connected: all nodes
// are listed, as for another replica. dialAny: a front door dials without naming a node.
func BenchmarkDirectory(b *testing.B) {
	const n = 10_000
	var d Directory
	nodes := make([]NodeName, n)
	for i := range nodes {
		nodes[i] = NodeName(fmt.Sprintf("edge-%05d", i))
		d.Attach(session(nodes[i], "a"))
	}
	i := 0
	for _, what := range []struct {
		name string
		once func(NodeName)
	}{
		{"lookup", func(node NodeName) { d.Lookup(node) }},
		{"join", func(node NodeName) { d.Attach(session(node, "b")) }},
		{"end", func(node NodeName) {
			s := d.Lookup(node)
			d.Detach(s)
			d.Attach(s)
		}},
		{"sessions", func(NodeName) { d.Sessions() }},
		{"connected", func(NodeName) { d.Connected() }},
		{"dialAny", func(NodeName) {
			if _, err := d.Dial(b.Context(), Request{Category: "tcp"}); err != nil {
				b.Fatal(err)
			}
		}},
	} {
		b.Run(what.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				i = (i + 1) % n
				what.once(nodes[i])
			}
			if d.Len() != n {
				b.Fatal(d.Len())
			}
		})
	}
}
