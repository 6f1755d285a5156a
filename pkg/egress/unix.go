package egress

import (
	"context"
	"net"
)

func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "unix", path)
}
