package stream

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// probeVersion is the version in the hello of a node that only asks whether it may join. The cloud checks the node's
// proof as for a join, but opens no session. An older cloud also checks the proof first, and then refuses the version.
const probeVersion = math.MaxUint32

// probePadding is how many bytes a hello of probeVersion has at least. So Probe fails on a path that loses large
// packets.
const probePadding = 4 << 10

// Answer is the cloud's answer to [Client.Probe]. It is zero if a cloud of an older release has answered: such a cloud
// accepts the proof, and says no more.
type Answer struct {
	Time     time.Time // time of the answer by the clock of the cloud; zero: not known
	Software string    // name and version of the cloud's program
	// Session is the live session of the node with the replica that has answered; "": there is none.
	Session string
	Since   time.Time // when that session began, by the clock of the cloud
	Remote  string    // the address from which that session has come
}

// Probe asks the cloud whether this client may join. It opens no session, and a live session continues. An error is why
// the cloud cannot be reached, or why it refuses; [Hinted] splits its text.
func (c *Client) Probe(ctx context.Context) (a Answer, err error) {
	var shown *handshake
	defer func() {
		if err != nil {
			err = c.explain(err, shown)
		}
	}()
	conf, shown, err := c.tlsConfig()
	if err != nil {
		return a, err
	}
	credential, _, err := c.as.credential(shown)
	if err != nil {
		return a, err
	}
	raw, err := c.cfg.connect(ctx)
	if err != nil {
		return a, err
	}
	cc, _, hangUp, err := connect(raw, c.cfg.Address, conf, shown, c.cfg.Software, c.cfg.farTrip, nil)
	if err != nil {
		return a, err
	}
	defer hangUp()
	ctx, cancel := context.WithTimeoutCause(ctx, joinTimeout, ErrNoAnswer)
	defer cancel()
	var cloud peer.Peer
	stream, err := pb.NewStreamClient(cc).TunnelStreaming(ctx, grpc.PerRPCCredentials(credential), grpc.Peer(&cloud))
	if err == nil {
		hello := encode(&pb.Hello{Version: probeVersion, Software: c.cfg.Software, Reach: strings.Repeat(" ", probePadding)})
		err = stream.Send(&pb.StreamMsg{Node: string(c.cfg.Node), Category: category, Type: typeHello, Data: hello})
		if err == nil || errors.Is(err, io.EOF) {
			_, err = stream.Recv() // after io.EOF, Recv returns the reason
		}
	}
	if errors.Is(context.Cause(ctx), ErrNoAnswer) && status.Code(err) != codes.Unauthenticated {
		return a, ErrNoAnswer
	}
	var binding string
	if info, ok := cloud.AuthInfo.(credentials.TLSInfo); ok {
		binding = bindingOf(&info.State)
	}
	return answerOf(err, binding)
}

// bindingOf returns a text that identifies a TLS connection (RFC 5705). Both ends compute the same text, and no other
// connection has it. If a box in between ends TLS, the texts differ. "" if the connection permits no such text (RFC
// 7627).
func bindingOf(state *tls.ConnectionState) string {
	secret, err := state.ExportKeyingMaterial("EXPERIMENTAL tunnel ask", nil, 32)
	if err != nil {
		return ""
	}
	return hex.EncodeToString(secret)
}

// answerOf reads the answer to a hello of probeVersion from err, the error that ends the stream. binding is the result
// of bindingOf for the connection.
func answerOf(err error, binding string) (a Answer, _ error) {
	if why := reasonOf(err); status.Code(err) != codes.FailedPrecondition || why != "" && why != reasonProbed {
		if err == nil {
			err = errors.New("the other side is no cloud: it has answered a question with a message")
		}
		return a, err
	}
	m := infoOf(err).GetMetadata()
	if m == nil {
		return a, nil // an older cloud
	}
	if m["version"] != strconv.Itoa(Version) {
		return a, status.Errorf(codes.FailedPrecondition,
			"the cloud speaks version %s of the protocol and this program version %d: "+
				"install the release of the cloud (%s) here",
			text(m["version"]), Version, text(m["software"]))
	}
	if theirs := m["binding"]; theirs != "" && theirs != binding {
		return a, &Hinted{
			errors.New("a balancer or a proxy in between ends TLS, so conns of the node would fail"),
			"have it pass TCP through to the cloud (docs/network.md), or try wss:// in servers",
		}
	}
	return Answer{
		Time: millisecond(m["time_ms"]), Software: text(m["software"]), Session: text(m["session"]),
		Since: millisecond(m["since_ms"]), Remote: text(m["remote"]),
	}, nil
}

// millisecond parses milliseconds since 1970; it returns the zero time if s is not such a number.
func millisecond(s string) time.Time {
	ms, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// answerProbe answers a hello of probeVersion: the node has proven itself, and may join.
func (s *Server) answerProbe(t *transport, node tunnel.NodeName) error {
	m := map[string]string{
		"version": strconv.Itoa(Version), "software": s.cfg.Software,
		"time_ms": strconv.FormatInt(time.Now().UnixMilli(), 10), "binding": bindingOf(&t.State),
	}
	if live := s.dir.Lookup(node); live != nil {
		m["session"], m["remote"] = live.ID, live.Remote
		m["since_ms"] = strconv.FormatInt(live.Since.UnixMilli(), 10)
	}
	return withFacts(codes.FailedPrecondition, reasonProbed, "this node may join; the question opens no session", m)
}
