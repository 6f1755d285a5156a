package peers

import (
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/stream"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// BenchmarkPeers measures what it costs a replica to know the nodes of another one:
// learn takes what that one tells of all of them when it has joined (heap-B/node is what
// stays in memory), one takes a node that joins there, and all merges the two replicas'
// nodes, as the writer of the ConfigMap has it done.
func BenchmarkPeers(b *testing.B) {
	const n = 10_000
	full := tellOf(n)
	b.Run("learn", func(b *testing.B) {
		wire := 0
		for _, m := range full {
			wire += len(m.Data)
		}
		before := heap()
		p, from := benchPeers()
		take(b, p, from, full)
		kept := heap() - before
		b.ReportAllocs()
		b.SetBytes(int64(wire))
		for b.Loop() {
			take(b, p, from, full)
		}
		runtime.KeepAlive(p)
		b.ReportMetric(float64(wire)/n, "wire-B/node")
		b.ReportMetric(float64(kept)/n, "heap-B/node")
	})
	b.Run("one", func(b *testing.B) {
		p, from := benchPeers()
		take(b, p, from, full)
		one := []*tunnel.Message{stream.NodesMessage(&pb.Nodes{Held: []*pb.Held{heldBy(0)}})}
		b.ReportAllocs()
		for b.Loop() {
			take(b, p, from, one)
		}
	})
	b.Run("all", func(b *testing.B) {
		p, from := benchPeers()
		take(b, p, from, full)
		for i := range n {
			p.dir.Attach(&tunnel.Session{Node: tunnel.NodeName(fmt.Sprintf("here-%05d", i))})
		}
		b.ReportAllocs()
		for b.Loop() {
			if got := len(p.All()); got != 2*n {
				b.Fatal(got)
			}
		}
	})
}

// benchPeers is a replica that another one has joined.
func benchPeers() (*Peers, *tunnel.Session) {
	p := &Peers{
		cfg: Config{Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
		dir: new(tunnel.Directory), log: slog.New(slog.DiscardHandler),
		left: make(chan struct{}), replicas: make(map[string]*replica),
	}
	from := new(tunnel.Session)
	p.Attach(uuid.NewString(), []string{"10.0.0.2"}, from)
	return p, from
}

func heldBy(i int) *pb.Held {
	return &pb.Held{Node: fmt.Sprintf("edge-%05d", i), AgeMs: uint64(time.Hour.Milliseconds()), Instance: uuid.NewString()}
}

// tellOf is what a replica says of n nodes when it has joined.
func tellOf(n int) (all []*tunnel.Message) {
	var news pb.Nodes
	for i := range n {
		news.Held = append(news.Held, heldBy(i))
	}
	link := new(collector)
	post(&tunnel.Session{Link: link}, &news, true)
	return link.sent
}

// collector is a link that keeps what is sent.
type collector struct {
	tunnel.Link
	sent []*tunnel.Message
}

func (c *collector) Send(m *tunnel.Message) error {
	c.sent = append(c.sent, m)
	return nil
}

// take has a replica take messages of another one.
func take(b *testing.B, p *Peers, from *tunnel.Session, all []*tunnel.Message) {
	for _, m := range all {
		var news pb.Nodes
		if err := proto.Unmarshal(m.Data, &news); err != nil {
			b.Fatal(err)
		}
		if _, err := p.Learn(from, &news); err != nil {
			b.Fatal(err)
		}
	}
}

// heap returns how much memory is in use.
func heap() int64 {
	runtime.GC()
	runtime.GC() // twice: what a first one has finalized
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
