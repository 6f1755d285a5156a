package page_test

import (
	"context"
	"fmt"
	"log/slog"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/page"
)

// A cloud serves the page on loopback.
func Example() {
	p := page.New("127.0.0.1:9790", new(api.Server), slog.New(slog.DiscardHandler))
	fmt.Println(p.Run(context.Background()))
}
