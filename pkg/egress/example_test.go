package egress_test

import (
	"context"
	"crypto/tls"
	"log/slog"

	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A cloud opens its front door. Callers reach the nodes of the directory by the identifiers that edges claim.
func Example() {
	serve := func(ctx context.Context, callers *tls.Config, directory *tunnel.Directory, log *slog.Logger) error {
		door, err := egress.New(egress.Config{
			GRPC:        []string{"unix:///run/tunnel/egress-grpc.sock"},
			HTTPConnect: []string{"unix:///run/tunnel/egress-connect.sock", "tls://0.0.0.0:8090"},
			TLS:         callers, // required by tls://
			Identifiers: egress.Believed(directory, log),
		}, directory, directory, log)
		if err != nil {
			return err
		}
		return door.Run(ctx)
	}
	_ = serve
}
