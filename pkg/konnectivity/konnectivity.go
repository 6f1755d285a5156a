// Package konnectivity speaks the protocol of Kubernetes' apiserver-network-proxy.
package konnectivity

import (
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel/pkg/tunnel"
)

// category is that of the conns that agents carry.
const category = "egress"

const (
	// DialTimeout bounds a dial through the tunnel, all nodes that are tried together. It is
	// shorter than the 30 s that kube-apiserver and konnectivity-client wait.
	DialTimeout = 20 * time.Second
	// MaxHeaders bounds the metadata of a stream, in bytes.
	MaxHeaders = 16 << 10
	// StrangerBytes is how much a peer may send before it is known: a TLS handshake with
	// certificates, and the header of a stream.
	StrangerBytes = 32<<10 + 2*MaxHeaders
	// DataSize is how much one packet of ours carries: it fills a buffer of 32 KiB.
	DataSize = 32<<10 - MaxHead
)

// GuardStreams has a panic in a handler end its stream, and nothing else.
func GuardStreams(log *slog.Logger, counters *tunnel.Counters) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) (answer error) {
		if tunnel.Guard(log, counters, "the stream ends", func() error { answer = handler(srv, stream); return nil }) != nil {
			return status.Error(codes.Internal, "internal error")
		}
		return answer
	}
}

// Addr is the address of a stream, which has none.
type Addr struct{}

func (Addr) Network() string { return "grpc" }
func (Addr) String() string  { return "stream" }
