// Package stream is the tunnel over gRPC: a [Server] on the cloud that edges dial,
// and a [Client] on the edge that keeps one session with it.
//
//	dir := &tunnel.Directory{}
//	srv, err := stream.NewServer(stream.ServerConfig{Listen: ":9000", TLS: cert, Auth: tokens, Log: log}, dir, mods...)
//	err = tunnel.Run(ctx, append(mods, srv)...)     // until ctx is done
//	conn, err := dir.Dial(ctx, tunnel.Request{…})   // from any front door
//
//	cl, err := stream.NewClient(stream.ClientConfig{Address: "cloud:9000", …}, mods...)
//	err = tunnel.Run(ctx, append(mods, cl)...)
//
// The package's example is a whole one.
//
// There are two planes (docs/protocol.md). A session is one TunnelStreaming stream
// and carries messages; each forwarded connection is one Connect stream, opened by
// the edge on the same HTTP/2 connection, so that HTTP/2 gives it its own flow
// control; or it has a TLS connection for itself. Nothing of our own multiplexes bytes.
//
// Where things are: transport.go accepts connections and knows which session came on which,
// carrier.go how its TCP connection is used; session.go is what both ends of a session share;
// server.go and client.go are the two ends, server_join.go and client_join.go how a session begins,
// server_proof.go and client_proof.go what it stands on, sign.go and client_tls.go certificates;
// data.go is the session's data connections, data_cloud.go and data_edge.go the two ends of those,
// pacer.go slows them down. A forwarded connection itself, whatever carries it, is package conn.
//
// A session owns its conns and its goroutines: when it ends, they end, and its
// module's Run returns only after all of them have.
//
// Several replicas: peers.go joins them, peers_nodes.go says who holds which node, and
// relay.go dials wherever that is.
//
// The package does not decide who may join (pkg/auth), what may be dialled (the
// edge's modules) or who may ask (front doors).
package stream

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"tunnel/pkg/conn"
	"tunnel/pkg/tunnel"
)

// Version is the version of the protocol. A session is only between equals.
const Version = 1

// capabilityAbort is in the hello of a side that takes chunks with abort.
const capabilityAbort = "abort"

// capabilities is what this release says in its hello.
func capabilities() []string { return []string{capabilityAbort} }

// category is this package's name as a module and the category of its messages.
const category = "stream"

// Types of message in that category; each has a protobuf of the same name.
const (
	typeHello     = "hello"
	typeHeartbeat = "heartbeat"
	typeRefused   = "refused"
	typeCancel    = "cancel" // no protobuf: the topic says it all
	typeDrain     = "drain"
	// typeCredential proves an edge's node anew.
	typeCredential = "credential"
)

// categoryRelay is the category of open requests to another replica.
const categoryRelay = "relay"

// typeConnection asks an edge for a data connection. No protobuf: the topic is a ticket.
const typeConnection = "connection"

// typeReplicas tells an edge which replicas there are.
const typeReplicas = "replicas"

// maxInstance is the longest instance of a process, in bytes: that of a UUID.
const maxInstance = 36

// maxReach is how long an edge's list of what it reaches may be, in bytes.
const maxReach = 4 << 10

// maxReplicas is how many there may be.
const maxReplicas = 64

// typeNodes tells another replica which nodes are held.
const typeNodes = "nodes"

// replicaKey is the metadata key by which a replica says that it is one, and its id.
const replicaKey = "tunnel-replica"

// nodeKey is the metadata key by which an edge says which node it is whose certificate
// it shows.
const nodeKey = "tunnel-node"

// topicKey is the metadata key of a Connect's topic.
const topicKey = "topic"

const (
	// joinTimeout is how long a stranger may take from TCP accept to session.
	joinTimeout = 10 * time.Second
	// signTimeout is how long a certificate may take: Kubernetes' signer has 30 s.
	signTimeout = 45 * time.Second
	// tokenInterval is how often an edge looks whether its token is another one.
	tokenInterval = time.Minute
	// dialTimeout is how long an edge tries a target.
	dialTimeout = 10 * time.Second
	// hangUpTimeout is how long a stopping cloud waits for an edge to hang up once its
	// last conn has ended.
	hangUpTimeout = 2 * time.Second
	// leaveTimeout is how long a stopping edge waits for the cloud to take its last
	// messages.
	leaveTimeout = time.Second
	// leaveFirst is how long a replica that is to stop goes on, while balancers and edges
	// turn to the others. It is part of the grace period.
	leaveFirst = 3 * time.Second
	// overlap is how long an edge keeps its session with a replica that is to stop, when
	// another one has taken over: the other replicas have to hear of that one first. It is
	// shorter than leaveFirst.
	overlap = time.Second
	// heartbeatInterval is how often an edge measures the round trip, at least.
	heartbeatInterval = 10 * time.Second
	// stuckAfter is how long the cloud may take to answer a heartbeat while other bytes come.
	// Over the thinnest link it takes some seconds.
	stuckAfter = time.Minute
	// lostAfter is how long nothing may come from the other side: then the session ends. It leaves
	// a second for callers, which learn of a lost path within 15 s.
	lostAfter = 14 * time.Second
	// doubtTime is how long before it the session looks first.
	doubtTime = time.Second
	// The cloud pings when nothing has come for keepaliveCloud, so that a link may be cut for
	// 10 s and the answer still comes within lostAfter. An edge cannot ping as often, since
	// grpc-go's clients do so after 10 s at least. It sends a heartbeat when nothing has come for
	// heartbeatSilence: a cloud that receives a bulk transfer has no reason to ping.
	keepaliveCloud   = 2500 * time.Millisecond
	keepaliveEdge    = 10 * time.Second
	heartbeatSilence = keepaliveCloud + 500*time.Millisecond
	// keepaliveTotal is how long nothing may come by the session's own connection, while data
	// connections bring something.
	keepaliveTotal = 30 * time.Second
	// keepaliveMinTime is what a server tolerates; grpc's default of 5 minutes would
	// answer our own clients with too_many_pings.
	keepaliveMinTime = 5 * time.Second
)

const (
	// DefaultMaxConns is how many conns a node may have at once: docs/limits.md says what
	// they cost.
	DefaultMaxConns = 4096
	// readBuffer is none: TLS keeps what it has read and nobody has taken. A buffer above
	// it would be one more copy, and memory of every idle node.
	readBuffer = 0
	// maxHeaderList bounds the metadata of an answer, in bytes.
	maxHeaderList = 16 << 10
	// outboxSize and outboxPerConn say how many control messages may wait for the
	// peer: a conn needs an open and a cancel, and its successor may follow at once. A
	// peer that lets more pile up does not read, and its session ends.
	outboxSize    = 256
	outboxPerConn = 4
	// maxAddr is the longest target, in bytes: a DNS name and a port need 259.
	maxAddr = 512
)

// serverOptions are the settings of the gRPC server. Its defaults are too open for a
// public port: unlimited streams, headers of 16 MiB, handshakes of two minutes.
func serverOptions(maxConns int, l Limits, link far) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(conn.NewCodec()),
		// Conns are bounded by the session, with a refusal; were this limit ever
		// reached, the edge would wait without a word. Twice, since a cancelled conn
		// may overlap with its successor.
		grpc.MaxConcurrentStreams(uint32(2*maxConns + 8)),
		// What is longer is reset without a word, and cannot be counted: see metadataFits.
		grpc.MaxHeaderListSize(uint32(2 * l.Metadata)),
		grpc.MaxRecvMsgSize(conn.MaxMessage),
		grpc.ConnectionTimeout(l.JoinTimeout + time.Second), // joinListener is first, and counts
		grpc.StaticStreamWindowSize(link.sizes().streamWindow),
		grpc.StaticConnWindowSize(link.sizes().sessionWindow),
		grpc.ReadBufferSize(readBuffer),
		grpc.WriteBufferSize(link.sizes().writeBuffer),
		grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveCloud, Timeout: keepaliveTotal - keepaliveCloud}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveMinTime, PermitWithoutStream: true}),
	}
}

// dialOptions are the same settings for the edge.
func dialOptions(link far) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithDefaultCallOptions(
			grpc.ForceCodecV2(conn.NewCodec()),
			grpc.MaxCallRecvMsgSize(conn.MaxMessage),
			// grpc-go keeps what was sent for a transparent retry until the server has
			// answered, also without retries. Nothing is ever sent twice here.
			grpc.MaxRetryRPCBufferSize(0),
		),
		grpc.WithStaticStreamWindowSize(link.sizes().streamWindow),
		grpc.WithStaticConnWindowSize(link.sizes().sessionWindow),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithWriteBufferSize(link.sizes().writeBuffer),
		grpc.WithMaxHeaderListSize(maxHeaderList),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(), // nor may DNS configure us
		grpc.WithIdleTimeout(0),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveEdge, Timeout: keepaliveTotal - keepaliveEdge, PermitWithoutStream: true,
		}),
	}
}

// Both ends are modules.
var _ tunnel.Module = (*Server)(nil)
var _ tunnel.Module = (*Client)(nil)
