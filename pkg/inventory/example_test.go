package inventory_test

import (
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A cloud tells the inventory of sessions by its directory.
func Example() {
	nodes := inventory.New("", slog.New(slog.DiscardHandler)) // Run keeps it in a file, if it has a path
	directory := &tunnel.Directory{Watcher: nodes}
	prometheus.NewRegistry().MustRegister(nodes.Collector(nil, 0))
	fmt.Println(len(directory.Connected()), len(nodes.All()))
	// Output: 0 0
}
