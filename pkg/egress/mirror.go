package egress

import (
	"context"
	"net"

	"tunnel.example/tunnel/pkg/tunnel"
)

// doorMirror is the door of callers without a protocol: the port that accepted them says where they want to go.
const doorMirror = "mirror"

// Serve connects a caller that another listener has accepted to addr, the host:port of a Service. It owns c. It returns
// when both have ended, or when ctx is done. Unlike callers at listeners of the front door, nobody has authenticated
// the caller.
func (f *FrontDoor) Serve(ctx context.Context, c net.Conn, addr string) {
	tunnel.ResetOnDeath(c)
	target, o, err := f.dial(ctx, doorMirror, addr, c.RemoteAddr().String())
	if err != nil {
		tunnel.Reset(c)
		return
	}
	f.splice(ctx, o, c, target)
}
