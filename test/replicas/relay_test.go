package replicas

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// TestEverywhere asks every node through every replica, and has streams run the same
// ways. What another replica holds is relayed, once.
func TestEverywhere(t *testing.T) {
	beside(t)
	lasts, rate := 3*time.Second, 100
	if soak() {
		lasts, rate = 30*time.Second, 200
	}
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprint(n, " replicas"), func(t *testing.T) {
			beside(t)
			f := newFleet(t, size{replicas: local(n), edges: 20})
			for i := range f.Replicas {
				if len(f.held(i)) == 0 {
					t.Fatalf("replica %d holds no node: nothing would be relayed to it", i)
				}
			}
			before := f.relayed()

			var relayed atomic.Int64 // conns that must have been
			// Each node through each replica: every pair comes up, since i/len(nodes) goes on
			// where i%len(nodes) starts again.
			next := func(i int) request {
				r := request{node: i % len(f.nodes), replica: i / len(f.nodes) % n, tls: (i+i/len(f.nodes))%4 == 3}
				if f.ports[r.node].holder() != r.replica {
					relayed.Add(1)
				}
				return r
			}
			streams := f.startStreams(20, order{Bytes: 128 << 10, BytesPerSecond: 64 << 10}, next)
			load := f.startLoad(rate, next)
			time.Sleep(lasts)
			load.want(every)
			streams.want(20)

			// Who asks counts a relayed conn, and who is asked.
			late := int64(0) // of these requests nobody knows whether they were relayed
			for _, r := range load.results {
				if errors.Is(r.err, rig.ErrLate) {
					late++
				}
			}
			if got, want := f.relayed()-before, 2*relayed.Load(); got > want || got < want-2*late || want == 0 {
				t.Errorf("the replicas count %d relayed conns, want %d; %d requests were late", got, want, late)
			}
			for _, r := range f.Replicas {
				for _, name := range []string{"tunnel_relay_conns_opened_total", "tunnel_relay_sent_bytes_total",
					"tunnel_relay_received_bytes_total"} {
					testkit.Within(t, atOnce, r.Name+" counts "+name, func() error {
						v, err := metric(r, name)
						if err == nil && v == 0 {
							err = errors.New("it is 0")
						}
						return err
					})
				}
			}
			t.Logf("%d requests and %d streams of %d bytes in all; %d were relayed", len(load.results), streams.whole,
				streams.bytes, relayed.Load())
		})
	}
}

// relayed returns how many conns the replicas have relayed and been asked for.
func (f *fleet) relayed() (sum int64) {
	f.t.Helper()
	for _, r := range f.Replicas {
		v, err := metric(r, "tunnel_relay_conns_opened_total")
		if err != nil {
			f.t.Fatal(err)
		}
		sum += int64(v)
	}
	return sum
}
