package dns_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"tunnel.example/tunnel/pkg/dns"
	"tunnel.example/tunnel/pkg/tunnel"
)

// one is a replica to which edge1 is connected. A cloud uses its tunnel.Directory.
type one struct{}

func (one) Holds(n tunnel.NodeName) bool { return n == "edge1" }
func (one) Connected() []tunnel.NodeName { return []tunnel.NodeName{"edge1"} }
func (one) Changed() <-chan struct{}     { return nil } // never

// A replica answers for its nodes: their names lead to the replica.
func ExampleResponder() {
	r := dns.NewResponder(dns.ResponderConfig{
		Listen: "127.0.0.1:0",
		Truth:  dns.Local{Nodes: one{}, Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.5")}},
		Log:    slog.New(slog.DiscardHandler),
	})
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	for r.Ready() != nil {
		select {
		case err := <-ended:
			fmt.Println("it does not listen:", err)
			return
		case <-time.After(time.Millisecond):
		}
	}

	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, r.Addr().String())
	}}
	addrs, err := resolver.LookupNetIP(ctx, "ip4", "edge1.")
	fmt.Println(addrs, err)
	_, err = resolver.LookupNetIP(ctx, "ip4", "edge2.")
	fmt.Println("edge2 is unknown:", err != nil)

	stop()
	fmt.Println(<-ended)
	// Output:
	// [10.0.0.5] <nil>
	// edge2 is unknown: true
	// <nil>
}

// The lines of others stay as they are.
func ExampleHosts() {
	hosts := dns.ParseHosts("10.0.0.1 registry.local\n10.0.0.4    edge0 # tunnel\n")
	hosts.Own = append(hosts.Own, dns.Entry{Addr: netip.MustParseAddr("10.0.0.5"), Node: "edge1"})
	fmt.Print(hosts)
	// Output:
	// 10.0.0.1 registry.local
	// 10.0.0.4    edge0 # tunnel
	// 10.0.0.5    edge1 # tunnel
}
