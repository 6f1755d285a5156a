package egress

import (
	"context"
	"net"

	"tunnel.example/tunnel/pkg/tunnel"
)

// doorMirror is the door of callers of a twin, package mirror. They send no address: each port of the cloud belongs
// to one port of one Service.
const doorMirror = "mirror"

// Serve connects c, a caller that another listener has accepted, to addr, the host:port of a Service. It owns c. It
// returns when c and the conn have ended, or when ctx is done. Unlike a caller at a listener of the front door, this
// caller is not authenticated.
func (f *FrontDoor) Serve(ctx context.Context, c net.Conn, addr string) {
	tunnel.ResetOnDeath(c)
	target, o, err := f.dial(ctx, doorMirror, addr, c.RemoteAddr().String())
	if err != nil {
		tunnel.Reset(c)
		return
	}
	f.splice(ctx, o, c, target)
}
