package oneport_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/oneport"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Edges, callers and health checks share port 443.
func Example() {
	log, directory, conf := slog.New(slog.DiscardHandler), new(tunnel.Directory), new(tls.Config)
	port := oneport.New(oneport.Config{
		Listen: ":443", DataProtocol: stream.DataProtocol, Nodes: directory, HasDoor: true, Log: log,
	})
	server, err := stream.NewServer(stream.ServerConfig{OnePort: port.Edges, TLS: conf, Log: log}, directory)
	if err != nil {
		fmt.Println(err)
		return
	}
	door, err := https.New(https.Config{OnePort: port.Callers}, directory, directory, log)
	if err != nil {
		fmt.Println(err)
		return
	}
	health := admin.NewPublic(port.Health, conf, nil, log)
	for _, run := range []func(context.Context) error{port.Run, server.Run, door.Run, health.Run} {
		go func() { fmt.Println(run(context.Background())) }()
	}
}
