// Package konnectivity speaks the wire protocol of Konnectivity, Kubernetes'
// apiserver-network-proxy, with components that are not ours.
//
// Konnectivity has two gRPC services. A caller, usually kube-apiserver, opens a stream of
// ProxyService on a proxy-server, and names the address to dial. An agent beside the targets opens
// a stream of AgentService on the proxy-server, and dials. Both kinds of stream carry one message,
// [Packet].
//
// The package plays either side of AgentService:
//
//	type      runs on    plays           its peer
//	[Agents]  our cloud  a proxy-server  stock konnectivity-agents, or an [Agent] of another cluster
//	[Agent]   our edge   an agent        stock proxy-servers, or [Agents] of another cloud
//
// With Agents a node joins our cloud without running our edge. With Agent a node joins stock
// proxy-servers while kube-apiserver still uses them. The caller's side, ProxyService, is served by
// package egress, which borrows [Packet] and [Codec].
//
// One AgentService stream carries every conn of an agent (mux.go). A conn is a [Conn] at either
// end. The protocol has no flow control per conn and no half-close. conn.go describes the
// consequences.
//
// Each stream at Agents is a [tunnel.Session] of the node that the agent's credential proves, and
// is attached to the same [tunnel.Directory] as the sessions of edges. Front doors see no
// difference.
//
// The package neither chooses a node for an address (package egress does) nor decides which targets
// an edge may dial (AgentConfig.Dial does).
package konnectivity

import (
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/tunnel"
)

// category marks dials of this package in [tunnel.Request].
const category = "egress"

const (
	// DialTimeout bounds one dial for a caller, over all nodes that are tried. It is shorter than
	// the 30 s that kube-apiserver and konnectivity-client wait.
	DialTimeout = 20 * time.Second
	// MaxHeaders bounds the metadata of a stream, in bytes.
	MaxHeaders = 16 << 10
	// StrangerBytes bounds the bytes that a peer may send before it is authenticated: a TLS handshake
	// with certificates, and the header of a stream.
	StrangerBytes = 32<<10 + 2*MaxHeaders
	// DataSize is the most data that we send in one packet. With its head, such a packet fills a
	// buffer of 32 KiB.
	DataSize = 32<<10 - MaxHead
)

// GuardStreams returns an interceptor that confines a panic in a stream's handler to that stream.
// The panic is logged and counted, and the peer receives Internal.
func GuardStreams(log *slog.Logger, counters *tunnel.Counters) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) (answer error) {
		err := tunnel.Guard(log, counters, "the stream ends", func() error { answer = handler(srv, stream); return nil })
		if err != nil {
			return status.Error(codes.Internal, "internal error")
		}
		return answer
	}
}

// Addr is the placeholder address of a conn on a gRPC stream, for net.Conn.
type Addr struct{}

// Network implements net.Addr.
func (Addr) Network() string { return "grpc" }

// String implements net.Addr.
func (Addr) String() string { return "stream" }
