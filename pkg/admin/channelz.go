package admin

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/channelz/service"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Limits of a channelz client.
const (
	channelzStreams   = 16       // per connection
	channelzRequest   = 4 << 10  // bytes; a request holds a few numbers
	channelzHeader    = 16 << 10 // bytes
	channelzHandshake = 5 * time.Second
)

// Channelz serves gRPC's channelz service, for tools such as grpcdebug. It shows the address of
// every peer and does not authenticate callers, so it listens on loopback only. It is the module
// "channelz".
type Channelz struct {
	// Set once.
	listen string
	log    *slog.Logger

	// Sockets opens the port; nil: nobody can take it over. Set before Run.
	Sockets *listen.Sockets

	addr atomic.Pointer[net.Addr] // nil while not listening
}

var _ tunnel.Module = (*Channelz)(nil)

// NewChannelz returns a server for the address listen, such as "127.0.0.1:7001".
func NewChannelz(listen string, log *slog.Logger) *Channelz {
	return &Channelz{listen: listen, log: log}
}

// Name implements tunnel.Module.
func (z *Channelz) Name() string { return "channelz" }

// Addr returns the address the server listens on, nil while it does not.
func (z *Channelz) Addr() net.Addr {
	if a := z.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Run listens and serves until ctx is done. An address that is not on loopback is an error.
func (z *Channelz) Run(ctx context.Context) error {
	// Resolved here, so that the address checked below is the address that is opened.
	addr, err := net.ResolveTCPAddr("tcp", z.listen)
	if err != nil {
		return fmt.Errorf("channelzaddr %q: %w; write an address and a port, such as 127.0.0.1:7001", z.listen, err)
	}
	if !addr.IP.IsLoopback() {
		return fmt.Errorf("channelzaddr %q: channelz shows every connection to whoever asks, "+
			"so it is served on loopback only; write 127.0.0.1:%d", z.listen, addr.Port)
	}
	ln, err := openPort(ctx, z.Sockets, addr.String())
	if err != nil {
		return fmt.Errorf("listening on %s for channelz (channelzaddr): %w", z.listen, err)
	}
	a := ln.Addr()
	z.addr.Store(&a)
	defer z.addr.Store(nil)

	srv := grpc.NewServer(
		grpc.UnaryInterceptor(localAuthority),
		grpc.MaxConcurrentStreams(channelzStreams),
		grpc.MaxRecvMsgSize(channelzRequest),
		grpc.MaxHeaderListSize(channelzHeader),
		grpc.ConnectionTimeout(channelzHandshake),
		grpc.WaitForHandlers(true),
	)
	service.RegisterChannelzServiceToServer(srv)
	// Stop, not GracefulStop: nothing is lost, and a slow reader must not delay the end.
	stop := context.AfterFunc(ctx, srv.Stop)
	defer stop()
	if err := srv.Serve(listen.Steady(ln, z.log)); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serving channelz on %s: %w", a, err)
	}
	srv.Stop() // returns when all handlers have returned, also if AfterFunc called it first
	return nil
}

// localAuthority answers only callers whose :authority is a name or an address of loopback. A web
// page in a browser on this machine cannot pass: its requests carry the page's own host name, even
// if that name resolves to loopback.
func localAuthority(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	for _, authority := range md.Get(":authority") {
		if !IsLocal(authority) {
			return nil, status.Errorf(codes.PermissionDenied, "channelz is for localhost, not %q", authority)
		}
	}
	return next(ctx, req)
}

// IsLocal reports whether authority, with or without a port, is localhost or a loopback address.
func IsLocal(authority string) bool {
	host, _, err := net.SplitHostPort(authority)
	if err != nil {
		host = authority
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
