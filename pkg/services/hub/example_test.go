package hub_test

import (
	"fmt"
	"log/slog"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/services/hub"
)

// A cloud fills the hub from the cluster. A Service without endpoints reaches nothing.
func Example() {
	h := hub.New(hub.Config{Log: slog.New(slog.DiscardHandler)})
	h.Set(services.ServicePath("shop", "web"), nil)
	h.Synced()
	_, refusal := h.Target("edge1", "endpoint/shop/web/web-x7/10.88.2.5 TCP 8080")
	fmt.Println(refusal != nil)
	found, err := h.Endpoints("web.shop.svc.cluster.local", 80)
	fmt.Println(len(found), err)
	// Output:
	// true
	// 0 <nil>
}
