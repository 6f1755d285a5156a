package spans_test

import (
	"log/slog"

	"tunnel.example/tunnel/pkg/spans"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The spans of one conn in a hundred go to a collector.
func Example() {
	exporter := spans.New(spans.Config{
		Endpoint: "http://collector:4318/v1/traces", Service: "tunnel-cloud", Log: slog.New(slog.DiscardHandler),
	})
	exporter.Start()
	defer exporter.Close()
	sink := tunnel.Sink{Tracer: &tunnel.Tracer{PerMillion: 10_000, Take: exporter.Take}}
	_ = sink // a front door feeds it
}
