package interop

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client/metrics"

	"tunnel.example/tunnel/test/rig"
)

// Whatever becomes of a dial, nothing of it stays: at the cloud, at the edge, in the target.
func TestNothingLeaks(t *testing.T) {
	hang, stopHanging, err := rig.FullBacklog()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stopHanging)
	o := start(t)
	all := ways(t, o.grpc, o.connect)
	back := serving(t, echo)
	var targets sync.WaitGroup // the target's connections
	silent := serving(t, func(c *net.TCPConn) {
		targets.Add(1)
		defer targets.Done()
		io.Copy(io.Discard, c)
	})
	for way, dial := range all {
		if err := works(dial, back); err != nil {
			t.Fatalf("%s: %v", way, err)
		}
	}
	ends := map[string]string{"cloud": o.pair.CloudHealth(), "edge": o.pair.EdgeHealth()}
	// What is there when nothing is going on.
	kept := []string{"go_goroutines", "process_open_fds", "tunnel_conns", "tunnel_opens_waiting",
		`tunnel_egress_conns{door="grpc"}`, `tunnel_egress_conns{door="httpconnect"}`,
		`tunnel_egress_dials_pending{door="grpc"}`, `tunnel_egress_dials_pending{door="httpconnect"}`}
	held := func() map[string]float64 {
		now := make(map[string]float64)
		for end, health := range ends {
			m, err := rig.Metrics(health)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range kept {
				now[end+" "+name] = m[name]
			}
			// Data connections that wait for another conn: each has a goroutine at the edge.
			data := m["tunnel_data_connections"]
			now[end+" process_open_fds"] -= data
			if end == "edge" {
				now[end+" go_goroutines"] -= data
			}
		}
		return now
	}
	var first map[string]float64
	until(t, "the first dials are over", o.pair.CloudLog.String, func() bool {
		first = held()
		return first["cloud tunnel_conns"]+first["edge tunnel_conns"] == 0
	})
	// Whoever answers a question after metrics has some of its own, not always as many.
	const answering = 8

	conns := func() float64 { return held()["edge tunnel_conns"] }
	const many = 50
	together := func(f func()) {
		var wg sync.WaitGroup
		for range many {
			wg.Go(f)
		}
		wg.Wait()
	}
	for way, dial := range all {
		t.Run(way, func(t *testing.T) {
			// Given up while the target is being dialled, which the edge would do for 10 s.
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var dialling sync.WaitGroup
			dialling.Go(func() {
				together(func() {
					c, err := dial(ctx, hang)
					if err == nil {
						c.Close()
						t.Error("nobody answers there")
					} else if way != "CONNECT" && reason(err) != metrics.DialFailureContext {
						t.Errorf("a dial that was given up: %v", err)
					}
				})
			})
			// Two dials try a target that has not answered yet; the others wait for their turn.
			until(t, "all are being dialled, or wait", o.pair.CloudLog.String, func() bool {
				now := held()
				return now["edge tunnel_conns"]+now["cloud tunnel_opens_waiting"] >= many
			})
			cancel()
			dialling.Wait()
			for late := time.Now().Add(8 * time.Second); conns() > 0; time.Sleep(20 * time.Millisecond) {
				if time.Now().After(late) {
					t.Fatalf("the edge goes on with dials that have been given up: %v", held())
				}
			}
			// Refused by the target, by the edge, by nobody's name.
			together(func() {
				for addr, why := range map[string]string{"127.0.0.1:1": "refused", "192.0.2.1:80": "denied"} {
					_, err := dial(t.Context(), addr)
					if err == nil || !strings.Contains(err.Error(), why) {
						t.Errorf("%s: %v", addr, err)
					} else if way != "CONNECT" && reason(err) != metrics.DialFailureEndpoint {
						t.Errorf("%s: the client takes it for %q", addr, reason(err))
					}
				}
			})
			if _, err := dial(t.Context(), "nobody.invalid:80"); err == nil || !strings.Contains(err.Error(), "nobody.invalid") {
				t.Errorf("a name that is nobody's: %v", err)
			}
			// Given up while the target has the request.
			var got sync.WaitGroup
			got.Add(many)
			slow := newSlow(t, got.Done)
			ctx, cancel = context.WithCancel(t.Context())
			go func() {
				got.Wait()
				cancel()
			}()
			together(func() {
				tr := &http.Transport{DisableKeepAlives: true,
					DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) { return dial(ctx, addr) }}
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, slow, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if res, err := tr.RoundTrip(req); err == nil {
					res.Body.Close()
					t.Error("there is no answer")
				}
			})
			// Closed at once.
			together(func() {
				c, err := dial(t.Context(), silent)
				if err != nil {
					t.Error(err)
					return
				}
				c.Close()
			})
			var over string
			until(t, "nothing is left", func() string { return over }, func() bool {
				over = ""
				for name, n := range held() {
					most := 0.0
					if strings.Contains(name, "go_goroutines") || strings.Contains(name, "open_fds") {
						most = first[name] + answering
					}
					if n > most {
						over += fmt.Sprintf("%s is %v, at first %v\n", name, n, first[name])
					}
				}
				return over == ""
			})
		})
	}
	targets.Wait()
}

// newSlow starts a target that has got a request and never answers.
func newSlow(t *testing.T, got func()) (url string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: patience,
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			got()
			<-r.Context().Done()
		})}
	go server.Serve(ln)
	t.Cleanup(func() { server.Close() })
	return "http://" + ln.Addr().String()
}

// reason is why the stock client says that a dial has failed.
func reason(err error) metrics.DialFailureReason {
	_, reason := client.GetDialFailureReason(err)
	return reason
}
