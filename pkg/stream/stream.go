// Package stream is the tunnel over gRPC: a [Server] on the cloud that edges dial,
// and a [Client] on the edge that keeps a session with it.
//
//	dir := &tunnel.Directory{}
//	srv, err := stream.NewServer(stream.ServerConfig{Listen: ":9000", TLS: cert, Auth: tokens, Log: log}, dir, mods...)
//	err = tunnel.Run(ctx, append(mods, srv)...)     // until ctx is done
//	conn, err := dir.Dial(ctx, tunnel.Request{…})   // from any front door
//
//	cl, err := stream.NewClient(stream.ClientConfig{Address: "cloud:9000", …}, mods...)
//	err = tunnel.Run(ctx, append(mods, cl)...)
//
// The example of the package is a complete program.
//
// There are two planes (docs/protocol.md). A session is one TunnelStreaming stream that carries
// messages. Each forwarded connection is one Connect stream, or has a TLS connection for itself.
// The edge opens the Connect stream on the session's HTTP/2 connection, so that HTTP/2 gives the
// stream its own flow control. The package has no multiplexer of bytes of its own.
//
// Files: transport.go accepts connections and knows the session of each connection. carrier.go
// decides how a session uses its TCP connection. session.go is the part of a session that both ends
// share. server.go and client.go are the two ends. server_join.go and client_join.go begin a
// session. server_session.go and client_session.go are the two ends of a live session, and
// open_edge.go serves opens at the edge. server_proof.go and client_proof.go handle the proof that a
// session depends on. server_reach.go and client_reach.go are the conns that edges ask for, and
// server_services.go serves further gRPC services to edges. server_web.go accepts connections inside
// WebSockets, and client_route.go checks sessions after a change of routes. sign.go and client_tls.go
// handle certificates. data.go is the session's data connections, data_cloud.go and data_edge.go are
// their two ends, and pacer.go slows them down.
// congestion.go chooses the kernel's congestion control of all these connections.
// Package conn implements a forwarded connection for both ways.
//
// A session owns its conns and its goroutines: they end when the session ends. Run of the module
// returns only after all of them have ended.
//
// A session may also connect two replicas of a cloud: package peers makes replicas join each other.
// What differs by the role of a peer, a node or a replica, is in server_role.go and client_role.go;
// server_replicas.go says what a server asks about the other replicas.
//
// The package does not know proxies (pkg/dial), and does not decide who may join (pkg/auth), what an
// edge may dial (the edge's modules), or who may send requests (front doors).
package stream

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Version is the version of the protocol. Both ends of a session must have the same version.
const Version = 1

// capabilityAbort is in the hello of a side that accepts chunks with abort.
const capabilityAbort = "abort"

// capabilities returns the capabilities that this release lists in its hello.
func capabilities() []string { return []string{capabilityAbort} }

// capabilityRenew says that the edge renews its certificate when it is asked.
const capabilityRenew = "renew"

// capabilityServices, in the hello of an edge, says that the edge watches Services and dials the endpoints of its node.
// In the hello of a cloud, it says that edges can watch Services and ask for conns to endpoints.
const capabilityServices = "services"

// category is this package's name as a module, and the category of its messages.
const category = "stream"

// Types of message in the category stream. Each type has a protobuf of the same name.
const (
	typeHello     = "hello"
	typeHeartbeat = "heartbeat"
	typeRefused   = "refused"
	typeCancel    = "cancel" // no protobuf: the topic names the conn or the open request
	typeDrain     = "drain"
	typeEnds      = "ends"
	// typeCredential proves the edge's node again, with a new credential.
	typeCredential = "credential"
)

// categoryRelay is the category of open requests to another replica.
const categoryRelay = "relay"

// typeConnection asks an edge for a data connection. It has no protobuf: the topic is a ticket.
const typeConnection = "connection"

// typeReplicas tells an edge which replicas exist.
const typeReplicas = "replicas"

// maxInstance is the longest instance id of a process, in bytes: the length of a UUID.
const maxInstance = 36

// MaxReach is the longest list of identifiers that an edge says it reaches, in bytes.
const MaxReach = 4 << 10

// maxReplicas is the largest number of replicas in the list that an edge gets.
const maxReplicas = 64

// typeRenew asks an edge to renew its certificate.
const typeRenew = "renew"

// An edge says by which CAs it verifies the cloud. maxTrusts is how many CAs it may name, and maxTrust is the longest
// id of a CA, in bytes.
const maxTrusts, maxTrust = 8, 16

// typeNodes tells another replica which nodes this replica holds.
const typeNodes = "nodes"

// replicaKey is the metadata key of a replica's id. A peer that sends it claims to be a replica.
const replicaKey = "tunnel-replica"

// nodeKey is the metadata key by which an edge that shows a certificate names its node. The
// certificate must prove the same name.
const nodeKey = "tunnel-node"

// topicKey is the metadata key of a Connect's topic.
const topicKey = "topic"

// dataKey is a metadata key of a Reach. The edge says dataYes if it takes the conn by a data connection as well as by
// the stream of the call, and the cloud says so in its header if the conn has come by a data connection.
const (
	dataKey = "data"
	dataYes = "yes"
)

// targetKey is the metadata key of a Reach's target, and maxTarget the longest target in bytes.
const (
	targetKey = "target"
	maxTarget = 1 << 10
)

const (
	// joinTimeout is how long a stranger may take from TCP accept to session.
	joinTimeout = 10 * time.Second
	// signTimeout is how long signing a certificate may take. Kubernetes' signer has 30 s.
	signTimeout = 45 * time.Second
	// tokenInterval is how often an edge checks whether its token has changed.
	tokenInterval = time.Minute
	// dialTimeout is how long an edge tries to reach a target.
	dialTimeout = 10 * time.Second
	// hangUpTimeout is how long a stopping cloud waits for an edge to close the connection, once
	// the edge's last conn has ended.
	hangUpTimeout = 2 * time.Second
	// leaveTimeout is how long a stopping edge waits for the cloud to receive its last messages.
	leaveTimeout = 3 * time.Second
	// A replica that is about to stop continues for leaveFirst, while load balancers and edges move to
	// the other replicas. It continues until leaveLast at most, while its balancer still leads edges to it, or while a
	// caller has come within leaveQuiet. All are part of the grace period.
	leaveFirst = 5 * time.Second
	leaveQuiet = 3 * time.Second
	leaveLast  = 12 * time.Second
	// Overlap is how long an edge keeps its session with a replica that is about to stop, once
	// another replica has taken over. The other replicas must first hear of the new session. A replica that
	// restarts still dials for callers that it has accepted before.
	// Overlap is shorter than leaveFirst.
	Overlap = 2500 * time.Millisecond
	// heartbeatInterval is the longest time between two heartbeats, by which an edge measures the
	// round trip.
	heartbeatInterval = 10 * time.Second
	// stuckAfter is how long the cloud may take to answer a heartbeat while other bytes come. Over
	// the slowest link an answer takes some seconds.
	stuckAfter = time.Minute
	// lostAfter is how long the other side may be silent before the session ends. It leaves one
	// second for callers, which must learn of a lost path within 15 s.
	lostAfter = 14 * time.Second
	// doubtTime is how long before lostAfter the session first checks for silence.
	doubtTime = time.Second
	// The cloud pings when nothing has come for keepaliveCloud. So a link may be cut for 10 s, and
	// the answer still comes within lostAfter. An edge cannot ping as often: grpc-go's clients wait
	// at least 10 s. Instead, the edge sends a heartbeat when nothing has come for
	// heartbeatSilence, because a cloud that receives a bulk transfer has no reason to ping.
	keepaliveCloud   = 2500 * time.Millisecond
	keepaliveEdge    = 10 * time.Second
	heartbeatSilence = keepaliveCloud + 500*time.Millisecond
	// keepaliveTotal is how long no byte may come on the session's own connection while bytes still
	// come on data connections.
	keepaliveTotal = 30 * time.Second
	// multipathLost and multipathTotal replace lostAfter and keepaliveTotal for a connection with
	// Multipath TCP. Such a connection may lose its only path for half a minute, until this machine
	// gets another address. The kernel keeps it for a minute (net.mptcp.close_timeout).
	multipathLost  = 45 * time.Second
	multipathTotal = time.Minute
	// keepaliveMinTime is the shortest interval between pings that a server tolerates. With grpc's
	// default of 5 minutes, the server would answer our own clients with too_many_pings.
	keepaliveMinTime = 5 * time.Second
)

const (
	// DefaultMaxConns is how many conns a node may have at once. docs/limits.md says what they
	// cost.
	DefaultMaxConns = 4096
	// readBuffer is 0: TLS already buffers bytes that it has read and no reader has taken. Another
	// buffer would cost one more copy, and memory for every idle node.
	readBuffer = 0
	// maxHeaderList bounds the metadata of an answer, in bytes.
	maxHeaderList = 16 << 10
	// outboxSize and outboxPerConn bound how many control messages may wait for the peer. A conn
	// needs an open, the message that it ends and a cancel, and its successor may follow at once. A peer that lets more
	// messages wait does not read, so its session ends.
	outboxSize    = 256
	outboxPerConn = 4
	// maxAddr is the longest target of a caller, in bytes. A DNS name and a port need 259.
	maxAddr = 512
	// maxTopic is the longest topic that an edge takes with an open or a cancel, in bytes. The cloud sends UUIDs.
	maxTopic = 64
)

// serverOptions are the settings of the gRPC server. gRPC's defaults are too open for a public
// port: unlimited streams, headers of 16 MiB, handshakes of two minutes.
// total is keepaliveTotal or multipathTotal.
func serverOptions(maxConns int, l Limits, link far, total time.Duration) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(conn.NewCodec()),
		// The session bounds conns, and refuses further conns with a reason. If gRPC's limit of
		// streams were reached, the edge would wait and not learn why. This limit is twice
		// maxConns, since a cancelled conn may overlap with its successor.
		grpc.MaxConcurrentStreams(uint32(2*maxConns + 8)),
		// grpc-go resets streams with longer metadata without a reason, and the server cannot count
		// them. See metadataFits.
		grpc.MaxHeaderListSize(uint32(2 * l.Metadata)),
		grpc.MaxRecvMsgSize(conn.MaxMessage),
		grpc.ConnectionTimeout(l.JoinTimeout + time.Second), // joinListener's timeout passes first, and is counted
		grpc.StaticStreamWindowSize(link.sizes().streamWindow),
		grpc.StaticConnWindowSize(link.sizes().sessionWindow),
		grpc.ReadBufferSize(readBuffer),
		grpc.WriteBufferSize(link.sizes().writeBuffer),
		grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveCloud, Timeout: total - keepaliveCloud}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveMinTime, PermitWithoutStream: true}),
	}
}

// dialOptions are the same settings for the gRPC client of the edge.
func dialOptions(link far, total time.Duration) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithDefaultCallOptions(
			grpc.ForceCodecV2(conn.NewCodec()),
			grpc.MaxCallRecvMsgSize(conn.MaxMessage),
			// grpc-go keeps sent bytes for a transparent retry until the server has answered, even
			// when retries are disabled. The tunnel never sends anything twice.
			grpc.MaxRetryRPCBufferSize(0),
		),
		grpc.WithStaticStreamWindowSize(link.sizes().streamWindow),
		grpc.WithStaticConnWindowSize(link.sizes().sessionWindow),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithWriteBufferSize(link.sizes().writeBuffer),
		grpc.WithMaxHeaderListSize(maxHeaderList),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(), // DNS must not configure the client either
		grpc.WithIdleTimeout(0),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveEdge, Timeout: total - keepaliveEdge, PermitWithoutStream: true,
		}),
	}
}

// Both ends are modules that handle messages.
var _ tunnel.Routed = (*Server)(nil)
var _ tunnel.Routed = (*Client)(nil)
