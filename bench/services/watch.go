package main

import (
	"bytes"
	"compress/flate"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// node is a node that asks a server what has changed.
type node interface {
	// pull asks for what has changed since the last pull, and waits until something has. It returns the bytes of the
	// messages, both ways, with gRPC's prefixes. The first pull gets what the node lacks.
	pull() (size int, err error)
	// again begins a new stream. The next pull gets what the node lacks.
	again() error
}

// grpcPrefix is the length of gRPC's prefix of a message.
const grpcPrefix = 5

// tunnelNode is a node that tunnel's cloud tells about Services. It has a session of its own, with TLS.
type tunnelNode struct {
	// Set once.
	ctx    context.Context
	client *stream.Client
	state  *services.State // nil: the node forgets what it gets, and always says that it has nothing

	stop  context.CancelFunc // ends the stream
	watch servicesv1.Services_WatchClient
	next  *servicesv1.Next // nil: the cloud sends the next batch without it
}

// newTunnelNode joins the cloud of a fleet. keep says that the node keeps what it gets.
func newTunnelNode(ctx context.Context, in *rig.Network, f *rig.Fleet, name string, keep bool) (*tunnelNode, error) {
	n := &tunnelNode{ctx: ctx, stop: func() {}}
	if keep {
		n.state = services.NewState()
	}
	conf := rig.EdgeTLS(f.CA().CertPEM())
	var err error
	n.client, err = stream.NewClient(stream.ClientConfig{
		Address: f.Replicas[0].GRPC(), TLS: func() *tls.Config { return conf },
		Node: tunnel.NodeName(name), Token: auth.StaticToken(f.Token(name)),
		Log: slog.New(slog.DiscardHandler), Software: "bench",
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			return in.Dial(ctx, network, address)
		},
	})
	if err != nil {
		return nil, err
	}
	go n.client.Run(ctx) //nolint:errcheck // a pull has the error
	return n, n.again()
}

func (n *tunnelNode) again() error {
	n.stop()
	ctx, stop := context.WithCancel(n.ctx)
	n.stop = stop
	calls, err := n.client.Calls(ctx)
	if err != nil {
		return err
	}
	n.watch, err = servicesv1.NewServicesClient(calls).Watch(ctx)
	n.next = &servicesv1.Next{Unasked: true}
	if n.state != nil {
		has := n.state.Digests()
		n.next.Digests = has.Encode()
	}
	return err
}

func (n *tunnelNode) pull() (size int, err error) {
	var series []*servicesv1.Changes
	for {
		if n.next != nil {
			if err = n.watch.Send(n.next); err != nil {
				return size, err
			}
			size += grpcPrefix + proto.Size(n.next)
		}
		var batch *servicesv1.Batch
		if batch, err = n.watch.Recv(); err != nil {
			return size, err
		}
		size += grpcPrefix + proto.Size(batch)
		n.next = new(servicesv1.Next)
		if batch.GetUnasked() {
			n.next = nil
		}
		if n.state != nil {
			data := batch.GetChanges()
			if batch.GetDeflated() {
				if data, err = io.ReadAll(flate.NewReader(bytes.NewReader(data))); err != nil {
					return size, err
				}
			}
			changes := new(servicesv1.Changes)
			if err = proto.Unmarshal(data, changes); err != nil {
				return size, err
			}
			series = append(series, changes)
		}
		if !batch.GetMore() {
			break
		}
	}
	if n.state != nil {
		_, err = n.state.Apply(series...)
	}
	return size, err
}

// kpngNode is a node that KPNG's server tells about Services. It has a connection of its own, without TLS: that is
// KPNG's default.
type kpngNode struct {
	// Set once.
	ctx  context.Context
	conn *grpc.ClientConn
	name string

	stop  context.CancelFunc // ends the stream
	watch grpc.ClientStream
}

// kpngPort is where KPNG's server listens by default.
const kpngPort = "127.0.0.1:12090"

func newKPNGNode(ctx context.Context, in *rig.Network, name string) (*kpngNode, error) {
	n := &kpngNode{ctx: ctx, name: name, stop: func() {}}
	var err error
	n.conn, err = grpc.NewClient("passthrough:"+kpngPort, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(plain{})),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return in.Dial(ctx, "tcp", address)
		}))
	if err != nil {
		return nil, err
	}
	return n, n.again()
}

func (n *kpngNode) again() (err error) {
	n.stop()
	ctx, stop := context.WithCancel(n.ctx)
	n.stop = stop
	n.watch, err = n.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		"/localv1.Sets/Watch", grpc.WaitForReady(true))
	return err
}

// The fields of KPNG's messages WatchReq and OpItem (api/localv1/api.proto of its repository).
const (
	kpngNodeName protowire.Number = 1
	kpngSync     protowire.Number = 1
)

func (n *kpngNode) pull() (size int, err error) {
	request := protowire.AppendString(protowire.AppendTag(nil, kpngNodeName, protowire.BytesType), n.name)
	if err = n.watch.SendMsg(&request); err != nil {
		return size, err
	}
	size += grpcPrefix + len(request)
	for {
		var item []byte
		if err = n.watch.RecvMsg(&item); err != nil {
			return size, err
		}
		size += grpcPrefix + len(item)
		field, _, length := protowire.ConsumeTag(item)
		if length < 0 {
			return size, fmt.Errorf("KPNG sends %q, which is no OpItem", item)
		}
		if field == kpngSync {
			return size, nil
		}
	}
}

// plain is a codec of gRPC for messages that are bytes already.
type plain struct{}

// Name implements encoding.Codec. KPNG's server takes messages of this name.
func (plain) Name() string { return "proto" }

// Marshal implements encoding.Codec.
func (plain) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

// Unmarshal implements encoding.Codec. data is gRPC's own memory.
func (plain) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = bytes.Clone(data)
	return nil
}
